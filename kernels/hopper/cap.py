"""The soft cap on Hopper: tanh without the special-function unit, where scores are near 0."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from flashjax.kernels.hopper.vote import any_beyond

# tanh(x) / x by powers of x², wrong by 1e-7 of it on |x| < NEAR (least squares, weighted until
# the largest errors were even).
TANH = (0.9999999019009492, -0.3333136245912089, 0.1327097676184371, -0.0475536037440507)
NEAR = 0.4
# Of scale / cap: the coefficients hold its powers.
LEAST_RATIO = 2.0**-20


def expands(cap: float, scale: float) -> bool:
    """Whether :func:`capped` is for such numbers."""
    return LEAST_RATIO <= scale / cap <= 1 / LEAST_RATIO


def capped(
    products: jax.Array,
    scale: float,
    cap: float,
    exact: Callable[[jax.Array], jax.Array],
    *,
    interpreted: bool,
) -> jax.Array:
    """cap · tanh(products · scale / cap); a warp with one beyond NEAR · cap takes `exact`."""
    first, *others = (scale * c * (scale / cap) ** (2 * i) for i, c in enumerate(TANH))

    def near(products: jax.Array) -> jax.Array:
        square, found = products * products, jnp.full_like(products, others[-1])
        for c in (*reversed(others[:-1]), first):
            found = found * square + c
        return products * found

    beyond = any_beyond(products, NEAR * cap / scale, interpreted=interpreted)
    found: jax.Array = lax.cond(beyond, exact, near, products)
    return found
