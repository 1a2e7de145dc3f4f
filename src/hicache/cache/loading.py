"""A load ends when it has settled or takes too long: for one rank when it is asked, for several in the same `poll`."""

from collections.abc import Callable, Sequence
from functools import partial

from hicache.cache.load import Load, SharedLoad
from hicache.cache.match import Match
from hicache.controller import HybridCacheController
from hicache.transfer import LayerProgress


def load_of(
    controller: HybridCacheController, match: Match, progress: Sequence[LayerProgress], timeout_s: float
) -> Load:
    """The load of a match that has begun to load."""
    return _make(controller, match, progress, timeout_s, partial(_settle, controller, match))


def return_of(
    controller: HybridCacheController, match: Match, progress: Sequence[LayerProgress], timeout_s: float
) -> Load:
    """The load of a match that comes back from a retraction, or is lost."""
    return _make(controller, match, progress, timeout_s, partial(_settle_return, controller, match))


def _make(
    controller: HybridCacheController,
    match: Match,
    progress: Sequence[LayerProgress],
    timeout_s: float,
    settle: Callable[[], int],
) -> Load:
    if controller.alone:
        return Load(match.length_tokens, progress, timeout_s, settle)
    begun_s = controller.now()

    def agreed() -> bool:
        return match.is_lost or not match.loading or controller.now() - begun_s > timeout_s

    return SharedLoad(match.length_tokens, progress, timeout_s, settle, agreed)


def _poll_if_alone(controller: HybridCacheController) -> None:
    """One rank may settle at any time; several do so together."""
    if controller.alone:
        controller.poll()


def _settle(controller: HybridCacheController, match: Match) -> int:
    _poll_if_alone(controller)
    given_up = match.loading and not controller.alone
    if match.loading:
        load = match.abandon_load()
        if load is not None:
            controller.give_up(load, match)
    match.shortness_known()
    return 0 if given_up or match.is_torn else match.shared_tokens


def _settle_return(controller: HybridCacheController, match: Match) -> int:
    _poll_if_alone(controller)
    if match.returning:
        load = match.abandon_return()
        if load is not None:
            controller.give_up(load, match)
    return match.good_tokens
