"""A row block's walk over the tiles of its schedule, as each of its warpgroups finds it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flashjax.kernels import walk
from flashjax.kernels.hopper.replay import MOSAIC
from flashjax.kernels.visits import visits
from flashjax.masks import Blocks, Mask, schedule
from flashjax.masks.schedule import Pair
from flashjax.spec import Spec


class Walker(walk.Walker):
    """The walks of a call's row blocks."""

    def __init__(self, spec: Spec, mask: Mask | None, rows: Blocks, columns: Blocks) -> None:
        super().__init__(spec, mask, rows, columns, "rows", MOSAIC)
        # Whether the first tile of a walk may hide anything.
        self.masks_first = mask is not None or self.masked or columns.padded != columns.length
        self.lengths: np.ndarray[Any, Any] | None = None  # tiles of each block; arrays do not tell
        self.loops = True, True  # whether any walk has PARTIAL, or FULL, tiles after its first
        if not self.arrays:
            partial, full = self._counts()
            self.lengths = partial + full
            self.loops = bool((partial > 1).any()), bool((full > 0).any())

    def _counts(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """How many PARTIAL and how many FULL tiles each block visits."""
        if self.mask is None:
            whole = 0 if self.masked else self.other.length // self.other.size
            full = np.full(self.own.count, whole)
            return self.other.count - full, full
        with jax.ensure_compile_time_eval():
            found = visits(schedule(self.mask, self.own, self.other, "rows"), masked=self.masked)
            sizes = np.asarray(found.ranges[0, 0, ..., 1] - found.ranges[0, 0, ..., 0])
        sizes = np.broadcast_to(sizes, (self.own.count, sizes.shape[-1]))
        n = found.partial
        return sizes[:, :n].sum(1), sizes[:, n:].sum(1)

    def at(self, refs: Any, at: Any, block: Any) -> Walk:
        """The walk of one block of one batch member and head."""

        def read(i: int, index: tuple[Any, ...]) -> Any:
            return refs[i][tuple(jnp.int32(x) for x in index)]

        return Walk(*self.ranges(read, at, block), self.loops)


class Walk:
    """Tiles in the order in which they are taken: PARTIAL ones, then FULL ones.

    A block that sees nothing takes one tile, which hides everything.
    """

    def __init__(
        self,
        partial: list[Pair],
        full: list[Pair],
        tile: Callable[[Any], Any],
        loops: tuple[bool, bool],
    ) -> None:
        self._ranges, self._tile = [*partial, *full], tile
        sizes = (jnp.int32(end - begin) for begin, end in self._ranges)
        self._before = list(itertools.accumulate(sizes, initial=jnp.int32(0)))
        self._masked = self._before[len(partial)]
        self._kinds = bool(partial) and loops[0], bool(full) and loops[1]
        self.count = lax.max(self._before[-1], jnp.int32(1))

    def tile(self, step: Any) -> Any:
        """The tile's index among the column blocks."""
        found = self._ranges[0][0] + step
        for (begin, _), before in zip(self._ranges[1:], self._before[1:], strict=False):
            found = lax.select(step >= before, begin + step - before, found)
        return self._tile(found)

    def loops(self) -> list[tuple[bool, Any, Any]]:
        """(whether masked, begin, end) of the steps after the first."""
        partial, full = self._kinds
        middle = lax.max(self._masked, jnp.int32(1)) if partial else jnp.int32(1)
        found = [(True, jnp.int32(1), middle)] if partial else []
        return [*found, (False, middle, self.count)] if full else found
