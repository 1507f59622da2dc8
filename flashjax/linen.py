"""Flax linen: ``MultiHeadDotProductAttention(…, attention_fn=flashjax.linen.attention_fn)``."""

from __future__ import annotations

from typing import Any

import jax
from flax.linen.dtypes import promote_dtype

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
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    is_causal: bool = False,
    **options: Any,
) -> jax.Array:
    """``flashjax.dot_product_attention`` in the form that linen's layers call.

    linen hands over only what the signature names, so every argument of its contract stands
    here. More arguments of ``dot_product_attention`` go in with ``functools.partial``:
    ``partial(attention_fn, is_causal=True, logits_soft_cap=50.0)``.

    The layer passes `mask` and dropout itself: in a partial its values replace them; give them to
    the layer's call.

    Args:
      query, key, value: (…, length, heads, dim), promoted to `dtype` together.
      bias: float, broadcasts to (…, N, T, S).
      mask: bool or 0/1 array that broadcasts to (…, N, T, S), or a flashjax.masks term.
      broadcast_dropout: one dropout pattern for all batch members and heads (Flax's default).
      dropout_rng: key for dropout.
      deterministic: dropout off.
      module: must be None: weights cannot be sown.
      force_fp32_for_softmax: the softmax is always computed in float32 or wider.
      qk_attn_weights_einsum, attn_weights_value_einsum: must be None: products run in a kernel.
      is_causal: as in ``dot_product_attention``; for one query row and a longer cache (decoding)
        the layer's cache mask stands for it.

    Returns:
      (…, T, N, Hv).

    Raises:
      NotImplementedError: `module` or a replacement einsum is given.
      ValueError, TypeError: as ``dot_product_attention``.
    """
    del force_fp32_for_softmax
    for name, given in (
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        if given is not None:
            raise NotImplementedError(
                f"{name} is given: flashjax computes its products inside one kernel and cannot "
                "take another einsum. Leave it out, or use Flax's own attention_fn."
            )
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
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
