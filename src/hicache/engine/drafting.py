"""What a drafter does in a step of many sequences: when it fails, they go on without it, and no answer changes."""

import logging
from collections.abc import Iterable, Mapping

from hicache.engine.compute import Hidden
from hicache.engine.segment import TokenArray
from hicache.engine.sequence import Sequence
from hicache.engine.speculation import Drafter
from hicache.errors import InvariantError

log = logging.getLogger("hicache")


class Drafting:
    """The drafter of a core, if it has one."""

    def __init__(self, drafter: Drafter | None) -> None:
        self.drafter = drafter

    def room(self, sequence: Sequence) -> int:
        """How many drafts a sequence could use in the next step."""
        return sequence.draft_room(self.drafter.most) if self.drafter is not None and sequence.speculates else 0

    def propose(self, rooms: Mapping[Sequence, int]) -> Mapping[Sequence, TokenArray]:
        """Guesses for sequences that have slots for so many; none if the drafter fails."""
        if self.drafter is None or not rooms:
            return {}
        try:
            guesses = self.drafter.propose([one.lead(self.drafter) for one in rooms], list(rooms.values()))
        except InvariantError:
            raise
        except Exception:
            log.exception("drafts for %d requests failed; they go on without", len(rooms))
            return {}
        return {one: guess[:room] for (one, room), guess in zip(rooms.items(), guesses, strict=True)}

    def follow(self, sequence: Sequence, hidden: Hidden) -> None:
        """Tokens of a sequence were computed: their last hidden states, [tokens, hidden size]."""
        if self.drafter is not None:
            self.drafter.follow(sequence.trail, hidden)

    def settle(self, sequences: Iterable[Sequence]) -> None:
        """Have the drafter's state of pages that are to be shared. If that fails, they are shared later or not."""
        behind = [one for one in sequences if one.speculates]
        if self.drafter is None or not behind:
            return
        try:
            self.drafter.settle([one.lead(self.drafter) for one in behind])
        except InvariantError:
            raise
        except Exception:
            log.exception("the drafter failed for %d requests; their pages are not shared now", len(behind))
