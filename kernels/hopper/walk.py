"""A block's walk over the tiles of its schedule, as each of its warpgroups finds it."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flashjax.kernels import walk
from flashjax.kernels.hopper.replay import MOSAIC
from flashjax.kernels.visits import Visits, visits
from flashjax.masks import Blocks, Mask, schedule
from flashjax.masks.bounds import Axis
from flashjax.masks.schedule import Pair
from flashjax.spec import Spec


@functools.lru_cache(maxsize=1024)
def visited(
    mask: Mask | None, rows: Blocks, columns: Blocks, axis: Axis, *, masked: bool
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """How many PARTIAL and FULL tiles each block of `axis` visits; `mask` has no arrays."""
    own, other = (rows, columns) if axis == "rows" else (columns, rows)
    if mask is None:
        full = np.full(own.count, 0 if masked else other.length // other.size)
        return other.count - full, full

    @jax.jit
    def ranges() -> Visits:
        return visits(schedule(mask, rows, columns, axis), masked=masked)

    # A thread of its own knows of no trace and no mesh: there it is one small program, while
    # `jax.ensure_compile_time_eval` compiles each of its operations.
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(lambda: jax.device_get(ranges())).result()
    sizes = found.ranges[0, 0]
    sizes = np.broadcast_to(sizes[..., 1] - sizes[..., 0], (own.count, sizes.shape[-2]))
    return sizes[:, : found.partial].sum(1), sizes[:, found.partial :].sum(1)


class Walker(walk.Walker):
    """The walks of a call's blocks.

    Those of rows begin with a step of its own.
    """

    def __init__(
        self,
        spec: Spec,
        mask: Mask | None,
        rows: Blocks,
        columns: Blocks,
        axis: Axis = "rows",
    ) -> None:
        super().__init__(spec, mask, rows, columns, axis, MOSAIC)
        first = axis == "rows"
        # What hangs over the end of a block of columns must not enter dQ: FULL tiles count as
        # PARTIAL there.
        self.edge = not first and self.own.padded != self.own.length
        # Whether the first tile of a walk may hide anything.
        self.masks_first = mask is not None or self.masked or columns.padded != columns.length
        self.lengths: np.ndarray[Any, Any] | None = None  # tiles of each block; arrays do not tell
        self.loops = True, True  # whether a walk has PARTIAL, or FULL, tiles after that step
        if not self.arrays:
            partial, full = visited(mask, rows, columns, axis, masked=self.masked)
            self.lengths = partial + full
            self.loops = bool((partial > first).any()), bool((full > 0).any())

    def at(self, refs: Any, at: Any, block: Any) -> Walk:
        """The walk of one block of one batch member and head."""

        def read(i: int, index: tuple[Any, ...]) -> Any:
            return refs[i][tuple(jnp.int32(x) for x in index)]

        edge = block == self.own.count - 1 if self.edge else None
        return Walk(*self.ranges(read, at, block), self.loops, edge)


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
        edge: Any,
    ) -> None:
        self._ranges, self._tile = [*partial, *full], tile
        sizes = (jnp.int32(end - begin) for begin, end in self._ranges)
        self._before = list(itertools.accumulate(sizes, initial=jnp.int32(0)))
        self._partial = len(partial)
        self._masked = self._before[self._partial]
        self._kinds = bool(partial) and loops[0], bool(full) and loops[1]
        self._edge, self._descends = edge, False
        self.total = self._before[-1]
        self.count = lax.max(self.total, jnp.int32(1))

    def part(self, begin: Any, count: Any) -> Walk:
        """The walk from its tile `begin` on, `count` tiles at most."""
        found = copy.copy(self)
        found._before = [before - begin for before in self._before]
        found.count = lax.min(self.count - begin, count)
        found._masked = lax.min(self._masked - begin, found.count)
        return found

    def descending(self) -> Walk:
        """The walk from its last tile to its first."""
        found = copy.copy(self)
        found._descends = True
        return found

    def tile(self, step: Any, masked: bool | None = None) -> Any:
        """The tile's index among the other axis's blocks, in a loop of `all_loops` if so told."""
        if self._descends:
            step = self.count - 1 - step
        first, end = 0, len(self._ranges)
        if masked is False:
            first = self._partial
        elif masked and self._edge is None:
            end = self._partial
        own = list(zip(self._ranges, self._before, strict=False))[first:end]
        found = own[0][0][0] + step - own[0][1]
        for (begin, _), before in own[1:]:
            found = lax.select(step >= before, begin + step - before, found)
        return self._tile(found)

    def loops(self) -> list[tuple[bool, Any, Any]]:
        """(whether masked, begin, end) of the steps after the first."""
        partial, full = self._kinds
        middle = lax.max(self._masked, jnp.int32(1)) if partial else jnp.int32(1)
        found = [(True, jnp.int32(1), middle)] if partial else []
        return [*found, (False, middle, self.count)] if full else found

    def all_loops(self) -> list[tuple[bool, Any, Any]]:
        """The same for all steps, of which there may be none; all masked at an `edge`."""
        partial, full = self._kinds
        middle = self._masked
        if self._edge is not None:
            partial, middle = True, lax.select(self._edge, self.total, middle)
        found = [(True, jnp.int32(0), middle)] if partial else []
        found += [(False, middle, self.total)] if full else []
        if self._descends:
            found = [(x, self.total - end, self.total - begin) for x, begin, end in found[::-1]]
        return found

    def one_loop(self) -> list[tuple[Any, Any, Any]]:
        """The same as one loop: where it has tiles of both kinds, a function of the step tells."""
        found = self.all_loops()
        if len(found) < 2:
            return found
        (first_masked, _, turn), _ = found
        masked = (lambda t: t < turn) if first_masked else (lambda t: t >= turn)
        return [(masked, jnp.int32(0), self.total)]
