"""``implementation="cudnn"``: hands the call to jax.nn, for comparison.

LSE is then jax.nn's: rounded to the key's dtype, and without a gradient.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flashjax.backend import Device, no_nvidia
from flashjax.bind import Arguments, Bound
from flashjax.masks import Mask
from flashjax.plan import current_device

# What jax.nn's function knows, by its own names.
_TAKEN = {
    "bias",
    "mask",
    "scale",
    "is_causal",
    "query_seq_lengths",
    "key_value_seq_lengths",
    "local_window_size",
}


def refusal(arguments: Arguments, device: Device) -> str | None:
    """Why jax.nn cannot do the call, naming the argument; None if it may."""
    other = no_nvidia(device)
    if other is not None:
        return other
    default = Arguments()
    for name in vars(default):
        value, unset = getattr(arguments, name), getattr(default, name)
        given = value is not unset if unset is None else bool(value != unset)
        if name not in _TAKEN and given:
            return f"jax.nn has no {name}"
    if isinstance(arguments.mask, Mask):
        return "jax.nn takes mask as a bool array only"
    return None


def call(bound: Bound, arguments: Arguments, return_residual: bool) -> Any:
    """Output (B, T, N, H), or it and LSE (B, T, N); batch dims flattened."""
    reason = refusal(arguments, current_device())
    if reason is not None:
        raise NotImplementedError(
            f"implementation='cudnn' cannot do this call: {reason}. Pass implementation=None."
        )
    operands = bound.operands

    def lengths(x: object) -> jax.Array | None:
        if x is None:
            return None
        return jnp.broadcast_to(jnp.asarray(x, jnp.int32).reshape(-1), (bound.spec.batch,))

    def tile(x: object) -> jax.Array | None:
        if x is None:
            return None
        array = jnp.asarray(x)
        full = (*bound.batch, bound.spec.heads, bound.spec.rows, bound.spec.columns)
        if len(bound.batch) > 1 and array.ndim > 3:
            array = jnp.broadcast_to(array, (*bound.batch, *array.shape[-3:]))
        return array.reshape(-1, *((1,) * (len(full) - array.ndim) + array.shape)[-3:])

    attend: Any = jax.nn.dot_product_attention
    return attend(
        operands.query,
        operands.key,
        operands.value,
        bias=tile(arguments.bias),
        mask=tile(arguments.mask),
        scale=bound.spec.scale if operands.scale is None else operands.scale.reshape(()),
        is_causal=arguments.is_causal,
        query_seq_lengths=lengths(arguments.query_seq_lengths),
        key_value_seq_lengths=lengths(arguments.key_value_seq_lengths),
        local_window_size=arguments.local_window_size,
        implementation="cudnn",
        return_residual=return_residual,
    )
