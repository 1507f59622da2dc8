"""The vmap rule: a mapped axis becomes part of the batch.

Axis 0 of every canonical operand is the batch, of size 1 or B, so one rule serves them all, and a
backend never sees a mapped axis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from flashjax.spec import Operands, Spec

X = TypeVar("X")
Forward = Callable[[Spec, Operands], tuple[jax.Array, jax.Array]]
Backward = Callable[[Spec, Operands, jax.Array, jax.Array, jax.Array], Operands]


def forward(run: Forward, spec: Spec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """``run(spec, operands)`` with the vmap rule."""

    @custom_vmap
    def call(operands: Operands) -> tuple[jax.Array, jax.Array]:
        return run(spec, operands)

    @call.def_vmap
    def rule(size: int, mapped: Any, operands: Operands) -> Any:
        folded = _fold(operands, mapped[0], size, spec.batch)
        out, lse = forward(run, spec.at(folded), folded)
        return (_unfold(out, size, spec.batch), _unfold(lse, size, spec.batch)), (True, True)

    return call(operands)


def backward(
    run: Backward,
    spec: Spec,
    operands: Operands,
    lse: jax.Array,
    delta: jax.Array,
    d_out: jax.Array,
) -> Operands:
    """``run(spec, operands, lse, delta, d_out)`` with the vmap rule."""

    @custom_vmap
    def call(operands: Operands, *rows: jax.Array) -> Operands:
        return run(spec, operands, *rows)

    @call.def_vmap
    def rule(size: int, mapped: Any, operands: Operands, *rows: jax.Array) -> Any:
        folded = _fold(operands, mapped[0], size, spec.batch, whole=spec.wanted)
        folded_rows = _fold(rows, tuple(mapped[1:]), size, spec.batch)
        grads = backward(run, spec.at(folded), folded, *folded_rows)

        # Each example has a gradient of its own, of the operand that it had: where that was
        # broadcast over the batch, the batch's parts are summed, the examples' are not.
        def unfold(name: str) -> Any:
            like = jax.tree.leaves(getattr(spec.shapes, name))

            def one(grad: jax.Array | None, shape: jax.ShapeDtypeStruct) -> jax.Array | None:
                if grad is None:
                    return None
                grad = _unfold(grad, size, spec.batch)
                summed = shape.shape[0] == 1 and grad.shape[1] != 1
                return grad.sum(1, keepdims=True) if summed else grad

            found = getattr(grads, name)
            if name == "score" and found is not None:
                return tuple(map(one, found, like))
            return None if found is None else one(found, like[0])

        out = Operands(**{f.name: unfold(f.name) for f in dataclasses.fields(grads)})
        return out, jax.tree.map(lambda _: True, out)

    return call(operands, lse, delta, d_out)


def _fold[X](tree: X, mapped: Any, size: int, batch: int, whole: frozenset[str] = frozenset()) -> X:
    """Leaves of batch 1 or `batch`, some with a mapped axis 0 before it, to one batch axis.

    A leaf without a mapped axis and with batch 1 stays so, unless it belongs to an operand named
    in `whole`.
    """

    def fold(x: jax.Array, has_axis: bool, keep_apart: bool) -> jax.Array:
        shape = x.shape[1:] if has_axis else x.shape
        if not has_axis and shape[0] == 1 and not keep_apart:
            return x
        rest = shape[1:]
        x = x if has_axis else x[None]
        return jnp.broadcast_to(x, (size, batch, *rest)).reshape(size * batch, *rest)

    if not isinstance(tree, Operands):
        return jax.tree.map(lambda x, has_axis: fold(x, has_axis, True), tree, mapped)
    folded = {}
    for field in dataclasses.fields(tree):
        name = field.name
        apart = name in whole or name in ("query", "key", "value")
        folded[name] = jax.tree.map(
            lambda x, has_axis, apart=apart: fold(x, has_axis, apart),
            getattr(tree, name),
            getattr(mapped, name),
        )
    return Operands(**folded)  # type: ignore[return-value]


def _unfold(x: jax.Array, size: int, batch: int) -> jax.Array:
    return x.reshape(size, batch, *x.shape[1:])
