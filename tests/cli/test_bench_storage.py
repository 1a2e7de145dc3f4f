"""`hicache bench storage` prints a table or JSON, and refuses sizes that are none."""

import json
from pathlib import Path

import pytest

from hicache.cli.main import main


def test_json_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = ["bench", "storage", "--folder", str(tmp_path), "--page-size", "4KiB", "--total", "64KiB", "--rounds", "1"]
    assert main([*flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["page_bytes"] for row in report["rows"]] == [4096, 4096]
    assert main([*flags, "--url", "memory:"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("memory:")


@pytest.mark.parametrize("flags", [["--page-size", "1MB"], ["--total", "much"], ["--rounds", "0"], ["--url", "no"]])
def test_what_is_wrong_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]):
    assert main(["bench", "storage", "--folder", str(tmp_path), "--total", "4MiB", *flags]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
