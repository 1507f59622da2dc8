"""A Triton program's loops over the tiles of its schedule."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from flashjax.kernels import walk
from flashjax.kernels.triton import language as tl
from flashjax.kernels.triton.replay import TRITON
from flashjax.kernels.visits import count_of, tile_at
from flashjax.masks import Blocks, Mask
from flashjax.masks.bounds import Axis
from flashjax.spec import Spec


class Walker(walk.Walker):
    """The loops of Triton programs over the tiles that they visit."""

    def __init__(
        self, spec: Spec, mask: Mask | None, rows: Blocks, columns: Blocks, axis: Axis
    ) -> None:
        super().__init__(spec, mask, rows, columns, axis, TRITON)

    def blocks(self, heads: int = 1) -> list[tl.Block]:
        """The schedule as a kernel's inputs, for programs of `heads` heads each."""
        return [tl.broadcast_block(x, heads, 1) for x in self.arrays]

    def run(
        self,
        refs: Any,
        head: Any,
        block: Any,
        take: Callable[[bool, bool], Callable[[jax.Array, Any], Any]],
        carry: Any,
        guard: bool,
    ) -> Any:
        """``take(masked, guard)(tile, carry)`` over all tiles, PARTIAL ones first.

        With `guard` all are taken as masked, in the same order.
        """
        partial, full, tile = self.ranges(lambda i, at: tl.load(refs[i], at), (0, head), block)
        loops = [(True, [*partial, *full])] if guard else [(True, partial), (False, full)]
        for masked, ranges in loops:
            if ranges:
                body = take(masked, guard)
                carry = lax.fori_loop(
                    jnp.int32(0),
                    jnp.int32(count_of(ranges)),
                    lambda i, c, body=body, ranges=ranges: body(tile(tile_at(ranges, i)), c),
                    carry,
                )
        return carry


def guarded(walk: Callable[[bool], Any], sums: Callable[[Any], Any], needed: bool) -> Any:
    """``walk(False)``, and ``walk(True)`` in its place if any of its sums came out NaN.

    What no row sees may be NaN or inf, and 0 · NaN is NaN. Setting it to 0 takes registers that
    the walk has not got, so that is done only where it shows.
    """
    found = walk(False)
    if not needed:
        return found
    rows = functools.reduce(jnp.add, (part.sum(1) for part in jax.tree.leaves(sums(found))))
    spoilt = jnp.where(rows == rows, jnp.int32(0), jnp.int32(1)).max(0) > 0
    return lax.cond(spoilt, lambda: walk(True), lambda: found)
