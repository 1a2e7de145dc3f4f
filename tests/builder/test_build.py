"""A cache is built whole or not at all, and what does not fit is said in one line before any memory is taken."""

import threading
from pathlib import Path

import pytest

from hicache.builder import ModelDescription, build_kv_cache, full_attention
from hicache.config import CacheConfig
from hicache.device.array import ArrayDevicePool
from hicache.errors import ConfigError
from hicache.memory import available_memory_bytes
from hicache.pools import HostPool
from hicache.storage.memory import MemoryBackend
from hicache.storage.registry import register_backend, unregister_backend
from tests.world import DERIVED, PAGE, THREE_POOLS, checkpoint_share, namespace, tokens

MODEL = full_attention(2, 2, 8, "float32", PAGE)
PAGE_BYTES = MODEL.slot_bytes


def config(**changes) -> CacheConfig:
    return CacheConfig(**{"device_size": 10 * PAGE_BYTES, "host_size": 20 * PAGE_BYTES, "page_size": PAGE} | changes)


@pytest.fixture
def nothing_is_allocated(monkeypatch):
    """Fails the test if host or device memory is taken."""

    def refuse(*arguments, **names):
        raise AssertionError("memory was taken")

    monkeypatch.setattr(HostPool, "allocate", refuse)
    return refuse


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"device_size": PAGE_BYTES - 1},
            r"device_size=1023B holds less than one page \(1KiB over all pools\); give it 1KiB or more",
        ),
        ({"host_size": 100}, r"host_size=100B holds less than one page \(1KiB over all pools\); give it 1KiB or more"),
        ({"page_size": 8}, "page_size=8: a slot of pool 'kv' holds 4 tokens"),
        ({"host_size": "4096TiB"}, "device_size and host_size together: .* asked, but .* set a smaller size"),
        ({"storage_url": "nosuch:x"}, "storage_url=nosuch:x: no storage backend named 'nosuch'"),
        ({"storage_url": "memory:", "storage_size": PAGE_BYTES}, "storage_size=.* less than one page"),
        ({"storage_url": "file:x?color=red"}, "color"),
    ],
)
def test_what_does_not_fit_is_said_before_memory_is_taken(nothing_is_allocated, changes, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        build_kv_cache(MODEL, config(**changes), device_pool=nothing_is_allocated)
    assert "\n" not in str(refusal.value)


def test_a_page_larger_than_the_pool_is_refused_with_the_size_that_would_do(nothing_is_allocated):
    large = full_attention(2, 2, 8, "float32", 1024)
    with pytest.raises(ConfigError, match="give it 256KiB or more"):
        build_kv_cache(large, config(page_size=1024))
    build_config = config(page_size=1024, device_size="256KiB", host_size="256KiB")
    with pytest.raises(AssertionError, match="memory was taken"):
        build_kv_cache(large, build_config)


def test_reserved_slots_come_on_top_of_one_page(nothing_is_allocated):
    with pytest.raises(ConfigError, match=r"all pools\), and 3 more of each are reserved; give it 4KiB or more"):
        build_kv_cache(MODEL, config(device_size=3 * PAGE_BYTES), reserved_slots=3)


def test_device_memory_that_is_not_the_hosts_is_not_counted(nothing_is_allocated):
    model = full_attention(64, 64, 256, "float32", PAGE)
    sizes = config(device_size="64TiB", host_size="32MiB")
    with pytest.raises(ConfigError, match="together"):
        build_kv_cache(model, sizes)
    with pytest.raises(AssertionError, match="memory was taken"):
        build_kv_cache(model, sizes, device_in_host_memory=False)


@pytest.mark.parametrize("model", [MODEL, DERIVED, THREE_POOLS])
def test_pools_get_the_slots_that_the_sizes_allow(model: ModelDescription):
    sizes = config(
        device_size=12 * model.slot_bytes,
        host_size=20 * model.slot_bytes,
        window_ratio=1.0,
        checkpoint_share=checkpoint_share(model),
    )
    cache = build_kv_cache(model, sizes, reserved_slots=2)
    for pool in cache.stats().pools:
        assert pool.slots == (10 if pool.tier.value == "device" else 20), pool
    for tier in ("device", "host"):
        pools = [pool for pool in cache.stats().pools if pool.tier.value == tier]
        derived = sum(pool.slot_bytes for pool in model.pools if pool.derived_from is not None)
        assert sum(pool.slot_bytes for pool in pools) + derived == model.slot_bytes
    match = cache.match_prefix(tokens(*range(9)), namespace(model))
    taken = cache.allocate(match, 10 * PAGE)
    assert all(slots.min() >= 2 for slots in taken.values()), "reserved slots are never handed out"
    assert cache.allocate(match, 1) is None
    cache.release(match)
    cache.audit()
    cache.close()


def test_a_device_that_has_no_memory_gives_host_memory_and_store_back():
    closed = []

    class Told(MemoryBackend):
        def close(self):
            closed.append(self)
            super().close()

    def fails(name, geometry, slots):
        if name == "indexer":
            raise MemoryError("the device is full")
        return ArrayDevicePool.page_first(name, geometry, slots)

    register_backend("told", lambda location: Told())
    try:
        before = available_memory_bytes()
        with pytest.raises(MemoryError):
            build_kv_cache(DERIVED, config(host_size="256MiB", storage_url="told:"), device_pool=fails)
        assert len(closed) == 1
        assert available_memory_bytes() > before - (64 << 20), "256MiB are not promised to anybody any more"
    finally:
        unregister_backend("told")


def test_a_store_that_can_not_be_opened_leaves_the_cache_at_work(tmp_path: Path):
    in_the_way = tmp_path / "store"
    in_the_way.write_text("a file, not a folder")
    cache = build_kv_cache(MODEL, config(storage_url=f"file:{in_the_way}"))
    (trouble,) = cache.health()
    assert str(in_the_way) in trouble
    assert cache.stats().storage is None
    ticket = cache.prefetch(tokens(*range(9)), namespace())
    assert ticket.done
    cache.close()


def test_a_config_of_transformers_is_enough(tmp_path: Path):
    fields = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    before = set(threading.enumerate())
    cache = build_kv_cache(fields, config(storage_url=f"file:{tmp_path}"), dtype="bfloat16")
    assert cache.stats().pools[0].slot_bytes == 2 * 2 * PAGE * 16 * 2
    assert cache.health() == ()
    cache.close()
    assert set(threading.enumerate()) <= before
