"""From the user's arguments to ``Spec`` and ``Operands``: all validation happens here, once."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flashjax import dropout
from flashjax.masks import Causal, Dense, Lengths, Mask, Segments, Window
from flashjax.scores import Score, SoftCap
from flashjax.spec import Operands, Spec, shapes_of
from flashjax.structure import (
    POSITION_LIMIT,
    Dims,
    Place,
    align,
    columns_in,
    describe,
    flatten_batch,
)

FLOATS = ("float16", "bfloat16", "float32", "float64")
MAX_HEAD_DIM = 256
MAX_LENGTH = 2 * POSITION_LIMIT - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arguments:
    """The user's arguments beyond query, key and value, as they came."""

    bias: Any = None
    mask: Any = None
    scale: Any = None
    is_causal: bool = False
    query_seq_lengths: Any = None
    key_value_seq_lengths: Any = None
    local_window_size: Any = None
    segment_ids: Any = None
    logits_soft_cap: Any = None
    score_mod: Any = None
    sinks: Any = None
    dropout_rate: float = 0.0
    dropout_key: Any = None
    deterministic_backward: bool = False
    precision: Any = None
    # Flax's broadcast_dropout: one dropout pattern for all batch members and heads.
    share_dropout: bool = False
    # Decoding: what is said of positions in the text is placed on the rows and columns of the call,
    # of which `filled` hides those that hold no token.
    place: Place | None = None
    filled: Mask | None = None


class Bound(NamedTuple):
    """A call in canonical form."""

    spec: Spec
    operands: Operands
    batch: tuple[int, ...]  # the user's batch dims, which the canonical form flattens


def bind(query: Any, key: Any, value: Any, arguments: Arguments) -> Bound:
    """Checks everything, fills in defaults, brings every array to canonical form."""
    query, key, value, dims = _check_qkv(query, key, value)
    dtype = query.dtype
    batch = math.prod(dims.batch)
    scale = _scale(arguments.scale, query.shape[-1], dims, dtype)
    static_scale = scale if isinstance(scale, float) else None
    mask = mask_of(arguments, dims)
    score = _score(arguments, dims)
    rate = _dropout_rate(arguments)
    ids = (mask is not None and mask.uses_ids) or (score is not None and score.uses_ids)
    operands = Operands(
        query=query.reshape(batch, *query.shape[-3:]),
        key=key.reshape(batch, *key.shape[-3:]),
        value=value.reshape(batch, *value.shape[-3:]),
        scale=None if static_scale is not None else scale,
        bias=_bias(arguments, dims),
        mask=mask,
        score=score,
        sinks=_sinks(arguments.sinks, dims),
        seed=_seed(arguments, batch, dims.heads) if rate else None,
        batch_id=jnp.arange(batch, dtype=jnp.int32).reshape(-1, 1, 1, 1) if ids else None,
        head_id=jnp.arange(dims.heads, dtype=jnp.int32).reshape(1, -1, 1, 1) if ids else None,
    )
    spec = Spec(
        shapes=shapes_of(operands),
        scale=static_scale,
        dropout_rate=rate,
        precision=_precision(arguments.precision, dtype),
        deterministic_backward=_flag(arguments, "deterministic_backward"),
    )
    return Bound(spec, operands, dims.batch)


def _array(x: Any, name: str, wanted: str) -> jax.Array:
    if x is None:
        raise TypeError(f"{name} is None; wanted {wanted}.")
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is a {type(x).__name__}; wanted {wanted}.") from error


def _check_qkv(query: Any, key: Any, value: Any) -> tuple[jax.Array, jax.Array, jax.Array, Dims]:
    layouts = {"query": "(…, T, N, H)", "key": "(…, S, K, H)", "value": "(…, S, K, Hv)"}
    q, k, v = (
        _array(x, name, f"an array of shape {layout}")
        for x, (name, layout) in zip((query, key, value), layouts.items(), strict=True)
    )
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.ndim < 3:
            raise ValueError(f"{name} has shape {x.shape}; wanted {layouts[name]}, rank 3 or more.")
        if x.dtype.name not in FLOATS:
            raise TypeError(f"{name} has dtype {x.dtype}; wanted one of {', '.join(FLOATS)}.")
        if x.dtype != q.dtype:
            raise TypeError(
                f"{name} has dtype {x.dtype} and query {q.dtype}; wanted one dtype for query, key "
                "and value. Cast them to the one you mean to compute in."
            )
        if x.shape[:-3] != q.shape[:-3]:
            raise ValueError(
                f"{name} has batch dims {x.shape[:-3]} and query {q.shape[:-3]}; wanted the same. "
                "Broadcast them first."
            )
        if not 1 <= x.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name} has head dim {x.shape[-1]}; wanted 1 to {MAX_HEAD_DIM} "
                f"(layout {layouts[name]})."
            )
        if x.shape[-3] > MAX_LENGTH:
            raise ValueError(
                f"{name} has length {x.shape[-3]}; wanted at most {MAX_LENGTH}, since positions "
                "are int32. Split the sequence, and join the parts with flashjax.merge."
            )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"key has head dim {k.shape[-1]} and query {q.shape[-1]}; wanted the same H."
        )
    if v.shape[-3:-1] != k.shape[-3:-1]:
        raise ValueError(
            f"value has shape {v.shape} and key {k.shape}; wanted the same S and K: "
            f"{layouts['value']}."
        )
    heads, key_heads = q.shape[-2], k.shape[-2]
    if key_heads == 0 or heads == 0 or heads % key_heads:
        raise ValueError(
            f"query has {heads} heads and key {key_heads}; wanted N a multiple of K, both at "
            "least 1 (layout (…, length, heads, dim))."
        )
    return q, k, v, Dims(q.shape[:-3], heads, q.shape[-3], k.shape[-3])


def _scale(scale: Any, head_dim: int, dims: Dims, dtype: Any) -> float | jax.Array:
    if scale is None:
        return float(1 / np.sqrt(head_dim))
    if isinstance(scale, (int, float, np.generic)) and not isinstance(scale, bool):
        return float(scale)
    array = _array(scale, "scale", "a number or a float scalar")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"scale has dtype {array.dtype}; wanted a float.")
    return align(array, "scalar", dims, "scale")


def _bias(arguments: Arguments, dims: Dims) -> jax.Array | None:
    if arguments.bias is None:
        return None
    array = _array(arguments.bias, "bias", "a float array that broadcasts to (…, N, T, S)")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"bias has dtype {array.dtype}; wanted a float dtype. A boolean array is a mask: pass "
            "it as mask."
        )
    return align(_placed(array, arguments.place), "tile", dims, "bias")


def _placed(array: jax.Array, place: Place | None) -> jax.Array:
    """The call's columns of a bias or dense mask."""
    cut = place is not None and columns_in(array) is not None
    return place.columns_of(array) if cut else array  # type: ignore[union-attr]


def mask_of(arguments: Arguments, dims: Dims) -> Mask | None:
    """The And of everything that hides columns."""
    place = arguments.place
    terms: list[Mask] = []
    if arguments.mask is not None:
        mask = _mask_term(arguments.mask)
        if isinstance(mask, Dense):
            align(_placed(mask.values, place), "tile", dims, "mask")
        terms.append(mask)
    lengths = {
        name: _lengths(getattr(arguments, name), name, dims)
        for name in ("query_seq_lengths", "key_value_seq_lengths")
    }
    if any(x is not None for x in lengths.values()):
        terms.append(Lengths(lengths["query_seq_lengths"], lengths["key_value_seq_lengths"]))
    if arguments.local_window_size is not None:
        terms.append(Window(*window_sides(arguments.local_window_size)))
    if _flag(arguments, "is_causal"):
        terms.append(Causal())
    if arguments.segment_ids is not None:
        terms.append(_segments(arguments.segment_ids, dims, place))
    if place is not None:
        terms = [term.placed(place) for term in terms]
    if arguments.filled is not None:
        terms.append(arguments.filled)
    aligned = [term.aligned(dims) for term in terms]
    return functools.reduce(lambda a, b: a & b, aligned) if aligned else None


def _mask_term(mask: Any) -> Mask:
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, type) and issubclass(mask, Mask):
        name = mask.__name__
        raise TypeError(f"mask is the class {name}; wanted a term: call it, {name}(…).")
    if callable(mask):
        raise TypeError(
            "mask is a function; wanted a bool array or a flashjax.masks term. Wrap the "
            "function as flashjax.masks.Predicate(fn)."
        )
    return Dense(_array(mask, "mask", "a bool array or a flashjax.masks term"))


def _flag(arguments: Arguments, name: str) -> bool:
    value = getattr(arguments, name)
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is {describe(value)}; wanted True or False, which is compiled in.")
    return bool(value)


def _lengths(lengths: Any, name: str, dims: Dims) -> jax.Array | None:
    if lengths is None:
        return None
    array = _array(lengths, name, f"an integer array of shape {dims.batch}")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {array.dtype}; wanted an integer dtype.")
    if dims.batch == () and array.shape == (1,):
        array = array[0]  # jax.nn's form for a call without batch
    if array.shape not in (dims.batch, ()):
        raise ValueError(
            f"{name} has shape {array.shape}; wanted {dims.batch}, one per batch member."
        )
    return array


def window_sides(size: Any) -> tuple[int | None, int | None]:
    """`local_window_size` as (left, right).

    Raises:
      ValueError, TypeError: it is neither an int >= 0 nor a pair of them or None.
    """
    sides = (size, size) if not isinstance(size, (tuple, list)) else tuple(size)
    valid = len(sides) == 2 and all(
        side is None or (isinstance(side, (int, np.integer)) and not isinstance(side, bool))
        for side in sides
    )
    if not valid:
        raise TypeError(
            f"local_window_size is {describe(size)}; wanted an int or a pair (left, right) of "
            "Python ints. For a traced width use flashjax.masks.Predicate with scalars=."
        )
    if any(side is not None and side < 0 for side in sides):
        raise ValueError(
            f"local_window_size is {size!r}; wanted sides of 0 or more. None leaves a side open."
        )
    left, right = (None if side is None else int(side) for side in sides)
    return left, right


def _segments(ids: Any, dims: Dims, place: Place | None) -> Mask:
    wanted = f"integer ids of shape {(*dims.batch, dims.rows)}, or a pair (query ids, key ids)"
    if isinstance(ids, list):
        raise TypeError(
            f"segment_ids is a list; wanted {wanted}. Of two lists it cannot be told which is "
            "meant: pass an array, or a tuple of two."
        )
    pair = ids if isinstance(ids, tuple) else (ids,)
    if len(pair) not in (1, 2) or any(x is None for x in pair):
        came = ", ".join(describe(x) for x in pair)
        raise TypeError(f"segment_ids is ({came}); wanted {wanted}.")
    if len(pair) == 1 and (dims.rows != dims.columns or place is not None):
        why = f"T = {dims.rows} and S = {dims.columns}" if place is None else "a KV cache"
        raise ValueError(
            f"segment_ids is one array with {why}; wanted a pair (query ids, key ids)."
        )
    # The keys' ids are those of the whole text while decoding; a window's cache holds a part.
    columns = dims.columns if place is None or place.is_whole else None
    sides: list[jax.Array] = []
    for x, length in zip(pair, (dims.rows, columns), strict=False):
        array = _array(x, "segment_ids", wanted)
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"segment_ids has dtype {array.dtype}; wanted an integer dtype.")
        length = array.shape[-1] if length is None and array.ndim else length
        if array.shape not in ((*dims.batch, length), (length,)):
            raise ValueError(
                f"segment_ids has shape {array.shape}; wanted {(*dims.batch, length)} "
                f"({'query' if not sides else 'key/value'} side)."
            )
        sides.append(array)
    return Segments(*sides)


def _score(arguments: Arguments, dims: Dims) -> Score | None:
    score, cap = arguments.score_mod, arguments.logits_soft_cap
    if score is not None and not isinstance(score, Score):
        raise TypeError(
            f"score_mod is a {type(score).__name__}; wanted a flashjax.scores modifier. Wrap a "
            "function as flashjax.scores.ScoreMod(fn)."
        )
    if cap is not None:
        if isinstance(cap, (bool, str)) or (
            isinstance(cap, (int, float, np.generic)) and not 0 < float(cap) < math.inf
        ):
            raise ValueError(
                f"logits_soft_cap is {cap!r}; wanted a finite number > 0, or None for no cap."
            )
        capped = SoftCap(cap)
        score = capped if score is None else score.then(capped)
    if score is None:
        return None
    return (score if arguments.place is None else score.placed(arguments.place)).aligned(dims)


def _sinks(sinks: Any, dims: Dims) -> jax.Array | None:
    if sinks is None:
        return None
    array = _array(sinks, "sinks", f"a float array of shape ({dims.heads},)")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"sinks has dtype {array.dtype}; wanted a float dtype.")
    if array.shape != (dims.heads,):
        raise ValueError(
            f"sinks has shape {array.shape}; wanted ({dims.heads},), one logit per query head."
        )
    return flatten_batch(array, (), (dims.heads, 1, 1), dims.batch)


def _dropout_rate(arguments: Arguments) -> float:
    rate = arguments.dropout_rate
    if isinstance(rate, (bool, jax.core.Tracer)) or not isinstance(
        rate, (int, float, np.generic, np.ndarray, jax.Array)
    ):
        raise TypeError(
            f"dropout_rate is {describe(rate)}; wanted a Python number, which is compiled in."
        )
    rate = float(rate)
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate is {rate}; wanted 0 <= rate < 1.")
    if rate and arguments.dropout_key is None:
        raise ValueError(
            f"dropout_key is None with dropout_rate = {rate}; wanted a key: jax.random.key(seed). "
            "For evaluation pass dropout_rate=0.0."
        )
    return rate


def _seed(arguments: Arguments, batch: int, heads: int) -> tuple[jax.Array, jax.Array]:
    key = arguments.dropout_key
    typed = hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    raw = not typed and getattr(key, "dtype", None) == jnp.uint32 and getattr(key, "ndim", 0) == 1
    if (typed and key.shape != ()) or not (typed or raw):
        came = f"{key.dtype}{list(key.shape)}" if hasattr(key, "dtype") else repr(key)
        raise TypeError(
            f"dropout_key is {came}; wanted one key, jax.random.key(seed) or "
            "jax.random.PRNGKey(seed)."
        )
    words = dropout.seeds(key, batch, heads, shared=arguments.share_dropout)
    return words[0], words[1]


def _precision(precision: Any, dtype: Any) -> jax.lax.Precision | None:
    if precision is None:
        # The config option, where set, applies to a dot whose precision is None.
        if jax.config.jax_default_matmul_precision is not None or dtype != jnp.float32:
            return None
        return jax.lax.Precision.HIGHEST
    try:
        return jax.lax.Precision(precision)
    except (TypeError, ValueError):
        raise ValueError(
            f"precision is {precision!r}; wanted None, 'default', 'high', 'highest' or a "
            "jax.lax.Precision."
        ) from None
