"""What happened, in numbers that only grow: every failure that shrinks a hit is counted here."""

from dataclasses import asdict, dataclass, field

from hicache.units import Tier


@dataclass(slots=True)
class Counters:
    """Counts since the cache was built. Tokens unless the name says otherwise."""

    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    kv_hit_without_state: int = 0
    """Tokens behind a hit that only a snapshot of the state was lacking for."""
    backup_pages: int = 0
    backup_failed_pages: int = 0
    backup_refused_pages: int = 0
    dropped_pages: int = 0
    backup_bytes: int = 0
    """Of all copies to the host that were begun, those of retracted requests too."""
    load_pages: int = 0
    load_failed: int = 0
    load_refused: int = 0
    load_bytes: int = 0
    """Of all copies to the device that were begun, those of retracted requests too."""
    store_pages: int = 0
    store_failed_pages: int = 0
    fetch_pages: int = 0
    fetch_failed_pages: int = 0
    fetch_refused_pages: int = 0
    prefetches: int = 0
    prefetch_deadlines: int = 0
    prefetch_left: int = 0
    """Prefetches that were not begun because computing was expected to be quicker."""
    retraction_backups: int = 0
    """Requests that left the device, for the host or storage."""
    retraction_restores: int = 0
    retraction_spilled: int = 0
    """Of those that left, the ones that the host had no room for and storage was asked to take."""
    retraction_refused: int = 0
    """Times that neither host nor storage could take a request."""
    retraction_lost: int = 0
    """Requests that left and could not be brought back: they are computed again."""

    def snapshot(self) -> dict[str, int]:
        """The counts by name; hits by tier as `hit_tokens_device` and so on."""
        counts = asdict(self)
        hits = counts.pop("hit_tokens")
        return counts | {f"hit_tokens_{tier.value}": tokens for tier, tokens in hits.items()}
