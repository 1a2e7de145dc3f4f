"""`hicache serve` in a process of its own, watched from outside: what it says and holds, and whether it is idle."""

import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.server.fake_engine import wait_until
from tests.server.test_launch import lines_until_ready, process

BUSY = (
    "hicache_transfers_in_flight",
    "hicache_open_matches",
    "hicache_retracted_requests",
    "hicache_pins",
    'hicache_engine_requests{state="running"}',
    'hicache_engine_requests{state="waiting"}',
    'hicache_engine_requests{state="retracted"}',
)
"""What is zero when nobody asks anything."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process holds: bytes of memory that are in use, open files, threads."""

    resident_bytes: int
    files: int
    threads: int


class Served:
    """One server: `url` without a path."""

    def __init__(self, started: subprocess.Popen[str], announced: list[str]) -> None:
        found = re.search(r"ready at (http://127\.0\.0\.1:\d+)/v1", "\n".join(announced))
        assert found is not None, announced
        self.url = found[1]
        self.said = announced
        self._process = started
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        self.said += (line.rstrip() for line in self._process.stderr)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name and labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def rest(self) -> dict[str, float]:
        """Waits until nothing is under way; the metrics then. Fails if something stays lent, pinned or in flight."""
        wait_until(lambda: not self._busy(), 60)
        return self.metrics()

    def _busy(self) -> dict[str, float]:
        metrics = self.metrics()
        busy = {name: metrics[name] for name in BUSY if metrics[name]}
        busy |= {name: value for name, value in metrics.items() if 'state="busy"' in name and value}
        if metrics["hicache_requests_running"] != 1:  # the scrape itself
            busy["hicache_requests_running"] = metrics["hicache_requests_running"]
        return busy

    def footprint(self) -> Footprint:
        """What it holds now."""
        folder = Path(f"/proc/{self._process.pid}")
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        resident_bytes = int(status["VmRSS"].split()[0]) * 1024
        return Footprint(resident_bytes, len(list((folder / "fd").iterdir())), int(status["Threads"]))

    def stop(self) -> list[str]:
        """Asks it to end, which it must do with status 0; all that it said, the announcement included."""
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(60) == 0
        self._listener.join()
        return self.said


@contextmanager
def served(*arguments: str, home: Path) -> Iterator[Served]:
    """`hicache serve` on a free port, killed at the end if it has not been stopped."""
    with process(*arguments, "--port", "0", "--threads", "1", home=home) as started:
        one = Served(started, lines_until_ready(started))
        try:
            yield one
        finally:
            started.kill()
            one._listener.join()
