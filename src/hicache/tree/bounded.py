"""A bounded set of nodes knows how many pages they have together; who is over the bound leaves from the front."""

from collections import OrderedDict

from hicache.errors import ConfigError
from hicache.tree.policy import NodeUse


class Bounded:
    """Nodes in the order in which they were put last, each with its pages."""

    def __init__(self) -> None:
        self._pages: OrderedDict[NodeUse, int] = OrderedDict()
        self.total = 0
        """Pages of all nodes."""

    def __contains__(self, node: NodeUse) -> bool:
        return node in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def first(self) -> NodeUse:
        """The node that was put longest ago."""
        return next(iter(self._pages))

    def put(self, node: NodeUse, pages: int) -> None:
        """Adds a node at the end, or moves it there."""
        self.resize(node, pages)
        self._pages.move_to_end(node)

    def resize(self, node: NodeUse, pages: int) -> None:
        """Counts a node with so many pages from now on, where it stands."""
        self.total += pages - self._pages.get(node, 0)
        self._pages[node] = pages

    def discard(self, node: NodeUse) -> None:
        """Takes a node out, if it is in."""
        self.total -= self._pages.pop(node, 0)


def bound(share: float, device_pages: int | None) -> float:
    """How many pages a share of the device pool is; no bound where its size is not known."""
    return float("inf") if device_pages is None else share * device_pages


def require_share(share: float, name: str) -> float:
    """Raises ConfigError unless 0 < `share` < 1."""
    if not 0 < share < 1:
        raise ConfigError(f"{name} is {share}; it is a share of the device pool, above 0 and below 1")
    return share
