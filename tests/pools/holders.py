"""Who holds which slots, and what bytes are in them: the plain model beside a group with transfers in flight."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hicache.coverage import Checkpoint, Coverage, Full, Window
from hicache.layout import PackedLayout, PoolGeometry, TensorSpec
from hicache.pools import HostPool, PoolCapabilities, PoolEntry, PoolTransfer
from hicache.units import HOLE, BoolArray, Int32Array, Tier
from tests.pools.device_bytes import LAYOUTS, make_pool

PAGE = 2
COVERAGES: list[Coverage] = [Full(), Window(1), Window(3), Window(2 * PAGE + 2), Checkpoint()]
SPECS = [
    TensorSpec("k", (3,), "uint8"),
    TensorSpec("v", (2, 1), "bfloat16"),
    TensorSpec("scale", (), "float32"),
    TensorSpec("code", (7,), "int8"),
]


@dataclass(eq=False)
class Holder:
    """Somebody's pages in one tier: per pool a slot for each page, HOLE where the pool has nothing."""

    runs: dict[str, Int32Array]

    @property
    def pages(self) -> int:
        """How many pages."""
        return max(len(run) for run in self.runs.values())

    @property
    def empty(self) -> bool:
        """Whether no pool has anything."""
        return all(np.all(run == HOLE) for run in self.runs.values())

    def slots(self, pool: str) -> set[int]:
        """Its slots of one pool."""
        return {int(slot) for slot in self.runs[pool] if slot != HOLE}


def held(holders: Iterable[Holder], pool: str) -> set[int]:
    """All slots of a pool that `holders` hold."""
    return set().union(*(holder.slots(pool) for holder in holders))


def without(run: Int32Array, slots: set[int]) -> Int32Array:
    """The run with HOLE in place of `slots`."""
    return np.array([HOLE if slot in slots else slot for slot in run.tolist()], np.int32)


def values(transfer: PoolTransfer, tier: Tier) -> Int32Array:
    """The slots of a transfer that has some in `tier`."""
    slots = transfer.slots_on(tier)
    assert slots is not None
    return slots


def kept_pages(coverage: Coverage, pages: int, choice: BoolArray) -> BoolArray:
    """Which of `pages` pages a pool keeps a slot for: what coverage needs to resume, and of snapshots those chosen."""
    kept = np.zeros(pages, np.bool_)
    required = coverage.required(pages, PAGE)
    kept[required.start : required.stop] = True
    return kept | choice if isinstance(coverage, Checkpoint) else kept


def make_geometry(dice: random.Random, layers: int, tokens: int) -> PoolGeometry:
    """Layers that differ: one to three tensors each, of several dtypes and odd sizes."""
    return PoolGeometry(tuple(tuple(dice.sample(SPECS, dice.randint(1, 3))) for _ in range(layers)), tokens)


def make_uses(dice: random.Random, model_layers: int) -> tuple[int | None, ...]:
    """For each model layer the pool layer it uses, or none; layers may be shared, and in any order."""
    there = dice.randint(1, model_layers)
    uses: list[int | None] = list(range(there))
    uses += dice.choices([None, *range(there)], k=model_layers - there)
    dice.shuffle(uses)
    return tuple(uses)


def make_drafts(dice: random.Random, model_layers: int, tokens: int) -> tuple[PoolGeometry, ...]:
    """None, or one or two drafts that together are as deep as the model, less deep, or deeper."""
    depth = dice.choice([0, 0, 1, model_layers - 1, model_layers, model_layers + 1, model_layers + 2])
    first = dice.randint(min(1, depth), depth)
    return tuple(make_geometry(dice, layers, tokens) for layers in (first, depth - first) if layers)


def make_entry(
    dice: random.Random, name: str, model_layers: int, source: PoolEntry | None, *, staged: bool
) -> PoolEntry:
    """An entry of any kind, with memory of its own and as yet without functions."""
    coverage = dice.choice(COVERAGES) if source is None else source.coverage
    tokens = 1 if isinstance(coverage, Checkpoint) else PAGE
    uses = make_uses(dice, model_layers)
    geometry = make_geometry(dice, len(set(uses) - {None}), tokens)
    drafts = make_drafts(dice, model_layers, tokens)
    host = dice.randint(3, 20) if source is None else source.host_pool.slots
    device = dice.randint(3, 20) if source is None else source.device_pool.slots
    layout = dice.choice(sorted(LAYOUTS))
    return PoolEntry(
        name,
        HostPool.allocate(name, PackedLayout(geometry, drafts), host, PoolCapabilities(staged, True)),
        make_pool(name, geometry, device, layout),
        lambda layer: uses[layer],
        coverage=coverage,
        derived_from=None if source is None else source.name,
        packed_draft_device_pools=tuple(
            make_pool(f"{name}.draft{index}", draft, device, layout) for index, draft in enumerate(drafts)
        ),
    )


class Pages:
    """The bytes that every slot must hold, per pool and tier: a dict."""

    def __init__(self, names: Sequence[str]) -> None:
        self._pages: Mapping[tuple[str, Tier], dict[int, bytes]] = {
            (name, tier): {} for name in names for tier in (Tier.DEVICE, Tier.HOST)
        }

    def of(self, pool: str, tier: Tier) -> dict[int, bytes]:
        """What is known of one pool and tier."""
        return self._pages[pool, tier]
