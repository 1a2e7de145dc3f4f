"""Where a rank stands follows from numbers: two ranks with other bytes never have one key, those with equal ones do."""

from dataclasses import dataclass
from functools import lru_cache

from hicache.errors import ConfigError
from hicache.keys import digest_parts


@dataclass(frozen=True, slots=True)
class Place:
    """Which part of a model a rank has: shard `shard` of `shards` of each layer, and stage `stage` of its layers.

    Raises ConfigError for a part that is not there.
    """

    shard: int = 0
    shards: int = 1
    stage: int = 0
    stages: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.shard < self.shards:
            raise ConfigError(f"shard {self.shard} of {self.shards}: shards are counted from 0")
        if not 0 <= self.stage < self.stages:
            raise ConfigError(f"stage {self.stage} of {self.stages}: stages are counted from 0")

    def namespace(self, fingerprint: bytes, *, replicated: bool) -> bytes:
        """The namespace (32 bytes) of a pool's pages in storage, given that of the request."""
        return _namespace(self, fingerprint, replicated)

    def writes(self, *, replicated: bool) -> bool:
        """Whether this rank puts a pool's pages into storage: of ranks that hold equal bytes, the first does."""
        return not replicated or self.shard == 0


@lru_cache(maxsize=1 << 14)
def _namespace(place: Place, fingerprint: bytes, replicated: bool) -> bytes:
    shard, stage = f"{place.shard}/{place.shards}", f"{place.stage}/{place.stages}"
    if replicated or place.shards == 1:
        shard = ""
    if place.stages == 1:
        stage = ""
    if not shard and not stage:
        return fingerprint
    return digest_parts({"namespace": fingerprint, "shard": shard, "stage": stage})
