"""Flax nnx: ``nnx.MultiHeadAttention(..., attention_fn=flashjax.nnx.attention_fn)``."""

from __future__ import annotations

from typing import Any

import jax
from flax.nnx.nn.dtypes import promote_dtype

from flashjax.adapter import attend_for_flax


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: Any = None,
    mask: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    is_causal: bool = False,
    input_positions: Any = None,
    **options: Any,
) -> jax.Array:
    """``flashjax.dot_product_attention`` in the form that nnx's layers call.

    More arguments of ``dot_product_attention`` go in with ``functools.partial``:
    ``partial(attention_fn, logits_soft_cap=50.0)``.

    The layer passes `mask`, `is_causal` and dropout itself: in a partial its values replace them;
    give them to the layer's call.

    Args:
      query, key, value: (…, length, heads, dim), promoted to `dtype` together; key and value may
        have fewer heads.
      bias: float, broadcasts to (…, N, T, S).
      mask: bool or 0/1 array that broadcasts to (…, N, T, S), or a flashjax.masks term.
      broadcast_dropout: one dropout pattern for all batch members and heads (Flax's default).
      dropout_rng: key for dropout.
      deterministic: dropout off.
      module: must be None: weights cannot be sown.
      is_causal: as in ``dot_product_attention``.
      input_positions: must be None: rotary embedding is not attention's part.

    Returns:
      (…, T, N, Hv).

    Raises:
      NotImplementedError: `module` or `input_positions` is given.
      ValueError, TypeError: as ``dot_product_attention``.
    """
    if input_positions is not None:
        raise NotImplementedError(
            "input_positions is given: flashjax's attention_fn applies no rotary embedding. Rotate "
            "query and key before, as flax.nnx.dot_product_attention_with_rope does, and call "
            "this function without input_positions."
        )
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    return attend_for_flax(
        query,
        key,
        value,
        mask=mask,
        broadcast_dropout=broadcast_dropout,
        dropout_rng=dropout_rng,
        dropout_rate=dropout_rate,
        deterministic=deterministic,
        module=module,
        is_causal=is_causal,
        options={"bias": bias, "precision": precision, **options},
    )
