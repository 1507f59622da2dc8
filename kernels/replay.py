"""Users' functions in the primitives that a kernel's lowering has.

A function of a mask or a score is traced, and what the lowering lacks or gets wrong is replayed
through other primitives, or in float32. What is left over is told at plan time
(:meth:`Lowering.unknown`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

# Primitives that move small integers about, and convert them.
AS_THEY_ARE = frozenset({"broadcast_in_dim", "convert_element_type", "reshape", "squeeze"})
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


@dataclasses.dataclass(frozen=True)
class Lowering:
    """What a kernel's lowering has of elementwise primitives, and what stands in for the others.

    `names` of those for float32, `narrow` of those for bfloat16 and float16 too; the rest of them
    run in float32. `library`: functions that want arrays where a number stands beside them.
    `calls`: primitives that hold a function, as they are. `bytes`: of the least integers; of fewer
    run in int32. `splats`: whether a result may be the same everywhere.
    """

    title: str
    names: frozenset[str]
    narrow: frozenset[str]
    library: frozenset[str]
    rules: Mapping[str, Callable[..., Any]]
    calls: frozenset[str] = frozenset(CALLS)
    bytes: int = 1
    splats: bool = True

    def lowerable(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn`, with what the lowering does not take replayed, and each primitive with a rule."""

        def replayed(*args: Any) -> Any:
            closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
            as_it_is = all(x in self.calls for x in _calls(closed.jaxpr))
            if as_it_is and not any(self._needs_replay(x) for x in _equations(closed.jaxpr)):
                return fn(*args)
            out = self._evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args))
            return jax.tree.unflatten(jax.tree.structure(shape), out)

        return replayed

    def unknown(self, fn: Callable[..., Any], *args: Any) -> str | None:
        """The first primitive of `fn` that neither the lowering nor its rules know."""
        jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
        for equation in _equations(jaxpr):
            if _name(equation) not in self.rules and equation.primitive.name not in self.names:
                return _name(equation)
        if not self.splats and any(x.aval.dtype == jnp.bool_ for x in _constant(jaxpr)):
            return "a constant"
        return None

    def _is_narrow(self, equation: Any) -> bool:
        """Whether a float of 16 bits meets a primitive that the lowering has for 32 alone."""
        atoms = (*equation.invars, *equation.outvars)
        floats = [x.aval for x in atoms if jnp.issubdtype(x.aval.dtype, jnp.floating)]
        name = equation.primitive.name
        return name not in self.narrow and any(x.dtype.itemsize == 2 for x in floats)

    def _is_small(self, equation: Any) -> bool:
        """Whether the equation computes with integers of too few bytes."""
        if equation.primitive.name in AS_THEY_ARE:
            return False
        dtypes = [x.aval.dtype for x in (*equation.invars, *equation.outvars)]
        return any(
            jnp.issubdtype(x, jnp.integer) and jnp.iinfo(x).bits < 8 * self.bytes for x in dtypes
        )

    def _needs_replay(self, equation: Any) -> bool:
        beside_number = any(isinstance(x, jex.Literal) for x in equation.invars)
        return (
            _name(equation) in self.rules
            or self._is_narrow(equation)
            or self._is_small(equation)
            or (beside_number and equation.primitive.name in self.library)
        )

    def _evaluate(self, jaxpr: Any, consts: Any, args: Any) -> list[Any]:
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(atom: Any) -> Any:
            if isinstance(atom, jex.Literal):
                return np.asarray(atom.val, _aval(atom).dtype)[()]
            return values[atom]

        for equation in jaxpr.eqns:
            inputs = [read(x) for x in equation.invars]
            if equation.primitive.name in CALLS:
                out = self._evaluate(*_inner(equation), inputs)
            else:
                out = self._one(equation, inputs)
            values.update(zip(equation.outvars, out, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _one(self, equation: Any, inputs: list[Any]) -> list[Any]:
        name, primitive = _name(equation), equation.primitive
        out = equation.outvars[0].aval
        rule = self.rules.get(name)
        if primitive.name in self.library:
            if all(isinstance(x, np.generic) for x in inputs) and hasattr(np, primitive.name):
                return [out.dtype.type(getattr(np, primitive.name)(*inputs))]
            inputs = [_spread(x, out.shape) for x in inputs]
        # A rule's own constants are float32, too.
        widen = self._is_narrow(equation) or (rule is not None and name not in DTYPE_FREE)
        small = self._is_small(equation)
        if widen:
            inputs = [_as(x, jnp.float32, jnp.floating) for x in inputs]
        if small:
            inputs = [_as(x, jnp.int32, jnp.integer) for x in inputs]
        if rule is not None:
            found = [rule(*inputs, **equation.params)]
        else:
            bound = primitive.bind(*inputs, **equation.params)
            found = list(bound) if primitive.multiple_results else [bound]
        if widen or small:
            wanted = [x.aval.dtype for x in equation.outvars]
            found = [jnp.asarray(x, dtype) for x, dtype in zip(found, wanted, strict=True)]
        return found


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name in CALLS:
            yield from _equations(_inner(equation)[0])
        else:
            yield equation


def _calls(jaxpr: Any) -> Iterator[str]:
    """The names of all primitives in it that hold a function."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in CALLS:
            yield equation.primitive.name
            yield from _calls(_inner(equation)[0])


def _constant(jaxpr: Any) -> list[Any]:
    """Results that no argument has a part in."""
    reached = set(jaxpr.invars)
    for equation in jaxpr.eqns:
        if any(not isinstance(x, jex.Literal) and x in reached for x in equation.invars):
            reached.update(equation.outvars)
    return [x for x in jaxpr.outvars if isinstance(x, jex.Literal) or x not in reached]


def _name(equation: Any) -> str:
    """The primitive's name, with what the lowering gets wrong told apart."""
    name, operands = str(equation.primitive.name), [x.aval for x in equation.invars]
    if name == "select_n":
        if len(operands) > 3:
            return "select_n of many"
        if operands[0].ndim < operands[1].ndim:
            return "select_n by a number"
        # Of numbers without a dtype of their own the lowering takes the condition's.
        if any(x.ndim == 0 and x.weak_type for x in operands[1:]):
            return "select_n of numbers"
    if name in ("max", "min", "not") and operands[0].dtype == jnp.bool_:
        return f"{name} of bools"
    if name == "rem" and jnp.issubdtype(operands[0].dtype, jnp.floating):
        return "rem of floats"
    if name == "convert_element_type" and equation.outvars[0].aval.dtype == jnp.bool_:
        return "conversion to bools"
    return name


def _inner(equation: Any) -> tuple[Any, Any]:
    found = equation.params[CALLS[equation.primitive.name]]
    return getattr(found, "jaxpr", found), getattr(found, "consts", ())


def _spread(x: Any, shape: tuple[int, ...]) -> Any:
    """A number as an array; an array as it is."""
    number: Any = x
    return jnp.full(shape, number) if isinstance(x, np.generic) else x


def _as(x: Any, dtype: Any, kind: Any) -> Any:
    """`x` in the dtype, if it is of that kind."""
    return jnp.asarray(x, dtype) if jnp.issubdtype(jnp.result_type(x), kind) else x


def _aval(atom: Any) -> Any:
    return atom.aval


def _select(which: Any, *cases: Any, **_: Any) -> Any:
    def choose(rest: Any, numbered: tuple[int, Any]) -> Any:
        return jnp.where(which == numbered[0], numbered[1], rest)

    return functools.reduce(choose, enumerate(cases[:-1]), cases[-1])


def round_by(floor: Callable[[Any], Any]) -> Callable[..., Any]:
    """The rule of `round`, by one of `floor`."""

    def rule(x: Any, *, rounding_method: Any, **_: Any) -> Any:
        below = floor(x)
        part = x - below
        if rounding_method == jax.lax.RoundingMethod.TO_NEAREST_EVEN:
            up_at_half = below != 2 * floor(below / 2)
        else:
            up_at_half = x > 0
        return jnp.where((part > 0.5) | ((part == 0.5) & up_at_half), below + 1, below)

    return rule


def tanh_by_exp2(x: Any, **_: Any) -> Any:
    """Wrong by 2⁻²³ of 1, not of the value."""
    return 1 - 2 / (jnp.exp2(x * (2 / math.log(2))) + 1)


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


RULES: dict[str, Callable[..., Any]] = {
    "select_n of many": _select,
    "select_n of numbers": lambda which, a, b, **_: jnp.where(which, b, a),
    "round": round_by(jnp.floor),
    "erf": _erf,
    "erfc": lambda x, **_: 1 - _erf(x),
    "max of bools": lambda a, b, **_: a | b,
    "min of bools": lambda a, b, **_: a & b,
    "polynomial": lambda x, *terms, **_: functools.reduce(
        lambda total, term: total * x + term, reversed(terms)
    ),
    "copy": lambda x, **_: x,
    "reduce_precision": lambda x, **_: x,
}


# Rules that take any dtype as it is.
DTYPE_FREE = frozenset(
    {
        "select_n of many",
        "select_n of numbers",
        "max of bools",
        "min of bools",
        "not of bools",
        "select_n by a number",
        "conversion to bools",
        "reshard",
        "copy",
        "reduce_precision",
    }
)
