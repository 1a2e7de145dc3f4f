"""Tokens become text as they come: only whole characters are shown, and never a part of a stop string."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str: ...


class Detokenizer:
    """The text of a growing list of tokens, piece by piece; the pieces add up to the text of the whole list.

    Tokens are decoded together with some that came before, since a tokenizer may join or drop spaces at the start.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._context: list[int] = []
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """The text that is certain with this token: empty while a character is incomplete."""
        self._pending.append(token)
        text = self._new_text()
        return "" if text.endswith(_UNKNOWN) else self._take(text)

    def finish(self) -> str:
        """The rest, with a replacement character for what never became whole."""
        return self._take(self._new_text())

    def _new_text(self) -> str:
        before = self._decoder.decode(self._context, skip_special_tokens=True) if self._context else ""
        return self._decoder.decode(self._context + self._pending, skip_special_tokens=True)[len(before) :]

    def _take(self, text: str) -> str:
        if text:
            self._context = self._pending
            self._pending = []
        return text


@dataclass(frozen=True, slots=True)
class Piece:
    """Text to show; `stopped` when a stop string was found right after it."""

    text: str
    stopped: bool


class StopStrings:
    """Cuts a text before the stop string that is complete first, however the text is cut into pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def add(self, text: str) -> Piece:
        """What can be shown now. After a piece that is `stopped` nothing more may be added."""
        held = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            self._held = ""
            _, at = min(found)
            return Piece(held[:at], stopped=True)
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return Piece(held[: len(held) - keep], stopped=False)

    def finish(self) -> str:
        """What was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the start of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
