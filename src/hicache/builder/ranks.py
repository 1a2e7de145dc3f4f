"""Before any rank takes memory, all have one plan: the smallest of their pools, one set of settings, one verdict."""

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hicache.builder.describe import ModelDescription
from hicache.builder.sizes import PoolSizes
from hicache.config import format_size
from hicache.controller import Agree
from hicache.errors import ConfigError
from hicache.memory import available_memory_bytes, require_memory
from hicache.units import PoolName

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank would take. Slots per pool; bytes of this machine's memory; `settings` that all must share."""

    kinds: Mapping[PoolName, str]
    slot_bytes: Mapping[PoolName, int]
    device: Mapping[PoolName, int]
    host: Mapping[PoolName, int]
    settings: Mapping[str, Any]
    needed_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks take: slots per pool, and the bytes that a slot has on all ranks together."""

    sizes: PoolSizes
    slot_bytes: Mapping[PoolName, int] = field(default_factory=dict)


def with_replicated(model: ModelDescription, *pools: PoolName) -> ModelDescription:
    """The same model, of which the ranks that share a stage's layers hold equal bytes in `pools` (latents, say).

    One rank writes these to storage and all read them: only for ranks that reach one store. Raises ConfigError for a
    pool that the model does not have.
    """
    names = [pool.name for pool in model.pools]
    unknown = [name for name in pools if name not in names]
    if unknown:
        raise ConfigError(f"pools {unknown} are not in the model, which has {names}")
    alike = tuple(replace(pool, replicated=pool.replicated or pool.name in pools) for pool in model.pools)
    return replace(model, pools=alike)


def local_ranks(agree: Agree) -> tuple[int, ...]:
    """The ranks on this machine, this one among them. A collective call."""
    hosts = agree.gather(_host_identity().encode())
    return tuple(rank for rank, host in enumerate(hosts) if host == hosts[agree.rank])


def plan_of(model: ModelDescription, sizes: PoolSizes, settings: Mapping[str, Any], needed_bytes: int) -> RankPlan:
    """The plan of this rank."""
    return RankPlan(
        {pool.name: f"{pool.coverage} {pool.derived_from} {pool.replicated}" for pool in model.pools},
        {pool.name: pool.slot_bytes for pool in model.pools},
        sizes.device,
        sizes.host,
        settings,
        needed_bytes,
        available_memory_bytes(),
    )


def agree_on(
    agree: Agree, plan: Callable[[], tuple[ModelDescription, RankPlan]], local: Sequence[int], memory: str
) -> tuple[ModelDescription, Agreed]:
    """This rank's model, and what every rank takes: in each pool as much as the smallest. A collective call.

    Raises ConfigError, the same on every rank, when `plan` raises it on any, when plans contradict each other, or when
    the ranks of a machine need more memory than it has; `memory` names the settings that say how much.
    """
    if agree.ranks == 1:
        model, own = plan()
        require_memory(own.needed_bytes, memory)
        return model, _smallest([own])
    try:
        model, own = plan()
    except ConfigError as error:
        agree.gather(json.dumps({"error": str(error)}).encode())
        raise ConfigError(f"rank {agree.rank}: {error}") from error
    answers = [json.loads(text) for text in agree.gather(json.dumps(asdict(own)).encode())]
    for rank, answer in enumerate(answers):
        if "error" in answer:
            raise ConfigError(f"rank {rank}: {answer['error']}")
    plans = [RankPlan(**answer) for answer in answers]
    _require_alike(plans)
    _require_memory(plans, local, memory)
    return model, _smallest(plans)


def _smallest(plans: Sequence[RankPlan]) -> Agreed:
    first = plans[0]
    return Agreed(
        PoolSizes(
            {pool: min(plan.device[pool] for plan in plans) for pool in first.device},
            {pool: min(plan.host[pool] for plan in plans) for pool in first.host},
            first.settings["reserved_slots"],
        ),
        {pool: sum(plan.slot_bytes[pool] for plan in plans) for pool in first.slot_bytes},
    )


def said_by_ranks(agree: Agree, trouble: str | None) -> tuple[str, ...]:
    """What is wrong on any rank, named by rank where there are several. A collective call."""
    said = [text.decode() for text in agree.gather((trouble or "").encode())]
    return tuple(text if agree.ranks == 1 else f"rank {rank}: {text}" for rank, text in enumerate(said) if text)


def _require_alike(plans: Sequence[RankPlan]) -> None:
    first = plans[0]
    for rank, plan in enumerate(plans):
        if list(plan.kinds.items()) != list(first.kinds.items()):
            raise ConfigError(
                f"rank 0 has pools {dict(first.kinds)}, rank {rank} {dict(plan.kinds)};"
                " every rank needs the same pools in one order: give each stage layers of every kind"
            )
        for name, value in first.settings.items():
            if plan.settings[name] != value:
                raise ConfigError(
                    f"{name} is {value} on rank 0 and {plan.settings[name]} on rank {rank}; give all ranks one"
                )


def _require_memory(plans: Sequence[RankPlan], local: Sequence[int], memory: str) -> None:
    needed = [plans[rank].needed_bytes for rank in local]
    there = min(plans[rank].available_bytes for rank in local)
    if sum(needed) > there:
        raise ConfigError(
            f"{memory}: ranks {list(local)} of this machine need {format_size(sum(needed))}"
            f" ({' + '.join(format_size(one) for one in needed)}), but {format_size(there)} can be had here;"
            " set a smaller size or raise the memory limit"
        )


def _host_identity() -> str:
    """What tells machines, and containers with limits of their own, apart."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"
