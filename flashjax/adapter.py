"""What the ``attention_fn`` adapters for Flax's linen and nnx layers share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from flashjax.attention import call
from flashjax.bind import Arguments
from flashjax.masks import Mask


def attend_for_flax(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: Any,
    broadcast_dropout: bool,
    dropout_rng: Any,
    dropout_rate: float,
    deterministic: bool,
    module: Any,
    is_causal: bool,
    options: dict[str, Any],
) -> jax.Array:
    """Flax's conventions, translated: 0/1 masks, ``deterministic``, shared dropout patterns.

    Raises:
      NotImplementedError: `module` is given, which asks for the weights.
      ValueError, TypeError: as ``flashjax.dot_product_attention``.
    """
    if module is not None:
        raise NotImplementedError(
            "module is given (sow_weights=True): it asks for the attention weights, which tiled "
            "attention never forms. Call the layer without sow_weights, or with Flax's own "
            "attention_fn where you want to look at weights."
        )
    known = {f.name for f in dataclasses.fields(Arguments)} - {"share_dropout", "dropout_key"}
    unknown = set(options) - known - {"implementation"}
    if unknown:
        raise TypeError(
            f"attention_fn got {', '.join(sorted(unknown))}; wanted arguments of "
            "flashjax.dot_product_attention."
        )
    drop = dropout_rate > 0 and not deterministic
    if drop and dropout_rng is None:
        raise ValueError(
            f"dropout_rng is None with dropout_rate = {dropout_rate}; wanted a key. Pass "
            "rngs={'dropout': key}, or deterministic=True."
        )
    # Flax's decoding asks one row of a longer cache, under a mask of what is written: that is
    # the causal mask of a row at the end, which top-left alignment would not be.
    one_row_of_many = query.shape[-3] == 1 and key.shape[-3] > 1
    implementation = options.pop("implementation", None)
    arguments = Arguments(
        mask=as_bool(mask),
        is_causal=bool(is_causal) and not one_row_of_many,
        dropout_rate=dropout_rate if drop else 0.0,
        dropout_key=dropout_rng if drop else None,
        share_dropout=broadcast_dropout,
        **options,
    )
    found: jax.Array = call(query, key, value, arguments, implementation)
    return found


def as_bool(mask: Any) -> Any:
    """Flax's mask helpers make float32 arrays of 0 and 1; what is no array is left to bind.

    Raises:
      TypeError: the values are known and some are neither 0 nor 1.
    """
    if mask is None or isinstance(mask, (Mask, type)) or callable(mask):
        return mask
    array = jnp.asarray(mask)
    if array.dtype != jnp.bool_ and not isinstance(array, jax.core.Tracer):
        with jax.ensure_compile_time_eval():
            other = bool(((array != 0) & (array != 1)).any())
        if other:
            raise TypeError(
                f"mask has dtype {array.dtype} and values beside 0 and 1; wanted True or 1 where a "
                "column is allowed. An additive mask (0, −inf) goes in as bias."
            )
    return array.astype(bool)
