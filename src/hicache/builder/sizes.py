"""The pools of a tier never take more than the size asked for, and each gets enough to be of use, or it is said."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hicache.builder.describe import ModelDescription, PoolDescription
from hicache.config import CacheConfig, format_size
from hicache.coverage import Checkpoint, Full, Window
from hicache.errors import ConfigError
from hicache.units import PoolName

SPARE_PAGES = 2
"""A window moves on: beside its own pages there is one that is being filled and one that leaves."""

SPARE_SNAPSHOTS = 2
"""Beside the live states: a snapshot to resume from, and one that is being taken."""


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Slots that every pool, derived ones included, can hand out on device and host.

    On the device, `reserved` more come before them that are never handed out.
    """

    device: Mapping[PoolName, int]
    host: Mapping[PoolName, int]
    reserved: int


def split_sizes(
    model: ModelDescription, config: CacheConfig, *, reserved_slots: int = 0, live_slots: int = 1
) -> PoolSizes:
    """How many slots of each pool `device_size` and `host_size` hold.

    Pools with snapshots get `checkpoint_share` of the bytes, and on the device at least `live_slots + 2` slots: one for
    the state of each request that runs, two for snapshots. All of them get as many; so do pools of full coverage. A
    windowed pool gets `window_ratio` pages per page of those, at least its window and two more where they have as many.
    A derived pool has its source's slots, and its bytes count as the source's. Pools of one kind only get everything.

    Raises ConfigError that says the size to give.
    """
    if live_slots < 1:
        raise ConfigError(f"live_slots={live_slots}: at least one request runs at a time")
    device = _Tier("device_size", config.device_size, reserved_slots, live_slots, live_slots + SPARE_SNAPSHOTS)
    host = _Tier("host_size", config.host_size, 0, 0, 1)
    return PoolSizes(_split(model, config, device), _split(model, config, host), reserved_slots)


def describe_sizes(
    model: ModelDescription, config: CacheConfig, *, reserved_slots: int = 0, live_slots: int = 1
) -> str:
    """What a cache of this model allocates: one line per pool and tier, and one for all pools of a tier."""
    sizes = split_sizes(model, config, reserved_slots=reserved_slots, live_slots=live_slots)
    return "\n".join(
        [
            *_lines("device", model, config.page_size, config.device_size, sizes.device, reserved_slots),
            *_lines("host", model, config.page_size, config.host_size, sizes.host, 0),
        ]
    )


@dataclass(frozen=True, slots=True)
class _Tier:
    """What a tier must hold. `snapshots`: the least slots of a Checkpoint pool, `live` of them for running requests."""

    field: str
    size_bytes: int
    reserved: int
    live: int
    snapshots: int


def _split(model: ModelDescription, config: CacheConfig, tier: _Tier) -> dict[PoolName, int]:
    """Slots per pool that may be handed out."""
    token_pools = [pool for pool in model.pools if pool.derived_from is None and not _is_checkpoint(pool)]
    state_pools = [pool for pool in model.pools if pool.derived_from is None and _is_checkpoint(pool)]
    costs = {pool.name: _cost(model, pool) for pool in (*token_pools, *state_pools)}
    page_bytes = sum(costs[pool.name] for pool in token_pools)
    state_bytes = sum(costs[pool.name] for pool in state_pools)
    pages = _least_pages(token_pools, config.page_size)
    room = tier.size_bytes - tier.reserved * model.slot_bytes
    least_state = tier.snapshots * state_bytes
    if room < pages * page_bytes + least_state:
        raise _too_small(tier, model, pages * page_bytes, pages, state_bytes)
    snapshots = 0
    if state_pools:
        share = config.checkpoint_share if token_pools else 1
        wanted = max(round(room * share), least_state)
        snapshots = min(wanted, room - pages * page_bytes) // state_bytes
    own = {pool.name: snapshots for pool in state_pools}
    if token_pools:
        own |= _token_slots(token_pools, costs, room - snapshots * state_bytes, config)
    return {pool.name: own[pool.derived_from or pool.name] for pool in model.pools}


def _token_slots(
    pools: Sequence[PoolDescription], costs: Mapping[PoolName, int], room: int, config: CacheConfig
) -> dict[PoolName, int]:
    """As many pages as fit into `room` bytes, windowed pools in proportion."""
    has_full = any(isinstance(pool.coverage, Full) for pool in pools)

    def slots(pages: int) -> dict[PoolName, int]:
        return {
            pool.name: _window_slots(pool.coverage, pages, config)
            if has_full and isinstance(pool.coverage, Window)
            else pages
            for pool in pools
        }

    def nbytes(pages: int) -> int:
        return sum(count * costs[name] for name, count in slots(pages).items())

    scaled = sum(costs[pool.name] for pool in pools if not has_full or isinstance(pool.coverage, Full))
    return slots(bisect_right(range(room // scaled + 1), room, key=nbytes) - 1)


def _window_slots(window: Window, pages: int, config: CacheConfig) -> int:
    """Slots of a windowed pool beside `pages` pages of full pools: more than those no prefix can use."""
    return min(pages, max(int(pages * config.window_ratio), window.pages(config.page_size) + SPARE_PAGES))


def _least_pages(pools: Sequence[PoolDescription], page_size: int) -> int:
    """Pages that each of these pools needs at least: one, or a window where there are only windows."""
    windows = [pool.coverage.pages(page_size) for pool in pools if isinstance(pool.coverage, Window)]
    if windows and len(windows) == len(pools):
        return max(windows) + SPARE_PAGES
    return 1 if pools else 0


def _is_checkpoint(pool: PoolDescription) -> bool:
    return isinstance(pool.coverage, Checkpoint)


def _cost(model: ModelDescription, pool: PoolDescription) -> int:
    """Bytes of one slot with those of the pools that live at it."""
    return pool.slot_bytes + sum(other.slot_bytes for other in model.pools if other.derived_from == pool.name)


def _too_small(tier: _Tier, model: ModelDescription, pages_bytes: int, pages: int, state_bytes: int) -> ConfigError:
    least, advice = [], ""
    if pages:
        what = "one page" if pages == 1 else f"a window and {SPARE_PAGES} more pages, {pages} in all"
        least.append(f"{what} ({format_size(pages_bytes)} over all {'token pools' if state_bytes else 'pools'})")
    if state_bytes:
        running = f"; a live one for each of {tier.live} running requests and {SPARE_SNAPSHOTS} to keep"
        count = "one snapshot" if tier.snapshots == 1 else f"{tier.snapshots} snapshots"
        least.append(f"{count} ({format_size(state_bytes)} each over all pools{running if tier.live else ''})")
        advice = ", or run fewer requests at a time (max_running, in the server)" if tier.live > 1 else ""
    reserved = f", and {tier.reserved} more of each are reserved" if tier.reserved else ""
    need = pages_bytes + tier.snapshots * state_bytes + tier.reserved * model.slot_bytes
    return ConfigError(
        f"{tier.field}={format_size(tier.size_bytes)} holds less than {' and '.join(least)}{reserved};"
        f" give it {format_size(need)} or more{advice}"
    )


def _lines(
    tier: str, model: ModelDescription, page_size: int, asked: int, slots: Mapping[PoolName, int], reserved: int
) -> Iterator[str]:
    total = 0
    for pool in model.pools:
        count, nbytes = slots[pool.name], (slots[pool.name] + reserved) * pool.slot_bytes
        total += nbytes
        what = f"{count} snapshots" if _is_checkpoint(pool) else f"{count} pages of {page_size} tokens"
        more = f" and {reserved} reserved" if reserved else ""
        yield f"{tier} {pool.name}: {what}{more}, {format_size(pool.slot_bytes)} each, {format_size(nbytes)}"
    yield f"{tier} in all: {format_size(total)} of {format_size(asked)}"
