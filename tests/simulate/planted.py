"""Bugs of the kinds that a cache of this sort has, to be planted by `monkeypatch`: each leaves the code plausible."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from hicache.controller.loads import Loads
from hicache.controller.retractions import Retractions
from hicache.coverage import Window
from hicache.engine.lineup import Lineup
from hicache.engine.sequence import Sequence
from hicache.keys import Namespace
from hicache.pools import HostPoolGroup
from hicache.transfer import Completion


def frees_slots_before_they_are_copied(patch: pytest.MonkeyPatch) -> None:
    """What a request leaves on the device is free when its backup is asked for, not when that has settled."""
    to_host = Retractions.to_host

    def hasty(self, shared, own, after):
        parcel = to_host(self, shared, own, after)
        if parcel is not None:
            self._state.free_device(parcel.device)
            parcel.device = {}
        return parcel

    patch.setattr(Retractions, "to_host", hasty)


def lets_windows_go_too_early(patch: pytest.MonkeyPatch) -> None:
    """A window is taken for two tokens shorter than it is."""

    def pages(self, page_size):
        return -(-max(0, self.tokens - 3) // page_size)

    patch.setattr(Window, "pages", pages)


def believes_loads_that_failed(patch: pytest.MonkeyPatch) -> None:
    """What has arrived is not asked of a completion."""
    split = Loads._split

    def believing(self, op, completion):
        pools = [member for pool in op.device for member in self._state.members(pool)]
        counts = {member: len(op.device[pool]) for pool in op.device for member in self._state.members(pool)}
        good = {member: np.ones(counts[member], np.bool_) for member in pools}
        return split(self, op, Completion(completion.id, good))

    patch.setattr(Loads, "_split", believing)


def forgets_a_pool_when_it_rolls_back(patch: pytest.MonkeyPatch) -> None:
    """A shortage in a later pool leaves the first one's slots with nobody."""
    take = HostPoolGroup._take

    def forgetful(self, wanted, tier):
        spared = [
            (name, side if index else replace(side, free=lambda slots: None), count)
            for index, (name, side, count) in enumerate(wanted)
        ]
        return take(self, spared, tier)

    patch.setattr(HostPoolGroup, "_take", forgetful)


def resumes_from_a_stale_state(patch: pytest.MonkeyPatch) -> None:
    """A request that comes back reads its recurrent state from where it was when it left."""
    retract, segment = Sequence.retract, Sequence.segment
    left: dict[int, Mapping[str, int]] = {}

    def remembering(self):
        slots = self._match.live_slots
        gone = retract(self)
        if gone and slots:
            left[id(self)] = dict(slots)
        return gone

    def stale(self, *args):
        next_part = segment(self, *args)
        slots = left.pop(id(self), None)
        return next_part if slots is None or self._resumes else replace(next_part, state_from=slots)

    patch.setattr(Sequence, "retract", remembering)
    patch.setattr(Sequence, "segment", stale)


def mixes_tenants(patch: pytest.MonkeyPatch) -> None:
    """The salt of a tenant does not make its namespace another."""
    patch.setattr(Namespace, "with_salt", lambda self, salt: self)


def lets_priority_go_before_any_age(patch: pytest.MonkeyPatch) -> None:
    """Whoever comes with a higher priority overtakes all others, however long they have waited."""

    def come(self, request, now_s):
        self._came += 1
        request.turn = (-request.priority, self._came)

    patch.setattr(Lineup, "come", come)


def makes_the_first_give_way(patch: pytest.MonkeyPatch) -> None:
    """Whoever runs gives way to any higher priority, also when its own turn comes first by now."""

    def lower(self, request):
        return [one for one in self.running if one.request.priority < request.priority]

    patch.setattr(Lineup, "lower", lower)


BUGS: Mapping[str, tuple[Callable[[pytest.MonkeyPatch], None], int]] = {
    "slots freed too early": (frees_slots_before_they_are_copied, 9),
    "short windows": (lets_windows_go_too_early, 7),
    "failed loads": (believes_loads_that_failed, 12),
    "rollback": (forgets_a_pool_when_it_rolls_back, 9),
    "stale state": (resumes_from_a_stale_state, 9),
    "tenants": (mixes_tenants, 0),
    "overtaken": (lets_priority_go_before_any_age, 1),
    "gives way too often": (makes_the_first_give_way, 1),
}
"""By name: how it is planted, and the first seed that a short search begins with."""
