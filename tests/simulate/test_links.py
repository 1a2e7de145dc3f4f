"""Transfers take the time that their bytes take, one after the other, and end as the seed says."""

import pytest

from hicache.errors import ClosedError
from hicache.simulate.clock import VirtualClock
from hicache.simulate.journal import Journal
from hicache.simulate.links import Lane, Links
from hicache.simulate.scenario import Faults, Hardware
from hicache.storage import PageStore
from hicache.storage.memory import MemoryBackend
from hicache.storage.protocol import StorageKey
from hicache.transfer import Fetch, Query, Store, StoredPages

KEY = StorageKey(bytes(32), "kv", b"p" * 32, bytes(32))
NO_FAULTS = Faults()
HARDWARE = Hardware(storage_bytes_per_s=100.0, storage_latency_s=0.5, fetch_workers=1)


def links(faults: Faults = NO_FAULTS, hardware: Hardware = HARDWARE) -> tuple[VirtualClock, Links]:
    clock = VirtualClock()
    return clock, Links(clock, hardware, faults, 0, Journal(clock))


def page(value: int) -> memoryview:
    return memoryview(bytearray([value]) * 100)


def store(number: int, kept: PageStore, content: memoryview) -> Store:
    return Store(number, kept, (StoredPages("kv", (KEY,), (content,)),))


def fetch(number: int, kept: PageStore, content: memoryview) -> Fetch:
    return Fetch(number, kept, (StoredPages("kv", (KEY,), (content,)),))


def test_a_transfer_ends_after_its_latency_and_bytes():
    clock, lines = links()
    lines.submit(store(1, PageStore(MemoryBackend()), page(3)))
    assert lines.next_s == pytest.approx(1.5)
    clock.pass_to(1.4)
    assert lines.poll() == []
    clock.pass_to(1.5)
    (completion,) = lines.poll()
    assert completion.id == 1 and completion.good["kv"].tolist() == [True]
    assert lines.next_s is None and lines.poll() == []
    assert lines.carried[Lane.STORE].nbytes == 100 and lines.carried[Lane.STORE].busy_s == pytest.approx(1.5)


def test_one_waits_for_the_one_before_on_its_link_and_for_no_other():
    clock, lines = links()
    kept = PageStore(MemoryBackend())
    for number in (1, 2):
        lines.submit(store(number, kept, page(3)))
    lines.submit(Query(3, kept, {"kv": (KEY,)}))
    clock.pass_to(0.5)
    assert [one.id for one in lines.poll()] == [3]
    clock.pass_to(10)
    assert [one.id for one in lines.poll()] == [1, 2]


def test_bytes_move_at_the_end():
    clock, lines = links()
    kept, content = PageStore(MemoryBackend()), page(3)
    lines.submit(store(1, kept, content))
    content[0] = 9
    clock.pass_to(2)
    lines.poll()
    back = page(0)
    lines.submit(fetch(2, kept, back))
    assert back[0] == 0
    clock.pass_to(10)
    lines.poll()
    assert back[0] == 9


def test_a_transfer_that_fails_leaves_garbage_and_says_so():
    clock, lines = links(Faults(fail=1.0))
    kept, back = PageStore(MemoryBackend()), page(0)
    kept.write((KEY,), (page(3),))
    lines.submit(fetch(1, kept, back))
    clock.pass_to(10)
    (completion,) = lines.poll()
    assert completion.error == "simulated failure" and not completion.good
    assert set(back.tolist()) == {0xA5}


def test_a_lost_completion_comes_when_all_is_closed():
    clock, lines = links(Faults(lose=1.0))
    lines.submit(store(1, PageStore(MemoryBackend()), page(3)))
    clock.pass_to(10)
    assert lines.poll() == [] and lines.lost == 1
    assert [one.id for one in lines.close()] == [1]
    with pytest.raises(ClosedError):
        lines.submit(store(2, PageStore(MemoryBackend()), page(3)))


def test_late_ones_take_longer():
    _, lines = links(Faults(late=1.0))
    lines.submit(store(1, PageStore(MemoryBackend()), page(3)))
    assert lines.next_s is not None and lines.next_s > 3.0
