"""Flax nnx: the layer, and ``attention_fn`` for Flax's own layers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from flax.nnx.nn.linear import default_kernel_init
from jaxtyping import Array

from flashjax.adapter import attend_for_flax
from flashjax.cache import KVCache, cache_length
from flashjax.layer import Given, attend, drops, heads_of, key_inputs, norm_kind, window_of
from flashjax.rotary import Rotary
from flashjax.structure import describe

Metadata = Mapping[str, Any]
NO_METADATA: Metadata = MappingProxyType({})
ZEROS = nnx.initializers.zeros_init()


class MultiHeadAttention(nnx.Module):
    """Multi-head attention with what today's models need, on ``flashjax.dot_product_attention``.

    Where options coincide with those of ``flax.nnx.MultiHeadAttention``, so do their names,
    defaults, parameters and outputs: weights load both ways.

    >>> import jax.numpy as jnp, flashjax.nnx
    >>> from flax import nnx
    >>> layer = flashjax.nnx.MultiHeadAttention(
    ...     8, 64, num_kv_heads=2, is_causal=True, rotary=flashjax.Rotary(), rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 16, 64))).shape
    (2, 16, 64)

    Decoding: ``init_cache((batch, longest text, features))``, then each call with ``decode=True``
    takes the next tokens, any number of them: first the prompt, then one at a time. A window
    layer's cache is no longer than its window. Masks, biases and score modifiers speak of positions
    in the text: arrays hold the rows of the call, and a column for each position of the text, in a
    window layer too. Setting ``cache_index`` back takes tokens back; in a window layer only to 0.

    Args:
      num_heads: N, query heads.
      in_features: width of the inputs.
      qkv_features: N · H; None for `in_features`.
      out_features: None for `in_features`.
      num_kv_heads: K, a divisor of N; None for N.
      in_kv_features: width of the keys' and values' inputs; None for `in_features`.
      dtype: to compute in; None infers it from inputs and parameters.
      param_dtype: of the parameters.
      broadcast_dropout: one dropout pattern for all batch members and heads.
      dropout_rate: of attention weights.
      deterministic: dropout off; may be given at the call instead.
      precision: of all products.
      kernel_init, out_kernel_init, bias_init, out_bias_init: initialisers, also those that
        ``nnx.with_partitioning`` makes; None takes the one without ``out``.
      use_bias: in all four projections.
      decode: keep keys and values in a cache; None leaves it to the call, where False is the
        default.
      normalize_qk: True or "layer" normalises queries and keys as Flax does (LayerNorm,
        ``query_ln``, ``key_ln``), "rms" by RMSNorm (``query_norm``, ``key_norm``), before rotary.
      is_causal: None means: when decoding.
      local_window_size: (left, right) or an int, as in ``dot_product_attention``.
      logits_soft_cap: as there.
      scale: as there; a Python number.
      rotary: embeds positions in queries and keys; :class:`flashjax.Rotary`.
      use_sinks: a learned logit per query head, ``sinks`` (N,), as in gpt-oss.
      sinks_init: its initialiser.
      deterministic_backward, implementation: as in ``dot_product_attention``.
      rngs: for the parameters, and for dropout.
      keep_rngs: keep the stream "dropout"; else pass rngs at the call.
      kernel_metadata, out_kernel_metadata, bias_metadata, out_bias_metadata: of the projections'
        variables, such as ``{"out_sharding": (…)}``.
      query_ln_scale_metadata, key_ln_scale_metadata: of the norms', of either kind.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        broadcast_dropout: bool = True,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: Any = None,
        kernel_init: Any = default_kernel_init,
        out_kernel_init: Any = None,
        bias_init: Any = ZEROS,
        out_bias_init: Any = None,
        use_bias: bool = True,
        decode: bool | None = None,
        normalize_qk: bool | str = False,
        is_causal: bool | None = None,
        local_window_size: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        scale: float | None = None,
        rotary: Rotary | None = None,
        use_sinks: bool = False,
        sinks_init: Any = ZEROS,
        deterministic_backward: bool = False,
        implementation: str | None = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
        kernel_metadata: Metadata = NO_METADATA,
        out_kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
        out_bias_metadata: Metadata = NO_METADATA,
        query_ln_scale_metadata: Metadata = NO_METADATA,
        key_ln_scale_metadata: Metadata = NO_METADATA,
    ) -> None:
        qkv_features = in_features if qkv_features is None else qkv_features
        kv_width = in_features if in_kv_features is None else in_kv_features
        heads = heads_of(num_heads, num_kv_heads, qkv_features)
        self.num_heads, self.num_kv_heads, self.head_dim = heads
        self.in_features, self.in_kv_features = in_features, kv_width
        self.qkv_features, self.use_bias = qkv_features, use_bias
        self.out_features = in_features if out_features is None else out_features
        self.dtype, self.param_dtype = dtype, param_dtype
        self.broadcast_dropout, self.dropout_rate = broadcast_dropout, dropout_rate
        self.deterministic, self.decode = deterministic, decode
        self.precision, self.implementation = precision, implementation
        self.normalize_qk, self.rotary = normalize_qk, rotary
        self.is_causal = is_causal
        # A pair: a list would not hash.
        self.local_window_size = window_of(local_window_size)
        self.logits_soft_cap, self.scale = logits_soft_cap, scale
        self.deterministic_backward = deterministic_backward

        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        linear = functools.partial(
            nnx.LinearGeneral, use_bias=use_bias, precision=precision, rngs=rngs, **dtypes
        )
        inwards = functools.partial(
            linear,
            kernel_init=kernel_init,
            bias_init=bias_init,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )
        self.query = inwards(in_features=in_features, out_features=(heads.query, heads.dim))
        self.key = inwards(in_features=kv_width, out_features=(heads.key_value, heads.dim))
        self.value = inwards(in_features=kv_width, out_features=(heads.key_value, heads.dim))
        kind = norm_kind(normalize_qk)

        def norm(of: str, metadata: Metadata) -> Any:
            made: Any = None
            if kind == of == "layer":
                made = nnx.LayerNorm(
                    heads.dim, use_bias=False, scale_metadata=metadata, rngs=rngs, **dtypes
                )
            elif kind == of:
                made = nnx.RMSNorm(heads.dim, scale_metadata=metadata, rngs=rngs, **dtypes)
            return nnx.data(made)

        self.query_ln = norm("layer", query_ln_scale_metadata)
        self.key_ln = norm("layer", key_ln_scale_metadata)
        self.query_norm = norm("rms", query_ln_scale_metadata)
        self.key_norm = norm("rms", key_ln_scale_metadata)
        self.sinks = nnx.data(
            nnx.Param(sinks_init(rngs.params(), (num_heads,), param_dtype)) if use_sinks else None
        )
        self.out = linear(
            in_features=(heads.query, heads.dim),
            out_features=self.out_features,
            axis=(-2, -1),
            kernel_init=out_kernel_init or kernel_init,
            bias_init=out_bias_init or bias_init,
            kernel_metadata=out_kernel_metadata or kernel_metadata,
            bias_metadata=out_bias_metadata or bias_metadata,
        )
        self.rngs = rngs.dropout.fork() if keep_rngs and dropout_rate > 0 else None
        self.cached_key: nnx.Cache[Array] | None = nnx.data(None)
        self.cached_value: nnx.Cache[Array] | None = nnx.data(None)
        self.cache_index: nnx.Cache[Array] | None = nnx.data(None)

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
        decode: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        qkv_sharding: Any = None,
        out_sharding: Any = None,
    ) -> Array:
        """From (…, T, in_features) to (…, T, out_features).

        Args:
          inputs_q: (…, T, in_features).
          inputs_k: (…, S, in_kv_features); None for `inputs_q`.
          inputs_v: (…, S, in_kv_features); None for `inputs_k`.
          mask: bool or 0/1 array that broadcasts to (…, N, T, S), or a flashjax.masks term.
          bias, score_mod, segment_ids, query_seq_lengths, key_value_seq_lengths: as in
            ``flashjax.dot_product_attention``. While decoding, segment ids are a pair, (…, T) and
            those of all positions.
          positions: for the rotary embedding, integers (T,) or (…, T), or a pair of those and the
            keys'. None counts from 0, while decoding from the tokens already written.
          is_causal, deterministic, decode: in place of what the layer was made with.
          rngs: for dropout, in place of the layer's.
          qkv_sharding, out_sharding: of the projections' outputs, on explicit meshes.

        Raises:
          ValueError, TypeError: an argument does not fit; the message names it. A full cache
            gives NaN under jit, where it cannot raise.
          NotImplementedError: as in ``dot_product_attention``.
        """
        inputs_k, inputs_v = key_inputs(inputs_q, inputs_k, inputs_v)
        for name, x, width in (
            ("inputs_q", inputs_q, self.in_features),
            ("inputs_k", inputs_k, self.in_kv_features),
            ("inputs_v", inputs_v, self.in_kv_features),
        ):
            if x.shape[-1] != width:
                raise ValueError(f"{name} has shape {x.shape}; wanted a last dim of {width}.")
        query = self.query(inputs_q, out_sharding=qkv_sharding)
        key = self.key(inputs_k, out_sharding=qkv_sharding)
        value = self.value(inputs_v, out_sharding=qkv_sharding)
        query_norm, key_norm = self.query_ln or self.query_norm, self.key_ln or self.key_norm
        if query_norm is not None and key_norm is not None:
            query, key = query_norm(query), key_norm(key)
        query, key, value = promote_dtype((query, key, value), dtype=self.dtype)
        given = Given(
            mask, bias, score_mod, segment_ids, query_seq_lengths, key_value_seq_lengths,
            positions, is_causal,
        )  # fmt: skip
        decode = self.decode if decode is None else decode
        out, cache = attend(
            self, given, query, key, value,
            sinks=None if self.sinks is None else self.sinks[...],
            dropout_key=self._dropout_key(deterministic, rngs),
            cache=KVCache(*(v[...] for v in self._cache_variables())) if decode else None,
        )  # fmt: skip
        if cache is not None:
            for variable, new in zip(self._cache_variables(), cache, strict=True):
                variable[...] = new
        projected: Array = self.out(out, out_sharding=out_sharding)
        return projected

    def init_cache(
        self, input_shape: tuple[int, ...], dtype: Any = None, *, sharding: Any = None
    ) -> None:
        """An empty cache for texts of `input_shape` (…, longest text, features).

        Args:
          dtype: that of the keys and values; None for the layer's `dtype`, float32 without one.
          sharding: of keys and values, (…, length, K, H); on an explicit mesh it must be that of
            the projected keys (``qkv_sharding``).

        Raises:
          ValueError: `input_shape` is none.
        """
        if not isinstance(input_shape, (tuple, list)) or len(input_shape) < 2:
            raise ValueError(f"input_shape is {input_shape!r}; wanted (…, longest text, features).")
        dtype = dtype or self.dtype or jnp.float32
        length = cache_length(input_shape[-2], self.local_window_size)
        shape = (*input_shape[:-2], length, self.num_kv_heads, self.head_dim)
        self.cached_key = nnx.Cache(jnp.zeros(shape, dtype, device=sharding))
        self.cached_value = nnx.Cache(jnp.zeros(shape, dtype, device=sharding))
        self.cache_index = nnx.Cache(jnp.zeros((), jnp.int32))

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None,
        max_length: int | None = None,
    ) -> None:
        """What ``nnx.view(model, …)`` sets.

        Args:
          deterministic, decode: in place of what the layer was made with.
          batch_size, max_length: where both are given with ``decode=True``, an empty cache is made.
        """
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
        if decode and batch_size is not None and max_length is not None:
            batch = tuple(batch_size) if isinstance(batch_size, (tuple, list)) else (batch_size,)
            self.init_cache((*batch, max_length, self.in_features))

    def _cache_variables(self) -> tuple[nnx.Cache[Array], ...]:
        if self.cached_key is None or self.cached_value is None or self.cache_index is None:
            raise ValueError(
                "decode is True and there is no cache; wanted one. Call "
                "init_cache((batch, longest text, features)) first."
            )
        return self.cached_key, self.cached_value, self.cache_index

    def _dropout_key(
        self, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None
    ) -> Any:
        if not drops(self.dropout_rate):
            return None
        if deterministic is None:
            deterministic = self.deterministic
        if deterministic is None:
            raise ValueError(
                f"deterministic is None with dropout_rate = {self.dropout_rate}; wanted True or "
                "False, at the call or when the layer is made."
            )
        if deterministic:
            return None
        stream = self.rngs if rngs is None else rngs
        if stream is None:
            raise ValueError(
                "rngs is None, and the layer was made with keep_rngs=False; wanted "
                "rngs=nnx.Rngs(dropout=seed) at the call."
            )
        if not isinstance(stream, (nnx.Rngs, nnx.RngStream)):
            raise TypeError(
                f"rngs is {describe(stream)}; wanted nnx.Rngs or one of its streams, for a key "
                "nnx.Rngs(dropout=key)."
            )
        return stream.dropout() if isinstance(stream, nnx.Rngs) else stream()


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
