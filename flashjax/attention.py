"""The public function."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import numpy as np
from jaxtyping import Array, ArrayLike

from flashjax import cudnn, reference
from flashjax.bind import Arguments, Bound, bind
from flashjax.masks import Mask
from flashjax.plan import check_implementation
from flashjax.scores import Score
from flashjax.sharding import over_explicit_mesh
from flashjax.spec import Operands, Spec
from flashjax.vjp import attend


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | Mask | None = ...,
    *,
    scale: ArrayLike | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    local_window_size: int | tuple[int | None, int | None] | None = ...,
    implementation: str | None = ...,
    return_residual: Literal[False] = ...,
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None = ...,
    logits_soft_cap: ArrayLike | None = ...,
    score_mod: Score | None = ...,
    sinks: ArrayLike | None = ...,
    dropout_rate: float = ...,
    dropout_key: Array | None = ...,
    deterministic_backward: bool = ...,
    precision: str | jax.lax.Precision | None = ...,
) -> Array: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | Mask | None = ...,
    *,
    scale: ArrayLike | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    local_window_size: int | tuple[int | None, int | None] | None = ...,
    implementation: str | None = ...,
    return_residual: Literal[True],
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None = ...,
    logits_soft_cap: ArrayLike | None = ...,
    score_mod: Score | None = ...,
    sinks: ArrayLike | None = ...,
    dropout_rate: float = ...,
    dropout_key: Array | None = ...,
    deterministic_backward: bool = ...,
    precision: str | jax.lax.Precision | None = ...,
) -> tuple[Array, Array]: ...


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    logits_soft_cap: ArrayLike | None = None,
    score_mod: Score | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    deterministic_backward: bool = False,
    precision: str | jax.lax.Precision | None = None,
) -> Any:
    r"""Scaled dot-product attention, exact, in O(T + S) memory.

    softmax(soft_cap(score_mod(scale · QKᵀ + bias)), over the columns that every mask allows) V.
    A superset of :func:`jax.nn.dot_product_attention`: the same call works with the import
    changed. B batch (any number of leading dims, or none), T query length, S key/value length, N
    query heads, K key/value heads (N a multiple of K), H and Hv head dims (at most 256).

    >>> import jax.numpy as jnp, flashjax
    >>> q = k = v = jnp.ones((2, 128, 4, 64))
    >>> flashjax.dot_product_attention(q, k, v, is_causal=True).shape
    (2, 128, 4, 64)

    Args:
      query: (B, T, N, H), float16, bfloat16, float32 or float64.
      key: (B, S, K, H), in the query's dtype.
      value: (B, S, K, Hv), in the query's dtype.
      bias: added to the scores; float, of rank at most the logits' (B, N, T, S), right-aligned,
        broadcasts. −inf hides its column. Its gradient has its own shape and dtype.
      mask: bool array like bias, True where a column is allowed; or a :mod:`flashjax.masks` term.
      scale: factor on QKᵀ, 1/√H by default. A Python number is compiled in; an array, (), (B,)
        or (B|1, N|1), is an operand with a gradient.
      is_causal: hides columns after the row; top-left aligned when T ≠ S. See
        :class:`flashjax.masks.Causal` for other conventions.
      query_seq_lengths: (B,), or () for all, of any integer dtype; rows from there on are padding
        and give 0.
      key_value_seq_lengths: (B,); columns from there on are hidden.
      local_window_size: (left, right) keeps columns row−left … row+right; an int w is (w, w);
        None leaves a side open.
      implementation: None takes the best that supports the call; "mosaic", "triton", "xla"
        (chunked, any platform), "reference" (dense, any platform, differentiable any number of
        times) or "cudnn" (jax.nn's).
      return_residual: also return the LSE.
      segment_ids: (B, T), or (T,) for all, integer ids where T = S, else a pair of (B, T) and
        (B, S). Rows see
        columns of their own segment; a negative id is padding and matches nothing.
      logits_soft_cap: c gives c · tanh(score / c).
      score_mod: a :mod:`flashjax.scores` modifier.
      sinks: (N,) logits, natural log, neither scaled nor capped, that take weight in every row and
        have no value (as in gpt-oss).
      dropout_rate: probability of dropping a weight, a Python number, 0 <= rate < 1.
      dropout_key: a key, typed or raw; needed where the rate is above 0. The pattern depends on
        the key and on (batch, head, row, column) only, not on the implementation or sharding.
      deterministic_backward: the same bits in every run of the backward too (outputs always are).
        "xla", "triton" and "reference" always are.
      precision: of the products. None follows ``jax_default_matmul_precision`` where that is
        set, else float32 inputs get full float32 accuracy. bf16 and fp16 accumulate in float32.

    Returns:
      The output, (B, T, N, Hv) in the query's dtype; with `return_residual` a pair of it and the
      LSE, (B, T, N) in float32 (float64 for float64 inputs), natural log, differentiable. A row
      that may see no column gives 0 and LSE −inf (or the sink).

    Raises:
      ValueError, TypeError: an argument does not fit; the message names it.
      NotImplementedError: the named implementation cannot do the call; or a tiled implementation
        is differentiated twice.

    References:
      Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691.
    """
    arguments = Arguments(
        bias=bias,
        mask=mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        segment_ids=segment_ids,
        logits_soft_cap=logits_soft_cap,
        score_mod=score_mod,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        deterministic_backward=deterministic_backward,
        precision=precision,
    )
    return call(query, key, value, arguments, implementation, return_residual)


def call(
    query: Any,
    key: Any,
    value: Any,
    arguments: Arguments,
    implementation: str | None,
    return_residual: bool = False,
) -> Any:
    """`dot_product_attention` with its arguments in one value; the Flax adapters enter here."""
    check_implementation(implementation)
    if not isinstance(return_residual, (bool, np.bool_)):
        raise TypeError(f"return_residual is {return_residual!r}; wanted True or False.")
    arrays, static = _parted((query, key, value, arguments))
    return _attention((static, implementation, bool(return_residual)), arrays)


def _parted(tree: Any) -> tuple[list[Any], Any]:
    """Splits arguments into arrays, which jit traces, and the rest, which it compiles in."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
    # Containers of an array, such as nnx.Param, count as arrays.
    leaves = [_unwrapped(x) for x in leaves]
    for x in leaves:
        if isinstance(x, np.ndarray) and x.dtype == object:
            raise TypeError(
                f"an argument is a numpy array of dtype object, shape {x.shape}; wanted numbers."
            )
    dynamic = [isinstance(x, (jax.Array, np.ndarray)) for x in leaves]
    # The type beside the value: True == 1 == 1.0 would share a cache entry.
    rest = tuple(None if d else (type(x), x) for d, x in zip(dynamic, leaves, strict=True))
    return [x for d, x in zip(dynamic, leaves, strict=True) if d], (treedef, rest)


def _unwrapped(x: Any) -> Any:
    convert = None if isinstance(x, jax.Array) else getattr(x, "__jax_array__", None)
    return x if convert is None else convert()


def _joined(arrays: Sequence[Any], static: Any) -> Any:
    treedef, rest = static
    remaining = iter(arrays)
    return jax.tree.unflatten(treedef, [next(remaining) if r is None else r[1] for r in rest])


@functools.partial(jax.jit, static_argnums=0)
def _attention(static: Any, arrays: list[jax.Array]) -> Any:
    parts, implementation, return_residual = static
    query, key, value, arguments = _joined(arrays, parts)
    bound = bind(query, key, value, arguments)
    if implementation == "cudnn":
        found = cudnn.call(bound, arguments, return_residual)
    else:
        out, lse = _run(bound, implementation)
        found = (out, lse.swapaxes(1, 2)) if return_residual else out
    return jax.tree.map(lambda x: x.reshape(*bound.batch, *x.shape[1:]), found)


def _run(bound: Bound, implementation: str | None) -> tuple[jax.Array, jax.Array]:
    def fn(spec: Spec, operands: Operands) -> tuple[jax.Array, jax.Array]:
        if implementation == "reference":
            return reference.forward(spec, operands)
        return attend(spec, implementation, operands)

    return over_explicit_mesh(fn, bound.spec, bound.operands)
