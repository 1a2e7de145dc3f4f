"""The split of a size over pools: checked against the rules by counting bytes, at and just below the least size."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.builder import ModelDescription, PoolDescription, build_kv_cache, describe_sizes, split_sizes
from hicache.config import CacheConfig, parse_size
from hicache.coverage import Checkpoint, Full, Window
from hicache.errors import ConfigError
from hicache.units import Tier
from tests.world import DERIVED, PAGE, THREE_POOLS, geometry

FULL = PoolDescription("kv", geometry(1, 5), (0,))
DRAFT = PoolDescription("draft", geometry(1, 2), (0,), derived_from="kv")
SWA = PoolDescription("swa", geometry(1, 3), (0,), coverage=Window(5 * PAGE + 1))
STATE = PoolDescription("state", geometry(1, 50, tokens=1), (0,), coverage=Checkpoint())


def model(*pools: PoolDescription) -> ModelDescription:
    return ModelDescription(1, pools)


def config(device: int = 1 << 20, host: int = 1 << 20, **settings) -> CacheConfig:
    return CacheConfig(device_size=device, host_size=host, page_size=PAGE, **settings)


def test_windowed_pools_get_their_ratio_of_the_full_ones():
    sizes = split_sizes(model(FULL, SWA), config(100 * 20 + 25 * 12, window_ratio=0.25))
    assert sizes.device == {"kv": 100, "swa": 25}


@pytest.mark.parametrize(("pages", "window"), [(1, 1), (5, 5), (7, 7), (8, 7), (50, 7), (80, 8)])
def test_a_window_fits_its_pool_as_far_as_a_prefix_can_be_long(pages, window):
    """5 pages and 2 more; no more than the full pool has, since no prefix is longer."""
    size = pages * 20 + window * 12
    assert split_sizes(model(FULL, SWA), config(size, window_ratio=0.1)).device == {"kv": pages, "swa": window}


def test_snapshots_get_their_share_and_leave_what_they_cannot_use():
    sizes = split_sizes(model(FULL, STATE), config(4000 + 90, checkpoint_share=0.25))
    assert sizes.device == {"kv": 154, "state": 20}, "1022 bytes hold 20 snapshots of 50, and the rest is for pages"


def test_running_requests_have_live_states_whatever_the_share():
    sizes = split_sizes(model(FULL, STATE), config(1000 + 40, 1000, checkpoint_share=0.01), live_slots=18)
    assert sizes.device == {"kv": 2, "state": 20}
    assert sizes.host == {"kv": 47, "state": 1}, "on the host, nothing runs"


@pytest.mark.parametrize(
    ("pools", "expected"),
    [
        ((STATE,), {"state": 20}),
        ((SWA,), {"swa": 84}),
        ((SWA, PoolDescription("wide", geometry(1, 1), (0,), coverage=Window(40 * PAGE))), {"swa": 63, "wide": 63}),
        ((FULL, DRAFT), {"kv": 36, "draft": 36}),
        ((FULL,), {"kv": 50}),
    ],
)
def test_pools_of_one_kind_share_everything(pools, expected):
    assert split_sizes(model(*pools), config(1010)).device == expected


def test_reserved_slots_are_part_of_the_size():
    sizes = split_sizes(model(FULL, DRAFT), config(10 * 28), reserved_slots=3)
    assert (sizes.device, sizes.host["kv"], sizes.reserved) == ({"kv": 7, "draft": 7}, (1 << 20) // 28, 3)


@pytest.mark.parametrize(
    ("pools", "options", "message"),
    [
        ((FULL,), {}, r"device_size=1B holds less than one page \(20B over all pools\); give it 20B or more$"),
        (
            (FULL, DRAFT, STATE),
            {"live_slots": 4},
            r"one page \(28B over all token pools\) and 6 snapshots \(50B each over all pools; a live one for each of"
            r" 4 running requests and 2 to keep\); give it 328B or more,"
            r" or run fewer requests at a time \(max_running, in the server\)$",
        ),
        (
            (STATE,),
            {"reserved_slots": 1},
            r"less than 3 snapshots \(.*\), and 1 more of each are reserved; give it 200B or more$",
        ),
        ((SWA,), {}, r"a window and 2 more pages, 7 in all \(84B over all pools\); give it 84B or more$"),
    ],
)
def test_what_is_too_small_says_the_size_that_would_do(pools, options, message):
    with pytest.raises(ConfigError, match=message):
        split_sizes(model(*pools), config(1), **options)


def test_a_host_without_room_for_a_snapshot_is_named():
    with pytest.raises(ConfigError, match=r"host_size=1B holds less than one snapshot \(50B each over all pools\)"):
        split_sizes(model(STATE), config(host=1))


def test_no_request_at_all_is_refused():
    with pytest.raises(ConfigError, match="live_slots=0"):
        split_sizes(model(FULL), config(), live_slots=0)


COVERAGES = st.one_of(st.just(Full()), st.just(Checkpoint()), st.integers(1, 40).map(Window))


@st.composite
def models(draw: st.DrawFn) -> ModelDescription:
    pools: list[PoolDescription] = []
    for number in range(draw(st.integers(1, 5))):
        coverage = draw(COVERAGES)
        layers = geometry(draw(st.integers(1, 2)), draw(st.integers(1, 60)), 1 if coverage == Checkpoint() else PAGE)
        pools.append(PoolDescription(f"pool{number}", layers, (0, 1), coverage))
        if draw(st.booleans()):
            pools.append(PoolDescription(f"derived{number}", geometry(1, 3), (0,), derived_from=f"pool{number}"))
    return ModelDescription(2, tuple(pools))


@given(
    models(), st.integers(1, 30_000), st.floats(0.01, 1), st.floats(0.01, 0.99), st.integers(0, 3), st.integers(1, 9)
)
def test_every_split_keeps_to_its_size_and_gives_every_pool_its_least(made, size, ratio, share, reserved, live):
    settings = config(size, window_ratio=ratio, checkpoint_share=share)
    options = {"reserved_slots": reserved, "live_slots": live}
    try:
        slots = split_sizes(made, settings, **options).device
    except ConfigError as refusal:
        least = parse_size(re.search(r"give it (\w+) or more", str(refusal))[1])
        assert least > size
        slots = split_sizes(made, settings.replace(device_size=least), **options).device
        with pytest.raises(ConfigError):
            split_sizes(made, settings.replace(device_size=least - 1), **options)
        size = least
    used = sum((slots[pool.name] + reserved) * pool.slot_bytes for pool in made.pools)
    assert size - made.slot_bytes < used <= size, "less than one slot of each is left over"
    own = {pool.name: pool for pool in made.pools if pool.derived_from is None}
    full = [slots[name] for name, pool in own.items() if isinstance(pool.coverage, Full)]
    assert len(set(full)) <= 1
    for pool in made.pools:
        if pool.derived_from is not None:
            assert slots[pool.name] == slots[pool.derived_from]
        elif isinstance(pool.coverage, Checkpoint):
            assert slots[pool.name] >= live + 2
        elif isinstance(pool.coverage, Window):
            least = pool.coverage.pages(PAGE) + 2
            assert slots[pool.name] >= (min(least, full[0]) if full else least)
            assert not full or slots[pool.name] <= max(least, full[0] * ratio)
        else:
            assert slots[pool.name] >= 1


@pytest.mark.parametrize("made", [DERIVED, THREE_POOLS, model(STATE)])
def test_a_cache_is_built_as_described(made):
    settings = config(40 * made.slot_bytes, 50 * made.slot_bytes)
    sizes = split_sizes(made, settings, reserved_slots=1, live_slots=2)
    cache = build_kv_cache(made, settings, reserved_slots=1, live_slots=2)
    for pool in cache.stats().pools:
        assert pool.slots == (sizes.device if pool.tier is Tier.DEVICE else sizes.host)[pool.pool]
    for entry in cache.controller.mem_pool_host.entries:
        assert entry.device_pool.slots == sizes.device[entry.name] + 1
        assert entry.host_pool.slots == sizes.host[entry.name]
        assert all(draft.slots == entry.device_pool.slots for draft in entry.packed_draft_device_pools)
    cache.close()


def test_sizes_are_described_one_line_per_pool_and_tier():
    settings = config(120 * 20, 10 * 20 + 7 * 12 + 6 * 50)
    assert describe_sizes(model(FULL, DRAFT, SWA, STATE), settings, reserved_slots=1, live_slots=3).splitlines() == [
        "device kv: 51 pages of 4 tokens and 1 reserved, 20B each, 1040B",
        "device draft: 51 pages of 4 tokens and 1 reserved, 8B each, 416B",
        "device swa: 25 pages of 4 tokens and 1 reserved, 12B each, 312B",
        "device state: 11 snapshots and 1 reserved, 50B each, 600B",
        "device in all: 2368B of 2400B",
        "host kv: 14 pages of 4 tokens, 20B each, 280B",
        "host draft: 14 pages of 4 tokens, 8B each, 112B",
        "host swa: 7 pages of 4 tokens, 12B each, 84B",
        "host state: 2 snapshots, 50B each, 100B",
        "host in all: 576B of 584B",
    ]
