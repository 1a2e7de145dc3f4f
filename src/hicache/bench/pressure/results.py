"""What the runs say, as frozen values: medians per setting, ratios within a round, and what was never seen."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, median_low
from typing import Any

from hicache.bench.pressure.measure import Run
from hicache.bench.pressure.plan import BACKUP, COPIES, DROP, ENOUGH, RECOMPUTE, Load, Setting
from hicache.pools import PoolCounts
from hicache.units import PoolName, Tier

Place = tuple[PoolName, Tier]


@dataclass(frozen=True, slots=True)
class Row:
    """One setting: medians over its rounds. `pools` are sums over them."""

    setting: Setting
    identical: bool
    numbers: Mapping[str, float | int]
    pools: Mapping[Place, PoolCounts]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "setting": self.setting.name,
            "meaning": self.setting.meaning,
            "outputs_identical": self.identical,
            **self.numbers,
            "pools": [_pool_json(counts) for counts in self.pools.values()],
        }


@dataclass(frozen=True, slots=True)
class Result:
    """One model. `carried`: per pool with slots of its own, the pools that live at them: its counts are theirs.

    `ratios`: requests per minute with retraction backup over those of another setting; `cpu_ratios` the same per minute
    of CPU time. With `all_counts`, every pool must have been reclaimed in both tiers, and have undone a reservation.
    """

    model: str
    load: Load
    carried: Mapping[PoolName, tuple[PoolName, ...]]
    rows: tuple[Row, ...]
    ratios: Mapping[str, float]
    cpu_ratios: Mapping[str, float]
    all_counts: bool

    @property
    def failures(self) -> tuple[str, ...]:
        """What is wrong, a sentence each."""
        other = [f"{row.setting.name}: other outputs than with enough memory" for row in self.rows if not row.identical]
        return (*other, *(self._zeros() if self.all_counts else ()))

    def _zeros(self) -> Iterator[str]:
        for pool in self.carried:
            for tier in (Tier.DEVICE, Tier.HOST):
                if not self._sum(pool, tier, lambda counts: counts.reclaims):
                    yield f"pool {pool!r}: never told to evict in tier {tier.value}"
            if not self._sum(pool, Tier.DEVICE, lambda counts: counts.rollbacks):
                yield f"pool {pool!r}: no reservation was undone because of it"

    def _sum(self, pool: PoolName, tier: Tier, count: Callable[[PoolCounts], int]) -> int:
        return sum(count(row.pools[pool, tier]) for row in self.rows)

    def totals(self) -> list[PoolCounts]:
        """Over all settings and rounds."""
        return [
            PoolCounts(
                pool,
                tier,
                self._sum(pool, tier, lambda counts: counts.reclaims),
                self._sum(pool, tier, lambda counts: counts.reclaimed_slots),
                self._sum(pool, tier, lambda counts: counts.refusals),
                self._sum(pool, tier, lambda counts: counts.rollbacks),
            )
            for pool in self.carried
            for tier in (Tier.DEVICE, Tier.HOST)
        ]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        load = self.load
        return {
            "model": self.model,
            "requests": load.requests,
            "load": asdict(load),
            "outputs_identical": all(row.identical for row in self.rows),
            "backup_over": dict(self.ratios),
            "backup_over_by_cpu_time": dict(self.cpu_ratios),
            "settings": [row.to_json() for row in self.rows],
            "pools": [{**_pool_json(counts), "with": list(self.carried[counts.pool])} for counts in self.totals()],
            "failures": list(self.failures),
        }


def summarize(
    model: str,
    load: Load,
    carried: Mapping[PoolName, tuple[PoolName, ...]],
    rounds: Sequence[Sequence[Run]],
    all_counts: bool,
) -> Result:
    """`rounds[i]` has a run of every setting, in the order of the settings, the one with enough memory first."""
    expected = rounds[0][0].answers
    columns = list(zip(*rounds, strict=True))
    return Result(
        model,
        load,
        carried,
        tuple(_row(load, carried, runs, all(run.answers == expected for run in runs)) for runs in columns),
        _ratios(rounds, lambda run: run.wall_s),
        _ratios(rounds, lambda run: run.cpu_s),
        all_counts,
    )


def _ratios(rounds: Sequence[Sequence[Run]], cost: Callable[[Run], float]) -> dict[str, float]:
    """The cost in other settings over that with backup: median over the rounds."""
    found = {}
    for name in (RECOMPUTE, COPIES, DROP, ENOUGH):
        each = []
        for runs in rounds:
            costs = {run.setting.name: cost(run) for run in runs}
            each.append(costs[name] / costs[BACKUP])
        found[name] = round(median(each), 3)
    return found


def _row(load: Load, carried: Mapping[PoolName, tuple[PoolName, ...]], runs: Sequence[Run], identical: bool) -> Row:
    wall_s = median(run.wall_s for run in runs)
    numbers: dict[str, float | int] = {
        "requests_per_minute": round(60 * load.requests / wall_s, 2),
        "wall_s": round(wall_s, 3),
        "cpu_s": round(median(run.cpu_s for run in runs), 3),
    }
    counted = [_counts(run) for run in runs]
    numbers |= {name: median_low(counts[name] for counts in counted) for name in counted[0]}
    places = [(pool, tier) for pool in carried for tier in (Tier.DEVICE, Tier.HOST)]
    return Row(runs[0].setting, identical, numbers, {place: _pool(place, runs) for place in places})


def _counts(run: Run) -> dict[str, int]:
    core, cache = run.stats.core, run.stats.cache
    return {
        "prefill_tokens": core.prefill_tokens,
        "recomputed_tokens": core.prefill_tokens + core.decode_tokens - run.least_tokens,
        "decode_tokens": core.decode_tokens,
        "drafted_tokens": core.drafted_tokens,
        "accepted_tokens": core.accepted_tokens,
        "steps": core.steps,
        "preemptions": core.preemptions,
        "retractions": core.retractions,
        "retractions_to_storage": cache.counters["retraction_spilled"],
        "retractions_lost": cache.counters["retraction_lost"],
        "dropped_pages": cache.counters["dropped_pages"],
        "backup_bytes": cache.counters["backup_bytes"],
        "load_bytes": cache.counters["load_bytes"],
        "stored_bytes": cache.storage.written_bytes if cache.storage is not None else 0,
        "fetched_bytes": cache.storage.read_bytes if cache.storage is not None else 0,
        "device_reservations": cache.group.device_reservations,
        "host_reservations": cache.group.host_reservations,
    }


def _pool(place: Place, runs: Sequence[Run]) -> PoolCounts:
    found = [counts for run in runs for counts in run.stats.cache.group.pools if (counts.pool, counts.tier) == place]
    return PoolCounts(
        *place,
        sum(counts.reclaims for counts in found),
        sum(counts.reclaimed_slots for counts in found),
        sum(counts.refusals for counts in found),
        sum(counts.rollbacks for counts in found),
    )


def _pool_json(counts: PoolCounts) -> dict[str, Any]:
    return {
        "pool": counts.pool,
        "tier": counts.tier.value,
        "reclaims": counts.reclaims,
        "reclaimed_slots": counts.reclaimed_slots,
        "refusals": counts.refusals,
        "rollbacks": counts.rollbacks,
    }


_COLUMNS = {
    "requests_per_minute": "req/min",
    "cpu_s": "CPU s",
    "prefill_tokens": "prefill",
    "recomputed_tokens": "again",
    "preemptions": "gave way",
    "retractions": "retracted",
    "backup_bytes": "MB to host",
    "load_bytes": "MB back",
}


def table(result: Result) -> str:
    """For people."""
    cells = [["setting", *_COLUMNS.values(), "outputs"]]
    for row in result.rows:
        numbers = [_shown(name, row.numbers[name]) for name in _COLUMNS]
        cells.append([row.setting.name, *numbers, "identical" if row.identical else "DIFFERENT"])
    lines = [result.model, *_aligned(cells)]
    compared = ", ".join(
        f"{ratio:.2f} times those of {name!r} (by CPU time {result.cpu_ratios[name]:.2f})"
        for name, ratio in result.ratios.items()
    )
    lines.append(f"requests per minute with 'backup': {compared}")
    pools = [["pool", "tier", "reclaims", "slots", "refusals", "rollbacks"]]
    for counts in result.totals():
        name = "+".join((counts.pool, *result.carried[counts.pool]))
        numbers = [str(counts.reclaims), str(counts.reclaimed_slots), str(counts.refusals), str(counts.rollbacks)]
        pools.append([name, counts.tier.value, *numbers])
    return "\n".join([*lines, *_aligned(pools), *(f"FAIL {text}" for text in result.failures)])


def _shown(name: str, number: float) -> str:
    if name.endswith("_bytes"):
        return f"{number / 1e6:,.1f}"
    return f"{number:,}" if isinstance(number, int) else f"{number:,.1f}"


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
