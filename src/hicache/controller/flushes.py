"""What was computed before a flush is found by nobody after it: not in memory, nor in storage, nor on the way."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from hicache.controller.dispatch import InFlight
from hicache.controller.state import State
from hicache.controller.stores import Attachment
from hicache.errors import InvariantError
from hicache.keys import digest_parts
from hicache.storage import Cleared
from hicache.transfer.messages import CLEARED, Clear, Completion
from hicache.units import Tier

MOST_NAMESPACES = 1000
"""How many namespaces are remembered, those that were used last."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """What can't be found any more, by tier. In memory, a part of it may stay until the requests that hold it end.

    `problems`: why something is still in storage; it is not used all the same, as long as this cache lives.
    """

    device: Cleared
    host: Cleared
    storage: Cleared
    problems: tuple[str, ...] = ()


@dataclass(slots=True)
class Flush:
    """A flush. In memory it has happened; `done` once storage has answered, which `poll` finds out."""

    _flushed: Flushed
    _waiting: int = 0

    @property
    def done(self) -> bool:
        """Whether `result` is final."""
        return self._waiting == 0

    def result(self) -> Flushed:
        """What went. Raises InvariantError before it is done."""
        if not self.done:
            raise InvariantError("the flush has not ended in storage; poll until it is done")
        return self._flushed

    # What follows is for Flushes.

    def ask(self) -> None:
        """Storage was asked to clear one more namespace."""
        self._waiting += 1

    def answer(self, completion: Completion) -> None:
        """Storage has cleared a namespace, or not."""
        self._waiting -= 1
        storage = self._flushed.storage + completion.cleared
        self._flushed = replace(self._flushed, storage=storage)
        if completion.error is not None:
            problem = f"storage was not cleared: {completion.error}"
            self._flushed = replace(self._flushed, problems=(*self._flushed.problems, problem))


@dataclass(slots=True)
class Flushes:
    """Which namespaces are used, which names were given up, and what of storage is not to be used."""

    _state: State
    _attachment: Callable[[], Attachment | None]
    _seen: dict[bytes, None] = field(default_factory=dict)
    _unseen_are_void: bool = False
    _void: dict[bytes, int] = field(default_factory=dict)
    """Namespaces whose stored pages are not to be used, with the number of clears under way; 0: it failed."""
    _retired: dict[bytes, int] = field(default_factory=dict)
    """Names of what was flushed and is still held, with the number of requests that run on it."""
    _count: int = 0

    def use(self, namespace: bytes) -> None:
        """A namespace is used. If storage may have pages of it from before a flush of everything, they are cleared."""
        known = namespace in self._seen
        if known:
            del self._seen[namespace]
        self._seen[namespace] = None
        if len(self._seen) > MOST_NAMESPACES:
            del self._seen[next(iter(self._seen))]
        if (self._unseen_are_void and not known) or self._void.get(namespace) == 0:
            self._clear(namespace, None)

    def may_fetch(self, namespace: bytes) -> bool:
        """Whether pages that storage has of a namespace are to be used now."""
        return namespace not in self._void

    def is_retired(self, name: bytes) -> bool:
        """Whether this is the name of something that was flushed."""
        return name in self._retired

    @property
    def any_retired(self) -> bool:
        """Whether something that was flushed is still held."""
        return bool(self._retired)

    def scope(self, holders: Mapping[bytes, int]) -> tuple[bytes, ...]:
        """Every namespace that is used, in memory or as far as it is remembered."""
        names = dict.fromkeys([*self._seen, *self._state.tree.namespaces(), *holders])
        return tuple(name for name in names if name not in self._retired)

    def start(
        self, names: tuple[bytes, ...], holders: Mapping[bytes, int], *, everything: bool
    ) -> tuple[Flush, Mapping[bytes, bytes]]:
        """Forget namespaces, or everything. `holders`: how many requests run on each.

        Returns the flush, and the names under which these requests go on.
        """
        self._unseen_are_void = self._unseen_are_void or (everything and self._attachment() is not None)
        flush = Flush(Flushed(self._counted(names, Tier.DEVICE), self._counted(names, Tier.HOST), Cleared()))
        renamed = {}
        for name in names:
            self._state.free_eviction(self._state.tree.flush(name))
            if name in holders or name in self._state.tree.namespaces():
                renamed[name] = self._retire(name, holders.get(name, 0))
            self._clear(name, flush)
        return flush, renamed

    def _retire(self, namespace: bytes, holders: int) -> bytes:
        """What is left of a namespace gets a name that no request can have."""
        self._count += 1
        name = digest_parts({"retired": namespace, "flush": self._count})
        self._state.tree.rename(namespace, name)
        self._retired[name] = holders
        return name

    def leave(self, name: bytes) -> None:
        """A request that ran on `name` has gone, whether that was flushed or not."""
        if name in self._retired:
            self._retired[name] -= 1

    def step(self) -> None:
        """Give back what nothing holds any more of what was flushed."""
        for name in tuple(self._retired):
            self._state.free_eviction(self._state.tree.flush(name))
            if self._retired[name] == 0 and name not in self._state.tree.namespaces():
                del self._retired[name]

    def leave_store(self) -> None:
        """Another store may be attached from now on: what it holds was not flushed."""
        self._unseen_are_void = False
        self._void = {name: running for name, running in self._void.items() if running}

    def _counted(self, names: tuple[bytes, ...], tier: Tier) -> Cleared:
        sizes = {pool.name: pool.slot_bytes for pool in self._state.tree.pools}
        pages = size_bytes = 0
        for name in names:
            for pool, count in self._state.tree.held(name)[tier].items():
                pages += count
                size_bytes += count * sizes[pool]
        return Cleared(pages, size_bytes)

    def _clear(self, namespace: bytes, flush: Flush | None) -> None:
        attachment = self._attachment()
        if attachment is None:
            return
        message = Clear(self._state.dispatcher.next_id(), attachment.store, self._state.storage_namespaces(namespace))
        self._state.dispatcher.submit(message, InFlight(partial(self._cleared, attachment, namespace, flush)))
        self._void[namespace] = self._void.get(namespace, 0) + 1
        if flush is not None:
            flush.ask()

    def _cleared(self, attachment: Attachment, namespace: bytes, flush: Flush | None, completion: Completion) -> None:
        running = self._void[namespace] - 1
        self._void[namespace] = running
        good = completion.error is None and CLEARED in completion.good and bool(completion.good[CLEARED].all())
        if running == 0 and (good or attachment is not self._attachment()):
            del self._void[namespace]
        if flush is not None:
            flush.answer(completion)
