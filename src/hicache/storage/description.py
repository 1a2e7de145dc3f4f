"""What a namespace is, in words: kept in a store for people and tools, never used to decide whose a page is."""

from collections.abc import Sequence

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from hicache.keys import Namespace


@dataclass(frozen=True, slots=True)
class PoolNote:
    """A pool with pages in a namespace. `whole`: a prefix needs its page at every place before its end."""

    name: str
    page_bytes: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Description:
    """The parts of a `Namespace`, but of its salt only whether there is one, and the pools that have pages in it."""

    model: str
    weights: str
    dtype: str
    page_size: int
    geometry: str
    shard: str
    adapter: str
    tenant: str
    salted: bool
    draft_lookahead: int
    pools: tuple[PoolNote, ...]

    @classmethod
    def of(cls, namespace: Namespace, pools: Sequence[PoolNote]) -> "Description":
        """Of a namespace with these pools."""
        return cls(
            model=namespace.model,
            weights=namespace.weights,
            dtype=namespace.dtype,
            page_size=namespace.page_size,
            geometry=namespace.geometry,
            shard=namespace.shard,
            adapter=namespace.adapter,
            tenant=namespace.tenant,
            salted=bool(namespace.salt),
            draft_lookahead=namespace.draft_lookahead,
            pools=tuple(pools),
        )

    def text(self) -> str:
        """As JSON."""
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def parse(cls, text: str) -> "Description | None":
        """What `text` gave; None for anything else."""
        try:
            return _ADAPTER.validate_json(text)
        except ValidationError:
            return None


_ADAPTER = TypeAdapter(Description)
