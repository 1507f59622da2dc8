"""A prompt, then one token at a time, over a KV cache: equal to the whole text at once."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from flashjax import Rotary, masks
from tests import layer_oracle, layers
from tests.layers import BATCH, LENGTH, MODELS, OPTIONS, WIDTH, Setting, params_of, text, whole

PROMPT = 11
LONGEST = LENGTH + 3
F64 = {"param_dtype": jnp.float64, "dtype": jnp.float64}
# In float64 two orders of the same sums agree to 1e-13.
EXACT = {"rtol": 0, "atol": 1e-11}


pytestmark = pytest.mark.usefixtures("quick_compiles")


def columns_of(layer: Any) -> int:
    """What arrays over columns hold: every position of the text, in a window layer's call too."""
    return LENGTH if layer.cached_key.shape[1] < LONGEST else LONGEST


def decoded(setting: Setting, layer: Any, x: Any, prompt: int = PROMPT) -> Any:
    """By nnx, under jit; the cache's count is traced, as in serving."""
    layer.init_cache((BATCH, LONGEST, WIDTH))

    @nnx.jit
    def step(layer: Any, x: Any, given: Any) -> Any:
        return layer(x, decode=True, **given)

    outputs = []
    for s in layers.stretches(prompt, x.shape[1], columns_of(layer)):
        outputs.append(step(layer, x[:, s.rows], setting.call(s)))
    assert layer.cache_index[...] == x.shape[1]
    return jnp.concatenate(outputs, axis=1)


def decoded_by_linen(setting: Setting, params: Any, x: Any, columns: int) -> Any:
    layer = setting.linen(decode=True, dtype=x.dtype, param_dtype=x.dtype)
    shape = jnp.zeros((BATCH, LONGEST, WIDTH), x.dtype)
    cache = jax.eval_shape(layer.init, jax.random.key(0), shape)["cache"]
    cache = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), cache)
    outputs = []
    for s in layers.stretches(PROMPT, x.shape[1], columns):
        out, new = layer.apply(
            {"params": params, "cache": cache}, x[:, s.rows], mutable=["cache"], **setting.call(s)
        )
        cache = new["cache"]
        outputs.append(out)
    return jnp.concatenate(outputs, axis=1)


# A prompt that sees all of itself, and masks without causality, need the call to say so. The others
# left out are in those that stay: T5 has a bias, Gemma-2's window left padding and a soft cap.
ELSEWHERE = (
    "bias", "causal", "left padding", "lengths", "window", "GPT-2", "Gemma-2, global",
    "gpt-oss, global",
)  # fmt: skip
CAUSAL = {
    name: setting
    for name, setting in (OPTIONS | MODELS).items()
    if setting.make.get("is_causal") and name not in ELSEWHERE
}


@pytest.mark.parametrize("name", CAUSAL)
def test_decoding_is_the_whole_forward(name: str) -> None:
    setting = CAUSAL[name]
    with jax.enable_x64(True):
        x = text(np.float64)
        layer = setting.nnx(**F64)
        wanted = layers.reference(setting, params_of(layer), x)
        np.testing.assert_allclose(decoded(setting, layer, x), wanted, **EXACT)


@pytest.mark.parametrize("name", ["gpt-oss, window"])
def test_linen_decodes_the_same(name: str) -> None:
    setting = MODELS[name]
    with jax.enable_x64(True):
        x = text(np.float64)
        layer = setting.nnx(**F64)
        params = params_of(layer)
        wanted = layers.reference(setting, params, x)
        layer.init_cache((BATCH, LONGEST, WIDTH))
        found = decoded_by_linen(setting, params, x, columns_of(layer))
        np.testing.assert_allclose(found, wanted, **EXACT)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["Llama", "gpt-oss, window"])
def test_decoding_rounds_no_worse_than_the_whole_forward(name: str, dtype: Any) -> None:
    """Both within the same bound of the truth, row by row."""
    setting, x = MODELS[name], text(dtype)
    layer = setting.nnx(dtype=dtype, param_dtype=dtype, precision="highest")
    params = params_of(layer)
    wanted = layers.reference(setting, params, x)
    drawn = layer_oracle.baseline(setting.layer, params, x, None, dtype, **setting.oracle())
    layer_oracle.hold(layer(x, **whole(setting)), wanted, drawn, dtype)
    layer_oracle.hold(decoded(setting, layer, x), wanted, drawn, dtype)


@pytest.mark.parametrize("prompt", [1, 20])
def test_prompts_shorter_and_longer_than_the_window(prompt: int) -> None:
    setting = OPTIONS["window"]
    with jax.enable_x64(True):
        x = text(np.float64)
        layer = setting.nnx(**F64)
        wanted = layers.reference(setting, params_of(layer), x)
        np.testing.assert_allclose(decoded(setting, layer, x, prompt), wanted, **EXACT)


def test_a_window_layer_keeps_only_its_window() -> None:
    layer = OPTIONS["window"].nnx()
    layer.init_cache((BATCH, 1000, WIDTH))
    assert layer.cached_key.shape == layer.cached_value.shape == (BATCH, 6, 4, layers.H)
    layer.init_cache((BATCH, 5, WIDTH))
    assert layer.cached_key.shape == (BATCH, 5, 4, layers.H)
    linen = OPTIONS["window"].linen(decode=True)
    variables = jax.eval_shape(linen.init, jax.random.key(0), jnp.zeros((BATCH, 1000, WIDTH)))
    assert variables["cache"]["cached_key"].shape == (BATCH, 6, 4, layers.H)


def test_a_window_of_nothing_before() -> None:
    """Each token sees itself alone, and the cache holds nothing."""
    layer = Setting({"is_causal": True, "local_window_size": (0, 0)}).nnx()
    x = text()
    layer.init_cache((BATCH, LONGEST, WIDTH))
    assert layer.cached_key.shape[1] == 0
    found = jnp.concatenate(
        [layer(x[:, s.rows], decode=True) for s in layers.stretches(5, 8, 0)], 1
    )
    np.testing.assert_allclose(found, layer(x)[:, :8], rtol=1e-5, atol=1e-5)


def test_several_prompts_in_a_row_and_any_number_of_tokens() -> None:
    with jax.enable_x64(True):
        x = text(np.float64)
        layer = OPTIONS["window"].nnx(**F64)
        layer.init_cache((BATCH, LONGEST, WIDTH))
        cuts = [0, 3, 4, 12, 13, LENGTH]
        found = [layer(x[:, a:b], decode=True) for a, b in itertools.pairwise(cuts)]
        np.testing.assert_allclose(jnp.concatenate(found, 1), layer(x), **EXACT)


def test_a_prompt_may_see_all_of_itself() -> None:
    """is_causal=False at the call: only what is not written yet is hidden."""
    with jax.enable_x64(True):
        x = text(np.float64)
        layer = OPTIONS["rotary"].nnx(**F64)
        layer.init_cache((BATCH, LONGEST, WIDTH))
        first = layer(x[:, :PROMPT], decode=True, is_causal=False)
        rest = [layer(x[:, t : t + 1], decode=True) for t in range(PROMPT, LENGTH)]
        wanted = layer(x, mask=masks.Prefix(PROMPT) | masks.Causal())
        np.testing.assert_allclose(jnp.concatenate([first, *rest], 1), wanted, **EXACT)


def test_decoding_is_causal_unless_told_otherwise() -> None:
    """Flax's layers decode causally without being told, so that a swap changes nothing."""
    layer, x = Setting().nnx(), text()
    layer.init_cache((BATCH, LONGEST, WIDTH))
    found, wanted = layer(x[:, :PROMPT], decode=True), layer(x[:, :PROMPT], is_causal=True)
    assert np.abs(found - wanted).max() < 1e-3 < np.abs(found - layer(x[:, :PROMPT])).max()


def test_lengths_are_positions() -> None:
    setting = OPTIONS["lengths"]
    with jax.enable_x64(True):
        x = text(np.float64)
        layer = setting.nnx(**F64)
        wanted = layers.reference(setting, params_of(layer), x)
        np.testing.assert_allclose(decoded(setting, layer, x), wanted, **EXACT)


def test_a_full_cache_raises_where_it_can_and_gives_nan_where_it_cannot() -> None:
    layer, x = OPTIONS["causal"].nnx(), text()
    layer.init_cache((BATCH, 12, WIDTH))
    with pytest.raises(ValueError, match=r"holds 12 positions, and 13 tokens came"):
        layer(x[:, :13], decode=True)
    step = nnx.jit(lambda layer, x: layer(x, decode=True))
    assert np.isfinite(step(layer, x[:, :12])).all()
    with pytest.raises(ValueError, match="12 positions, and 1 tokens came after 12 written"):
        layer(x[:, :1], decode=True)
    assert np.isnan(step(layer, x[:, :1])).all()


def test_mistakes_are_named() -> None:
    layer, x = OPTIONS["causal"].nnx(), text()
    with pytest.raises(ValueError, match=r"there is no cache.*init_cache"):
        layer(x, decode=True)
    layer.init_cache((BATCH, 40, WIDTH))
    with pytest.raises(ValueError, match=r"cached_key has shape \(2, 40, 4, 6\).*\(1, 3, 4, 6\)"):
        layer(x[:1, :3], decode=True)
    with pytest.raises(ValueError, match=r"decoding with 3 query and 5 key tokens"):
        layer(x[:, :3], x[:, :5], decode=True)
    with pytest.raises(ValueError, match="segment_ids is one array with a KV cache; wanted a pair"):
        layer(x[:, :3], segment_ids=np.zeros((BATCH, 3), np.int32), decode=True)
    layer.init_cache((BATCH, 40, WIDTH), jnp.bfloat16)
    with pytest.raises(ValueError, match="cached_key has dtype bfloat16 and this call's key float"):
        layer(x[:, :3], decode=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"is_causal": "no"}, "is_causal is 'no'; wanted True or False"),
        ({"score_mod": abs}, "score_mod is a builtin_function_or_method; wanted a flashjax.scores"),
        ({"mask": masks.Causal}, "mask is the class Causal; wanted a term"),
        ({"mask": abs}, "mask is a function"),
        ({"mask": -np.ones((1, 40))}, "values beside 0 and 1.* An additive mask"),
        ({"mask": np.ones((1, 39), bool)}, r"mask has shape \(1, 39\)"),
        ({"bias": np.ones((1, 39))}, r"bias has shape \(1, 39\)"),
        ({"key_value_seq_lengths": np.ones(3, int)}, "key_value_seq_lengths has shape"),
        ({"segment_ids": (np.zeros(3, int), None)}, r"segment_ids is \("),
        ({"segment_ids": (np.zeros(3, int), np.zeros(39, int))}, r"segment_ids has shape \(39,\)"),
        ({"segment_ids": [[0] * 3] * 2}, "segment_ids is a list"),
    ],
)
def test_mistakes_are_named_as_without_a_cache(given: dict[str, Any], said: str) -> None:
    layer, x = Setting().nnx(), text()
    layer.init_cache((BATCH, 40, WIDTH))
    with pytest.raises((TypeError, ValueError), match=said):
        layer(x[:, :3], decode=True, **given)


GIVEN: dict[str, Callable[[int], dict[str, Any]]] = {
    "mask": lambda n: {"mask": np.ones((1, n), bool)},
    "term": lambda n: {"mask": masks.Causal() & masks.Intervals(np.zeros(n, int), np.full(n, 99))},
    "bias": lambda n: {"bias": np.zeros((1, 1, 1, n), np.float32)},
    "segments": lambda n: {"segment_ids": (np.zeros(3, int), np.zeros(n, int))},
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_window_layer_wants_a_column_for_each_position(name: str) -> None:
    """And not as many as its cache holds, of which it keeps the last."""
    x = text()

    def after(columns: int) -> tuple[Any, Any]:
        layer = OPTIONS["window"].nnx()
        layer.init_cache((BATCH, LONGEST, WIDTH))
        layer(x[:, :20], decode=True)
        return layer, GIVEN[name](columns)

    layer, given = after(23)
    np.testing.assert_allclose(layer(x[:, 20:23], decode=True, **given), layer_whole(x), atol=1e-5)
    # As many as the cache holds, one short of the text.
    for columns in (6, 22):
        layer, given = after(columns)
        with pytest.raises(ValueError, match=f"has {columns} columns and the text 23 tokens"):
            layer(x[:, 20:23], decode=True, **given)
    step = nnx.jit(lambda layer, x, given: layer(x, decode=True, **given))
    assert np.isnan(step(layer, x[:, 20:23], given)).all()


@functools.cache
def _window_layer() -> Any:
    return OPTIONS["window"].nnx()


def layer_whole(x: Any) -> Any:
    return _window_layer()(x)[:, 20:23]


def test_linen_without_a_cache_says_so() -> None:
    layer = OPTIONS["causal"].linen(decode=True)
    x = text()
    params = layer.init(jax.random.key(0), x)["params"]
    with pytest.raises(ValueError, match=r'the variables hold no "cache".*layer.init'):
        layer.apply({"params": params}, x[:, :3], mutable=["cache"])


def test_tokens_are_taken_back() -> None:
    """Speculative decoding: the count is set back, and what was written beyond it is hidden."""
    layer, x = OPTIONS["causal"].nnx(), text()
    layer.init_cache((BATCH, LONGEST, WIDTH))
    layer(x[:, :10], decode=True)
    layer.cache_index[...] = jnp.int32(7)
    found = layer(x[:, 7:12], decode=True)
    np.testing.assert_allclose(found, layer(x)[:, 7:12], atol=1e-5)


def test_a_cache_on_an_explicit_mesh() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    layer, x = OPTIONS["causal"].nnx(), text()
    wanted = layer(x)
    with jax.set_mesh(mesh):
        place = jax.NamedSharding(mesh, jax.P("data"))
        layer.init_cache((BATCH, LONGEST, WIDTH), sharding=place)
        x = jax.device_put(x, place)
        found = [layer(x[:, a:b], decode=True) for a, b in ((0, 9), (9, 10), (10, LENGTH))]
        assert layer.cached_key[...].sharding.spec[0] == "data"
    np.testing.assert_allclose(
        jnp.concatenate([np.asarray(o) for o in found], 1), wanted, atol=1e-5
    )


def test_what_a_view_sets() -> None:
    layer = Setting({"is_causal": True, "dropout_rate": 0.1}).nnx()
    other = nnx.view(layer, deterministic=True, decode=True, batch_size=BATCH, max_length=9)
    assert other.deterministic
    assert other.cached_key.shape == (BATCH, 9, 4, layers.H)
    np.testing.assert_allclose(
        other(text()[:, :5]), nnx.view(layer, deterministic=True)(text())[:, :5], atol=1e-5
    )
    assert layer.decode is None


def test_generation_inside_a_scan() -> None:
    """The whole loop in one program, as serving runs it."""
    with jax.enable_x64(True):
        x = text(np.float64)
        layer = MODELS["gpt-oss, window"].nnx(**F64)
        layer.init_cache((BATCH, LONGEST, WIDTH))
        layer(x[:, :PROMPT], decode=True)
        graph, params, cache = nnx.split(layer, nnx.Param, nnx.Cache)

        @jax.jit
        def run(params: Any, cache: Any, rest: Any) -> Any:
            def step(cache: Any, token: Any) -> Any:
                layer = nnx.merge(graph, params, cache)
                out = layer(token[:, None], decode=True)
                return nnx.state(layer, nnx.Cache), out[:, 0]

            return jax.lax.scan(step, cache, rest.swapaxes(0, 1))[1]

        found = run(params, cache, x[:, PROMPT:]).swapaxes(0, 1)
        np.testing.assert_allclose(found, layer(x)[:, PROMPT:], **EXACT)


def test_rotary_follows_the_cache() -> None:
    """Positions given at the call stand for those counted from the cache."""
    x, found = text(), []
    for given in ({}, {"positions": np.arange(4, 7)}):
        layer = Setting({"rotary": Rotary(), "is_causal": True}).nnx()
        layer.init_cache((BATCH, LONGEST, WIDTH))
        layer(x[:, :4], decode=True)
        found.append(layer(x[:, 4:7], decode=True, **given))
    np.testing.assert_array_equal(*found)
