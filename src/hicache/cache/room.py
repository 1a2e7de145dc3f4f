"""What the device can hold for one request follows from sizes alone; what it can hold now, from what may go."""

from collections.abc import Mapping

from hicache.controller.state import State
from hicache.coverage import Coverage, Full, Window
from hicache.errors import CapacityError
from hicache.pools import SlotAllocator
from hicache.units import PoolName, Tier


def most_slots(coverage: Coverage, tokens: int, chunk_tokens: int, page_size: int, lookahead_tokens: int = 0) -> int:
    """The most device slots of a pool that a request of `tokens` tokens holds at once.

    It computes up to `chunk_tokens` at a time and then inserts them, so that pages behind a window can go. A pool of
    snapshots needs a slot for the running state; those for snapshots are taken where there are any.
    """
    pages = -(-tokens // page_size)
    if isinstance(coverage, Full):
        return pages
    if isinstance(coverage, Window):
        return min(
            pages, coverage.pages(page_size) + -(-(page_size - 1 + lookahead_tokens + chunk_tokens) // page_size)
        )
    return 1


def most_chunk(
    coverages: Mapping[PoolName, Coverage], slots: Mapping[PoolName, int], page_size: int, lookahead_tokens: int
) -> int | None:
    """The most tokens at a time that let requests of every length fit; None where no pool has a window.

    Below 1 where a windowed pool has no room beside its window: it has as many slots as others, and limits nothing.
    """
    rooms = [slots[pool] - one.pages(page_size) - 1 for pool, one in coverages.items() if isinstance(one, Window)]
    return min(rooms) * page_size + 1 - lookahead_tokens if rooms else None


def require_fit(
    state: State,
    allocators: Mapping[PoolName, SlotAllocator],
    tokens: int,
    chunk_tokens: int,
    page_size: int,
    tenant: str = "",
) -> None:
    """Raises CapacityError unless a request of `tokens` tokens fits into an empty device; it names every pool."""
    lookahead, short = state.tree.lookahead_tokens, []
    for pool in state.pools:
        coverage = state.group.get_entry(pool).coverage
        others = state.tree.promised_to_others(pool, Tier.DEVICE, tenant)
        slots = device_slots(allocators[pool]) - others
        need = most_slots(coverage, tokens, chunk_tokens, page_size, lookahead)
        if need > slots:
            beside = f" beside {others} that are promised to other tenants" if others else ""
            short.append(f"{need} slots of pool {pool!r}, which has {slots}{beside}")
    if short:
        raise CapacityError(
            f"{tokens} tokens, computed {min(tokens, chunk_tokens)} at a time, need {' and '.join(short)} on the"
            " device; ask for fewer tokens, compute fewer at a time, or raise device_size"
        )


def device_slots(allocator: SlotAllocator) -> int:
    """Slots that can be handed out."""
    return allocator.size - allocator.reserved


def room(state: State) -> dict[PoolName, int]:
    """Per pool, the device slots that are free now or could be made so."""
    return {pool: state.room(pool, Tier.DEVICE) for pool in state.pools}
