"""What all parts of the tree share: the pools and how they depend on each other, the roots, counters and queues."""

from collections.abc import Iterator, Sequence

from hicache.coverage import Checkpoint, Full
from hicache.errors import ConfigError
from hicache.tree.accounts import Accounts
from hicache.tree.node import Node
from hicache.tree.policy import EvictionPolicy, StatefulPolicy
from hicache.tree.runs import Run
from hicache.tree.values import Receipt, TreePool
from hicache.units import PoolName

TOKEN_BYTES = 4

CLEAN = 0
"""Queue: device pages with a host copy are next."""
DIRTY = 1
"""Queue: has device pages without a host copy."""
DUPLICATE = 2
"""Queue: has host copies of device pages."""
ONLY = 3
"""Queue: has host copies that are the last ones."""
USELESS_DEVICE = 4
USELESS_HOST = 5
QUEUES_PER_POOL = 6


class Core:
    """State of one tree. `lead` stands for all pools of full coverage (they leave a tier together); None without any.

    `loose` are the other pools with their reach in pages. `carriers[p]`: pools without whose page at the same place
    pool p's page is of no use; `dependents` is the inverse.
    """

    def __init__(
        self,
        page_size: int,
        lookahead_tokens: int,
        pools: Sequence[TreePool],
        policy: EvictionPolicy,
        host_duplicates_first: bool,
    ) -> None:
        _check_arguments(page_size, lookahead_tokens, pools)
        self.page_size = page_size
        self.lookahead_tokens = lookahead_tokens
        self.block_bytes = (page_size + lookahead_tokens) * TOKEN_BYTES
        self.pools = tuple(pools)
        self.index = {pool.name: number for number, pool in enumerate(pools)}
        reaches = [_reach(pool, page_size) for pool in pools]
        self.full = tuple(number for number, reach in enumerate(reaches) if reach is None)
        self.lead = self.full[0] if self.full else None
        self.loose = tuple((number, reach) for number, reach in enumerate(reaches) if reach is not None)
        self.carriers = tuple(self._carriers(number, reaches) for number in range(len(pools)))
        self.dependents = tuple(
            tuple(other for other in range(len(pools)) if number in self.carriers[other])
            for number in range(len(pools))
        )
        self.carriers_first = tuple(sorted((pool for pool, _ in self.loose), key=lambda pool: pool != 0))
        """The loose pools, those first that others need at the same page."""
        self.carried_by_lead = self.lead is not None and all(
            carriers == (self.lead,) for number, carriers in enumerate(self.carriers) if reaches[number] is not None
        )
        """Whether a loose pool's page needs nothing but one of full coverage."""
        self.classes = tuple(self.full[0] if number in self.full else number for number in range(len(pools)))
        """Per pool, the one that stands for all that leave a tier together with it."""
        self.main = 0 if self.lead is None else self.lead
        """The pool whose pages past a leaf's last resumable boundary go before anything else."""
        self.nothing: tuple[Run, ...] = (None,) * len(pools)
        self.policy = policy
        self.stateful = policy if isinstance(policy, StatefulPolicy) else None
        self.host_duplicates_first = host_duplicates_first
        self.roots: dict[bytes, Node] = {}
        self.clock = 0
        self.started_s: float | None = None
        self.now_s = 0.0
        """Seconds since `started_s`."""
        self.nodes = 0
        self.holey = 0
        """Nodes with a page of full coverage that has no copy."""
        self.dirty = [0] * len(pools)
        """Per class: device pages without a host copy, pinned or not."""
        self.accounts = Accounts(len(pools), QUEUES_PER_POOL * len(pools), policy)
        self.receipts: dict[int, Receipt] = {}
        self.receipts_made = 0

    def _carriers(self, number: int, reaches: Sequence[int | None]) -> tuple[int, ...]:
        reach = reaches[number]
        if reach is None:
            return ()
        carriers = [] if self.lead is None else [self.lead]
        anchor_reach = reaches[0]
        if number != 0 and anchor_reach is not None and reach <= anchor_reach and not self._outlives(number):
            carriers.append(0)
        return tuple(carriers)

    def _outlives(self, number: int) -> bool:
        """A page of a window may get its snapshot later: it is of use before the anchor has one."""
        anchor, own = self.pools[0].coverage, self.pools[number].coverage
        return isinstance(anchor, Checkpoint) and not isinstance(own, Checkpoint)

    def pool(self, name: PoolName) -> int:
        """A pool's number. Raises ConfigError if the tree has none of that name."""
        number = self.index.get(name)
        if number is None:
            raise ConfigError(f"pool {name!r} is not in the tree; it has {', '.join(self.index)}")
        return number

    def size(self, node: Node) -> int:
        """Pages of a node."""
        return len(node.key) // self.block_bytes

    def stop(self, node: Node) -> int:
        """One past a node's last page, counted from the root."""
        return node.start + len(node.key) // self.block_bytes

    def members(self, pool: int) -> tuple[int, ...]:
        """The pools that leave a tier together with this one."""
        return self.full if pool == self.lead else (pool,)

    def walk(self) -> Iterator[Node]:
        """All nodes below the roots, parents first, in order of insertion."""
        stack = [node for root in reversed(self.roots.values()) for node in reversed(root.children.values())]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))


def _reach(pool: TreePool, page_size: int) -> int | None:
    if isinstance(pool.coverage, Full):
        return None
    return 1 if isinstance(pool.coverage, Checkpoint) else pool.coverage.pages(page_size)


def _check_arguments(page_size: int, lookahead_tokens: int, pools: Sequence[TreePool]) -> None:
    if page_size < 1:
        raise ConfigError(f"page_size is {page_size}; a page holds at least 1 token")
    if lookahead_tokens < 0:
        raise ConfigError(f"lookahead_tokens is {lookahead_tokens}; it is a count of tokens, 0 or more")
    if not pools:
        raise ConfigError("a tree needs at least one pool; the first is the anchor")
    names = [pool.name for pool in pools]
    if len(set(names)) != len(names):
        raise ConfigError(f"pool names must differ; got {', '.join(names)}")
