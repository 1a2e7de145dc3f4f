"""What a type checker must refuse, it refuses: slots of the other tier, and the group where one pool is meant."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
"""Left out when the repository is checked: most of them are wrong."""
REPORT = re.compile(r"(?P<file>[^:]+):(?P<line>\d+): error: .*\[(?P<code>[a-z-]+)\]")
MARK = re.compile(r"# error: ([a-z-]+)$")


@pytest.fixture(scope="module")
def reported() -> dict[str, Counter[tuple[int, str]]]:
    """Errors by program, as (line, code); all programs are checked at once."""
    pytest.importorskip("mypy")
    programs = [str(program.relative_to(ROOT)) for program in sorted(PROGRAMS.glob("*.py"))]
    options = ["--config-file", "tests/types/mypy.ini", "--cache-dir", ".mypy_cache/types"]
    command = [sys.executable, "-m", "mypy", *options, "--no-color-output", "--no-error-summary", *programs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, cwd=ROOT)
    assert done.stderr == ""
    errors: dict[str, Counter[tuple[int, str]]] = {program: Counter() for program in programs}
    for line in done.stdout.splitlines():
        found = REPORT.match(line)
        if found is not None and found["file"] in errors:
            errors[found["file"]][int(found["line"]), found["code"]] += 1
    return {Path(program).name: counts for program, counts in errors.items()}


def marked(program: Path) -> set[tuple[int, str]]:
    lines = program.read_text(encoding="utf-8").splitlines()
    found = ((number, MARK.search(line)) for number, line in enumerate(lines, 1))
    return {(number, mark[1]) for number, mark in found if mark is not None}


@pytest.mark.parametrize("program", ["device_slots.py", "host_slots.py"])
def test_every_marked_line_is_refused_and_no_other(program, reported):
    expected = marked(PROGRAMS / program)
    assert len(expected) > 10
    assert set(reported[program]) == expected


def test_what_is_right_is_accepted(reported):
    assert not marked(PROGRAMS / "accepted.py")
    assert reported["accepted.py"] == Counter()


def test_no_source_turns_slots_of_one_tier_into_those_of_the_other():
    """The names would do that silently: they are checked only where they are used."""
    turned = re.compile(r"DeviceSlots\([^()]*host|HostSlots\([^()]*device")
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if turned.search(line)
    ]
    assert found == []
