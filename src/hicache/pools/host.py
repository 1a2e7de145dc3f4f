"""A host pool: slots and the pages behind them. One row of `pages` is one slot's whole page, packed drafts included."""

from dataclasses import dataclass

from hicache.errors import ConfigError
from hicache.layout import PackedLayout
from hicache.memory import ArenaKind, HostArena
from hicache.pools.slots import SlotAllocator
from hicache.units import ByteArray, HostSlots, PoolName


@dataclass(frozen=True, slots=True)
class PoolCapabilities:
    """What a host pool supports. None is "not declared", and a pool with one of those is refused by a group."""

    staged_write_back: bool | None = None
    """Backups may come as one contiguous block that is scattered to the pages afterwards."""
    zero_copy_storage: bool | None = None
    """Storage may read and write the pages themselves."""


class HostPool:
    """`slots` host pages of one pool, in one arena. Owned by the scheduler thread; workers only touch the pages."""

    def __init__(
        self, name: PoolName, layout: PackedLayout, slots: int, arena: HostArena, capabilities: PoolCapabilities
    ) -> None:
        if slots < 1:
            raise ConfigError(f"host pool {name!r} has {slots} slots; give it room for at least 1")
        if arena.nbytes < slots * layout.page_bytes:
            raise ConfigError(
                f"host pool {name!r}: {slots} pages of {layout.page_bytes} bytes don't fit an arena of {arena.nbytes};"
                " give it a larger arena or fewer slots"
            )
        self.name = name
        self.layout = layout
        self.slots = slots
        self.capabilities = capabilities
        self.arena = arena
        self._allocator = SlotAllocator(slots)

    @classmethod
    def allocate(
        cls,
        name: PoolName,
        layout: PackedLayout,
        slots: int,
        capabilities: PoolCapabilities,
        kind: ArenaKind = ArenaKind.PLAIN,
    ) -> "HostPool":
        """A pool with an arena of its own. Raises ConfigError when there isn't the memory."""
        if slots < 1:
            raise ConfigError(f"host pool {name!r} has {slots} slots; give it room for at least 1")
        arena = HostArena.allocate(slots * layout.page_bytes, kind, what=f"host pool {name!r}")
        return cls(name, layout, slots, arena, capabilities)

    @property
    def pages(self) -> ByteArray:
        """The pages, uint8 [slots, layout.page_bytes]. Raises ClosedError after `close`."""
        size = self.slots * self.layout.page_bytes
        return self.arena.data[:size].reshape(self.slots, self.layout.page_bytes)

    @property
    def available(self) -> int:
        """Slots that are free now."""
        return self._allocator.available

    def alloc(self, count: int) -> HostSlots | None:
        """`count` slots, ascending, or None when fewer are free."""
        slots = self._allocator.alloc(count)
        return None if slots is None else HostSlots(slots)

    def free(self, slots: HostSlots) -> None:
        """Takes slots back. Raises InvariantError, with nothing changed, unless every one is held and named once."""
        self._allocator.free(slots)

    def require_held(self, slots: HostSlots) -> None:
        """Raises InvariantError unless every slot was handed out and not yet given back."""
        self._allocator.require_held(slots)

    def taken(self) -> HostSlots:
        """The slots that are held, ascending."""
        return HostSlots(self._allocator.taken())

    def check(self) -> None:
        """Raises InvariantError unless every slot is exactly one of free and held."""
        self._allocator.check()

    def close(self) -> None:
        """Returns the memory."""
        self.arena.close()
