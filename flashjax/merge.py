"""Combining attention over parts of the columns: the one seam of split, cascade and ring."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def merge(parts: Sequence[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """Attention over the union of disjoint sets of columns, from attention over each.

    Args:
      parts: (out, lse) pairs as ``dot_product_attention(..., return_residual=True)`` gives them:
        out (…, T, N, Hv), lse (…, T, N), natural log. A part that saw no column (LSE −inf) is the
        identity. Give sinks to one part only, so that they count once.

    Returns:
      (out, lse) of the whole: out in the dtype of the first part's, lse in that of the LSEs.
      Differentiable.

    Raises:
      ValueError, TypeError: no parts, no pairs, or shapes that do not fit.
    """
    if not isinstance(parts, Sequence):
        raise TypeError(f"merge: parts is a {type(parts).__name__}; wanted a list of (out, lse).")
    if not parts:
        raise ValueError("merge: parts is empty; wanted at least one (out, lse).")
    for index, pair in enumerate(parts):
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(
                f"merge: parts[{index}] is a {type(pair).__name__}; wanted a pair (out, lse), in a "
                "list also where there is but one."
            )
    shape = parts[0][0].shape
    for index, (out, lse) in enumerate(parts):
        if out.shape != shape or lse.shape != shape[:-1]:
            raise ValueError(
                f"merge: parts[{index}] has out {out.shape} and lse {lse.shape}; wanted "
                f"{shape} and {shape[:-1]}, as in parts[0]."
            )
    lses = jnp.stack([lse for _, lse in parts])
    largest = jax.lax.stop_gradient(lses.max(0))
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    # Both arms finite, so that neither the value nor the gradient of an empty part is NaN.
    seen = lses != -jnp.inf
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, lses - largest, 0)), 0)
    total = weights.sum(0)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    out = jnp.zeros(shape, total.dtype)
    for weight, (part, _) in zip(weights, parts, strict=True):
        out = out + (weight / total)[..., None] * part.astype(total.dtype)
    lse = jnp.where(empty, -jnp.inf, jnp.log(total) + largest)
    return out.astype(parts[0][0].dtype), lse
