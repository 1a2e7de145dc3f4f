"""What the scheduler counts and plans with: its limits, its numbers, and the parts of a step."""

from dataclasses import dataclass, field

from hicache.engine.compute import Output
from hicache.engine.segment import TokenArray
from hicache.engine.sequence import Sequence
from hicache.engine.speculation import no_tokens
from hicache.storage import BreakerOptions


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """Limits of a step. A request that runs alone and still gets no memory for `stall_timeout_s` ends with an error.

    `snapshot_interval`: prompt tokens between snapshots of recurrent state, beside those where reuse is likely.
    `retract`: a request that gives way is kept on the host or in storage, whole, and goes on from there; else what is
    no longer cached of it is computed again. `priority_ageing_s`: who has waited for so long goes before those that
    come now with a priority one step higher. `breaker`: when a store that is attached later is left alone.
    """

    max_running: int = 16
    chunk_tokens: int = 512
    snapshot_interval: int = 0
    retract: bool = True
    priority_ageing_s: float = 30.0
    stall_timeout_s: float = 60.0
    breaker: BreakerOptions = field(default_factory=BreakerOptions)


@dataclass(slots=True)
class CoreStats:
    """Counts since the start, and how many requests run and wait now.

    `drafted_tokens` were guessed by a drafter; the model chose `accepted_tokens` of them as well. Of the `preemptions`,
    `retractions` kept all that was computed; `retracted` requests are off the device now.
    """

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    retractions: int = 0
    void_steps: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    failed_requests: int = 0
    running: int = 0
    waiting: int = 0
    retracted: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """A sequence's part of a step: its next `tokens` tokens, and `drafts` behind them, for which there is `room`."""

    sequence: Sequence
    tokens: int
    room: int = 0
    drafts: TokenArray = field(default_factory=no_tokens)


@dataclass(frozen=True, slots=True)
class Done:
    """What came of it: `tokens` more of the sequence are computed."""

    work: Work
    output: Output
    tokens: int
    prefill: bool

    @property
    def sequence(self) -> Sequence:
        """Whose it is."""
        return self.work.sequence
