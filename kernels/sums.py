"""Gradients of operands that are broadcast over the logits: sums of one value per element.

A kernel sums a tile's values along rows or columns, XLA then over batch and heads. Triton's pass
over row blocks takes operands of rows (and of nothing), that over column blocks those of columns;
operands with both, only a bias can be that, have a pass of their own. Hopper's one pass, over
column blocks, takes all that have no rows.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from flashjax.kernels.tile import Pulled, Scored, hidden
from flashjax.spec import Spec

Kind = Literal["rows", "columns", "tile"]


class Sum(NamedTuple):
    """A wanted gradient: its operand, its place among the operand's floating leaves, its shape."""

    name: str
    leaf: int
    shape: tuple[int, ...]

    @property
    def kind(self) -> Kind:
        if self.shape[3] == 1:
            return "rows"
        return "columns" if self.shape[2] == 1 else "tile"

    @property
    def has_rows(self) -> bool:
        return self.shape[2] != 1

    def of(self, scored: Scored, pulled: Pulled) -> jax.Array:
        """The tile's values."""
        if self.name == "scale":
            return hidden(pulled.raw * scored.products, scored.keep)
        return pulled.raw if self.name == "bias" else pulled.leaves[self.leaf]


def all_sums(spec: Spec) -> list[Sum]:
    """The wanted gradients."""
    found = []
    for name in ("scale", "bias", "score"):
        if name in spec.wanted:
            leaves = jax.tree.leaves(getattr(spec.shapes, name))
            floating = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
            found += [Sum(name, i, tuple(x.shape)) for i, x in enumerate(floating)]
    return found


def sums(spec: Spec, kind: Kind) -> list[Sum]:
    """Those of one kind."""
    return [x for x in all_sums(spec) if x.kind == kind]


def summed(vector: jax.Array, of: Sum) -> jax.Array:
    """(B, N, T or S) sums along tiles, summed on to the operand's shape.

    Of an operand of nothing they may be either.
    """
    spread = vector[..., None] if of.kind == "rows" else vector[..., None, :]
    axes = [i for i, size in enumerate(of.shape) if size == 1 and spread.shape[i] != 1]
    return spread.sum(axes, keepdims=True) if axes else spread


def in_structure(spec: Spec, found: dict[tuple[str, int], jax.Array]) -> dict[str, Any]:
    """Gradients by operand, in its dtype; a score's as a tuple of leaves, None for integers."""
    grads: dict[str, Any] = {}
    for name in {name for name, _ in found}:
        arrays = [
            array for (of, _), array in sorted(found.items(), key=lambda x: x[0]) if of == name
        ]
        mine, leaves = iter(arrays), jax.tree.leaves(getattr(spec.shapes, name))
        rounded = tuple(
            next(mine).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else None
            for x in leaves
        )
        grads[name] = rounded if name == "score" else rounded[0]
    return grads
