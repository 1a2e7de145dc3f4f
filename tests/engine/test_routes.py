"""Every layer finds its pool; what the engine has no use for is refused by name."""

from dataclasses import replace

import pytest

from hicache.builder import (
    ModelDescription,
    PoolDescription,
    attention_pool,
    chunked_pool,
    indexer_pool,
    latent_pool,
    state_pool,
    window_pool,
)
from hicache.engine.routes import Routes
from hicache.engine.token_pools import Sight
from hicache.errors import ConfigError
from hicache.layout import PoolGeometry, TensorSpec

PAGE = 4
STATE = state_pool([0, 1], (TensorSpec("conv", (2, 4), "float32"), TensorSpec("recurrent", (3,), "float32")))


def routes(layers: int, *pools: PoolDescription) -> Routes:
    return Routes.of(ModelDescription(layers, pools))


def test_every_kind_of_pool_has_its_route():
    found = routes(
        6,
        latent_pool([0, 2], 8, 4, "float32", PAGE),
        indexer_pool([2], 4, "float32", PAGE),
        replace(window_pool([1, 3], 10, 2, 4, "float32", PAGE), readers=((5, 1),)),
        replace(STATE, layers=(3, 4)),
    )
    assert found.latents == {0: ("latent", 0), 2: ("latent", 1)}
    assert found.indexers == {2: ("indexer", 0)}
    assert found.attention == {1: ("swa", 0), 3: ("swa", 1), 5: ("swa", 1)}
    assert found.states == {3: ("state", 0), 4: ("state", 1)}
    assert found.sights == {"latent": Sight(), "indexer": Sight(), "swa": Sight(window=10)}
    assert found.sources == {"latent": "latent", "indexer": "latent", "swa": "swa"}
    assert (found.token_pools, found.gathered_pools, found.state_pools) == (("latent", "swa"), ("swa",), ("state",))
    assert found.sees_less


def test_chunks_are_no_windows_and_full_attention_sees_all():
    chunked = routes(2, attention_pool([1], 2, 4, "float32", PAGE), chunked_pool([0], 10, 2, 4, "float32", PAGE))
    assert chunked.sights == {"kv": Sight(), "swa": Sight(chunk=10)}
    assert chunked.sees_less
    assert not routes(1, attention_pool([0], 2, 4, "float32", PAGE), STATE).sees_less


def test_a_pool_the_engine_has_no_use_for_is_refused_by_name():
    tensors = (TensorSpec("colour", (3,), "uint8"), TensorSpec("k", (2,), "float32"))
    unknown = PoolDescription("paint", PoolGeometry.uniform(1, tensors, PAGE), (0,))
    with pytest.raises(ConfigError, match="pool 'paint' holds colour, k per token; the engine has no use for that"):
        routes(1, attention_pool([0], 2, 4, "float32", PAGE), unknown)
