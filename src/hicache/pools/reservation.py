"""Slots taken for a purpose: handed over once by commit, or all free again when the block ends."""

from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType

from hicache.errors import InvariantError
from hicache.units import Int32Array, PoolName


class Reservation:
    """`with group.reserve(...) as r: ...; r.commit()`. Settles once."""

    def __init__(
        self, slots: Mapping[PoolName, Int32Array], free: Callable[[Mapping[PoolName, Int32Array]], None]
    ) -> None:
        self._slots = MappingProxyType(dict(slots))
        self._free = free
        self._settled = False

    @property
    def slots(self) -> Mapping[PoolName, Int32Array]:
        """Per pool the slots taken, int32, in the order of the demand's count."""
        return self._slots

    def commit(self) -> Mapping[PoolName, Int32Array]:
        """Hands the slots over to the caller. Raises InvariantError when the reservation has settled before."""
        self._settle()
        return self._slots

    def cancel(self) -> None:
        """Frees the slots. Raises InvariantError when the reservation has settled before."""
        self._settle()
        self._free(self._slots)

    def _settle(self) -> None:
        if self._settled:
            raise InvariantError("this reservation was committed or given back before")
        self._settled = True

    def __enter__(self) -> "Reservation":
        if self._settled:
            raise InvariantError("this reservation was committed or given back before")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._settled:
            self.cancel()
