"""Strided pieces of one buffer share no byte: proven dimension by dimension, or refused."""

from collections.abc import Sequence
from dataclasses import dataclass

from hicache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Extent:
    """Items of `item_bytes` bytes at `offset_bytes + sum(stride * index)`; `dims` are pairs (size, stride in bytes)."""

    what: str
    offset_bytes: int
    dims: tuple[tuple[int, int], ...]
    item_bytes: int

    @property
    def stop_bytes(self) -> int:
        """One past the last byte."""
        return self.offset_bytes + sum((size - 1) * stride for size, stride in self.dims) + self.item_bytes

    def outermost_first(self) -> "Extent":
        """The same bytes, without dims of size 1, the largest stride first."""
        dims = sorted(((size, stride) for size, stride in self.dims if size > 1), key=lambda dim: -dim[1])
        return Extent(self.what, self.offset_bytes, tuple(dims), self.item_bytes)


def check_one_to_one(extent: Extent) -> None:
    """Raises ConfigError unless every item has bytes of its own, in ascending order along every dim."""
    reach = extent.item_bytes
    for size, stride in reversed(extent.outermost_first().dims):
        if stride < reach:
            raise ConfigError(
                f"{extent.what} has (size, stride in bytes) {extent.dims}: elements share bytes or run backwards,"
                " so it can't be mapped; register a tensor with memory of its own"
            )
        reach += (size - 1) * stride


def check_disjoint(extents: Sequence[Extent]) -> None:
    """Raises ConfigError unless no two extents, each one to one, share a byte.

    Extents lie apart as wholes, or step together along an outer dim and are disjoint within one step: true of all
    views that index or slice one parent tensor. What can't be seen to be disjoint like that is refused.
    """
    _check_apart([extent.outermost_first() for extent in extents])


def _check_apart(extents: Sequence[Extent]) -> None:
    cluster: list[Extent] = []
    reach = 0
    for extent in sorted(extents, key=lambda extent: extent.offset_bytes):
        if cluster and extent.offset_bytes >= reach:
            _check_interleaved(cluster)
            cluster = []
        cluster.append(extent)
        reach = max(reach, extent.stop_bytes)
    _check_interleaved(cluster)


def _check_interleaved(cluster: Sequence[Extent]) -> None:
    if len(cluster) < 2:
        return
    steps = [extent.dims[0] if extent.dims else None for extent in cluster]
    step = steps[0]
    if step is None or any(other != step for other in steps):
        raise _refusal(cluster)
    inner = [Extent(extent.what, extent.offset_bytes, extent.dims[1:], extent.item_bytes) for extent in cluster]
    first = inner[0].offset_bytes
    if max(extent.stop_bytes for extent in inner) - first > step[1]:
        raise _refusal(cluster)
    _check_apart(inner)


def _refusal(cluster: Sequence[Extent]) -> ConfigError:
    return ConfigError(
        f"{cluster[0].what} and {cluster[1].what} share bytes, or interleave in a way that can't be mapped;"
        " register tensors that don't overlap, or that are views of one parent"
    )
