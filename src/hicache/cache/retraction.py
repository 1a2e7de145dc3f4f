"""A retracted request keeps its match and nothing on the device; what becomes of the match is decided here, once."""

from dataclasses import dataclass

from hicache.cache.account import solid
from hicache.cache.match import Match
from hicache.controller import HybridCacheController
from hicache.controller.parcels import Return, Shared, Stage
from hicache.transfer import Event


@dataclass(frozen=True, slots=True)
class Retracted:
    """A request that was taken off the device: what `retraction_restore` and `retraction_discard` are given."""

    match: Match

    @property
    def settled(self) -> bool:
        """Whether it has left the device for good or was lost: its device slots are free."""
        parcel = self.match.parcel
        return parcel is None or parcel.stage is not Stage.LEAVING

    @property
    def lost(self) -> bool:
        """Whether it has to be computed again; `retraction_restore` says the same."""
        return self.match.is_lost


def retract(controller: HybridCacheController, match: Match, after: Event | None) -> Retracted | None:
    """Take a match off the device: to the host, else to storage. None, with nothing taken, when neither can."""
    retractions = controller.retractions
    shared = retractions.shared(match.span, match.shared_starts())
    last = match.last_event(after)
    parcel = retractions.to_host(shared, match.owned(), controller.written(last))
    if parcel is not None:
        match.leave(parcel, shared, last)
        return Retracted(match)
    return _spill(controller, match, shared, last)


def _spill(controller: HybridCacheController, match: Match, shared: Shared, last: Event | None) -> Retracted | None:
    """What the host lacks of what the match shares becomes its own: it goes to storage with the rest."""
    retractions = controller.retractions
    clean = retractions.clean(shared)
    account = match.widened(shared, clean.span.stop)
    parcel = retractions.to_storage(clean, match.owned(), solid(account), match.receipts, controller.written(last))
    if parcel is None:
        controller.state.counters.retraction_refused += 1
        return None
    match.leave_for_storage(parcel, clean, account, last)
    return Retracted(match)


def restore(controller: HybridCacheController, match: Match, timeout_s: float) -> Return | None:
    """Bring a match back. None: not yet, or it is lost."""
    parcel = match.parcel
    if parcel is None:
        return None
    back = controller.retractions.restore(parcel, match, controller.now(), timeout_s)
    if back is not None:
        match.come_back(back)
    return back
