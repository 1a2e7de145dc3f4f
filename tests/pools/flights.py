"""Transfers that run late: step by step, in any order, failing or never reported, as a seed decides."""

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hicache.pools import BackupPlan, HostPoolGroup, LoadPlan, PoolCopy, PoolEntry, PoolTransfer
from hicache.units import BoolArray, Int32Array, Tier
from tests.pools.device_bytes import GARBAGE, CountingPool, all_slots, members, write_page

Good = Mapping[str, BoolArray]
OTHER = {Tier.HOST: Tier.DEVICE, Tier.DEVICE: Tier.HOST}


@dataclass(eq=False)
class Flight:
    """A transfer under way: until it has settled, its slots on both sides are its own."""

    to: Tier
    transfers: tuple[PoolTransfer, ...]
    content: Mapping[str, list[bytes]]
    steps: deque[Callable[[], None]] = field(default_factory=deque)

    def slots(self, pool: str, tier: Tier) -> list[int]:
        """What it holds of a pool in one tier."""
        return [
            int(slot)
            for transfer in self.transfers
            if transfer.name == pool
            for slot in present(transfer.slots_on(tier))
        ]

    def pages(self) -> dict[str, int]:
        """How many pages of each pool move."""
        return {transfer.name: len(transfer.pairs()[0]) for transfer in self.transfers}


@dataclass(frozen=True)
class Fates:
    """How often what happens, as probabilities."""

    fail: float = 0.05
    """Per step: that the transfer ends there."""
    partial: float = 0.15
    """That some pages of some pools are wrong and reported so."""
    lose: float = 0.1
    """That the end is not reported until all is closed."""


class LateExecutor:
    """Runs steps of any transfer that was taken on, when it is told to."""

    def __init__(self, group: HostPoolGroup, fates: Fates) -> None:
        self._group = group
        self._fates = fates
        self._waiting: list[Flight] = []
        self._lost: list[tuple[Flight, Good]] = []

    @property
    def flights(self) -> list[Flight]:
        """All that have not settled, lost ones included."""
        return [*self._waiting, *(flight for flight, _ in self._lost)]

    def submit(self, flight: Flight) -> None:
        """Take a transfer on."""
        self._waiting.append(flight)

    def run(self, seed: int, steps: int) -> list[tuple[Flight, Good]]:
        """Run up to `steps` steps, each of a transfer picked anew. What has ended, and which pages of it are right."""
        dice = random.Random(seed)
        ended = []
        for _ in range(steps):
            if not self._waiting:
                break
            flight = dice.choice(self._waiting)
            good = self._step(flight, dice)
            if good is None:
                continue
            self._waiting.remove(flight)
            if dice.random() < self._fates.lose:
                self._lost.append((flight, good))
            else:
                ended.append((flight, good))
        return ended

    def close(self, seed: int) -> list[tuple[Flight, Good]]:
        """Run all to its end; the lost come too."""
        ended = self.run(seed, sum(len(flight.steps) + 1 for flight in self._waiting) * 20)
        assert not self._waiting
        lost, self._lost = self._lost, []
        return ended + lost

    def _step(self, flight: Flight, dice: random.Random) -> Good | None:
        if flight.steps and dice.random() < self._fates.fail:
            self._spoil(flight, {name: np.zeros(pages, np.bool_) for name, pages in flight.pages().items()})
            return {}
        if flight.steps:
            flight.steps.popleft()()
        if flight.steps:
            return None
        good = {name: np.ones(pages, np.bool_) for name, pages in flight.pages().items()}
        if dice.random() < self._fates.partial:
            good = {name: np.array([dice.random() < 0.8 for _ in pages], np.bool_) for name, pages in good.items()}
            self._spoil(flight, good)
        return good

    def _spoil(self, flight: Flight, good: Good) -> None:
        for transfer in flight.transfers:
            entry = self._group.get_entry(transfer.name)
            garbage = np.full(entry.host_pool.layout.page_bytes, GARBAGE, np.uint8)
            for slot in present(transfer.slots_on(flight.to))[~good[transfer.name]]:
                write_page(entry, flight.to, int(slot), garbage)


def backup_steps(plan: BackupPlan) -> deque[Callable[[], None]]:
    """A step per device pool; each also goes the other way, staged or plain, into memory of its own: bytes equal."""
    return deque(lambda copy=copy: _back_up(plan, copy) for copy in plan.copies)  # type: ignore[misc]


def _back_up(plan: BackupPlan, copy: PoolCopy) -> None:
    assert isinstance(copy.device_pool, CountingPool)
    before = copy.device_pool.staged
    replace(plan, copies=(copy,)).run()
    assert copy.device_pool.staged - before == plan.staged
    scratch = replace(copy, pages=np.zeros_like(copy.pages))
    replace(plan, copies=(scratch,), staged=not plan.staged).run()
    assert np.array_equal(scratch.pages[copy.host_slots], copy.pages[copy.host_slots])


def load_steps(plan: LoadPlan, watches: Sequence["Watch"]) -> deque[Callable[[], None]]:
    """A step per model layer; after each, exactly the pool layers that are due have changed, and to the right bytes."""

    def step(layer: int) -> None:
        plan.run_layer(layer)
        for watch in watches:
            watch.check(layer, len(plan.layers))

    return deque(lambda layer=layer: step(layer) for layer in range(len(plan.layers)))  # type: ignore[misc]


class Watch:
    """What a load is to bring to the device slots of one entry, and what they held before: nobody else may write."""

    def __init__(self, entry: PoolEntry, slots: Int32Array, content: Sequence[bytes]) -> None:
        self._entry = entry
        self._slots = slots
        self._before = [all_slots(pool)[slots] for pool in members(entry)]
        raw = np.frombuffer(b"".join(content), np.uint8)
        self._content = raw.reshape(len(slots), entry.host_pool.layout.page_bytes)

    def check(self, layer: int, layers: int) -> None:
        """Raises unless what is due after model layer `layer` of `layers` is there, and the rest is as it was."""
        start = 0
        for pool, before, due in zip(members(self._entry), self._before, arrivals(self._entry, layers), strict=True):
            now = all_slots(pool)[self._slots]
            for own, arrives in enumerate(due):
                part = pool.geometry.layer_range(own)
                expected = self._content[:, start:] if arrives <= layer else before
                assert np.array_equal(now[:, part.start : part.stop], expected[:, part.start : part.stop]), (
                    f"{pool.name}: layer {own}, due with model layer {arrives}, after model layer {layer}"
                )
            start += pool.geometry.slot_bytes


def arrivals(entry: PoolEntry, layers: int) -> list[list[int]]:
    """Per device pool of an entry and layer of it, the model layer it has to arrive with."""
    own, *drafts = members(entry)
    uses = [entry.layer_mapper(layer) for layer in range(layers)]
    found = [[uses.index(layer) for layer in range(len(own.geometry.layers))]]
    depth = 0
    for draft in drafts:
        found.append([min(depth + layer, layers - 1) for layer in range(len(draft.geometry.layers))])
        depth += len(draft.geometry.layers)
    return found


def present(slots: Int32Array | None) -> Int32Array:
    """A run of slots without its holes."""
    assert slots is not None
    there: Int32Array = slots[slots >= 0]
    return there
