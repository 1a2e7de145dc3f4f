"""A pool's geometry to byte ranges of a page, and device layouts as values: a bijection, whatever layout and dtype."""

from hicache.layout.device import Block, DeviceLayout, TensorPlace
from hicache.layout.geometry import ITEM_BYTES, PackedLayout, PoolGeometry, TensorSpec

__all__ = ["ITEM_BYTES", "Block", "DeviceLayout", "PackedLayout", "PoolGeometry", "TensorPlace", "TensorSpec"]
