"""The KV cache of one attention layer, and what a call on it attends to.

A cache has a row per position. One no longer than the layer's window rolls: it keeps the last
`left` positions, oldest first, so that a window layer's memory does not grow with the text.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flashjax.masks import Mask, Prefix
from flashjax.structure import Place

Window = tuple[int | None, int | None] | None


class KVCache(NamedTuple):
    """key (…, C, K, H), value (…, C, K, Hv); how many tokens were written, () int32."""

    key: jax.Array
    value: jax.Array
    written: jax.Array


class Columns(NamedTuple):
    """What the rows of a call attend to, and the cache that it leaves behind.

    `filled` hides the columns that hold no token. `fits` is False where the cache was too short:
    the call's result means nothing then.
    """

    key: jax.Array
    value: jax.Array
    place: Place
    filled: Mask
    fits: jax.Array
    cache: KVCache


def cache_length(max_length: int, window: Window) -> int:
    """How many positions the cache of a layer needs for a text of `max_length` tokens."""
    left = None if window is None else window[0]
    return max_length if left is None else min(max_length, left)


def extend(cache: KVCache, key: jax.Array, value: jax.Array, window: Window) -> Columns:
    """Writes the keys (…, T, K, H) and values of the next T tokens.

    Raises:
      ValueError: they do not fit the cache's shapes or dtypes, or the cache is full (where its
        count is known while tracing; else `fits` tells).
    """
    _check(cache.key, key, "key")
    _check(cache.value, value, "value")
    if window is not None and cache.key.shape[-3] == window[0]:
        return _rolled(cache, key, value)
    return _written(cache, key, value)


def _written(cache: KVCache, key: jax.Array, value: jax.Array) -> Columns:
    length, rows = cache.key.shape[-3], key.shape[-3]
    end = cache.written + rows
    known = None if isinstance(end, jax.core.Tracer) else int(end)
    if rows > length or (known is not None and known > length):
        at = "" if known is None else f" after {known - rows} written before"
        raise ValueError(
            f"the cache holds {length} positions, and {rows} tokens came{at}; wanted no more than "
            "fit. Make the cache longer (init_cache in nnx, the length given to init in linen)."
        )

    def write(into: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(into, new, cache.written, axis=into.ndim - 3)

    new = KVCache(write(cache.key, key), write(cache.value, value), end)
    place = Place(cache.written, 0, length)
    return Columns(new.key, new.value, place, Prefix(end), end <= length, new)


def _rolled(cache: KVCache, key: jax.Array, value: jax.Array) -> Columns:
    length, rows = cache.key.shape[-3], key.shape[-3]

    def append(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.concatenate([old, new], axis=-3)

    keys, values = append(cache.key, key), append(cache.value, value)
    last = slice(rows, rows + length)
    new = KVCache(keys[..., last, :, :], values[..., last, :, :], cache.written + rows)
    place = Place(cache.written, cache.written - length, length + rows)
    unwritten = Prefix(jnp.maximum(length - cache.written, 0))
    return Columns(keys, values, place, ~unwritten, jnp.bool_(True), new)


def _check(cached: jax.Array, new: jax.Array, name: str) -> None:
    def without_length(x: Any) -> tuple[int, ...]:
        return (*x.shape[:-3], *x.shape[-2:])

    if without_length(cached) != without_length(new):
        raise ValueError(
            f"cached_{name} has shape {cached.shape} and this call's {name} {new.shape}; wanted "
            "the same batch dims, heads and head dim. Make the cache for this batch."
        )
    if cached.dtype != new.dtype:
        raise ValueError(
            f"cached_{name} has dtype {cached.dtype} and this call's {name} {new.dtype}; wanted "
            "one dtype. Make the cache in the dtype that the layer computes in."
        )
