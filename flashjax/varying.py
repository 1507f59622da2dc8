"""Varying manual axes: under ``shard_map`` values carry the mesh axes over which they differ.

Loops want their carries to start with the type that they end with, and a custom_vjp its cotangents
with the type of its inputs. Both hold once every operand varies over the union of all axes.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from jax import lax

X = TypeVar("X")


def varying_axes(tree: Any) -> frozenset[str]:
    """The union of the manual mesh axes over which the leaves of `tree` vary."""
    axes: frozenset[str] = frozenset()
    for leaf in jax.tree.leaves(tree):
        axes |= getattr(jax.typeof(leaf), "manual_axis_type").varying  # noqa: B009 (untyped in JAX)
    return axes


def cast_varying[X](tree: X, axes: frozenset[str]) -> X:
    """`tree` with every leaf varying over `axes` too; the transpose sums gradients over them."""

    def cast(leaf: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - varying_axes(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree) if axes else tree
