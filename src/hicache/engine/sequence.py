"""A request that is being computed, with its account at the cache. `computed` tokens have their KV in its slots."""

from hicache.cache import Load, Match, UnifiedRadixCache
from hicache.engine.attention import Segment
from hicache.engine.request import Request


class Sequence:
    """From admission to release. Slots are only ever reached through the match."""

    def __init__(self, request: Request, cache: UnifiedRadixCache, match: Match) -> None:
        self.request = request
        self.computed = 0
        self.refusals = 0
        self._cache = cache
        self._match = match
        self._load: Load | None = None
        self._settled = False
        self._released = False

    @property
    def missing(self) -> int:
        """Tokens that must be computed before the next one can be chosen."""
        return self.request.length - self.computed

    def start(self) -> bool:
        """Begin to load what is cached. False: ask again after the next poll.

        A load that has come short since is planned again now, before more slots are taken on top of it.
        """
        if self._load is not None and not self._settled and self._load.done:
            self.settle()
        if self._load is None:
            self._load = self._cache.load_back(self._match)
            if self._load is None:
                return False
            self.computed = self._load.tokens
            self._settled = False
        return True

    def reserve(self, tokens: int) -> bool:
        """Have slots for the first `tokens` tokens. False, with nothing taken, when the device has none to give."""
        if self._match.page_count * self._cache.page_size >= tokens:
            return True
        return self._cache.allocate(self._match, tokens - self._match.length_tokens) is not None

    def segment(self, tokens: int) -> Segment:
        """The next `tokens` tokens to compute."""
        token_ids = self.request.tokens(self.computed, self.computed + tokens)
        return Segment(token_ids, self.computed, self._match.slots())

    def wait(self, layer: int) -> None:
        """Block until what was loaded of `layer` is there."""
        if self._load is not None and not self._settled:
            self._load.wait(layer)

    def settle(self) -> bool:
        """After a step: whether what it ran on was really there. If not, the step is void and `start` plans again."""
        if self._settled or self._load is None:
            return True
        good = self._load.result()
        if good < self._load.tokens:
            self._load = None
            self.computed = 0
            return False
        self._settled = True
        self.request.use_cache(self._match.cached_tokens)
        return True

    def advance(self, tokens: int) -> None:
        """`tokens` more have been computed."""
        self.computed += tokens

    def share(self) -> None:
        """Put the full pages computed so far into the tree."""
        if self._settled:
            self._match = self._cache.insert(self._match, self.request.tokens(0, self.computed))

    def release(self) -> None:
        """Give everything back. Once."""
        if not self._released:
            self._released = True
            self._cache.release(self._match)
