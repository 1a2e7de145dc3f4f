"""A load that a request runs on: a layer may start once it has arrived, and the result says how much of it is good."""

from collections.abc import Callable, Sequence

from hicache.errors import InvariantError
from hicache.transfer import LayerProgress


class Load:
    """What `load_back` and `retraction_restore` return. `tokens` is the length to resume at if all goes well.

    One that takes longer than `timeout_s` seconds is overdue.
    """

    def __init__(
        self, tokens: int, progress: Sequence[LayerProgress], timeout_s: float, settle: Callable[[], int]
    ) -> None:
        self.tokens = tokens
        self._progress = tuple(progress)
        self.timeout_s = timeout_s
        self._settle = settle
        self._ran_ahead = False

    @property
    def done(self) -> bool:
        """Whether the load has ended, so that `result` will not block. Never blocks itself.

        With several ranks it is so once a `poll` has told that it ended on all of them, or that it takes too long.
        """
        return all(progress.ended for progress in self._progress)

    def wait(self, layer: int) -> None:
        """Block until model layer `layer` of every page has arrived, or the load has ended. Before each layer.

        A load that fails or takes too long does not fail here: `result` comes out short, also when what was late
        arrives after all. After one layer that was too late no other is waited for.
        """
        for progress in self._progress:
            if not progress.wait(layer, self._patience_s):
                progress.ran_ahead = self._ran_ahead = True

    def wait_end(self) -> None:
        """Block until the load has ended on this rank, or takes too long."""
        for progress in self._progress:
            progress.wait_end(self._patience_s)

    @property
    def _patience_s(self) -> float:
        return 0.0 if self._ran_ahead else self.timeout_s

    def result(self) -> int:
        """Block until the load has ended; the tokens that are really there, `tokens` if all went well.

        When they are fewer, what was computed on top is void: drop the step and plan the request again. With several
        ranks it asks nobody and does not block: it raises InvariantError unless the load is `done`.
        """
        self.wait_end()
        return self.give_up()

    def give_up(self) -> int:
        """Wait no longer: `result` as it is now, never blocking. What has not arrived is not used."""
        good = self._settle()
        return 0 if self._ran_ahead else min(self.tokens, good)


class SharedLoad(Load):
    """A load on several ranks: it is done, and has a result, in the same step on all of them."""

    def __init__(
        self,
        tokens: int,
        progress: Sequence[LayerProgress],
        timeout_s: float,
        settle: Callable[[], int],
        agreed: Callable[[], bool],
    ) -> None:
        super().__init__(tokens, progress, timeout_s, settle)
        self._agreed = agreed

    @property
    def done(self) -> bool:
        """Whether all ranks know how it ended, by the last `poll`."""
        return self._agreed()

    def result(self) -> int:
        """The tokens that are there on every rank; 0 when any rank went on without a layer, or nobody can tell."""
        if not self.done:
            raise InvariantError("not every rank has told how this load ended; call wait_end(), then poll() until done")
        return self.give_up()

    def give_up(self) -> int:
        """As `result`: no rank gives up alone, and `done` tells of a load that takes too long."""
        if not self.done:
            raise InvariantError("a load of several ranks ends on all of them together; poll() until it is done")
        good = self._settle()
        return 0 if any(progress.void for progress in self._progress) else min(self.tokens, good)
