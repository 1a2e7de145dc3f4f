"""Everything that happens in a run, in order: equal runs have equal digests, on every machine and in every process."""

import hashlib

from hicache.simulate.clock import VirtualClock


class Journal:
    """Writes down events with step and virtual time, and keeps their lines if they are to be shown."""

    def __init__(self, clock: VirtualClock, keep: bool = False) -> None:
        self.step = 0
        self.lines: list[str] = []
        self._clock = clock
        self._keep = keep
        self._hash = hashlib.sha256()
        self._size = 0

    def note(self, event: str) -> None:
        """One event: words and numbers that the seed decides, never an address or a set's order."""
        line = f"{self.step} {self._clock.now_s:.9f} {event}\n"
        self._hash.update(line.encode())
        self._size += 1
        if self._keep:
            self.lines.append(line.rstrip())

    @property
    def events(self) -> int:
        """How many there were."""
        return self._size

    @property
    def digest(self) -> str:
        """Over all events so far: 16 hexadecimal digits."""
        return self._hash.hexdigest()[:16]
