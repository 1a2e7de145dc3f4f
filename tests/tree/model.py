"""A slow, plain model of the tree: a dict from each page's whole prefix to the slots it has."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from hicache.coverage import Checkpoint, Coverage, Full, longest_usable
from hicache.tree import Eviction, Pin, TreePool
from hicache.units import HOLE, Tier

Key = tuple[bytes, bytes]
"""A page: its namespace, and all tokens from the start of the prompt up to the page's end and lookahead."""

TIERS = (Tier.DEVICE, Tier.HOST)


@dataclass
class PinnedPages:
    """What an open receipt pins: pages per pool."""

    pin: Pin
    pages: dict[str, set[Key]] = field(default_factory=dict)


class Model:
    def __init__(self, page_size: int, lookahead: int, pools: Iterable[TreePool]) -> None:
        self.page_size = page_size
        self.lookahead = lookahead
        self.pools = {pool.name: pool.coverage for pool in pools}
        self.anchor = next(iter(self.pools))
        self.full = [name for name, coverage in self.pools.items() if isinstance(coverage, Full)]
        self.slots: dict[Tier, dict[str, dict[Key, int]]] = {tier: {name: {} for name in self.pools} for tier in TIERS}
        self.pins: dict[int, PinnedPages] = {}

    def keys(self, namespace: bytes, tokens: bytes, stop: int | None = None) -> list[Key]:
        pages = max(0, len(tokens) // 4 - self.lookahead) // self.page_size
        pages = pages if stop is None else min(stop, pages)
        ends = [4 * ((page + 1) * self.page_size + self.lookahead) for page in range(pages)]
        return [(namespace, tokens[:end]) for end in ends]

    def carriers(self, pool: str) -> list[str]:
        """Pools without whose page this pool's page at the same place is useless."""
        if pool in self.full:
            return []
        found = self.full[:1]
        anchor = self.pools[self.anchor]
        late = isinstance(anchor, Checkpoint) and not isinstance(self.pools[pool], Checkpoint)
        if pool == self.anchor or isinstance(anchor, Full) or late:
            return found
        return [*found, self.anchor] if self.reach(pool) <= self.reach(self.anchor) else found

    def reach(self, pool: str) -> int:
        coverage = self.pools[pool]
        assert not isinstance(coverage, Full)
        return 1 if isinstance(coverage, Checkpoint) else coverage.pages(self.page_size)

    def there(self, pool: str, key: Key) -> bool:
        return any(key in self.slots[tier][pool] for tier in TIERS)

    def usable(self, keys: list[Key], tiers: tuple[Tier, ...]) -> int:
        present: list[tuple[Coverage, np.ndarray]] = []
        for name, coverage in self.pools.items():
            held = [any(key in self.slots[tier][name] for tier in tiers) for key in keys]
            present.append((coverage, np.array(held, np.bool_)))
        return longest_usable(present, self.page_size)

    def usable_everywhere(self) -> dict[Key, int]:
        """For every page that has anything: how much of its prefix can be resumed, with loads."""
        return {key: self.usable(self.prefix(key), TIERS) for key in self.resident()}

    def prefix(self, key: Key) -> list[Key]:
        return self.keys(key[0], key[1])

    def resident(self) -> set[Key]:
        return {key for tier in TIERS for held in self.slots[tier].values() for key in held}

    def insert(self, keys: list[Key], runs: Mapping[str, np.ndarray], tier: Tier) -> dict[str, list[int]]:
        """Returns what is not taken, per pool."""
        refused: dict[str, list[int]] = {name: [] for name in self.pools}
        held = self.slots[tier]
        for place, key in enumerate(keys):
            offered = {name: int(run[place]) for name, run in runs.items() if run[place] != HOLE}
            together = all(name in offered or key in held[name] for name in self.full)
            order = sorted(offered, key=lambda name: (name not in self.full, name != self.anchor))
            for name in order:
                wanted = together if name in self.full else all(self.there(it, key) for it in self.carriers(name))
                if wanted and key not in held[name]:
                    held[name][key] = offered[name]
                else:
                    refused[name].append(offered[name])
        return refused

    def remove(self, eviction: Eviction) -> dict[Tier, dict[str, list[Key]]]:
        """Takes out what the tree says has left. Returns which pages those slots were at."""
        gone: dict[Tier, dict[str, list[Key]]] = {tier: {name: [] for name in self.pools} for tier in TIERS}
        for tier, of_pools in eviction.freed.items():
            for name, slots in of_pools.items():
                places = {slot: key for key, slot in self.slots[tier][name].items()}
                for slot in slots.tolist():
                    key = places.pop(slot)
                    del self.slots[tier][name][key]
                    gone[tier][name].append(key)
        return gone

    def pin(self, serial: int, pin: Pin, pages: dict[str, set[Key]]) -> None:
        self.pins[serial] = PinnedPages(pin, pages)

    def required(self, keys: list[Key], start: int, stop: int) -> dict[str, set[Key]]:
        found = {}
        for name, coverage in self.pools.items():
            pages = coverage.required(stop, self.page_size)
            found[name] = set(keys[max(start, pages.start) : pages.stop])
        return found

    def assert_pins_held(self, gone: dict[Tier, dict[str, list[Key]]]) -> None:
        """Nothing that went was pinned where it was, and no last copy that was to stay."""
        for pinned in self.pins.values():
            for name, keys in pinned.pages.items():
                lost = {tier: keys & set(gone[tier][name]) for tier in TIERS}
                if pinned.pin is Pin.HERE:
                    assert not lost[Tier.DEVICE], f"a page pinned here lost its device copy in {name}"
                elif pinned.pin is Pin.HOST:
                    assert not lost[Tier.HOST], f"a page pinned on the host lost its host copy in {name}"
                for key in lost[Tier.DEVICE] | lost[Tier.HOST]:
                    assert self.there(name, key), f"a pinned page lost its last copy in {name}"

    def deeper(self, key: Key) -> Iterator[Key]:
        for other in self.resident():
            if other != key and other[0] == key[0] and key in self.prefix(other):
                yield other

    def assert_leaves_first(self, gone: dict[Tier, dict[str, list[Key]]]) -> None:
        """A page of full coverage leaves the device before those above it, and its last copy after all below it."""
        if not self.full:
            return
        lead = self.full[0]
        for key in gone[Tier.DEVICE][lead]:
            below = [other for other in self.deeper(key) if other in self.slots[Tier.DEVICE][lead]]
            assert not below, "a device page left before a deeper one"
        for tier in TIERS:
            for key in gone[tier][lead]:
                if not self.there(lead, key):
                    assert not list(self.deeper(key)), "a last copy left before what is below it"

    def assert_together(self) -> None:
        for tier in TIERS:
            for name in self.full[1:]:
                assert self.slots[tier][name].keys() == self.slots[tier][self.full[0]].keys()

    def assert_carried(self, exempt: set[Key]) -> None:
        """A page that needs another pool's page at the same place has it."""
        for tier in TIERS:
            for name, held in self.slots[tier].items():
                for carrier in self.carriers(name):
                    for key in held:
                        assert key in exempt or self.there(carrier, key), f"{name} has a page that {carrier} has not"

    def useless(self, tier: Tier) -> int:
        """At least so many pages of full coverage can go from a tier that lie behind a leaf's last boundary.

        Counted from each leaf's end up to the first page that has something in the other tier, and so stays.
        """
        if not self.full:
            return 0
        other = Tier.HOST if tier is Tier.DEVICE else Tier.DEVICE
        resident = self.resident()
        found: set[Key] = set()
        pinned = {
            prefix
            for pin in self.pins.values()
            for keys in pin.pages.values()
            for key in keys
            for prefix in self.prefix(key)
        }
        for leaf in resident:
            if any(leaf in self.prefix(below) for below in resident if below != leaf):
                continue
            keys = self.prefix(leaf)
            for page in reversed(keys[self.usable(keys, TIERS) :]):
                if page in pinned or any(below not in found for below in self.deeper(page)):
                    break
                found.add(page)
                if any(page in held for held in self.slots[other].values()):
                    break
        return sum(1 for key in found if key in self.slots[tier][self.full[0]])
