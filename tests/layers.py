"""Layers said three times: to linen, to nnx and to `tests.layer_oracle`.

A `Setting` is one option, or what a model uses. Positions are those of the text, so that the same
setting serves the whole text and any stretch of it that is decoded over a cache.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import flashjax.linen
import flashjax.nnx
from flashjax import Rotary, masks, rotary, scores
from tests import layer_oracle
from tests.layer_oracle import Layer
from tests.oracle import Array, Score

BATCH, LENGTH, WIDTH, HEADS = 2, 29, 24, 4


class Stretch(NamedTuple):
    """Rows begin … end−1 of the text; `columns` is what arrays over columns must hold."""

    begin: int
    end: int
    columns: int

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.end)


def nothing(stretch: Stretch) -> dict[str, Any]:
    return {}


@dataclasses.dataclass(frozen=True)
class Setting:
    """`make` goes to the layer, `call` to each call; the rest to the oracle."""

    make: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    call: Callable[[Stretch], dict[str, Any]] = nothing
    layer: Layer = Layer()  # noqa: RUF009
    keep: Array | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def linen(self, **more: Any) -> Any:
        return flashjax.linen.MultiHeadAttention(HEADS, **{**self.make, **more})

    def nnx(self, **more: Any) -> Any:
        """With every parameter non-zero, so that none can be lost."""
        options = {**self.make, **more}

        def make() -> flashjax.nnx.MultiHeadAttention:
            return flashjax.nnx.MultiHeadAttention(HEADS, WIDTH, rngs=nnx.Rngs(0), **options)

        # Only its shapes: compiling initialisers takes longer than what is tested.
        graph, state, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
        if options.get("dropout_rate"):
            rest = nnx.state(make(), nnx.RngState)
        return nnx.merge(graph, jax.tree.map_with_path(_drawn, state), rest)

    def oracle(self, length: int = LENGTH) -> dict[str, Any]:
        options = dict(self.options)
        if self.keep is not None:
            keep = self.keep[..., :length, :length]
            shape = (BATCH, HEADS, length, length)
            options["keep"] = np.broadcast_to(keep, shape)
        return options


def _drawn(path: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
    r = np.random.default_rng(len(jax.tree_util.keystr(path)))
    name = jax.tree_util.keystr(path)
    drawn = r.normal(size=shape.shape)
    if "kernel" in name:
        drawn /= WIDTH**0.5
    if "scale" in name:
        drawn = 1 + 0.3 * drawn
    return jnp.asarray(drawn, shape.dtype)


def params_of(layer: nnx.Module) -> dict[str, Any]:
    """As linen's tree of arrays."""
    pure = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    return jax.tree.map(np.asarray, pure)


def text(dtype: Any = np.float32, seed: int = 0) -> Array:
    r = np.random.default_rng(seed)
    return r.normal(size=(BATCH, LENGTH, WIDTH)).astype(dtype)


def stretches(prompt: int, length: int, columns: int) -> Iterator[Stretch]:
    """A prompt, then one token at a time."""
    yield Stretch(0, prompt, columns)
    for begin in range(prompt, length):
        yield Stretch(begin, begin + 1, columns)


ROW, COLUMN = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None, :]
CAUSAL = COLUMN <= ROW
EVERYTHING = np.ones((LENGTH, LENGTH), bool)


def window(left: int) -> Array:
    return CAUSAL & (ROW - left <= COLUMN)


def plain(dims: int, base: float = 10_000.0) -> Array:
    return base ** (-2.0 * np.arange(dims // 2) / dims)


H = WIDTH // HEADS

R = np.random.default_rng(7)
IDS = np.sort(R.integers(0, 3, (BATCH, LENGTH)), axis=1)
IDS[:, -4:] = -1
SAME = ((IDS[:, :, None] == IDS[:, None, :]) & (IDS[:, :, None] >= 0))[:, None]
KEPT = R.random((BATCH, 1, LENGTH, LENGTH)) < 0.8
BIAS = R.normal(size=(1, HEADS, LENGTH, LENGTH)).astype(np.float32)
LEFT_PADDING = np.array([0, 5])


def with_segments(s: Stretch) -> dict[str, Any]:
    whole = s.end - s.begin == LENGTH
    return {"segment_ids": IDS if whole else (IDS[:, s.rows], _columns(IDS, s))}


def _columns(array: Array, s: Stretch) -> Array:
    """Cut or filled up (with what causality hides) to the columns of a call."""
    extra = max(s.columns - array.shape[-1], 0)
    padded = np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, extra)])
    return padded[..., : s.columns]


def with_bias(s: Stretch) -> dict[str, Any]:
    return {"bias": _columns(BIAS[..., s.rows, :], s)}


def with_mask(s: Stretch) -> dict[str, Any]:
    return {"mask": _columns(KEPT[..., s.rows, :], s)}


def with_left_padding(s: Stretch) -> dict[str, Any]:
    real = np.arange(LENGTH) >= LEFT_PADDING[:, None]
    return {"mask": _columns(real[:, None, None, :], s)}


def with_term(term: masks.Mask) -> Callable[[Stretch], dict[str, Any]]:
    return lambda s: {"mask": term}


def far(row: Any, column: Any, reach: Any) -> Any:
    return (row - column) % reach == 0


def nearer(score: Any, row: Any, column: Any, batch: Any, head: Any, strength: Any) -> Any:
    return score - strength * (row - column) * (head + 1)


STRENGTH = np.float32(0.03)
ALIBI = scores.alibi_slopes(HEADS).astype(np.float64)[:, None, None]


def _shifted(by: Callable[..., Array]) -> Score:
    """A score modifier that adds a function of the position."""
    return Score(
        lambda score, row, column, batch, head: score + by(row, column, head),
        lambda score, *_: {"score": np.ones_like(score)},
    )


OPTIONS: dict[str, Setting] = {
    "nothing": Setting(keep=EVERYTHING),
    "causal": Setting({"is_causal": True}, keep=CAUSAL),
    "window": Setting({"is_causal": True, "local_window_size": (6, 0)}, keep=window(6)),
    "window of two sides": Setting(
        {"local_window_size": 3}, keep=(COLUMN >= ROW - 3) & (COLUMN <= ROW + 3)
    ),
    "soft cap": Setting({"logits_soft_cap": 2.0}, options={"soft_cap": 2.0}),
    "scale": Setting({"scale": 0.7}, options={"scale": 0.7}),
    "grouped heads": Setting({"num_kv_heads": 2}),
    "one key head": Setting({"num_kv_heads": 1}),
    "sizes": Setting({"qkv_features": 32, "out_features": 7}),
    "no bias": Setting({"use_bias": False}),
    "layer norm": Setting({"normalize_qk": True}, layer=Layer("layer")),
    "layer norm by name": Setting({"normalize_qk": "layer"}, layer=Layer("layer")),
    "rms norm": Setting({"normalize_qk": "rms"}, layer=Layer("rms")),
    "rotary": Setting({"rotary": Rotary()}, layer=Layer(frequencies=plain(H))),
    "rotary of some dims": Setting(
        {"rotary": Rotary(base=500.0, dims=4)}, layer=Layer(frequencies=plain(4, 500.0))
    ),
    "rotary, scaled": Setting(
        {"rotary": Rotary(scaling=rotary.Linear(4.0), magnitude=1.2)},
        layer=Layer(frequencies=plain(H) / 4, magnitude=1.2),
    ),
    "sinks": Setting({"use_sinks": True}),
    "segments": Setting({"is_causal": True}, with_segments, keep=CAUSAL & SAME),
    "lengths": Setting(
        {"is_causal": True},
        lambda s: {
            "query_seq_lengths": np.array([20, 29]),
            "key_value_seq_lengths": np.array([11, 0]),
        },
        keep=CAUSAL
        & (np.array([20, 29])[:, None, None, None] > ROW)
        & (np.array([11, 0])[:, None, None, None] > COLUMN),
    ),
    "array mask": Setting({"is_causal": True}, with_mask, keep=CAUSAL & KEPT),
    "left padding": Setting(
        {"is_causal": True},
        with_left_padding,
        keep=CAUSAL & (LEFT_PADDING[:, None, None, None] <= COLUMN),
    ),
    "prefix": Setting(
        {"is_causal": False},
        with_term(masks.Prefix(12) | masks.Causal()),
        keep=CAUSAL | (COLUMN < 12),
    ),
    "chunks": Setting(
        {"is_causal": True}, with_term(masks.Chunked(8)), keep=CAUSAL & (ROW // 8 == COLUMN // 8)
    ),
    "predicate": Setting(
        {"is_causal": True},
        with_term(masks.Predicate(far, scalars={"reach": 3})),
        keep=CAUSAL & ((ROW - COLUMN) % 3 == 0),
    ),
    "bias": Setting({"is_causal": True}, with_bias, keep=CAUSAL, options={"bias": BIAS}),
    "alibi": Setting(
        {"is_causal": True},
        lambda s: {"score_mod": scores.Alibi()},
        keep=CAUSAL,
        options={"score": _shifted(lambda r, c, h: -ALIBI[h, 0, 0] * np.abs(r - c))},
    ),
    "own score": Setting(
        {"is_causal": True},
        lambda s: {"score_mod": scores.ScoreMod(nearer, scalars={"strength": STRENGTH})},
        keep=CAUSAL,
        options={"score": _shifted(lambda r, c, h: -float(STRENGTH) * (r - c) * (h + 1))},
    ),
}

YARN = rotary.Yarn(factor=4.0, original_length=16, truncate=False)
LLAMA3 = rotary.Llama3(factor=8.0, original_length=64)
_NO_BIAS = {"is_causal": True, "use_bias": False}

# What models are made of.
MODELS: dict[str, Setting] = {
    "GPT-2": Setting({"is_causal": True}, keep=CAUSAL),
    "Llama": Setting(
        {**_NO_BIAS, "num_kv_heads": 2, "rotary": Rotary(500_000.0, scaling=LLAMA3)},
        layer=Layer(frequencies=LLAMA3(plain(H, 500_000.0))),
        keep=CAUSAL,
    ),
    "Qwen3": Setting(
        {**_NO_BIAS, "num_kv_heads": 2, "normalize_qk": "rms", "rotary": Rotary(1e6)},
        layer=Layer("rms", frequencies=plain(H, 1e6)),
        keep=CAUSAL,
    ),
    "Gemma-2, global": Setting(
        {
            **_NO_BIAS, "num_kv_heads": 2, "qkv_features": 32, "rotary": Rotary(),
            "logits_soft_cap": 5.0, "scale": 0.3,
        },
        layer=Layer(frequencies=plain(8)),
        keep=CAUSAL,
        options={"soft_cap": 5.0, "scale": 0.3},
    ),
    "Gemma-2, window": Setting(
        {
            **_NO_BIAS, "num_kv_heads": 2, "qkv_features": 32, "rotary": Rotary(),
            "logits_soft_cap": 5.0, "scale": 0.3, "local_window_size": (7, 0),
        },
        with_left_padding,
        layer=Layer(frequencies=plain(8)),
        keep=window(7) & (LEFT_PADDING[:, None, None, None] <= COLUMN),
        options={"soft_cap": 5.0, "scale": 0.3},
    ),
    "gpt-oss, global": Setting(
        {
            "is_causal": True, "num_kv_heads": 1, "use_sinks": True,
            "rotary": Rotary(150_000.0, scaling=YARN, magnitude=1.14),
        },
        layer=Layer(frequencies=YARN(plain(H, 150_000.0)), magnitude=1.14),
        keep=CAUSAL,
    ),
    "gpt-oss, window": Setting(
        {
            "is_causal": True, "num_kv_heads": 1, "use_sinks": True, "local_window_size": (4, 0),
            "rotary": Rotary(150_000.0, scaling=YARN, magnitude=1.14),
        },
        layer=Layer(frequencies=YARN(plain(H, 150_000.0)), magnitude=1.14),
        keep=window(4),
    ),
    "T5": Setting(
        {**_NO_BIAS, "scale": 1.0}, with_bias, keep=CAUSAL, options={"bias": BIAS, "scale": 1.0}
    ),
    "window and bias": Setting(
        {"is_causal": True, "local_window_size": (5, 0)},
        with_bias,
        keep=window(5),
        options={"bias": BIAS},
    ),
    "window and alibi": Setting(
        {"is_causal": True, "local_window_size": (5, 0)},
        lambda s: {"score_mod": scores.Alibi()},
        keep=window(5),
        options={"score": _shifted(lambda r, c, h: -ALIBI[h, 0, 0] * np.abs(r - c))},
    ),
    "window and chunks": Setting(
        {"is_causal": True, "local_window_size": (5, 0)},
        with_term(masks.Chunked(8)),
        keep=window(5) & (ROW // 8 == COLUMN // 8),
    ),
}  # fmt: skip


def whole(setting: Setting) -> dict[str, Any]:
    """The call on all of the text at once."""
    return setting.call(Stretch(0, LENGTH, LENGTH))


def reference(setting: Setting, params: Any, x: Array) -> Array:
    return layer_oracle.truth(setting.layer, params, x, **setting.oracle())
