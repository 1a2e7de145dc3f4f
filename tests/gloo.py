"""Real ranks: processes of this machine in one gloo group, with a deadline on everything they do."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

DEADLINE_S = 170.0

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["hicache.device.channel", "tests.controller.rank_driver"])


@dataclass(frozen=True)
class Failed:
    """What a rank raised."""

    name: str
    message: str
    trace: str


def run_ranks(ranks: int, work: Callable[..., Any], folder: Path, *args: Any) -> Mapping[int, Any]:
    """What `work(rank, folder, *args)` returned in each process, or `Failed`. A process that died is left out."""
    ends = [_CONTEXT.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        _CONTEXT.Process(target=_child, args=(ends[rank][1], rank, ranks, work, folder, args)) for rank in range(ranks)
    ]
    for process, (_, sending) in zip(processes, ends, strict=True):
        process.start()
        sending.close()
    deadline_s = time.monotonic() + DEADLINE_S
    try:
        answers = {rank: _answer(receiving, deadline_s) for rank, (receiving, _) in enumerate(ends)}
    finally:
        for process in processes:
            process.join(5.0)
            process.kill()
            process.join()
    return {rank: answer for rank, answer in answers.items() if answer is not None}


def _answer(receiving: Connection, deadline_s: float) -> Any:
    if not receiving.poll(max(0.0, deadline_s - time.monotonic())):
        raise AssertionError(f"a rank has not answered within {DEADLINE_S} s")
    try:
        return receiving.recv()
    except EOFError:
        return None


def _child(
    sending: Connection, rank: int, ranks: int, work: Callable[..., Any], folder: Path, args: tuple[Any, ...]
) -> None:
    from torch import distributed

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks)
    try:
        sending.send(work(rank, folder, *args))
    except Exception as error:  # noqa: BLE001 - whatever a child raises is the parent's to judge
        sending.send(Failed(type(error).__name__, str(error), traceback.format_exc()))
    os._exit(0)
