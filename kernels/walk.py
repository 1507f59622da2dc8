"""The tiles that a block visits, found by its kernel or read from its schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flashjax.kernels.replay import Lowering
from flashjax.kernels.visits import Visits, parted, visits
from flashjax.masks import Blocks, Mask, schedule
from flashjax.masks.bounds import Axis
from flashjax.masks.schedule import Pair, tile_ranges
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
    """The tiles that each block of `axis` visits.

    A mask without arrays, in closed form, costs no memory and no launch: each program finds its
    tiles by itself. Otherwise it reads them.
    """

    def __init__(
        self,
        spec: Spec,
        mask: Mask | None,
        rows: Blocks,
        columns: Blocks,
        axis: Axis,
        lowering: Lowering,
    ) -> None:
        self.own, self.other = (rows, columns) if axis == "rows" else (columns, rows)
        self.axis, self.mask, self._lowering = axis, mask, lowering
        # Any element of a bias may be −inf: every tile then evaluates its element mask.
        self.masked = spec.shapes.bias is not None
        self._visits: Visits | None = None
        self.arrays: list[jax.Array] = []
        if mask is not None and not self._closed(mask):
            self._visits = visits(schedule(mask, rows, columns, axis), masked=self.masked)
            found = [self._visits.ranges, self._visits.tiles]
            self.arrays = [x for x in found if x is not None]

    def _closed(self, mask: Mask) -> bool:
        if jax.tree.leaves(mask):
            return False
        bounds = mask.bounds(self.own, self.other.length, self.axis)
        return bounds is not None and bounds.exact

    def block(self, program: Any) -> Any:
        """The block that a program takes, such that under Causal the longest walks come first."""
        return self.own.count - 1 - program if self.axis == "rows" else program

    def ranges(
        self, read: Callable[[int, tuple[Any, ...]], Any], at: Any, block: Any
    ) -> tuple[list[Pair], list[Pair], Callable[[Any], Any]]:
        """Ranges of PARTIAL and FULL tiles, and from what they count to the tile's index.

        ``read(i, index)`` gives an element of ``arrays[i]``, `at` is batch member and head.
        """
        if self._visits is None:
            return *self._found(block), lambda i: i

        def element(which: int, *rest: Any) -> Any:
            shape = self.arrays[which].shape
            lead = (i if n != 1 else 0 for i, n in zip((*at, block), shape, strict=False))
            return read(which, (*lead, *rest))

        count, n = self._visits.ranges.shape[3], self._visits.partial
        pairs = [(element(0, i, 0), element(0, i, 1)) for i in range(count)]
        tile = (lambda i: i) if self._visits.tiles is None else (lambda i: element(1, i))
        return pairs[:n], pairs[n:], tile

    def _found(self, block: Any) -> tuple[list[Pair], list[Pair]]:
        if self.mask is None:
            whole = 0 if self.masked else self.other.length // self.other.size
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
            return parted(*tile_ranges(bounds, self.other), masked=self.masked)

        found_ranges: tuple[list[Pair], list[Pair]] = self._lowering.lowerable(found)(block)
        return found_ranges
