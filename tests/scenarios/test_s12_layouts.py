"""S12: an engine's tensors are packed, permuted or strided. Right bytes or a refusal at registration, never silent."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from hicache.device.array import AnyArray, ArrayDevicePool
from hicache.errors import ConfigError
from hicache.layout import PackedLayout, PoolGeometry, TensorSpec
from hicache.pools import HostPool, HostPoolGroup, PoolCapabilities, PoolEntry, PoolTransfer, plan_backup, plan_load
from hicache.units import DeviceSlots, HostSlots

SLOTS, TOKENS, HEADS, DIM, LAYERS = 6, 4, 2, 8, 3
GEOMETRY = PoolGeometry.uniform(
    LAYERS, [TensorSpec("k", (HEADS, DIM), "float32"), TensorSpec("v", (HEADS, DIM), "float32")], TOKENS
)
Tensors = list[list[AnyArray]]
Make = Callable[[], Tensors]


def zeros(*shape: int) -> AnyArray:
    return np.zeros(shape, np.float32)


def plain() -> Tensors:
    return [[zeros(SLOTS, TOKENS, HEADS, DIM) for _ in "kv"] for _ in range(LAYERS)]


def flat() -> Tensors:
    return [[zeros(SLOTS * TOKENS, HEADS, DIM) for _ in "kv"] for _ in range(LAYERS)]


def one_tensor() -> Tensors:
    """[layer, k or v, slot, ...]: all layers views of one storage."""
    return [list(layer) for layer in zeros(LAYERS, 2, SLOTS, TOKENS, HEADS, DIM)]


def slots_outermost() -> Tensors:
    """[slot, layer, k or v, ...]."""
    parent = zeros(SLOTS, LAYERS, 2, TOKENS, HEADS, DIM)
    return [[parent[:, layer, which] for which in range(2)] for layer in range(LAYERS)]


def heads_before_tokens() -> Tensors:
    """[slot, head, token, 2 x head size]: one tensor per layer, permuted, k and v in its last dim."""
    parents = [zeros(SLOTS, HEADS, TOKENS, 2 * DIM).transpose(0, 2, 1, 3) for _ in range(LAYERS)]
    return [[parent[..., :DIM], parent[..., DIM:]] for parent in parents]


def fused_heads() -> Tensors:
    """[token, q heads + k heads + v heads, dim]."""
    parents = [zeros(SLOTS * TOKENS, 3 + 2 * HEADS, DIM) for _ in range(LAYERS)]
    return [[parent[:, 3 : 3 + HEADS], parent[:, 3 + HEADS :]] for parent in parents]


def padded_and_cut() -> Tensors:
    """Slots with room for more tokens and heads than are used."""
    return [
        [zeros(SLOTS + 2, TOKENS + 3, HEADS + 1, DIM + 1)[1:-1, 1:-2, 1:, :-1] for _ in "kv"] for _ in range(LAYERS)
    ]


MAPPABLE: list[Make] = [plain, flat, one_tensor, slots_outermost, heads_before_tokens, fused_heads, padded_and_cut]


def attached(tensors: Sequence[Sequence[AnyArray]]) -> HostPoolGroup:
    device = ArrayDevicePool.from_arrays("kv", GEOMETRY, SLOTS, tensors)
    host = HostPool.allocate("kv", PackedLayout(GEOMETRY), 4, PoolCapabilities(True, True))
    return HostPoolGroup(LAYERS, [PoolEntry("kv", host, device, lambda layer: layer)])


def fill(tensors: Tensors) -> None:
    random = np.random.default_rng(12)
    for layer in range(LAYERS):
        for which in range(2):
            shape = (SLOTS, TOKENS, HEADS, DIM)
            tensors[layer][which][...] = random.standard_normal(shape, np.float32).reshape(tensors[layer][which].shape)


def of_slot(tensors: Tensors, slot: int) -> AnyArray:
    shaped = [[tensor.reshape(SLOTS, TOKENS, HEADS, DIM)[slot] for tensor in layer] for layer in tensors]
    return np.array(shaped)


@pytest.mark.parametrize("write", MAPPABLE)
@pytest.mark.parametrize("read", MAPPABLE)
def test_bytes_are_right_from_any_layout_into_any_other(write: Make, read: Make) -> None:
    source, target = write(), read()
    fill(source)
    rows = HostSlots(np.array([3, 0, 2], np.int32))
    one, other = attached(source), attached(target)
    plan_backup(one, [PoolTransfer("kv", DeviceSlots(np.array([5, 0, 3], np.int32)), rows)]).run()
    other.get_pool().pages[...] = one.get_pool().pages
    load = plan_load(other, [PoolTransfer("kv", DeviceSlots(np.array([1, 2, 4], np.int32)), rows)])
    for layer in range(LAYERS):
        load.run_layer(layer)
    for at, to in ((5, 1), (0, 2), (3, 4)):
        assert np.array_equal(of_slot(source, at), of_slot(target, to))
    assert not of_slot(target, 0).any() and not of_slot(target, 3).any() and not of_slot(target, 5).any()


def broadcast() -> Tensors:
    return [
        [np.broadcast_to(zeros(TOKENS, HEADS, DIM), (SLOTS, TOKENS, HEADS, DIM)) for _ in "kv"] for _ in range(LAYERS)
    ]


def backwards() -> Tensors:
    return [[zeros(SLOTS, TOKENS, HEADS, DIM)[::-1] for _ in "kv"] for _ in range(LAYERS)]


def k_is_v() -> Tensors:
    return [[tensor, tensor] for tensor in (zeros(SLOTS, TOKENS, HEADS, DIM) for _ in range(LAYERS))]


def layers_share() -> Tensors:
    shared = zeros(SLOTS, TOKENS, HEADS, DIM)
    return [[shared, zeros(SLOTS, TOKENS, HEADS, DIM)] for _ in range(LAYERS)]


def overlapping_windows() -> Tensors:
    parent = zeros(SLOTS, TOKENS + 2, HEADS, DIM)
    return [[parent[:, :TOKENS], parent[:, 2:]], *plain()[1:]]


def permuted() -> Tensors:
    return [[zeros(SLOTS, HEADS, TOKENS, DIM) for _ in "kv"] for _ in range(LAYERS)]


def fewer_slots() -> Tensors:
    return [[zeros(SLOTS - 1, TOKENS, HEADS, DIM) for _ in "kv"] for _ in range(LAYERS)]


def other_dtype() -> Tensors:
    return [[np.zeros((SLOTS, TOKENS, HEADS, DIM), np.float16) for _ in "kv"] for _ in range(LAYERS)]


def a_layer_short() -> Tensors:
    return plain()[1:]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (broadcast, "elements share bytes"),
        (backwards, "run backwards"),
        (k_is_v, "tensor 'k' of layer 0 and tensor 'v' of layer 0 share bytes"),
        (layers_share, "tensor 'k' of layer 0 and tensor 'k' of layer 1 share bytes"),
        (overlapping_windows, "tensor 'k' of layer 0 and tensor 'v' of layer 0 share bytes"),
        (permuted, "permute the view you register"),
        (fewer_slots, r"it must be \(6, 4, 2, 8\) or \(24, 2, 8\)"),
        (other_dtype, "for float32 register float32"),
        (a_layer_short, "one array for each layer and tensor"),
    ],
)
def test_what_can_not_be_mapped_is_refused_at_registration_by_name(make: Make, message: str) -> None:
    with pytest.raises(ConfigError, match=f"device pool 'kv': .*{message}"):
        attached(make())


def test_a_pool_of_another_geometry_is_refused_by_the_group() -> None:
    other = PoolGeometry(GEOMETRY.layers, TOKENS // 2)
    device = ArrayDevicePool.page_first("kv", other, SLOTS)
    host = HostPool.allocate("kv", PackedLayout(GEOMETRY), 4, PoolCapabilities(True, True))
    with pytest.raises(ConfigError, match="'kv' has another geometry"):
        HostPoolGroup(LAYERS, [PoolEntry("kv", host, device, lambda layer: layer)])


def test_pages_of_another_layout_or_dtype_have_another_fingerprint() -> None:
    """So that storage written with one is a miss for the other."""
    others = [
        PoolGeometry(GEOMETRY.layers, TOKENS * 2),
        PoolGeometry(tuple(layer[::-1] for layer in GEOMETRY.layers), TOKENS),
        PoolGeometry(GEOMETRY.layers[1:], TOKENS),
        PoolGeometry.uniform(LAYERS, [TensorSpec(n, (HEADS, DIM), "int32") for n in "kv"], TOKENS),
        PoolGeometry.uniform(LAYERS, [TensorSpec(n, (DIM, HEADS), "float32") for n in "kv"], TOKENS),
    ]
    prints = [PackedLayout(GEOMETRY), PackedLayout(GEOMETRY, (GEOMETRY,)), *map(PackedLayout, others)]
    assert len({layout.fingerprint for layout in prints}) == len(prints)
