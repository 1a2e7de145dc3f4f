"""Pieces add up to the whole text, never cut a character, and stop strings never show, whatever the tokens are."""

from hypothesis import given
from hypothesis import strategies as st

from hicache.engine.text import Detokenizer, Piece, StopStrings

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class ByteDecoder:
    """A token is a byte; 256 is special."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        assert skip_special_tokens
        return bytes(token for token in token_ids if token < 256).decode(errors="replace")


class SpaceDecoder:
    """As SentencePiece does it: every token begins with a space, and the first space of a text is dropped."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(f" w{token}" for token in token_ids)[1:]


@given(st.lists(st.integers(0, 256), max_size=30))
def test_pieces_of_any_bytes_add_up(tokens):
    detokenizer = Detokenizer(ByteDecoder())
    pieces = [detokenizer.add(token) for token in tokens] + [detokenizer.finish()]
    assert "".join(pieces) == ByteDecoder().decode(tokens, skip_special_tokens=True)


@given(st.text(max_size=20))
def test_a_character_comes_whole(text):
    detokenizer = Detokenizer(ByteDecoder())
    pieces = [detokenizer.add(token) for token in text.encode()] + [detokenizer.finish()]
    assert "".join(pieces) == text
    assert all(UNKNOWN not in piece for piece in pieces) or UNKNOWN in text


def test_spaces_between_words_are_kept():
    detokenizer = Detokenizer(SpaceDecoder())
    assert "".join(detokenizer.add(token) for token in (1, 2, 3)) + detokenizer.finish() == "w1 w2 w3"


def first_stop(text: str, stops: tuple[str, ...]) -> str | None:
    """What comes before the stop string that is complete first; of several the one that began first."""
    for end in range(1, len(text) + 1):
        found = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: min(found)]
    return None


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=3).map(tuple),
)
def test_the_text_before_the_first_stop_string_is_shown_and_nothing_else(pieces, stops):
    text, expected = "".join(pieces), first_stop("".join(pieces), stops)
    strings, shown = StopStrings(stops), ""
    for piece in pieces:
        got = strings.add(piece)
        shown += got.text
        if got.stopped:
            assert shown == expected
            return
    assert expected is None
    assert shown + strings.finish() == text


def test_only_what_may_become_a_stop_string_is_held_back():
    strings = StopStrings(("STOP",))
    assert strings.add("abcST").text == "abc"
    assert strings.add("A").text == "STA"
    assert strings.add("ST").text == ""
    assert strings.add("OPrest") == Piece("", stopped=True)
