"""Pages of a prompt that is longer than the host go on to the device, so that the host is free for those after them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from hicache.controller.dispatch import Retired
from hicache.controller.loads import Loads
from hicache.controller.state import State
from hicache.tree import Span


@dataclass(eq=False, slots=True)
class _Lift:
    """Waits for loads on nobody's behalf: what they bring belongs to the tree."""

    state: State
    on_settled: Callable[[], None]
    left: int = 0

    def load_settled(self, duplicates: Retired, whole: bool) -> None:
        """One load has settled."""
        self.state.give_back((), [duplicates], None)
        self.left -= 1
        if self.left == 0:
            self.on_settled()


@dataclass(slots=True)
class Lifts:
    """Loads without a request. Those that have no room yet are tried again, as long as pages are being written back."""

    _state: State
    _loads: Loads
    _writing_back: Callable[[], bool]
    _blocked: list[tuple[Callable[[], Span | None], Callable[[bool], None]]] = field(default_factory=list)

    def start(self, find: Callable[[], Span | None], then: Callable[[bool], None]) -> None:
        """Load the span (from page 0) that `find` gives; `then` hears when that has ended, or that it can't be done.

        `find` gives None when nobody wants it any more.
        """
        span = find()
        if span is None:
            return
        lift = _Lift(self._state, lambda: then(True))
        with self._state.tree.asking(span):
            back = self._loads.start(span, lift)
        if back is not None and back.ops:
            lift.left = len(back.ops)
        elif back is not None:
            then(True)
        elif self._writing_back():
            self._blocked.append((find, then))
        else:
            then(False)

    def step(self) -> None:
        """Try again what had no room."""
        blocked, self._blocked = self._blocked, []
        for find, then in blocked:
            self.start(find, then)
