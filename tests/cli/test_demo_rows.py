"""The demo's rows tell the truth: tokens are compared with the cold answer's, and what falls short is named."""

from collections.abc import Mapping

import pytest

from hicache.cli.demo_rows import CASES, Answer, make_rows, shortfalls, table

PROMPT_TOKENS = 2005
PAGE = 16


def answer(tokens: tuple[int, ...] = (5, 6), ttft_s: float = 0.1, **cached: int) -> Answer:
    return Answer(PROMPT_TOKENS, {"device": 0, "host": 0, "storage": 0} | cached, ttft_s, tokens, "text")


def good() -> dict[str, Answer]:
    return {
        "cold": answer(ttft_s=4.0),
        "device": answer(device=2000),
        "host": answer(host=2000),
        "storage": answer(storage=2000),
    }


def test_rows_are_in_order_and_as_agreed() -> None:
    rows = [row.to_json() for row in make_rows(good())]
    assert [row["case"] for row in rows] == list(CASES) == ["cold", "device", "host", "storage"]
    assert rows[3] == {
        "case": "storage",
        "prompt_tokens": PROMPT_TOKENS,
        "cached_tokens": {"device": 0, "host": 0, "storage": 2000},
        "ttft_s": 0.1,
        "same_tokens": True,
    }


def test_nothing_falls_short_when_all_is_well() -> None:
    assert shortfalls(make_rows(good()), PAGE) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cold": answer(host=16)}, "not cold"),
        ({"storage": answer(storage=1888)}, "storage: 1888 of 2000"),
        ({"host": answer(device=2000)}, "host: 0 of 2000"),
        ({"device": answer(tokens=(5, 7), device=2000)}, "device: the answer's tokens differ"),
    ],
)
def test_what_falls_short_is_named(change: Mapping[str, Answer], said: str) -> None:
    found = shortfalls(make_rows({**good(), **change}), PAGE)
    assert len(found) == 1
    assert said in found[0]


def test_a_few_pages_may_be_missing() -> None:
    assert shortfalls(make_rows({**good(), "storage": answer(storage=1904)}), PAGE) == []


def test_table_shows_the_speed_up() -> None:
    lines = table(make_rows(good())).splitlines()
    assert len(lines) == 5
    assert "4.000 s" in lines[1] and "1.0x" in lines[1]
    assert "40.0x" in lines[4] and "2000" in lines[4] and lines[4].endswith("yes")


def test_answer_survives_the_way_between_processes() -> None:
    assert Answer.from_json(answer(storage=3).to_json()) == answer(storage=3)
