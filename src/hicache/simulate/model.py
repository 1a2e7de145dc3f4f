"""A model that only adds up what it reads: a wrong byte anywhere becomes a wrong token, and is found at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from hicache.engine.segment import Segment, StateSlots
from hicache.simulate.broken import RuleError
from hicache.simulate.clock import VirtualClock
from hicache.simulate.content import VOCABULARY, Alphabet, WordArray, chosen, own_part
from hicache.simulate.journal import Journal
from hicache.simulate.links import Links
from hicache.simulate.memory import PoolMemory
from hicache.simulate.scenario import Hardware
from hicache.simulate.shapes import Routes
from hicache.simulate.truth import Truth, wrong_pools
from hicache.units import PoolName

_MASK = (1 << 64) - 1
Logits: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class VirtualOutput:
    """What came of a segment. Whoever uses it while something was read wrong raises RuleError: a step that rests on a
    load that failed is thrown away instead."""

    model: "VirtualModel"
    digests: tuple[int, ...]
    last: int
    wrong: str | None

    @property
    def logits(self) -> Logits:
        """Of its last tokens: 1 for the token that follows, 0 for all others."""
        self._require_right()
        rows = np.zeros((len(self.digests), VOCABULARY), np.float32)
        rows[np.arange(len(self.digests)), [chosen(digest) for digest in self.digests]] = 1
        return rows

    @property
    def hidden(self) -> str:
        """Nothing that anybody looks into."""
        self._require_right()
        return ""

    def keep_state(self, slots: StateSlots) -> None:
        """Keep the state after the segment's last token."""
        self._require_right()
        self.model.keep_state(slots, self.last)

    def _require_right(self) -> None:
        if self.wrong is not None:
            raise RuleError("bytes", self.wrong)


@dataclass(frozen=True, slots=True)
class VirtualModel:
    """Computes steps (see `hicache.engine.compute.StepExecutor`) over `memory`, while the clock runs."""

    layers: int
    routes: Routes
    memory: Mapping[PoolName, PoolMemory]
    alphabet: Alphabet
    truth: Truth
    clock: VirtualClock
    links: Links
    hardware: Hardware
    journal: Journal

    def run(self, segments: Sequence[Segment], before_layer: Callable[[int], None]) -> list[VirtualOutput]:
        """Waits for what is loading, layer by layer, and computes all segments."""
        self._pace(segments, before_layer)
        for segment in segments:
            self.journal.note(f"compute {len(segment.token_ids)} from {segment.start}")
        return [self._compute(segment) for segment in segments]

    def copy_state(self, source: StateSlots, to: StateSlots) -> None:
        """Copies snapshots within each pool."""
        for pool in self.routes.state_pools:
            self.memory[pool].copy(source[pool], to[pool])

    def keep_state(self, slots: StateSlots, hashed: int) -> None:
        """Writes the state after the prefix with this hash."""
        for pool in self.routes.state_pools:
            self.memory[pool].write_state(slots[pool], hashed)

    def _pace(self, segments: Sequence[Segment], before_layer: Callable[[int], None]) -> None:
        loads = self.links.loads_of(segments)
        for layer in range(self.layers):
            for load in loads:
                self.links.wait_layer(load, layer, self.layers)
            before_layer(layer)
        tokens = sum(len(segment.token_ids) for segment in segments)
        self.clock.pass_by(self.hardware.step_s + tokens / self.hardware.prefill_tokens_per_s)
        for load in loads:
            self.links.wait_end(load)

    def _compute(self, segment: Segment) -> VirtualOutput:
        before, wrong = self._before(segment)
        hashes = self.alphabet.hashes(before, segment.start, segment.token_ids)
        for sight in self.routes.sights:
            slots = segment.slots[self.routes.sources[sight.pool]]
            self.memory[sight.pool].write(slots, segment.start, hashes)
        last = int(hashes[-1])
        if segment.state_to is not None:
            self.keep_state(segment.state_to, last)
        digests = self._digests(segment, hashes)
        return VirtualOutput(self, digests, last, wrong or self._judge(segment, hashes, digests))

    def _before(self, segment: Segment) -> tuple[int, str | None]:
        """The hash of what precedes a segment, as its slots tell; and what contradicts it there."""
        if segment.start == 0:
            return 0, None
        said = []
        for pool in self.routes.state_pools:
            if segment.state_from is None:
                raise RuleError("slots", f"a segment from {segment.start} on has no state to begin with")
            hashed = self.memory[pool].read_state(segment.state_from[pool])
            if hashed is None:
                return 0, f"the state in slot {segment.state_from[pool]} of pool {pool!r} is garbage"
            said.append((f"the state of pool {pool!r}", hashed))
        for sight in self.routes.sights[:1]:
            memory = self.memory[sight.pool]
            words = memory.read(segment.slots[self.routes.sources[sight.pool]], segment.start - 1, segment.start)
            said.append((f"the last token in pool {sight.pool!r}", memory.code.decode(int(words[0, 0]))))
        first = said[0]
        for what, hashed in said:
            if hashed != first[1]:
                return first[1], f"{first[0]} and {what} are of different prefixes, at {segment.start}"
        return first[1], None

    def _digests(self, segment: Segment, hashes: WordArray) -> tuple[int, ...]:
        """What each of the last tokens reads, all pools together."""
        rows = range(segment.stop - segment.logit_rows, segment.stop)
        digests = [own_part(int(hashes[row - segment.start])) for row in rows]
        for sight in self.routes.sights:
            first = sight.first(rows.start)
            memory = self.memory[sight.pool]
            words = memory.read(segment.slots[self.routes.sources[sight.pool]], first, segment.stop)
            sums = np.cumsum((words @ memory.code.votes) * self.alphabet.weights[first : segment.stop], dtype=np.uint64)
            for index, row in enumerate(rows):
                start = sight.first(row) - first
                behind = int(sums[start - 1]) if start else 0
                digests[index] += int(sums[row - first]) - behind
        return tuple(digest & _MASK for digest in digests)

    def _judge(self, segment: Segment, hashes: WordArray, digests: Sequence[int]) -> str | None:
        """What is wrong with what was read up to the last token that is known for sure."""
        sure = len(segment.token_ids) - segment.logit_rows
        hashed = int(hashes[sure])
        expected = self.truth.digest(hashed)
        if expected == digests[0]:
            return None
        position = segment.start + sure
        if expected is None:
            return f"the tokens before {segment.start} are not those of any request, as its slots tell"
        return f"at {position}: {'; '.join(self._explain(segment, hashed)) or 'what is read adds up to nothing known'}"

    def _explain(self, segment: Segment, hashed: int) -> list[str]:
        known = self.truth.find(hashed)
        if known is None:
            return []
        explained = []
        for sight in self.routes.sights:
            first = sight.first(segment.stop - segment.logit_rows)
            words = self.memory[sight.pool].read(
                segment.slots[self.routes.sources[sight.pool]], first, segment.stop - segment.logit_rows + 1
            )
            explained += wrong_pools({sight.pool: words}, known, first)
        return explained
