"""Time passes only when somebody says so."""


class VirtualClock:
    """Seconds since the start of a run. Called as a function it tells the time, as `time.monotonic` does."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def pass_by(self, seconds: float) -> None:
        """So much later."""
        self.now_s += seconds

    def pass_to(self, time_s: float) -> None:
        """Not before `time_s`."""
        self.now_s = max(self.now_s, time_s)
