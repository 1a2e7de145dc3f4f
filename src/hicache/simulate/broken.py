"""A run that breaks a rule ends at once, and says how to see it again."""

from hicache.errors import InvariantError


class RuleError(InvariantError):
    """What must always hold does not. `rule` names it; nobody catches it on the way out of the scheduler."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule


class RunError(InvariantError):
    """A run broke a rule: which, and at which step. `lines` are the events up to there, if they were kept."""

    def __init__(self, seed: int, step: int, digest: str, error: InvariantError, lines: tuple[str, ...]) -> None:
        super().__init__(f"seed {seed}, step {step}: {error}")
        self.seed = seed
        self.step = step
        self.digest = digest
        self.rule = error.rule if isinstance(error, RuleError) else "audit"
        self.lines = lines
