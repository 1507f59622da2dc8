"""What the linen and nnx layers share between their projections: rotary, cache, masks, the call."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from flashjax.adapter import as_bool
from flashjax.attention import call
from flashjax.bind import Arguments, window_sides
from flashjax.cache import Columns, KVCache, Window, extend
from flashjax.rotary import Rotary
from flashjax.structure import Structure, columns_in, describe


class Options(Protocol):
    """What a layer is told when it is made."""

    @property
    def is_causal(self) -> bool | None: ...
    @property
    def local_window_size(self) -> int | tuple[int | None, int | None] | None: ...
    @property
    def logits_soft_cap(self) -> float | None: ...
    @property
    def scale(self) -> float | None: ...
    @property
    def rotary(self) -> Rotary | None: ...
    @property
    def dropout_rate(self) -> float: ...
    @property
    def broadcast_dropout(self) -> bool: ...
    @property
    def deterministic_backward(self) -> bool: ...
    @property
    def precision(self) -> Any: ...
    @property
    def implementation(self) -> str | None: ...


class Given(NamedTuple):
    """What a layer is told at a call, beyond its inputs; as the layers' own arguments."""

    mask: Any = None
    bias: Any = None
    score_mod: Any = None
    segment_ids: Any = None
    query_seq_lengths: Any = None
    key_value_seq_lengths: Any = None
    positions: Any = None
    is_causal: bool | None = None


class Heads(NamedTuple):
    """How many features a layer's projections make."""

    query: int
    key_value: int
    dim: int


def heads_of(num_heads: int, num_kv_heads: int | None, qkv_features: int) -> Heads:
    """Checks what shapes the projections.

    Raises:
      ValueError: a number is no count, or they do not divide.
    """
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    for name, number in (
        ("num_heads", num_heads), ("num_kv_heads", kv_heads), ("qkv_features", qkv_features)
    ):  # fmt: skip
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < 1:
            raise ValueError(f"{name} is {number!r}; wanted an int >= 1.")
    if qkv_features % num_heads:
        raise ValueError(
            f"qkv_features is {qkv_features} and num_heads {num_heads}; wanted a multiple of the "
            "number of heads."
        )
    if num_heads % kv_heads:
        raise ValueError(
            f"num_kv_heads is {kv_heads} and num_heads {num_heads}; wanted a divisor of the number "
            "of query heads."
        )
    return Heads(num_heads, kv_heads, qkv_features // num_heads)


def norm_kind(normalize_qk: bool | str) -> str | None:
    """None, "layer" (Flax's meaning of True) or "rms".

    Raises:
      ValueError: it is none of these.
    """
    kinds = {False: None, True: "layer", "layer": "layer", "rms": "rms"}
    if not isinstance(normalize_qk, (bool, str)) or normalize_qk not in kinds:
        raise ValueError(
            f"normalize_qk is {normalize_qk!r}; wanted False, True or 'layer' (LayerNorm, as in "
            "Flax), or 'rms'."
        )
    return kinds[normalize_qk]


def drops(dropout_rate: float) -> bool:
    """Whether the layer drops weights where it is not deterministic.

    Raises:
      ValueError: the rate is none.
    """
    if not 0 <= dropout_rate < 1:
        raise ValueError(f"dropout_rate is {dropout_rate!r}; wanted 0 <= rate < 1.")
    return dropout_rate > 0


def window_of(size: Any) -> Window:
    """The layer's window as (left, right)."""
    return None if size is None else window_sides(size)


def key_inputs(
    inputs_q: jax.Array, inputs_k: jax.Array | None, inputs_v: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Flax's rule: keys come from the queries' inputs, values from the keys'.

    Raises:
      ValueError, TypeError: `inputs_v` is given without `inputs_k`; one is no array.
    """
    if inputs_k is None:
        if inputs_v is not None:
            raise ValueError(
                "inputs_v is given and inputs_k is None; wanted inputs_k too. For the same keys "
                "and values pass inputs_k alone."
            )
        inputs_k = inputs_q
    inputs_v = inputs_k if inputs_v is None else inputs_v
    for name, x in (("inputs_q", inputs_q), ("inputs_k", inputs_k), ("inputs_v", inputs_v)):
        if getattr(x, "ndim", 0) < 2:
            raise TypeError(f"{name} is {describe(x)}; wanted an array (…, length, features).")
    return inputs_k, inputs_v


def attend(
    options: Options,
    given: Given,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    sinks: jax.Array | None,
    dropout_key: Any,
    cache: KVCache | None,
) -> tuple[jax.Array, KVCache | None]:
    """From projected heads to (…, T, N, Hv), and the cache with this call's tokens.

    Raises:
      ValueError, TypeError: as ``flashjax.dot_product_attention`` and :func:`flashjax.cache.extend`
        do; or positions are given to a layer without rotary embedding.
    """
    query, key = _turned(options, given, query, key, cache)
    is_causal = given.is_causal if given.is_causal is not None else options.is_causal
    arguments = Arguments(
        bias=given.bias,
        mask=as_bool(given.mask),
        score_mod=given.score_mod,
        scale=options.scale,
        is_causal=(cache is not None) if is_causal is None else is_causal,
        query_seq_lengths=given.query_seq_lengths,
        key_value_seq_lengths=given.key_value_seq_lengths,
        local_window_size=window_of(options.local_window_size),
        segment_ids=given.segment_ids,
        logits_soft_cap=options.logits_soft_cap,
        sinks=sinks,
        dropout_rate=options.dropout_rate if dropout_key is not None else 0.0,
        dropout_key=dropout_key,
        share_dropout=options.broadcast_dropout,
        deterministic_backward=options.deterministic_backward,
        precision=options.precision,
    )
    if cache is None:
        return call(query, key, value, arguments, options.implementation), None
    if query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"decoding with {query.shape[-3]} query and {key.shape[-3]} key tokens; wanted the "
            "same tokens. For cross-attention call the layer with decode=False."
        )
    columns = extend(cache, key, value, arguments.local_window_size)
    fits = columns.fits & _covered(arguments, columns)
    arguments = dataclasses.replace(arguments, place=columns.place, filled=columns.filled)
    out = call(query, columns.key, columns.value, arguments, options.implementation)
    # A traced count cannot raise; silence would give the text a hole.
    return jnp.where(fits, out, jnp.nan), columns.cache


def _turned(
    options: Options, given: Given, query: jax.Array, key: jax.Array, cache: KVCache | None
) -> tuple[jax.Array, jax.Array]:
    if options.rotary is None:
        if given.positions is not None:
            raise ValueError(
                "positions is given, and the layer has no rotary embedding; wanted None. Make the "
                "layer with rotary=flashjax.Rotary()."
            )
        return query, key
    if not isinstance(options.rotary, Rotary):
        raise TypeError(f"rotary is {describe(options.rotary)}; wanted flashjax.Rotary(…) or None.")
    begin = 0 if cache is None else cache.written
    pair: Any = given.positions
    if pair is None:
        pair = tuple(begin + jnp.arange(x.shape[-3], dtype=jnp.int32) for x in (query, key))
    elif not isinstance(pair, tuple):
        pair = (pair, pair)
    if len(pair) != 2 or any(x is None for x in pair):
        raise ValueError(
            f"positions has {len(pair)} parts, {sum(x is None for x in pair)} of them None; wanted "
            "an array, or a pair (query positions, key positions)."
        )
    return options.rotary(query, pair[0]), options.rotary(key, pair[1])


def _covered(arguments: Arguments, columns: Columns) -> jax.Array | bool:
    """Whether what is given over columns reaches to the last token, which a rolled cache hides.

    Raises:
      ValueError: it does not, and that is known while tracing.
    """
    if columns.place.is_whole:
        return True
    counts: list[int | None] = []
    for given in (arguments.mask, arguments.score_mod):
        if isinstance(given, Structure):
            counts.append(given.column_count())
    for given in (arguments.mask, arguments.bias):
        if given is not None and hasattr(given, "shape"):
            counts.append(columns_in(given))
    if isinstance(arguments.segment_ids, tuple) and hasattr(arguments.segment_ids[-1], "shape"):
        counts.append(columns_in(arguments.segment_ids[-1], "column"))
    count = min((n for n in counts if n is not None), default=None)
    if count is None:
        return True
    end = columns.cache.written
    if not isinstance(end, jax.core.Tracer) and int(end) > count:
        raise ValueError(
            f"mask, bias, score_mod or segment_ids has {count} columns and the text {int(end)} "
            "tokens; wanted a column for each position of the text. A window layer's cache is "
            "shorter; what is said of columns is not."
        )
    return end <= count
