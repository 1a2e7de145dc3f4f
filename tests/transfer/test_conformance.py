"""Every executor keeps the protocol: order per kind, one completion per transfer, no end before it can be polled."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from hicache.device.array import ArrayDevicePool
from hicache.errors import ClosedError, StorageError
from hicache.keys import page_keys
from hicache.layout import PackedLayout
from hicache.pools import HostPool, HostPoolGroup, PoolCapabilities, PoolEntry, PoolTransfer, plan_backup, plan_load
from hicache.storage import PageStore, chain_keys
from hicache.storage.memory import MemoryBackend
from hicache.testing.simulator import FaultRates, SimulatedExecutor
from hicache.testing.streams import StreamExecutor
from hicache.transfer import (
    Backup,
    Completion,
    Executor,
    Fetch,
    LayerProgress,
    Load,
    Message,
    Query,
    Store,
    StoredPages,
    ThreadExecutor,
)
from hicache.units import DeviceSlots, HostSlots
from tests.world import PAGE, geometry, namespace, tokens

LAYERS = 3
SLOTS = 8


class RecordingPool(ArrayDevicePool):
    """Says what it copied, in order; fails on demand."""

    calls: list[tuple[str, int]]
    broken: bool
    slow: bool

    def take_turn(self) -> None:
        """The first of several copies at once would be the last to be done."""
        if self.slow:
            time.sleep(max(0.0, 0.02 - 0.005 * len(self.calls)))

    @classmethod
    def make(cls, name: str) -> "RecordingPool":
        pool = cls.page_first(name, geometry(LAYERS, 5), SLOTS)
        pool.calls, pool.broken, pool.slow = [], False, False
        return pool

    def backup(self, slots, pages, rows) -> None:
        self.take_turn()
        self.calls.append(("backup", int(slots[0])))
        if self.broken:
            raise OSError("the device does not answer")
        super().backup(slots, pages, rows)

    def load_layer(self, slots, pages, rows, layer) -> None:
        self.take_turn()
        self.calls.append(("load", int(slots[0])))
        if self.broken and layer == 1:
            raise OSError("the device does not answer")
        super().load_layer(slots, pages, rows, layer)


class RecordingStore(MemoryBackend):
    """Says what was written, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.broken = False

    def write(self, keys, values):
        self.written += [key.page for key in keys]
        return super().write(keys, values)

    def read(self, keys, values):
        if self.broken:
            raise StorageError("the store is gone")
        return super().read(keys, values)


class Stage:
    """Two pools, a store, and an executor over them."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.pools = {name: RecordingPool.make(name) for name in ("kv", "extra")}
        self.group = HostPoolGroup(LAYERS, [self._entry(pool) for pool in self.pools.values()])
        self.backend = RecordingStore()
        self.store = PageStore(self.backend)
        self.ids = iter(range(1, 1000))
        keys = page_keys(namespace().fingerprint, tokens(*range(SLOTS * PAGE)), PAGE)
        self.keys = chain_keys(namespace().fingerprint, "kv", namespace().fingerprint, keys)
        self.fill()

    def _entry(self, pool: RecordingPool) -> PoolEntry:
        host = HostPool.allocate(pool.name, PackedLayout(pool.geometry), SLOTS, PoolCapabilities(False, True))
        return PoolEntry(pool.name, host, pool, lambda layer: layer)

    def fill(self) -> None:
        """Every byte of device and host pages is told from every other page's."""
        for number, pool in enumerate(self.pools.values()):
            for slot in range(SLOTS):
                for layer in range(LAYERS):
                    pool.tensor_bytes(layer, 0)[slot] = 100 * number + slot + 1
                self.group.get_pool(pool.name).pages[slot] = 100 * number + slot + 51

    def transfers(self, device: list[int], host: list[int]) -> list[PoolTransfer]:
        slots = DeviceSlots(np.array(device, np.int32)), HostSlots(np.array(host, np.int32))
        return [PoolTransfer(name, *slots) for name in self.pools]

    def backup(self, device: list[int], host: list[int]) -> Backup:
        return Backup(next(self.ids), plan_backup(self.group, self.transfers(device, host)))

    def load(self, host: list[int], device: list[int]) -> Load:
        plan = plan_load(self.group, self.transfers(device, host))
        return Load(next(self.ids), plan, LayerProgress(LAYERS))

    def content(self, pages: list[int]) -> tuple[StoredPages, ...]:
        views = tuple(memoryview(self.group.get_pool("kv").pages[page]) for page in pages)
        return (StoredPages("kv", tuple(self.keys[page] for page in pages), views),)

    def save(self, pages: list[int]) -> Store:
        return Store(next(self.ids), self.store, self.content(pages))

    def fetch(self, pages: list[int]) -> Fetch:
        return Fetch(next(self.ids), self.store, self.content(pages))

    def query(self, pages: list[int]) -> Query:
        return Query(next(self.ids), self.store, {"kv": tuple(self.keys[page] for page in pages)})

    def all_kinds(self) -> list[Message]:
        return [self.backup([0], [0]), self.load([1], [1]), self.save([2]), self.fetch([3]), self.query([4])]

    def run_all(self) -> None:
        """Let what was submitted run, where an executor waits to be told."""
        if isinstance(self.executor, StreamExecutor):
            for stream in (self.executor.backups, self.executor.loads, self.executor.storage):
                stream.run()

    def finish(self, messages: list[Message]) -> list[Completion]:
        """Submit, and poll until everything has come back."""
        for message in messages:
            self.executor.submit(message)
        return self.await_ids({message.id for message in messages})

    def await_ids(self, ids: set[int]) -> list[Completion]:
        self.run_all()
        ended: list[Completion] = []
        while not ids <= {completion.id for completion in ended}:
            ended += self.executor.poll()
        return ended


EXECUTORS: dict[str, Callable[[], Executor]] = {
    "threads": ThreadExecutor,
    "one fetch thread": lambda: ThreadExecutor(1),
    "simulated": lambda: SimulatedExecutor(7, FaultRates(start=0.5)),
    "streams": StreamExecutor,
}


@pytest.mark.parametrize("stage", list(EXECUTORS), indirect=True)
class TestExecutor:
    @pytest.fixture
    def stage(self, request) -> Iterator[Stage]:
        stage = Stage(EXECUTORS[request.param]())
        yield stage
        stage.executor.close()
        stage.group.close()
        stage.store.close()

    def test_a_backup_and_a_load_move_every_byte_of_every_pool(self, stage: Stage):
        (done,) = stage.finish([stage.backup([1, 5], [6, 2])])
        assert done.error is None
        assert {pool: good.tolist() for pool, good in done.good.items()} == {"kv": [True] * 2, "extra": [True] * 2}
        for number, name in enumerate(stage.pools):
            pages = stage.group.get_pool(name).pages
            assert (pages[6] == 100 * number + 2).all()
            assert (pages[2] == 100 * number + 6).all()
            assert (pages[0] == 100 * number + 51).all(), "no other page is touched"
        load = stage.load([6], [7])
        (done,) = stage.finish([load])
        assert {pool: good.tolist() for pool, good in done.good.items()} == {"kv": [True], "extra": [True]}
        assert load.progress.wait(LAYERS - 1, 0.0)
        for number, pool in enumerate(stage.pools.values()):
            assert (pool.tensor_bytes(2, 0)[7] == 100 * number + 2).all()

    def test_pages_come_back_from_storage(self, stage: Stage):
        stage.finish([stage.save([0, 1, 2])])
        pages = stage.group.get_pool("kv").pages
        pages[:] = 0
        (query,) = stage.finish([stage.query([0, 3, 2])])
        assert query.good["kv"].tolist() == [True, False, True]
        (fetch,) = stage.finish([stage.fetch([0, 3, 2])])
        assert fetch.good["kv"].tolist() == [True, False, True]
        assert (pages[0] == 51).all()
        assert (pages[2] == 53).all()

    def test_each_kind_that_copies_keeps_its_order(self, stage: Stage):
        messages: list[Message] = []
        stage.pools["kv"].slow = True
        for slot in range(SLOTS):
            messages += [stage.backup([slot], [slot]), stage.load([slot], [slot]), stage.save([slot])]
        done = stage.finish(messages)
        calls = stage.pools["kv"].calls
        assert [slot for what, slot in calls if what == "backup"] == list(range(SLOTS))
        assert [slot for what, slot in calls if what == "load"] == [s for s in range(SLOTS) for _ in range(LAYERS)]
        assert stage.backend.written == [key.page for key in stage.keys]
        for kind in (Backup, Load, Store):
            ids = [message.id for message in messages if isinstance(message, kind)]
            assert [one.id for one in done if one.id in ids] == ids

    def test_every_transfer_completes_once(self, stage: Stage):
        messages = [message for _ in range(10) for message in stage.all_kinds()]
        done = stage.finish(messages)
        assert sorted(one.id for one in done) == sorted(message.id for message in messages)
        assert not stage.executor.poll()
        assert not stage.executor.close()

    def test_close_ends_what_was_taken_on_and_returns_it(self, stage: Stage):
        messages = [message for _ in range(5) for message in stage.all_kinds()]
        for message in messages:
            stage.executor.submit(message)
        done = stage.executor.close()
        assert sorted(one.id for one in done) == sorted(message.id for message in messages)
        assert all(message.progress.ended for message in messages if isinstance(message, Load))
        assert not stage.executor.close()
        with pytest.raises(ClosedError, match="build a new cache"):
            stage.executor.submit(stage.query([0]))

    @pytest.mark.parametrize("kind", ["backup", "load"])
    def test_a_device_that_fails_is_a_completion_without_good_pages(self, stage: Stage, kind: str):
        stage.pools["extra"].broken = True
        message = stage.backup([0], [0]) if kind == "backup" else stage.load([0], [0])
        (done,) = stage.finish([message])
        assert done.good == {}, "a pool that was copied does not count without the others"
        assert done.error == "OSError: the device does not answer"
        stage.pools["extra"].broken = False
        (again,) = stage.finish([stage.backup([0], [0])])
        assert again.error is None, "the next transfer is not harmed"

    def test_a_load_that_fails_lets_whoever_waits_go_on(self, stage: Stage):
        stage.pools["kv"].broken = True
        load = stage.load([0], [0])
        stage.finish([load])
        assert load.progress.wait(0, 0.0), "layer 0 had arrived"
        assert load.progress.wait(LAYERS - 1, 10.0), "layer 2 will never arrive, and nobody waits for it"

    def test_a_store_that_fails_is_a_completion_without_good_pages(self, stage: Stage):
        stage.backend.broken = True
        (done,) = stage.finish([stage.fetch([0])])
        assert done.good == {}
        assert done.error == "StorageError: the store is gone"

    def test_a_load_that_has_ended_can_be_polled(self, stage: Stage):
        for _ in range(20):
            load = stage.load([0], [0])
            polled: list[Completion] = []
            done = threading.Thread(target=load.progress.wait_end)
            done.start()
            stage.executor.submit(load)
            stage.run_all()
            while not load.progress.ended:
                if isinstance(stage.executor, SimulatedExecutor):
                    polled += stage.executor.poll()
            done.join(10.0)
            polled += stage.executor.poll()
            assert [one.id for one in polled] == [load.id]


class HostEvent:
    """An event that a worker has to wait for."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.waited = threading.Event()

    def query(self) -> bool:
        return self.passed.is_set()

    def wait(self) -> None:
        self.waited.set()
        assert self.passed.wait(30.0)


def test_a_thread_waits_for_the_computation_before_it_copies():
    stage = Stage(ThreadExecutor())
    event = HostEvent()
    backup = replace(stage.backup([0], [3]), after=event)
    stage.executor.submit(backup)
    assert event.waited.wait(30.0)
    stage.pools["kv"].tensor_bytes(0, 0)[0] = 99
    assert not stage.executor.poll()
    event.passed.set()
    (done,) = stage.await_ids({backup.id})
    assert done.error is None
    assert (stage.group.get_pool("kv").pages[3][: PAGE * 5] == 99).all(), "what was written last is what was copied"
    stage.executor.close()
