"""A program's walk over the tiles of its schedule."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flashjax.kernels.triton import language as tl
from flashjax.kernels.triton.replay import lowerable
from flashjax.kernels.visits import Visits, count_of, parted, tile_at, visits
from flashjax.masks import Blocks, Mask, schedule
from flashjax.masks.bounds import Axis
from flashjax.masks.schedule import tile_ranges
from flashjax.spec import Spec


@dataclasses.dataclass(frozen=True)
class OneBlock:
    """One block of an axis, inside a kernel: what mask terms in closed form ask of `Blocks`."""

    length: int
    size: int
    index: Any

    @property
    def begin(self) -> Any:
        return self.index * self.size

    @property
    def last(self) -> Any:
        return jnp.minimum(self.begin + self.size, self.length) - 1


class Walker:
    """The tiles that each block of `axis` visits, and the loops over them.

    A mask without arrays, in closed form, costs no memory and no launch: each program finds its
    tiles by itself. Otherwise it reads them.
    """

    def __init__(
        self, spec: Spec, mask: Mask | None, rows: Blocks, columns: Blocks, axis: Axis
    ) -> None:
        self.own, self.other = (rows, columns) if axis == "rows" else (columns, rows)
        self.axis, self.mask = axis, mask
        # Any element of a bias may be −inf: every tile then evaluates its element mask.
        self._masked = spec.shapes.bias is not None
        self._visits: Visits | None = None
        if mask is not None and not self._closed(mask):
            walk = schedule(mask, rows, columns, axis)
            self._visits = visits(walk, masked=self._masked)

    def _closed(self, mask: Mask) -> bool:
        if jax.tree.leaves(mask):
            return False
        bounds = mask.bounds(self.own, self.other.length, self.axis)
        return bounds is not None and bounds.exact

    def blocks(self, heads: int = 1) -> list[tl.Block]:
        """The schedule as a kernel's inputs, for programs of `heads` heads each."""
        if self._visits is None:
            return []

        arrays = [self._visits.ranges, self._visits.tiles]
        return [tl.broadcast_block(x, heads, 1) for x in arrays if x is not None]

    def block(self, program: Any) -> Any:
        """The block that a program takes, such that under Causal the longest walks come first."""
        return self.own.count - 1 - program if self.axis == "rows" else program

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
        partial, full, tile = self._of(refs, head, block)
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

    def _of(self, refs: Any, head: Any, block: Any) -> tuple[Any, Any, Callable[[Any], Any]]:
        """Ranges of PARTIAL and FULL tiles, and from what they count to the tile's index."""
        if self._visits is None:
            return *self._found(block), lambda i: i
        array, listed = self._visits.ranges, self._visits.tiles
        h = head if array.shape[1] != 1 else 0
        row = block if array.shape[2] != 1 else 0

        def read(i: int) -> tuple[Any, Any]:
            return tl.load(refs[0], (0, h, row, i, 0)), tl.load(refs[0], (0, h, row, i, 1))

        ranges = [read(i) for i in range(array.shape[3])]
        n = self._visits.partial
        if listed is None:
            return ranges[:n], ranges[n:], lambda i: i
        listed_row = block if listed.shape[2] != 1 else 0
        return ranges[:n], ranges[n:], lambda i: tl.load(refs[1], (0, h, listed_row, i))

    def _found(self, block: Any) -> tuple[Any, Any]:
        if self.mask is None:
            whole = 0 if self._masked else self.other.length // self.other.size
            # A count that the compiler knows to be 1 makes it copy the body before the other loop
            # and hold the buffers of both.
            count = jnp.where(block >= 0, np.int32(self.other.count), np.int32(0))
            partial = [(whole, count)] if whole < self.other.count else []
            return partial, [(0, whole)] if whole else []
        mask = self.mask

        def found(block: Any) -> Any:
            own: Any = OneBlock(self.own.length, self.own.size, block)
            bounds = mask.bounds(own, self.other.length, self.axis)
            assert bounds is not None
            return parted(*tile_ranges(bounds, self.other), masked=self._masked)

        return lowerable(found)(block)


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
