"""One pool alone loses pages: the hit is what coverage says of what is left, and every other pool keeps its bytes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from hicache.bench.exact.plan import PAGE, TOLERANCE
from hicache.bench.exact.results import Check
from hicache.bench.exact.rig import Rig, full_pages, relative_difference, rigged
from hicache.bench.exact.subject import Subject
from hicache.bench.exact.trips import trunk
from hicache.coverage import longest_usable
from hicache.units import HOLE, BoolArray, ByteArray, Int32Array, PoolName, Tier

_Place: TypeAlias = tuple[PoolName, Tier]
_Where: TypeAlias = Mapping[_Place, Int32Array]
_MEMORY = (Tier.DEVICE, Tier.HOST)


def check_sidecars(subject: Subject, stores: Path) -> Check:
    """Each pool but the anchor loses its slots one by one, on the device and then on the host, and a page in the store.

    A derived pool has no slots of its own: it loses a page in the store only.
    """
    _, *others = subject.description.pools
    if not others:
        return Check("sidecars", None, "none")
    failures: list[str] = []
    lost = 0
    for pool in others:
        loss = _Loss(subject, pool.name, failures)
        lost += loss.in_store(stores / pool.name)
        if pool.derived_from is None:
            lost += loss.in_memory()
    return Check.judged("sidecars", f"{lost} lost", failures, lost=lost)


class _Loss:
    """One pool that loses what it has, and what is found wrong on the way."""

    def __init__(self, subject: Subject, pool: PoolName, failures: list[str]) -> None:
        self._subject = subject
        self._pool = pool
        self._failures = failures
        self._tokens = trunk(subject.plan)
        self._logits = subject.plain.logits(self._tokens)

    def in_store(self, store: Path) -> int:
        """The last page is lost, and a new cache has only the store. Returns how many pages were lost."""
        plan = self._subject.plan
        lost = plan.hits[-1] // PAGE - 1
        with rigged(self._subject, store) as rig:
            rig.compute(self._tokens, plan.hits, snapshots=plan.hits, keep=True)
            stored = self._present(rig.places(self._tokens), [Tier.HOST])
            gone = rig.forget(self._pool, lost, self._tokens)
        if gone != 1:
            self._failures.append(f"{self._pool}: page {lost} was not in the store")
        stored[self._source] = stored[self._source].copy()
        stored[self._source][lost] = False
        with rigged(self._subject, store) as rig:
            self._resume(rig, f"{self._pool} without page {lost} in storage", self._usable(stored), stored=True)
        return gone

    def in_memory(self) -> int:
        """Slot by slot, first on the device. Returns how many were evicted."""
        plan = self._subject.plan
        with rigged(self._subject) as rig:
            rig.compute(self._tokens, plan.hits, snapshots=plan.hits, keep=True)
            evicted = self._lose(rig, Tier.DEVICE)
            rig.evict(self._pool, Tier.DEVICE)
            evicted += self._lose(rig, Tier.HOST)
        if evicted < 2:
            self._failures.append(f"{self._pool}: only {evicted} slots could be evicted")
        return evicted

    def _lose(self, rig: Rig, tier: Tier) -> int:
        evicted = 0
        while self._evict_one(rig, tier):
            evicted += 1
            if evicted == 1:
                self._resume_in_memory(rig, f"{self._pool} without one slot in {tier.value}")
                if tier is Tier.HOST:
                    rig.evict(self._pool, Tier.DEVICE)
        self._resume_in_memory(rig, f"{self._pool} with nothing in {tier.value}")
        return evicted

    def _evict_one(self, rig: Rig, tier: Tier) -> bool:
        before = rig.places(self._tokens)
        kept = {place: slots for place, slots in before.items() if place != (self._pool, tier)}
        content = _content(rig, kept)
        if not rig.evict(self._pool, tier, 1):
            return False
        after = rig.places(self._tokens)
        what = f"{self._pool} with {(after[self._pool, tier] != HOLE).sum()} slots in {tier.value}"
        self._compare_hit(rig, after, what)
        for place, slots in kept.items():
            if not np.array_equal(after[place], slots):
                self._failures.append(f"{what}: {place[0]} has moved in {place[1].value}")
            elif not np.array_equal(_content(rig, {place: slots})[place], content[place]):
                self._failures.append(f"{what}: bytes of {place[0]} have changed in {place[1].value}")
        return True

    def _compare_hit(self, rig: Rig, places: _Where, what: str) -> None:
        expected = tuple(self._usable(self._present(places, tiers)) for tiers in ([Tier.DEVICE], _MEMORY))
        found = rig.hit(self._tokens)
        if found != expected:
            self._failures.append(
                f"{what}: {found[0]} tokens can be resumed on the device and {found[1]} with the host,"
                f" coverage says {expected[0]} and {expected[1]}"
            )

    @property
    def _source(self) -> PoolName:
        """The pool whose slots it lives at."""
        found = {pool.name: pool.derived_from or pool.name for pool in self._subject.description.pools}
        return found[self._pool]

    def _present(self, places: _Where, tiers: Sequence[Tier]) -> dict[PoolName, BoolArray]:
        """Per pool with slots of its own, which of the pages that a prompt can resume at are in one of some tiers."""
        pages = full_pages(len(self._tokens)) // PAGE
        pools = {pool for pool, _ in places}
        return {pool: np.logical_or.reduce([places[pool, tier][:pages] != HOLE for tier in tiers]) for pool in pools}

    def _usable(self, present: Mapping[PoolName, BoolArray]) -> int:
        """How many tokens can be resumed, as coverage says."""
        pools = [pool for pool in self._subject.description.pools if pool.name in present]
        return longest_usable([(pool.coverage, present[pool.name]) for pool in pools], PAGE) * PAGE

    def _resume_in_memory(self, rig: Rig, what: str) -> None:
        self._resume(rig, what, self._usable(self._present(rig.places(self._tokens), _MEMORY)))

    def _resume(self, rig: Rig, what: str, usable: int, *, stored: bool = False) -> None:
        came = rig.compute(self._tokens, stored=stored)
        if came.start != usable:
            self._failures.append(f"{what}: resumed after {came.start} tokens, coverage says {usable}")
        expected = self._logits[came.start :]
        apart = relative_difference(came.logits, expected)
        if not apart <= TOLERANCE or not (came.logits.argmax(-1) == expected.argmax(-1)).all():
            self._failures.append(f"{what}: logits differ by {apart:.1e} of the largest")


def _content(rig: Rig, places: _Where) -> dict[_Place, ByteArray]:
    return {place: rig.content(*place, slots[slots != HOLE]) for place, slots in places.items()}
