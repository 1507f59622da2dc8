"""Users' functions in the primitives that the Triton lowering has.

A function of a mask or a score is traced, and its few primitives that the lowering lacks are
replayed through others. What neither knows is told at plan time (:func:`unknown`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

# What the lowering has of elementwise primitives, JAX 0.11.2 and 0.12.0.1.
_NAMES = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type broadcast_in_dim
broadcast_to cbrt ceil clamp clz convert_element_type cos cosh div eq erf_inv exp exp2 expm1 floor
ge gt integer_pow iota is_finite le log log1p log2 logistic lt max min mul ne neg nextafter not
one_minus_square or population_count pow rem reshape rsqrt select_n shift_left
shift_right_arithmetic shift_right_logical sign sin sinh sqrt square squeeze stop_gradient sub tan
tanh xor
"""
LOWERED = frozenset(_NAMES.split())
Rules = dict[str, Callable[..., Any]]
# Primitives that hold a function, and where.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}


def lowerable(fn: Callable[..., Any], rules: Rules | None = None) -> Callable[..., Any]:
    """`fn`, with each primitive that has a rule replayed; by default those the lowering lacks."""
    rules = RULES if rules is None else rules

    def replayed(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        if not any(True for name in _primitives(closed.jaxpr) if name in rules):
            return fn(*args)
        out = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), rules)
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return replayed


def unknown(fn: Callable[..., Any], *args: Any) -> str | None:
    """The first primitive of `fn` that neither the lowering nor this module knows."""
    for name in _primitives(jax.make_jaxpr(fn)(*args).jaxpr):
        if name not in LOWERED and name not in RULES:
            return name
    return None


def _primitives(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in CALLS:
            yield from _primitives(_inner(equation)[0])
        else:
            yield _name(equation)


def _aval(atom: Any) -> Any:
    return atom.aval


def _name(equation: Any) -> str:
    """The primitive's name, with what the lowering gets wrong told apart."""
    name: str = equation.primitive.name
    if name == "select_n":
        if len(equation.invars) > 3:
            return "select_n of many"
        # Of numbers without a dtype of their own the lowering takes the condition's.
        if any(isinstance(x, jex.Literal) and _aval(x).weak_type for x in equation.invars[1:]):
            return "select_n of numbers"
    return name


def _inner(equation: Any) -> tuple[Any, Any]:
    found = equation.params[CALLS[equation.primitive.name]]
    return getattr(found, "jaxpr", found), getattr(found, "consts", ())


def _evaluate(jaxpr: Any, consts: Any, args: Any, rules: Rules) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        if isinstance(atom, jex.Literal):
            return np.asarray(atom.val, _aval(atom).dtype)[()]
        return values[atom]

    for equation in jaxpr.eqns:
        name, inputs = _name(equation), [read(x) for x in equation.invars]
        if name in CALLS:
            out = _evaluate(*_inner(equation), inputs, rules)
        elif name in rules:
            out = [rules[name](*inputs, **equation.params)]
        else:
            out = equation.primitive.bind(*inputs, **equation.params)
            out = out if equation.primitive.multiple_results else [out]
        values.update(zip(equation.outvars, out, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _select(which: Any, *cases: Any, **_: Any) -> Any:
    def choose(rest: Any, numbered: tuple[int, Any]) -> Any:
        return jnp.where(which == numbered[0], numbered[1], rest)

    return functools.reduce(choose, enumerate(cases[:-1]), cases[-1])


def _round(x: Any, *, rounding_method: Any, **_: Any) -> Any:
    below = jnp.floor(x)
    part = x - below
    if rounding_method == jax.lax.RoundingMethod.TO_NEAREST_EVEN:
        up_at_half = below != 2 * jnp.floor(below / 2)
    else:
        up_at_half = x > 0
    return jnp.where((part > 0.5) | ((part == 0.5) & up_at_half), below + 1, below)


# x · P(x²) / Q(x²) on |x| < 3.83, as in XLA (xla/hlo/builder/lib/math.cc, ErfImpl32).
_ERF_LIMIT = 3.832506856900711
_ERF_P = (
    2.2905065861350646e-4,
    3.4082910107109506e-3,
    5.0955695062380861e-2,
    1.8520832239976145e-1,
    1.128379143519084,
)
_ERF_Q = (
    -1.1791602954361697e-7,
    2.3547966471313185e-5,
    1.0179625278914885e-3,
    1.4070470171167667e-2,
    1.1098505178285362e-1,
    4.9746925110067538e-1,
    1.0,
)


def _erf(x: Any, **_: Any) -> Any:
    x = jnp.clip(x, -_ERF_LIMIT, _ERF_LIMIT)
    p, q = (functools.reduce(lambda a, c: a * (x * x) + c, terms) for terms in (_ERF_P, _ERF_Q))
    return x * p / q


RULES: Rules = {
    "select_n of many": _select,
    "select_n of numbers": lambda which, a, b, **_: jnp.where(which, b, a),
    "round": _round,
    "erf": _erf,
    "erfc": lambda x, **_: 1 - _erf(x),
    "polynomial": lambda x, *terms, **_: functools.reduce(
        lambda total, term: total * x + term, reversed(terms)
    ),
    "copy": lambda x, **_: x,
    "reduce_precision": lambda x, **_: x,
}


def _tanh(x: Any, **_: Any) -> Any:
    return 1 - 2 / (jnp.exp2(x * (2 / math.log(2))) + 1)


# For scores of 16-bit inputs: wrong by 2⁻²³ of 1 where libdevice's tanh is by that much of its
# value, and P is rounded to 2⁻⁹ or 2⁻¹² of its own; at a third of the instructions.
RULES_16_BIT: Rules = {**RULES, "tanh": _tanh}
