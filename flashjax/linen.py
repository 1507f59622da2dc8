"""Flax linen: the layer, and ``attention_fn`` for Flax's own layers."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from flax.linen.linear import default_kernel_init
from jaxtyping import Array

from flashjax.adapter import attend_for_flax
from flashjax.cache import KVCache, cache_length
from flashjax.layer import Given, attend, drops, heads_of, key_inputs, norm_kind, window_of
from flashjax.rotary import Rotary


class MultiHeadAttention(nn.Module):
    """Multi-head attention with what today's models need, on ``flashjax.dot_product_attention``.

    Where options coincide with those of ``flax.linen.MultiHeadDotProductAttention``, so do their
    names, defaults, parameters and outputs: weights load both ways.

    >>> import jax, jax.numpy as jnp, flashjax.linen
    >>> layer = flashjax.linen.MultiHeadAttention(
    ...     num_heads=8, num_kv_heads=2, is_causal=True, rotary=flashjax.Rotary())
    >>> x = jnp.ones((2, 16, 64))
    >>> variables = layer.init(jax.random.key(0), x)
    >>> layer.apply(variables, x).shape
    (2, 16, 64)

    Decoding: make the layer with ``decode=True`` and the cache by ``init`` on inputs as long as
    the longest text; then each ``apply(…, mutable=["cache"])`` takes the next tokens, any number
    of them: first the prompt, then one at a time. A window layer's cache is no longer than its
    window. Masks, biases and score modifiers speak of positions in the text: arrays hold the rows
    of the call, and a column for each position of the text, in a window layer too. Setting
    ``cache_index`` back takes tokens back; in a window layer only to 0.

    Attributes:
      num_heads: N, query heads.
      dtype: to compute in; None infers it from inputs and parameters.
      param_dtype: of the parameters.
      qkv_features: N · H; None for the width of the inputs.
      out_features: None for the width of the inputs.
      broadcast_dropout: one dropout pattern for all batch members and heads.
      dropout_rate: of attention weights.
      deterministic: dropout off; may be given at the call instead.
      precision: of all products.
      kernel_init, out_kernel_init, bias_init, out_bias_init: initialisers, also those that
        ``nn.with_partitioning`` makes; None takes the one without ``out``.
      use_bias: in all four projections.
      decode: keep keys and values in the collection "cache".
      normalize_qk: True or "layer" normalises queries and keys as Flax does (LayerNorm, parameters
        ``query_ln``, ``key_ln``), "rms" by RMSNorm (``query_norm``, ``key_norm``), before rotary.
      num_kv_heads: K, a divisor of N; None for N.
      is_causal: None means: when decoding.
      local_window_size: (left, right) or an int, as in ``dot_product_attention``.
      logits_soft_cap: as there.
      scale: as there; a Python number.
      rotary: embeds positions in queries and keys; :class:`flashjax.Rotary`.
      use_sinks: a learned logit per query head, parameter ``sinks`` (N,), as in gpt-oss.
      sinks_init: its initialiser.
      deterministic_backward, implementation: as in ``dot_product_attention``.
    """

    num_heads: int
    dtype: Any = None
    param_dtype: Any = jnp.float32
    qkv_features: int | None = None
    out_features: int | None = None
    broadcast_dropout: bool = True
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    precision: Any = None
    kernel_init: Any = default_kernel_init
    out_kernel_init: Any = None
    bias_init: Any = nn.initializers.zeros_init()
    out_bias_init: Any = None
    use_bias: bool = True
    decode: bool = False
    normalize_qk: bool | str = False
    num_kv_heads: int | None = None
    is_causal: bool | None = None
    local_window_size: int | tuple[int | None, int | None] | None = None
    logits_soft_cap: float | None = None
    scale: float | None = None
    rotary: Rotary | None = None
    use_sinks: bool = False
    sinks_init: Any = nn.initializers.zeros_init()
    deterministic_backward: bool = False
    implementation: str | None = None

    @nn.compact
    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        mask: Any = None,
        bias: Any = None,
        score_mod: Any = None,
        segment_ids: Any = None,
        query_seq_lengths: Any = None,
        key_value_seq_lengths: Any = None,
        positions: Any = None,
        is_causal: bool | None = None,
        deterministic: bool | None = None,
        dropout_rng: Any = None,
    ) -> Array:
        """From (…, T, features) to (…, T, out_features).

        Args:
          inputs_q: (…, T, features).
          inputs_k: (…, S, features); None for `inputs_q`.
          inputs_v: (…, S, features); None for `inputs_k`.
          mask: bool or 0/1 array that broadcasts to (…, N, T, S), or a flashjax.masks term.
          bias, score_mod, segment_ids, query_seq_lengths, key_value_seq_lengths: as in
            ``flashjax.dot_product_attention``. While decoding, segment ids are a pair, (…, T) and
            those of all positions.
          positions: for the rotary embedding, integers (T,) or (…, T), or a pair of those and the
            keys'. None counts from 0, while decoding from the tokens already written.
          is_causal: in place of the attribute.
          deterministic: in place of the attribute; needed where the rate is above 0.
          dropout_rng: None takes the rng stream "dropout".

        Raises:
          ValueError, TypeError: an argument does not fit; the message names it. A full cache
            gives NaN under jit, where it cannot raise.
          NotImplementedError: as in ``dot_product_attention``.
        """
        inputs_k, inputs_v = key_inputs(inputs_q, inputs_k, inputs_v)
        features = self.qkv_features or inputs_q.shape[-1]
        heads = heads_of(self.num_heads, self.num_kv_heads, features)
        query, key = (
            self._normalised(self._projected(x, n, heads.dim, name), name)
            for x, n, name in ((inputs_q, heads.query, "query"), (inputs_k, heads.key_value, "key"))
        )
        value = self._projected(inputs_v, heads.key_value, heads.dim, "value")
        query, key, value = promote_dtype(query, key, value, dtype=self.dtype)
        cache = self._cache(key, value) if self.decode else None
        given = Given(
            mask, bias, score_mod, segment_ids, query_seq_lengths, key_value_seq_lengths,
            positions, is_causal,
        )  # fmt: skip
        sinks = (
            self.param("sinks", self.sinks_init, (heads.query,), self.param_dtype)
            if self.use_sinks
            else None
        )
        out, cache = attend(
            self, given, query, key, value,
            sinks=sinks, dropout_key=self._dropout_key(deterministic, dropout_rng), cache=cache,
        )  # fmt: skip
        if cache is not None:
            self.put_variable("cache", "cached_key", cache.key)
            self.put_variable("cache", "cached_value", cache.value)
            self.put_variable("cache", "cache_index", cache.written)
        projected: Array = self._dense(
            features=self.out_features or inputs_q.shape[-1],
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            name="out",
        )(out)
        return projected

    @property
    def _dense(self) -> Any:
        return functools.partial(
            nn.DenseGeneral,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
        )

    def _projected(self, x: Array, heads: int, dim: int, name: str) -> Array:
        made: Array = self._dense(
            features=(heads, dim), kernel_init=self.kernel_init, bias_init=self.bias_init, name=name
        )(x)
        return made

    def _normalised(self, x: Array, name: str) -> Array:
        kind = norm_kind(self.normalize_qk)
        if kind is None:
            return x
        dtypes = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        if kind == "layer":
            return nn.LayerNorm(use_bias=False, name=f"{name}_ln", **dtypes)(x)
        return nn.RMSNorm(name=f"{name}_norm", **dtypes)(x)

    def _cache(self, key: Array, value: Array) -> KVCache | None:
        """The cache so far; None while it is made."""
        if not self.is_initializing() and not self.has_variable("cache", "cached_key"):
            raise ValueError(
                'decode is True and the variables hold no "cache"; wanted the one that '
                "layer.init(rng, inputs of the longest length) makes. Pass it to apply beside "
                'the parameters, with mutable=["cache"].'
            )

        def empty(x: Array) -> Array:
            length = cache_length(x.shape[-3], window_of(self.local_window_size))
            return jnp.zeros((*x.shape[:-3], length, *x.shape[-2:]), x.dtype)

        variables = [
            self.variable("cache", "cached_key", empty, key),
            self.variable("cache", "cached_value", empty, value),
            self.variable("cache", "cache_index", lambda: jnp.zeros((), jnp.int32)),
        ]
        return None if self.is_initializing() else KVCache(*(v.value for v in variables))

    def _dropout_key(self, deterministic: bool | None, dropout_rng: Any) -> Any:
        if not drops(self.dropout_rate):
            return None
        if nn.merge_param("deterministic", self.deterministic, deterministic):
            return None
        return self.make_rng("dropout") if dropout_rng is None else dropout_rng


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
