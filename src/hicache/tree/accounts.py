"""Every node belongs to one account, which knows what its nodes hold and may lose; what is promised to it stays."""

from collections.abc import Mapping, Sequence

from hicache.errors import ConfigError
from hicache.tree.policy import EvictionPolicy
from hicache.tree.queues import Queues

MOST_OWNERS = 1 << 16
"""How many namespaces are remembered whose pages have all gone."""


class Account:
    """The nodes of one tenant, or of all that nothing is promised to. Counts are slots, at 2 * pool + tier.

    `promised`: what others don't push it below; None: nothing, as to all in the shared account.
    """

    __slots__ = ("free", "held", "name", "promised", "queues")

    def __init__(
        self, name: str, pools: int, queues: int, policy: EvictionPolicy, promised: Sequence[int] | None
    ) -> None:
        self.name = name
        self.held = [0] * (2 * pools)
        self.free = [0] * (2 * pools)
        """Evictable slots, per class of pools and tier."""
        self.promised = None if promised is None else tuple(promised)
        self.queues = Queues(queues, policy)

    def over(self, place: int) -> int | None:
        """How many slots it has beyond what it is promised; None: that is not limited."""
        return None if self.promised is None else max(0, self.held[place] - self.promised[place])


class Accounts:
    """All accounts of a tree, the shared one first, and whose each namespace is."""

    def __init__(self, pools: int, queues: int, policy: EvictionPolicy) -> None:
        self._sizes = (pools, queues, policy)
        self.shared = Account("", pools, queues, policy, None)
        self.all: tuple[Account, ...] = (self.shared,)
        self.asking: Account | None = None
        """For whom slots are wanted now; None: for nobody in particular, who may have all of them."""
        self._by_name: dict[str, Account] = {}
        self._owners: dict[bytes, Account] = {}

    def promise(self, slots: Mapping[str, Sequence[int]]) -> None:
        """Opens an account for each name, with what it is promised."""
        if len(self.all) > 1:
            raise ConfigError("quotas were set before; they are set once, before the first request")
        self._by_name = {name: Account(name, *self._sizes, promised) for name, promised in slots.items()}
        self.all = (self.shared, *self._by_name.values())

    def own(self, namespace: bytes, name: str) -> None:
        """The pages of a namespace are this tenant's from now on."""
        account = self._by_name.get(name)
        if account is not None:
            self._owners.pop(namespace, None)
            self._owners[namespace] = account
            if len(self._owners) > MOST_OWNERS:
                del self._owners[next(iter(self._owners))]

    def of(self, namespace: bytes) -> Account:
        """Whose pages a namespace has, as far as that is known before it has any."""
        return self._owners.get(namespace, self.shared)

    def evictable(self, place: int) -> int:
        """How many slots may go, for the sake of whoever asks."""
        if len(self.all) == 1:
            return self.shared.free[place]
        return sum([self._may_lose(account, place) for account in self.all])

    def _may_lose(self, account: Account, place: int) -> int:
        over = account.over(place)
        if over is None or self.asking in (None, account):
            return account.free[place]
        return min(account.free[place], over)

    def stages(self) -> tuple[tuple[tuple[Account, ...], bool], ...]:
        """From whom to take, in this order; with True only what an account has beyond what it is promised.

        Who asks and has more than it is promised gives its own first; then all that have more; then what is promised
        to whoever asks. Without anyone who asks, all do.
        """
        if len(self.all) == 1:
            return ((self.all, False),)
        asking = self.asking
        if asking is None:
            return ((self.all, True), (self.all, False))
        if asking.promised is None:
            return ((self.all, True),)
        return (((asking,), True), (self.all, True), ((asking,), False))
