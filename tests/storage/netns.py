"""Tests of engines that listen on every interface run where there is no interface but loopback, or not at all."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ANYWAY = "TEST_ON_ALL_INTERFACES"
"""Set this variable to run such tests on a machine that can't fence them."""

_UP = "ip link set lo up && exec "


def run_fenced(tests: Path) -> None:
    """Runs a file of tests in a network namespace of its own; skips where there can't be one."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(tests)]
    if not os.environ.get(ANYWAY):
        command = ["unshare", "-rn", "sh", "-c", _UP + '"$@"', "sh", *command]
        if not _can_fence():
            pytest.skip(
                f"this engine listens on all interfaces, and unshare -rn does not work here; {ANYWAY}=1 runs it"
            )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def _can_fence() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return (
        subprocess.run(["unshare", "-rn", "sh", "-c", _UP + "true"], capture_output=True, check=False).returncode == 0
    )
