"""What a mask answers, evaluated in numpy, and the same by brute force.

JAX would compile every operation anew for every drawn shape, seconds an example. So the masks'
code runs on numpy in the place of jax.numpy, in microseconds; `test_numpy.py` holds that JAX
computes the same.
"""

import contextlib
import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal
from unittest import mock

import jax
import numpy as np

from flashjax.masks import EMPTY, FULL, PARTIAL, Blocks, Mask, Schedule, schedule
from flashjax.structure import At, Blocked, Dims, is_blocked
from tests.laws.strategies import AXES, Array, Axis, Drawn, Grid

# What `schedule` gives; what it gives for long sequences, ranges where the mask has a closed form;
# what it gives from verdicts alone.
Form = Literal["chosen", "ranges", "lists"]
FORMS: tuple[Form, ...] = ("chosen", "ranges", "lists")
# By its name: the package's attribute `schedule` is the function.
SCHEDULE = importlib.import_module("flashjax.masks.schedule")


class _Numpy:
    """numpy as jax.numpy behaves without x64: integers become int32 and must fit."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def asarray(self, x: Any, dtype: Any = None) -> Array:
        array = np.asarray(x, dtype)
        if array.dtype == np.int64:
            if not np.array_equal(array, array.astype(np.int32)):
                raise OverflowError(f"{x} does not fit into int32")
            array = array.astype(np.int32)
        return array


class _Lax:
    def __getattr__(self, name: str) -> Any:
        return getattr(jax.lax, name)

    rem = staticmethod(np.fmod)

    def cummax(self, x: Array, axis: int) -> Array:
        return np.maximum.accumulate(x, axis)

    def cummin(self, x: Array, axis: int, reverse: bool) -> Array:
        assert reverse
        return np.flip(np.minimum.accumulate(np.flip(x, axis), axis), axis)


class _Jax:
    lax = _Lax()

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)

    def vmap(self, f: Callable[..., Array]) -> Callable[..., Array]:
        return lambda *args: np.stack([f(*row) for row in zip(*args, strict=True)])


MASKS = ("algebra", "array_terms", "bounds", "schedule", "terms")


@contextlib.contextmanager
def numpy_for_jax() -> Iterator[None]:
    """Lets the code of masks compute with numpy."""
    with contextlib.ExitStack() as stack:
        for name in ("structure", *(f"masks.{m}" for m in MASKS)):
            module = importlib.import_module(f"flashjax.{name}")
            stack.enter_context(mock.patch.object(module, "jnp", _Numpy()))
            if name != "structure":
                stack.enter_context(mock.patch.object(module, "jax", _Jax()))
        yield


def spread(leaf: Any, dims: Dims) -> Any:
    """A mask's aligned array over all elements."""
    if not isinstance(leaf, Blocked):
        return leaf
    row = np.arange(dims.rows)[:, None] // leaf.block_rows
    column = np.arange(dims.columns)[None, :] // leaf.block_columns
    return leaf.values[:, :, row, column]


def keep(mask: Mask, dims: Dims) -> Any:
    """Keep of an aligned mask at every element, (B|1, N|1, T, S)."""
    shape = (dims.rows, dims.columns)
    at = At(*np.indices(shape, np.int32))
    return jax.tree.map(lambda x: spread(x, dims), mask, is_leaf=is_blocked).keep(at)


def verdicts(dense: Array, grid: Grid) -> Array:
    """EMPTY, PARTIAL or FULL of every tile by brute force: (B, N, row blocks, column blocks)."""
    rows, columns = grid.row_blocks, grid.column_blocks
    pad = [(0, 0), (0, 0), (0, rows.padded - grid.rows), (0, columns.padded - grid.columns)]

    def tiled(fill: bool) -> Array:
        padded = np.pad(dense, pad, constant_values=fill)
        return padded.reshape(*padded.shape[:2], rows.count, rows.size, columns.count, columns.size)

    some, every = tiled(False).any((3, 5)), tiled(True).all((3, 5))
    return some.astype(np.int8) + every.astype(np.int8)


def hangs_over(blocks: Blocks) -> Array:
    """Which blocks reach beyond the end of the axis."""
    return np.asarray((np.arange(blocks.count) + 1) * blocks.size > blocks.length)


@dataclasses.dataclass(frozen=True)
class Walk:
    """A schedule read step by step, as a kernel reads it; arrays over (B, N, blocks)."""

    form: type[Schedule]
    count: Array
    tile: Array  # (…, steps)
    full: Array  # (…, steps)
    tiles: int  # of the walked axis

    @property
    def taken(self) -> Array:
        return np.asarray(np.arange(self.tile.shape[-1]) < self.count[..., None])

    @property
    def visits(self) -> Array:
        """How often each tile is visited, (B, N, blocks, tiles)."""
        return self._marked(self.taken)

    @property
    def marked_full(self) -> Array:
        return self._marked(self.taken & self.full) > 0

    def _marked(self, which: Array) -> Array:
        one_hot = self.tile[..., None] == np.arange(self.tiles)
        return np.asarray((one_hot & which[..., None]).sum(-2))


def read(walk: Schedule, own: Blocks, other: Blocks, lead: tuple[int, int]) -> Walk:
    assert np.ndim(walk.count) == 3, "a schedule has a dimension for batch, heads and blocks"
    steps = [walk.step(index) for index in range(other.count)]

    def over(x: Any, *rest: int) -> Array:
        return np.broadcast_to(x, (*lead, own.count, *rest))

    tile, full = (np.stack([np.asarray(x) for x in xs], -1) for xs in zip(*steps, strict=True))
    n = other.count
    return Walk(type(walk), over(walk.count), over(tile, n), over(full, n), n)


class _WithoutBounds(Mask):
    """A mask of which only the verdict is known."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask

    def verdict(self, rows: Blocks, columns: Blocks) -> Any:
        return self.mask.verdict(rows, columns)


class Answers:
    """What a drawn mask answers, over (B, N, …)."""

    def __init__(self, drawn: Drawn) -> None:
        self.grid = drawn.grid
        with numpy_for_jax():
            self.mask = drawn.mask.aligned(drawn.grid.dims)

    @functools.cached_property
    def keep(self) -> Array:
        with numpy_for_jax():
            return np.broadcast_to(keep(self.mask, self.grid.dims), self.grid.logits)

    @functools.cached_property
    def verdict(self) -> Array:
        rows, columns = self.grid.row_blocks, self.grid.column_blocks
        with numpy_for_jax():
            verdict = self.mask.verdict(rows, columns)
        return np.broadcast_to(verdict, (*self.grid.logits[:2], rows.count, columns.count))

    def walk(self, axis: Axis, form: Form = "chosen") -> Walk:
        rows, columns = self.grid.row_blocks, self.grid.column_blocks
        mask = _WithoutBounds(self.mask) if form == "lists" else self.mask
        limit = -1 if form == "ranges" else SCHEDULE.LIST_LIMIT
        with numpy_for_jax(), mock.patch.object(SCHEDULE, "LIST_LIMIT", limit):
            return read(
                schedule(mask, rows, columns, axis), *self.grid.along(axis), self.grid.logits[:2]
            )


def truth_along(axis: Axis, drawn: Drawn) -> tuple[Array, Array]:
    """By brute force, (B, N, blocks, tiles): tiles that hold something; tiles that may be FULL."""
    verdict = verdicts(drawn.dense, drawn.grid)
    verdict = verdict if axis == "rows" else verdict.swapaxes(-1, -2)
    _, walked = drawn.grid.along(axis)
    return verdict != EMPTY, (verdict == FULL) & ~hangs_over(walked)


def hold_meaning(answers: Answers, drawn: Drawn) -> None:
    """keep is the definition, and the verdict promises no more than that."""
    np.testing.assert_array_equal(answers.keep, drawn.dense)
    truth = verdicts(drawn.dense, drawn.grid)
    assert np.isin(answers.verdict, (EMPTY, PARTIAL, FULL)).all()
    assert (truth[answers.verdict == EMPTY] == EMPTY).all(), "EMPTY, but an element is kept"
    assert (truth[answers.verdict == FULL] == FULL).all(), "FULL, but an element is hidden"


def hold_schedules(answers: Answers, drawn: Drawn) -> None:
    """Every tile that holds something is visited once, in order; FULL ones hold everything."""
    for axis, form in itertools.product(AXES, FORMS):
        walk, where = answers.walk(axis, form), f"axis={axis}, {form}: "
        some, may_be_full = truth_along(axis, drawn)
        assert (walk.count <= walk.tiles).all(), where + "more steps than tiles"
        assert (walk.visits <= 1).all(), where + "a tile comes twice"
        assert (walk.visits[some] == 1).all(), where + "a tile is missed"
        assert (walk.visits.sum(-1) == walk.count).all(), where + "a tile that does not exist"
        assert not (walk.marked_full & ~may_be_full).any(), where + "FULL, with something hidden"
        steps = np.where(walk.taken, walk.tile, np.arange(walk.tiles) + walk.tiles)
        assert (np.diff(steps, axis=-1) > 0).all(), where + "out of order"
