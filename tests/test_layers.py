"""Both layers, every option alone and as models combine them, against the layer in numpy.

In float64, where two orders of the same sums agree to 1e-13 and any fault of meaning shows.
"""

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
from flashjax import Rotary, masks
from tests import layers
from tests.inputs import Shape, dropout_pattern
from tests.layer_oracle import Layer, truth
from tests.layers import MODELS, OPTIONS, Setting, params_of, reference, text, whole

EXACT = {"rtol": 0, "atol": 1e-11}
SETTINGS = OPTIONS | MODELS
F64 = {"param_dtype": jnp.float64, "dtype": jnp.float64}


pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(autouse=True)
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", SETTINGS)
def test_both_layers_mean_what_their_options_say(name: str) -> None:
    setting, x = SETTINGS[name], text(np.float64)
    layer = setting.nnx(**F64)
    params = params_of(layer)
    wanted = reference(setting, params, x)
    np.testing.assert_allclose(layer(x, **whole(setting)), wanted, **EXACT)
    found = setting.linen(**F64).apply({"params": params}, x, **whole(setting))
    np.testing.assert_allclose(found, wanted, **EXACT)


@pytest.mark.parametrize("name", ["gpt-oss, window"])
def test_gradients_reach_every_parameter(name: str) -> None:
    """And are those of the dense implementation, which autodiff differentiates."""
    setting, x = SETTINGS[name], text(np.float64)

    def gradient(implementation: str) -> Any:
        def loss(layer: nnx.Module) -> Any:
            return (layer(x, **whole(setting)) ** 2).sum()

        return params_of_state(nnx.grad(loss)(setting.nnx(**F64, implementation=implementation)))

    found, wanted = gradient("xla"), gradient("reference")
    for path, leaf in jax.tree.leaves_with_path(wanted):
        assert np.abs(leaf).max() > 1e-6, path
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), found, wanted)


def params_of_state(state: Any) -> Any:
    return jax.tree.map(np.asarray, nnx.to_pure_dict(state))


def test_cross_attention() -> None:
    setting = Setting({"num_kv_heads": 2, "in_kv_features": 10})
    x = text(np.float64)
    r = np.random.default_rng(3)
    memory, other = r.normal(size=(2, layers.BATCH, 13, 10))
    layer = setting.nnx(**F64)
    params = params_of(layer)
    keep = r.random((layers.BATCH, 1, layers.LENGTH, 13)) < 0.7
    wanted = truth(Layer(), params, x, memory, keep=keep)
    np.testing.assert_allclose(layer(x, memory, mask=keep), wanted, **EXACT)
    linen = flashjax.linen.MultiHeadAttention(layers.HEADS, num_kv_heads=2, **F64)
    found = linen.apply({"params": params}, x, memory, mask=keep)
    np.testing.assert_allclose(found, wanted, **EXACT)
    values = linen.apply({"params": params}, x, memory, other)
    np.testing.assert_allclose(layer(x, memory, other), values, **EXACT)
    assert np.abs(values - layer(x, memory)).max() > 0.1


@pytest.mark.parametrize("shape", ["(T,)", "(B, T)", "pair"])
def test_positions_are_the_users(shape: str) -> None:
    setting = Setting({"rotary": Rotary()})
    x, r = text(np.float64), np.random.default_rng(5)
    own = r.integers(-20, 1000, (layers.BATCH, layers.LENGTH))
    other = np.sort(own, axis=1)
    pair = {"(T,)": (own[0], own[0]), "(B, T)": (own, own), "pair": (own, other)}[shape]
    layer = setting.nnx(**F64)
    frequencies = Layer(frequencies=layers.plain(layers.H))
    wanted = truth(frequencies, params_of(layer), x, positions=pair)
    given = pair if shape == "pair" else pair[0]
    np.testing.assert_allclose(layer(x, positions=given), wanted, **EXACT)


@pytest.mark.parametrize("shared", [True, False])
def test_dropout_is_that_of_the_call(shared: bool) -> None:
    setting = Setting({"dropout_rate": 0.4, "broadcast_dropout": shared})
    x, key = text(np.float64), jax.random.key(11)
    layer = setting.nnx(**F64, deterministic=True)
    params = params_of(layer)
    linen = setting.linen(**F64)
    shape = Shape(layers.BATCH, layers.LENGTH, layers.LENGTH, layers.HEADS, 1, 1, 1)
    kept = dropout_pattern(11, shape, 0.4)
    options: dict[str, Any] = {"dropout_keep": kept, "dropout_rate": 0.4}
    found = linen.apply({"params": params}, x, deterministic=False, dropout_rng=key)
    if shared:
        again = linen.apply({"params": params}, x[::-1], deterministic=False, dropout_rng=key)
        np.testing.assert_allclose(found, again[::-1], **EXACT)
    else:
        np.testing.assert_allclose(found, truth(Layer(), params, x, **options), **EXACT)
    undropped = truth(Layer(), params, x)
    np.testing.assert_allclose(layer(x), undropped, **EXACT)
    np.testing.assert_allclose(
        linen.apply({"params": params}, x, deterministic=True), undropped, **EXACT
    )
    a, b = (layer(x, deterministic=False, rngs=nnx.Rngs(dropout=seed)) for seed in (1, 2))
    assert np.abs(a - b).max() > 1e-3
    np.testing.assert_array_equal(a, layer(x, deterministic=False, rngs=nnx.Rngs(dropout=1)))


def test_linen_takes_the_stream_named_dropout() -> None:
    setting, x = Setting({"dropout_rate": 0.4, "deterministic": False}), text(np.float64)
    layer = setting.linen(**F64)
    variables = layer.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    a, b = (layer.apply(variables, x, rngs={"dropout": jax.random.key(s)}) for s in (1, 2))
    assert np.abs(a - b).max() > 1e-3


def test_dtypes() -> None:
    for dtype, param_dtype in ((jnp.bfloat16, jnp.float32), (None, jnp.bfloat16)):
        layer = Setting().nnx(dtype=dtype, param_dtype=param_dtype)
        assert {x.dtype for x in jax.tree.leaves(nnx.state(layer, nnx.Param))} == {
            jnp.dtype(param_dtype)
        }
        assert layer(text(jnp.bfloat16)).dtype == jnp.bfloat16


def test_initialisers_that_partition() -> None:
    names = (None, "heads", None)
    make = nn.with_partitioning(nn.initializers.lecun_normal(), names)
    linen = flashjax.linen.MultiHeadAttention(
        4, kernel_init=make, out_kernel_init=nn.with_partitioning(NORMAL, ("heads", None, None)),
        use_sinks=True, sinks_init=nn.with_partitioning(NORMAL, ("heads",)),
    )  # fmt: skip
    specs = nn.get_partition_spec(linen.init(jax.random.key(0), text()))["params"]
    assert specs["query"]["kernel"] == jax.P(None, "heads", None)
    assert specs["out"]["kernel"] == jax.P("heads", None, None)
    assert specs["sinks"] == jax.P("heads")
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        own = flashjax.nnx.MultiHeadAttention(
            4,
            24,
            rngs=nnx.Rngs(0),
            kernel_metadata={"out_sharding": names},
            out_kernel_metadata={"out_sharding": ("heads", None, None)},
        )
    assert own.value.kernel[...].sharding.spec == jax.P(None, "heads", None)
    assert own.out.kernel[...].sharding.spec == jax.P("heads", None, None)


NORMAL = nn.initializers.normal(1.0)


def test_linen_in_a_scan_with_remat() -> None:
    """Layers stacked along a leading axis, as large models are written."""
    x = text(np.float64)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            attention = flashjax.linen.MultiHeadAttention(
                2, is_causal=True, rotary=Rotary(), name="attention", **F64
            )
            return x + attention(x), None

    stack = nn.scan(
        nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    )()
    variables = stack.init(jax.random.key(0), x, None)
    found, _ = stack.apply(variables, x, None)
    wanted = x
    for i in range(3):
        params = jax.tree.map(lambda p, i=i: p[i], variables["params"])
        wanted, _ = Block().apply({"params": params}, wanted, None)
    np.testing.assert_allclose(found, wanted, **EXACT)
    grads = jax.grad(lambda v: (stack.apply(v, x, None)[0] ** 2).sum())(variables)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


def test_unbatched_and_many_batch_dims() -> None:
    layer = Setting({"is_causal": True, "rotary": Rotary()}).nnx(**F64)
    x = text(np.float64)
    wanted = layer(x)
    np.testing.assert_allclose(layer(x[1]), wanted[1], **EXACT)
    np.testing.assert_allclose(layer(x[None, :, None]), wanted[None, :, None], **EXACT)
    np.testing.assert_allclose(jax.vmap(layer)(x), wanted, **EXACT)


MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "heads do not divide": ({"qkv_features": 25}, {}, "qkv_features is 25 and num_heads 4"),
    "key heads do not divide": ({"num_kv_heads": 3}, {}, "num_kv_heads is 3 and num_heads 4"),
    "no such norm": ({"normalize_qk": "batch"}, {}, "normalize_qk is 'batch'"),
    "no such implementation": ({"implementation": "fast"}, {}, "implementation"),
    "window below 0": ({"local_window_size": (-1, 0)}, {}, "local_window_size is"),
    "odd head dim": ({"rotary": Rotary(), "qkv_features": 20}, {}, "rotary turns 5 components"),
    "positions without rotary": ({}, {"positions": np.arange(29)}, "positions is given"),
    "positions of floats": (
        {"rotary": Rotary()},
        {"positions": np.arange(29.0)},
        "positions has dtype",
    ),
    "positions of another length": (
        {"rotary": Rotary()},
        {"positions": np.arange(28)},
        r"positions has shape \(28,\); wanted \(29,\) or \(2, 29\)",
    ),
    "three positions": ({"rotary": Rotary()}, {"positions": (1, 2, 3)}, "positions has 3 parts"),
    "half a pair": ({"rotary": Rotary()}, {"positions": (1, None)}, "1 of them None"),
    "rotary as a flag": ({"rotary": True}, {}, "rotary is True; wanted flashjax.Rotary"),
    "a class for rotary": ({"rotary": Rotary}, {}, "rotary is Rotary; wanted flashjax.Rotary"),
    "an additive mask": ({}, {"mask": np.full((29, 29), -1e9)}, "An additive mask"),
    "a class for a mask": ({}, {"mask": masks.Causal}, "mask is the class Causal"),
    "segment ids in a list": ({}, {"segment_ids": [[0] * 29] * 2}, "segment_ids is a list"),
    "half a head": ({"num_kv_heads": 0.5}, {}, "num_kv_heads is 0.5; wanted an int >= 1"),
    "no features": ({"qkv_features": -4}, {}, "qkv_features is -4; wanted an int >= 1"),
    "values without keys": ({}, {"inputs_v": text()}, "inputs_v is given and inputs_k is None"),
    "segment ids of floats": ({}, {"segment_ids": np.zeros((2, 29))}, "segment_ids has dtype"),
    "dropout below 0": ({"dropout_rate": -0.1}, {}, "dropout_rate is -0.1; wanted 0 <= rate < 1"),
    "dropout undecided": ({"dropout_rate": 0.1}, {}, "deterministic"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name: str) -> None:
    make, call, said = MISTAKES[name]
    with pytest.raises((ValueError, TypeError), match=said):
        Setting(make).nnx()(text(), **call)
    with pytest.raises(Exception, match=said):
        Setting(make).linen().init(jax.random.key(0), text(), **call)


def test_what_is_no_input_is_named() -> None:
    for wrong in (None, np.zeros(3)):
        with pytest.raises(TypeError, match=r"inputs_q is .*; wanted an array \(…, length, feat"):
            Setting().nnx()(wrong)
    with pytest.raises(ValueError, match="input_shape is 6; wanted"):
        Setting().nnx().init_cache(6)


def test_lists_of_positions_are_one_array() -> None:
    layer, x = Setting({"rotary": Rotary()}).nnx(), text()[:, :2]
    given = [[0, 1], [5, 7]]
    np.testing.assert_array_equal(layer(x, positions=given), layer(x, positions=np.array(given)))


def test_nnx_names_the_wrong_width() -> None:
    with pytest.raises(ValueError, match=r"inputs_k has shape \(2, 5, 3\); wanted a last dim"):
        Setting().nnx()(text(), np.zeros((2, 5, 3), np.float32))


def test_nnx_says_where_dropout_keys_come_from() -> None:
    layer = Setting({"dropout_rate": 0.1, "keep_rngs": False}).nnx()
    with pytest.raises(ValueError, match=r"rngs is None.*rngs=nnx.Rngs\(dropout=seed\)"):
        layer(text(), deterministic=False)
    with pytest.raises(TypeError, match=r"rngs is key.*; wanted nnx.Rngs"):
        layer(text(), deterministic=False, rngs=jax.random.key(0))


def test_a_mask_of_zeros_and_ones_is_taken_as_flax_does() -> None:
    layer = Setting().nnx(**F64)
    x = text(np.float64)
    mask = nn.make_causal_mask(np.ones((layers.BATCH, layers.LENGTH)))
    np.testing.assert_allclose(layer(x, mask=mask), layer(x, mask=masks.Causal()), **EXACT)
