"""A load that a request runs on: a layer may start once it has arrived, and the result says how much of it is good."""

from collections.abc import Callable, Sequence

from hicache.transfer import LayerProgress


class Load:
    """What `load_back` and `retraction_restore` return. `tokens` is the length to resume at if all goes well."""

    def __init__(
        self, tokens: int, progress: Sequence[LayerProgress], timeout_s: float, settle: Callable[[], int]
    ) -> None:
        self.tokens = tokens
        self._progress = tuple(progress)
        self._timeout_s = timeout_s
        self._settle = settle
        self._ran_ahead = False

    @property
    def done(self) -> bool:
        """Whether the load has ended, so that `result` will not block. Never blocks itself."""
        return all(progress.ended for progress in self._progress)

    def wait(self, layer: int) -> None:
        """Block until model layer `layer` of every page has arrived, or the load has ended. Before each layer.

        A load that fails or takes too long does not fail here: `result` comes out short, also when what was late
        arrives after all.
        """
        for progress in self._progress:
            if not progress.wait(layer, self._timeout_s):
                self._ran_ahead = True

    def result(self) -> int:
        """Block until the load has ended; the tokens that are really there, `tokens` if all went well.

        When they are fewer, what was computed on top is void: drop the step and plan the request again.
        """
        for progress in self._progress:
            progress.wait_end(self._timeout_s)
        good = self._settle()
        return 0 if self._ran_ahead else min(self.tokens, good)
