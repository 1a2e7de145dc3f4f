"""What a worker does with one message: plain functions that every executor calls, so that all move the same bytes."""

import logging
from typing import assert_never

import numpy as np

from hicache.storage import Cleared
from hicache.transfer.messages import CLEARED, Backup, Clear, Completion, Delete, Fetch, Load, Message, Query, Store
from hicache.units import BoolArray, PoolName

log = logging.getLogger("hicache.transfer")


def run(message: Message) -> Completion:
    """Do what the message says and report it. Whatever goes wrong is in the completion, and nothing is raised."""
    try:
        return _clear(message) if isinstance(message, Clear) else Completion(message.id, _run(message))
    except Exception as error:  # noqa: BLE001 - a device or backend may raise anything: it is logged, reported and counted
        return failed(message, error)


def failed(message: Message, error: Exception) -> Completion:
    """The completion of a transfer of which no page is right."""
    reason = f"{type(error).__name__}: {error}"
    log.warning("%s %d failed: %s", type(message).__name__.lower(), message.id, reason)
    return Completion(message.id, error=reason)


def is_refused(message: Message) -> bool:
    """Whether its store would answer without doing anything now."""
    match message:
        case Fetch() | Query():
            return message.store.refuses_reads
        case Store():
            return message.store.refuses_writes
        case _:
            return False


def refused(message: Message) -> Completion:
    """The completion of a transfer that was not begun, since its store is left alone for a while."""
    return Completion(message.id, error="the store is paused")


def _run(message: Backup | Load | Store | Fetch | Query | Delete) -> dict[PoolName, BoolArray]:
    match message:
        case Backup():
            return _backup(message)
        case Load():
            return _load(message)
        case Store():
            return {part.pool: message.store.write(part.keys, part.pages) for part in message.content}
        case Fetch():
            return {part.pool: message.store.read(part.keys, part.pages).ok for part in message.content}
        case Query():
            return {pool: message.store.contains(keys) for pool, keys in message.keys.items()}
        case Delete():
            message.store.delete(message.keys)
            return {}
    assert_never(message)


def _clear(message: Clear) -> Completion:
    cleared = sum((message.store.clear(namespace) for namespace in message.namespaces), start=Cleared())
    return Completion(message.id, {CLEARED: np.array([cleared.left_pages == 0])}, cleared=cleared)


def _backup(message: Backup) -> dict[PoolName, BoolArray]:
    if message.after is not None:
        message.after.wait()
    message.plan.run()
    return {copy.pool: np.ones(len(copy.host_slots), dtype=np.bool_) for copy in message.plan.copies}


def _load(message: Load) -> dict[PoolName, BoolArray]:
    for layer in range(len(message.plan.layers)):
        message.plan.run_layer(layer)
        message.progress.arrive(layer)
    copies = [part.copy for layer in message.plan.layers for part in layer]
    return {copy.pool: np.ones(len(copy.host_slots), dtype=np.bool_) for copy in copies}
