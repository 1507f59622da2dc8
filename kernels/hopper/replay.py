"""What the Mosaic GPU lowering has of the primitives in users' functions (JAX 0.11.2, 0.12.0.1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from flashjax.kernels.replay import RULES, Lowering, round_by, tanh_by_exp2

_NAMES = """
abs add and atan bitcast_convert_type broadcast_in_dim convert_element_type div eq exp exp2 ge gt
iota le log logistic lt max min mul ne neg not or rem reshape rsqrt select_n shift_left
shift_right_arithmetic shift_right_logical sign sqrt square squeeze stop_gradient sub xor
"""
_NARROW = """
add broadcast_in_dim convert_element_type eq ge gt le lt max min mul ne neg reshape select_n squeeze
stop_gradient sub
"""
WHOLE = 2.0**23  # float32 from here on are whole numbers
# 2π in three parts, the first two of few enough bits that a multiple below 2¹⁰ is exact.
TWO_PI = (6.28125, 1.9340515136718750e-3, 1.2556659146e-6)


def _floor(x: Any, **_: Any) -> Any:
    inside = jnp.abs(x) < WHOLE
    cut = jnp.where(inside, x, 0.0).astype(jnp.int32).astype(jnp.float32)
    return jnp.where(inside, jnp.where(cut > x, cut - 1, cut), x)


def _remainder(x: Any, y: Any, **_: Any) -> Any:
    """Of a division that rounds to 0."""
    sign, x, y = jnp.where(x < 0, -1.0, 1.0), jnp.abs(x), jnp.abs(y)
    rest = x - _floor(x / y) * y  # off by one y where the quotient was rounded
    rest = jnp.where(rest < 0, rest + y, rest)
    return sign * jnp.where(rest >= y, rest - y, rest)


def _select_by_number(which: Any, a: Any, b: Any, **_: Any) -> Any:
    if isinstance(which, np.generic):
        return b if which else a
    return jnp.where(jnp.full(jnp.shape(a), which), b, a)


def _turned(x: Any) -> Any:
    """`x` less whole turns, where the hardware's sine is good to 2⁻²¹ (CUDA Programming Guide)."""
    turns = _floor(x * (1 / (2 * math.pi)) + 0.5)
    for part in TWO_PI:
        x = x - turns * part
    return x


# The kernels ask for approximate functions, for exp2's sake: of those tanh (2⁻¹¹) is too coarse,
# and sine and cosine are good near 0 alone.
_RULES: dict[str, Callable[..., Any]] = {
    **RULES,
    "floor": _floor,
    "ceil": lambda x, **_: -_floor(-x),
    "round": round_by(_floor),
    "tanh": tanh_by_exp2,
    "sin": lambda x, **_: jnp.sin(_turned(x)),
    "cos": lambda x, **_: jnp.cos(_turned(x)),
    "clamp": lambda low, x, high: jnp.minimum(jnp.maximum(x, low), high),
    "rem of floats": _remainder,
    "not of bools": lambda x, **_: x != jnp.ones_like(x),
    "conversion to bools": lambda x, **_: x != jnp.zeros_like(x),
    "select_n by a number": _select_by_number,
    "reshard": lambda x, **_: x,
    "is_finite": lambda x: jnp.abs(x) < jnp.inf,
    # Of derivatives.
    "add_any": lambda x, y, **_: x + y,
    "one_minus_square": lambda x, **_: (1 - x) * (1 + x),
    "integer_pow": lambda x, y: x**y if y > 0 else 1 / x**-y,
}
MOSAIC = Lowering(
    "Mosaic GPU",
    frozenset(_NAMES.split()),
    frozenset(_NARROW.split()),
    frozenset(),
    _RULES,
    calls=frozenset({"jit", "pjit"}),
    bytes=2,
    splats=False,
)
