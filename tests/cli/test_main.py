import json
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import hicache
from hicache.cli.main import main
from hicache.config import OPTIONS, Settings
from hicache.errors import CacheError, StorageError


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch):
    for option in OPTIONS:
        monkeypatch.delenv(option.variable, raising=False)
    monkeypatch.delenv("HICACHE_CONFIG", raising=False)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a module with these functions in place of one that a command imports when it runs."""

    def put(name: str, **functions: Any) -> None:
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)

    return put


def test_version(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"hicache {hicache.__version__}\n"


def test_help_names_every_setting_by_flag_variable_and_default(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for option in OPTIONS:
        assert f"{option.flag} " in text
        assert f"[{option.variable}]" in text
        assert option.default is None or f"(default: {option.default})" in text


def test_serve_prints_the_settings_and_hands_them_over(
    stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
):
    served: list[Settings] = []

    def run(settings: Settings) -> int:
        served.append(settings)
        return 0

    stand_in("hicache.server", run=run)
    assert main(["serve", "some/model", "--port", "0", "--device-size=3MiB"]) == 0
    (settings,) = served
    assert (settings.serve.model, settings.serve.port, settings.cache.device_size) == ("some/model", 0, 3 << 20)
    assert settings.describe() in capsys.readouterr().err


def test_demo_hands_over_the_settings_and_prints_nothing_of_its_own(
    stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
):
    calls: list[tuple[str, bool]] = []

    def run_demo(settings: Settings, as_json: bool) -> int:
        calls.append((settings.serve.model, as_json))
        return 3

    stand_in("hicache.cli.demo", run_demo=run_demo)
    assert main(["demo", "--json", "a/b"]) == 3
    assert main(["demo"]) == 3
    assert calls == [("a/b", True), (Settings().serve.model, False)]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_bench_prints_what_was_measured(
    flags: list[str], stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
):
    stand_in("hicache.bench.tree", run=lambda page: {"one_pool": {"page": page}})
    assert main(["bench", "tree", "--page", "32", *flags]) == 0
    assert json.loads(capsys.readouterr().out) == {"one_pool": {"page": 32}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--port", "x"], "hicache: --port=x: should be a valid integer"),
        (["demo", "--device-size", "50%"], "hicache: --device-size=50%: write a size"),
        (["serve", "--config", "/none.toml"], "hicache: /none.toml: can't be read"),
        (["bench", "tree", "--page", "0"], "hicache: --page=0: at least one token"),
    ],
)
def test_a_bad_setting_is_one_line_before_anything_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for module in ("hicache.server", "hicache.cli.demo", "hicache.bench.tree"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_a_flag_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--device", "1GiB"])
    assert "--device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (StorageError("the store is full"), 1, "hicache: the store is full\n"),
        (CacheError("no"), 1, "hicache: no\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_failures_on_purpose_are_one_line(
    error: BaseException, status: int, message: str, stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
):
    def fail(*_: object) -> int:
        raise error

    stand_in("hicache.cli.demo", run_demo=fail)
    assert main(["demo"]) == status
    assert capsys.readouterr().err == message


def test_a_missing_extra_says_what_to_install(capsys: pytest.CaptureFixture[str], stand_in: Callable[..., None]):
    def run_demo(*_: object) -> int:
        raise ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")

    stand_in("hicache.cli.demo", run_demo=run_demo)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == 'hicache: torch is not installed; try: pip install "hicache[server]"\n'


def test_a_missing_module_of_hicache_itself_is_a_bug(stand_in: Callable[..., None]):
    def run_demo(*_: object) -> int:
        raise ModuleNotFoundError("No module named 'hicache.lost'", name="hicache.lost")

    stand_in("hicache.cli.demo", run_demo=run_demo)
    with pytest.raises(ModuleNotFoundError):
        main(["demo"])


def test_variables_that_are_no_settings_are_named(
    monkeypatch: pytest.MonkeyPatch, stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
):
    stand_in("hicache.cli.demo", run_demo=lambda *_: 0)
    monkeypatch.setenv("HICACHE_DEVICESIZE", "1GiB")
    assert main(["demo"]) == 0
    assert "HICACHE_DEVICESIZE" in capsys.readouterr().err


def test_the_module_runs_as_the_command():
    done = subprocess.run([sys.executable, "-m", "hicache", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"hicache {hicache.__version__}\n")
