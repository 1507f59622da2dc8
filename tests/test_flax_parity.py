"""Where options coincide with those of Flax's layers, weights load both ways and mean the same."""

import functools
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flashjax.linen
import flashjax.nnx

# In float64 two orders of the same sums agree to 1e-13.
EXACT = {"rtol": 0, "atol": 1e-11}
F64 = {"param_dtype": jnp.float64, "dtype": jnp.float64}
NORMAL = nn.initializers.normal(1.0)


pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(autouse=True)
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


LINEN: dict[str, dict[str, Any]] = {
    "defaults": {},
    "sizes": {"qkv_features": 32, "out_features": 5},
    "no bias": {"use_bias": False},
    "normalised": {"normalize_qk": True},
    "initialisers": {
        "kernel_init": NORMAL,
        "out_kernel_init": nn.initializers.ones,
        "bias_init": NORMAL,
        "out_bias_init": nn.initializers.ones,
    },
}


@pytest.mark.parametrize("name", LINEN)
def test_linen(name: str) -> None:
    options = {**F64, **LINEN[name]}
    flax = nn.MultiHeadDotProductAttention(4, **options)
    own = flashjax.linen.MultiHeadAttention(4, **options)
    x, memory = normal(2, 9, 24), normal(2, 13, 24, seed=1)
    mask = normal(2, 1, 9, 13, seed=2) < 0.5
    key = jax.random.key(3)
    theirs, ours = flax.init(key, x), own.init(key, x)
    assert shapes(theirs) == shapes(ours)
    same(theirs, ours)  # the same initialisers, and the same keys for them
    for variables in (theirs, ours):
        for call in (
            functools.partial(dict, inputs_q=x),
            functools.partial(dict, inputs_q=x, inputs_k=memory, mask=mask),
            functools.partial(dict, inputs_q=x, inputs_k=memory, inputs_v=memory**2),
        ):
            wanted = flax.apply(variables, **call())
            np.testing.assert_allclose(own.apply(variables, **call()), wanted, **EXACT)


# Flax's nnx layer takes its softmax in float32, also of float64: 13 weights of 2⁻²⁴ each, on values
# of size 4. What is missing a term is wrong by 0.01 or more.
NEAR = {"rtol": 0, "atol": 4e-6}
NNX: dict[str, dict[str, Any]] = {
    "sizes": {"qkv_features": 32, "out_features": 5},
    "other inputs for keys": {"in_kv_features": 7},
    "grouped heads": {"num_kv_heads": 2},
    "no bias": {"use_bias": False},
    "normalised": {"normalize_qk": True},
}


@pytest.mark.parametrize("name", NNX)
def test_nnx(name: str) -> None:
    options = {**F64, "bias_init": NORMAL, **NNX[name]}
    flax = nnx.MultiHeadAttention(4, 24, decode=False, rngs=nnx.Rngs(5), **options)
    own = flashjax.nnx.MultiHeadAttention(4, 24, rngs=nnx.Rngs(5), **options)
    theirs, ours = (nnx.to_pure_dict(nnx.state(layer, nnx.Param)) for layer in (flax, own))
    assert shapes(theirs) == shapes(ours)
    same(theirs, ours)
    x, memory = normal(2, 9, 24), normal(2, 13, NNX[name].get("in_kv_features", 24), seed=1)
    mask = normal(2, 1, 9, 13, seed=2) < 0.5
    np.testing.assert_allclose(own(x, memory, mask=mask), flax(x, memory, mask=mask), **NEAR)
    if memory.shape[-1] == 24:
        np.testing.assert_allclose(own(x, is_causal=True), flax(x, is_causal=True), **NEAR)
    other = nnx.state(flashjax.nnx.MultiHeadAttention(4, 24, rngs=nnx.Rngs(6), **options))
    nnx.update(flax, nnx.filter_state(other, nnx.Param))
    nnx.update(own, nnx.filter_state(nnx.state(flax), nnx.Param))
    np.testing.assert_allclose(own(x, memory), flax(x, memory), **NEAR)


def test_linen_decodes_on_flax_caches() -> None:
    x = normal(2, 7, 24)
    options = {**F64, "num_heads": 4, "decode": True}
    flax, own = (
        nn.MultiHeadDotProductAttention(**options),
        flashjax.linen.MultiHeadAttention(**options),
    )
    key = jax.random.key(0)
    theirs, ours = flax.init(key, x), own.init(key, x)
    assert shapes(theirs) == shapes(ours)
    same(theirs, ours)
    for t in range(7):
        wanted, new = flax.apply(theirs, x[:, t : t + 1], mutable=["cache"])
        theirs = {**theirs, **new}
        found, new = own.apply(ours, x[:, t : t + 1], mutable=["cache"])
        np.testing.assert_allclose(found, wanted, **EXACT)
        # Either may go on from the other's cache.
        ours = {**ours, **(theirs if t % 2 else new)}


def test_nnx_decodes_on_flax_caches() -> None:
    x = normal(2, 7, 24)
    flax = nnx.MultiHeadAttention(4, 24, rngs=nnx.Rngs(0), num_kv_heads=2, decode=True, **F64)
    own = flashjax.nnx.MultiHeadAttention(
        4, 24, rngs=nnx.Rngs(0), num_kv_heads=2, decode=True, **F64
    )
    flax.init_cache(x.shape, jnp.float64)
    own.init_cache(x.shape, jnp.float64)
    theirs, ours = (nnx.to_pure_dict(nnx.state(m, nnx.Cache)) for m in (flax, own))
    assert shapes(theirs) == shapes(ours)
    for t in range(7):
        token = x[:, t : t + 1]
        np.testing.assert_allclose(own(token), flax(token), **NEAR)
        if t % 2:
            nnx.update(own, nnx.state(flax, nnx.Cache))
