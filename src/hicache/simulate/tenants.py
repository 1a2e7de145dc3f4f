"""What a tenant's requests have in common: nobody is served from what only others have asked."""

from collections import Counter

from hicache.simulate.truth import Known


class Tenants:
    """How many requests of each tenant have a prefix, by its hash."""

    def __init__(self) -> None:
        self._prefixes: dict[str, Counter[int]] = {}

    def add(self, salt: str, known: Known) -> None:
        """A request of the tenant with this salt."""
        self._prefixes.setdefault(salt, Counter()).update(known.hashes.tolist())

    def shares(self, salt: str, known: Known, tokens: int) -> bool:
        """Whether another request of the tenant has the first `tokens` tokens too."""
        return tokens == 0 or self._prefixes[salt][int(known.hashes[tokens - 1])] > 1
