"""A request that is taken off the device comes back whole, to other slots, and goes on as one that never left."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from hicache.bench.exact.plan import PAGE
from hicache.bench.exact.results import Check
from hicache.bench.exact.rig import BrokenError, Rig, rigged
from hicache.bench.exact.subject import Subject, random_tokens
from hicache.cache import Match
from hicache.engine.sequence import Sequence as Computation
from hicache.engine.speculation import choose, no_tokens
from hicache.units import HOLE, Int32Array, PoolName, Tier

_SEED = 8
_CHUNK = 9
"""Tokens of a prompt's chunks: they end within pages, but where a snapshot is taken."""
_STAGING = 1
"""Slots of each pool that a full host has left, to copy through to storage."""


@dataclass(frozen=True, slots=True)
class _Way:
    """With `shared`, a request begins with a hit and shares what it computes; else all of it is its own.

    With `full_host`, it leaves for storage.
    """

    shared: bool
    full_host: bool

    @property
    def name(self) -> str:
        return f"{'with' if self.shared else 'without'} reuse, by way of {'storage' if self.full_host else 'the host'}"


@dataclass(frozen=True, slots=True)
class _Step:
    """What one step has computed: a part of the prompt, or with `decode` the token chosen last; logits of all of it."""

    start: int
    decode: bool
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Leave:
    """How a request leaves: with `planned`, after it was lent slots for the step.

    With `inspect`, all it has is compared before the step; else the step runs while layers are still loading.
    """

    planned: bool
    inspect: bool


def check_retraction(subject: Subject, store: Path) -> Check:
    """Requests leave and come back at random steps: all they have is what it was, and so are all later logits."""
    host = [_Way(shared=True, full_host=False), _Way(shared=False, full_host=False)]
    with rigged(subject) as rig:
        trials = [_Trial(rig, way) for way in host]
        expected = [trial.stay() for trial in trials]
        for trial, steps in zip(trials, expected, strict=True):
            trial.run(steps)
        failures = _amiss(rig, trials)
    with rigged(subject, store) as rig:
        last = _Trial(rig, _Way(shared=True, full_host=True))
        last.run(expected[0])
        failures += _amiss(rig, [last])
        stored = rig.cache.stats().counters["retraction_spilled"]
    if not stored:
        failures.append("nothing went through storage")
    tried = sum(trial.tried for trial in (*trials, last))
    equal = sum(trial.equal for trial in (*trials, last))
    return Check.judged("retraction", f"{equal} of {tried}", failures, equal=equal, tried=tried, through_storage=stored)


def _amiss(rig: Rig, trials: "Sequence[_Trial]") -> list[str]:
    """What was wrong, be it only that a request came back in another way than by being restored."""
    rig.cache.audit()
    failures = [text for trial in trials for text in trial.failures]
    tried, restored = sum(trial.tried for trial in trials), rig.cache.stats().counters["retraction_restores"]
    return failures if restored == tried else [*failures, f"{restored} of {tried} were restored"]


class _Trial:
    """One way of leaving, tried as often as the plan says. `tried` and `equal` count how often a request has left."""

    def __init__(self, rig: Rig, way: _Way) -> None:
        plan = rig.subject.plan
        self.tried = self.equal = 0
        self._rig = rig
        self._way = way
        self.failures: list[str] = []
        self._tokens = random_tokens(plan.hits[-2] + max(plan.suffixes), _SEED)
        self._hit = plan.hits[-2] if way.shared else 0
        self._changed: set[int] = set()

    def stay(self) -> list[_Step]:
        """What a walk computes in which nothing leaves."""
        return self._walk("stays", {})

    def run(self, expected: Sequence[_Step]) -> None:
        """Compare walks with one in which nothing leaves."""
        for seed in range(self._rig.subject.plan.retracted):
            leaves = self._draw(expected, seed)
            self._changed = set()
            found = self._walk(f"leaves {seed}", leaves)
            wrong = [place for place, steps in enumerate(zip(expected, found, strict=True)) if not _same(*steps)]
            if wrong:
                after = expected[wrong[0]].start
                self._fail(f"walk {seed}: other logits after {after} tokens; it left before steps {sorted(leaves)}")
            self.tried += len(leaves)
            self.equal += sum(step > max(wrong, default=-1) for step in set(leaves) - self._changed)

    def _fail(self, text: str) -> None:
        self.failures.append(f"{self._way.name}: {text}")

    def _draw(self, steps: Sequence[_Step], seed: int) -> dict[int, _Leave]:
        """Right after a hit, between two chunks of the prompt, and twice while the answer grows."""
        random = np.random.default_rng((_SEED, seed))
        chunks = [place for place, step in enumerate(steps) if not step.decode][1:]
        answer = [place for place, step in enumerate(steps) if step.decode]
        drawn = [int(random.choice(chunks)), *random.choice(answer, 2, replace=False).tolist()]
        places = [0, *sorted(drawn)] if self._hit else sorted(drawn)
        return {
            place: _Leave(planned=bool(place and random.integers(2)), inspect=(order + seed) % 2 == 0)
            for order, place in enumerate(places)
        }

    def _walk(self, salt: str, leaves: Mapping[int, _Leave]) -> list[_Step]:
        """Prompt and greedy answer, step by step."""
        rig, salt = self._rig, f"{self._way.name}, {salt}"
        if self._hit:
            rig.compute(self._tokens[: self._hit + 1], [self._hit], snapshots=[self._hit], salt=salt, keep=True)
        steps: list[_Step] = []
        answer = rig.subject.plan.retracted_answer
        stops = (self._hit + 2 * _CHUNK,)
        with rig.begin(self._tokens, answer, salt=salt, snapshots=stops) as (computation, match):
            rig.until(partial(computation.start, 0.0))
            self._settle(computation)
            if computation.computed != self._hit:
                raise BrokenError(f"{computation.computed} tokens were cached, not {self._hit}")
            while not computation.request.finished:
                steps.append(self._step(computation, match, leaves.get(len(steps)), len(steps)))
        return steps

    def _step(self, computation: Computation, match: Match, leave: _Leave | None, place: int) -> _Step:
        request, start = computation.request, computation.computed
        decode = request.answer_tokens > 0
        count = computation.chunk(_CHUNK)
        if leave is None or leave.planned:
            self._rig.until(partial(computation.reserve, count))
        if leave is not None:
            if not self._move(computation, match, leave.inspect):
                self._changed.add(place)
            self._rig.until(partial(computation.reserve, count))
        logits = self._rig.run(computation, count)
        self._settle(computation)
        if computation.missing == count:
            choose(request, logits[-1:], no_tokens(), 0.0)
        computation.advance(count)
        if self._way.shared:
            (computation.share_behind if decode else computation.share)()
        return _Step(start, decode, logits)

    def _settle(self, computation: Computation) -> None:
        if not computation.settle():
            raise BrokenError(f"{self._way.name}: what was computed was lost")

    def _move(self, computation: Computation, match: Match, inspect: bool) -> bool:
        """Away from the device, which is overwritten, and back. Whether all lies elsewhere and is what it was."""
        rig = self._rig
        pages = {pool: _needed(match, pool, computation.computed) for pool in rig.cache.controller.state.pools}
        before = {pool: _slots(match, pool, pages[pool]) for pool in pages}
        content = {pool: rig.content(pool, Tier.DEVICE, slots) for pool, slots in before.items()}
        self._leave(computation)
        rig.empty(Tier.DEVICE)
        taken = rig.take(Tier.DEVICE)
        held = {pool: np.intersect1d(run, before[pool]) for pool, run in taken.items()}
        rig.give(Tier.DEVICE, {pool: np.setdiff1d(run, held[pool]) for pool, run in taken.items()})
        rig.until(computation.restore)
        rig.give(Tier.DEVICE, held)
        if inspect:
            self._settle(computation)
        same = True
        for pool, old in before.items():
            new = _slots(match, pool, pages[pool])
            where = f"{pool} after {computation.computed} tokens"
            if np.isin(new, old).any() or (new == HOLE).any():
                self._fail(f"{where}: some of its slots are those from before, or none")
                same = False
            elif inspect and not np.array_equal(rig.content(pool, Tier.DEVICE, new), content[pool]):
                self._fail(f"{where}: bytes have changed")
                same = False
        return same

    def _leave(self, computation: Computation) -> None:
        rig = self._rig
        rig.settle()
        full: Mapping[PoolName, Int32Array] = {}
        if self._way.full_host:
            for pool in rig.cache.controller.state.pools:
                rig.evict(pool, Tier.HOST)
            full = rig.take(Tier.HOST, _STAGING)
        if not computation.retract():
            raise BrokenError(f"{self._way.name}: it could not leave the device")
        rig.until(lambda: not computation.leaving)
        rig.give(Tier.HOST, full)
        rig.settle()


def _same(one: _Step, other: _Step) -> bool:
    return torch.equal(one.logits, other.logits)


def _needed(match: Match, pool: PoolName, computed: int) -> Int32Array:
    """Pages, or boundaries of snapshots that were taken, whose slots it needs: its own, and those it sees of others."""
    whole = match.slots(pool)
    slots = whole[: computed // PAGE] if pool in match.live_slots else whole
    needed = np.isin(slots, match.lent[pool])
    needed[match.shared_starts()[pool] :] = True
    return np.flatnonzero(needed & (slots != HOLE)).astype(np.int32)


def _slots(match: Match, pool: PoolName, pages: Int32Array) -> Int32Array:
    """Their device slots, and that of the live state."""
    live = [match.live_slots[pool]] if pool in match.live_slots else []
    return np.concatenate((match.slots(pool)[pages], np.array(live, np.int32)))
