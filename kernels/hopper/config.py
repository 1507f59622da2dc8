"""Configurations of the Hopper kernel, and which of them fit a call."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flashjax import backend
from flashjax.kernels.hopper.shares import WORTH
from flashjax.kernels.hopper.walk import visited
from flashjax.masks import Blocks
from flashjax.masks.schedule import hides
from flashjax.spec import Spec
from flashjax.structure import is_blocked

CAPABILITIES = ("9.0",)
CLUSTER = "cluster"  # the axis of the programs that take an item together
SHARED_MEMORY = 227 * 1024  # that one program can have
ALIGNMENT = 1024
ROWS = 64  # of a warpgroup: wgmma's M
HEAD_DIMS = (64, 96, 128, 192, 256)  # as the tiles in shared memory have them
# Products take 8 rows together. TMA does not clip rows that come in eights, so their number in an
# array has to be a multiple of this, or less.
TOGETHER = 8
TMA_ELEMENTS = 8  # of 16 bits: rows in global memory are whole 16 bytes
# Registers of a consumer's and of the producer's thread, by consumers; one consumer keeps what it
# was launched with.
REGISTERS = {2: (240, 24), 3: (160, 32)}
# Multiprocessors: of an H100 SXM, H100 NVL, H200 and GH200, and by the ends of other names.
PROGRAMS = 132
OTHER_PROGRAMS = {"PCIe": 114, "H20": 78}


@dataclasses.dataclass(frozen=True)
class ForwardConfig(backend.Config):
    """`rows` are 64 for each consumer warpgroup.

    `programs`: 0 for one an item (a block of rows of a head), else so many that share them out.
    `ahead`: a program's items overlap, with memory for the queries of two. `cluster`: programs that
    take an item together and send each other their part of its keys and values: each has a head of
    a group, or else `rows` of the item's.
    """

    stages: int
    query_in_registers: bool
    programs: int
    ahead: bool = False
    cluster: int = 1

    @property
    def consumers(self) -> int:
        return self.rows // ROWS

    @property
    def queries(self) -> int:
        """Items whose queries there is memory for."""
        return 2 if self.ahead else 1

    def __str__(self) -> str:
        query = ", Q in registers" if self.query_in_registers else ""
        programs = f", {self.programs} programs" if self.programs else ""
        ahead = ", ahead" if self.ahead else ""
        together = f", {self.cluster} together" if self.cluster > 1 else ""
        stages = f", {self.stages} stages"
        return f"{super().__str__()}{stages}{query}{programs}{ahead}{together}"


def padded_head_dim(dim: int) -> int:
    """The head dim of tiles in shared memory; what is more than the array has is 0."""
    return next(size for size in HEAD_DIMS if dim <= size)


def held_head_dim(dim: int) -> int:
    """The head dim of arrays in global memory: TMA fills tiles up to 64, from whole 16 bytes."""
    return dim if dim < HEAD_DIMS[0] and dim % TMA_ELEMENTS == 0 else padded_head_dim(dim)


def swizzle_elements(*sizes: int, itemsize: int = 2) -> int:
    """How many elements wide the swizzled tiles are that make up these sizes."""
    wides = (swizzle // itemsize for swizzle in (128, 64, 32))
    return next(wide for wide in wides if all(size % wide == 0 for size in sizes))


def ragged(spec: Spec) -> bool:
    """Whether rows or columns cannot be copied in eights."""
    return any(size > TOGETHER and size % TOGETHER for size in (spec.rows, spec.columns))


def guards(spec: Spec) -> bool:
    """Whether columns that no row sees, perhaps NaN, can lie in a tile that is visited."""
    _, columns = hides(spec.shapes.mask, spec.rows, spec.columns)
    return columns or spec.shapes.bias is not None


def reduction_scratch(spec: Spec) -> int:
    """Bytes by which warps add up along columns; along rows each warp is by itself."""
    return 2048 if guards(spec) else 0


def is_matrix(operand: Any) -> bool:
    """Whether it has rows and columns of its own, such as a bias may, and not in blocks."""
    return not is_blocked(operand) and operand.shape[2] != 1 and operand.shape[3] != 1


def staged(spec: Spec, config: ForwardConfig) -> dict[int, int]:
    """Which operands come through shared memory, and the bytes of their elements.

    Those with rows and columns, counted as `Scorer` does; none if all do not fit.
    """
    rest = dataclasses.replace(spec.shapes, query=None, key=None, value=None)
    leaves = jax.tree.leaves(rest, is_leaf=is_blocked)
    found = {i: jnp.dtype(x.dtype).itemsize for i, x in enumerate(leaves) if is_matrix(x)}
    tile = config.rows * config.columns
    taken = _bytes(spec, config, separate=apart(spec, config)) + tile * sum(found.values())
    return found if not config.programs and taken <= SHARED_MEMORY else {}


def apart(spec: Spec, config: ForwardConfig) -> bool:
    """Whether O leaves through shared memory of its own, not through that of Q.

    With one item a program, Q is done with by then.
    """
    if padded_head_dim(spec.value_dim) != padded_head_dim(spec.head_dim):
        return True
    return bool(config.programs) and _bytes(spec, config, separate=True) <= SHARED_MEMORY


def shared_memory(spec: Spec, config: ForwardConfig) -> int:
    """Bytes that one program takes."""
    tile = config.rows * config.columns
    operands = tile * sum(staged(spec, config).values())
    return _bytes(spec, config, separate=apart(spec, config)) + operands


def _bytes(spec: Spec, config: ForwardConfig, *, separate: bool) -> int:
    head, value = padded_head_dim(spec.head_dim), padded_head_dim(spec.value_dim)
    rows, columns = config.rows, config.columns
    item = jnp.dtype(spec.dtype).itemsize
    parts = [
        rows * head * item * config.queries,
        config.stages * columns * head * item,
        config.stages * columns * value * item,
        rows * value * item * separate,
        4 * rows,
        4 * columns * config.consumers * guards(spec),
        reduction_scratch(spec),
        ALIGNMENT,  # barriers
    ]
    return sum(-(-part // ALIGNMENT) * ALIGNMENT for part in parts)


class Tiles(NamedTuple):
    """What is offered up to a head dim; `plain`: without mask, bias and score modifier alone.

    With those, wide tiles take more registers than there are.
    """

    rows: int
    columns: int
    stages: int
    plain: bool = False


# By the larger of the padded head dims, best first.
FORWARD: dict[int, tuple[Tiles, ...]] = {
    64: (
        Tiles(192, 128, 2), Tiles(128, 128, 2), Tiles(128, 192, 2, plain=True), Tiles(128, 64, 3),
    ),
    96: (Tiles(128, 128, 2), Tiles(128, 192, 2, plain=True), Tiles(128, 64, 3)),
    128: (Tiles(128, 128, 2), Tiles(128, 64, 3)),
    192: (Tiles(128, 96, 2, plain=True), Tiles(128, 64, 3), Tiles(128, 64, 2)),
    256: (Tiles(128, 64, 2),),
}  # fmt: skip

# Keys and values of heads beside one another, in bytes, and the most heads, as measured. Under a
# mask more of them share the long and the short walks out better.
BESIDE, BESIDE_MASKED, MOST_HEADS = 4 * 2**20, 16 * 2**20, 16
# A walk of more tiles than this gains nothing from an item that begins before it ends.
LONG = 24
# Programs work in pairs at these padded head dims, where walks are of more tiles than this. With an
# odd number of blocks one of them has no rows, which so many blocks hide.
PAIRED, PAIRS_FROM, BLOCKS_TO_HIDE_ONE = (128, 192), 12, 32


def within_blocks(spec: Spec, rows: int, columns: int) -> bool:
    """Whether a consumer's tiles of such sizes lie within the blocks of operands that have some."""
    leaves = jax.tree.leaves(spec.shapes.mask, is_leaf=is_blocked)
    return all(
        x.block_rows % rows == 0 and x.block_columns % columns == 0 for x in leaves if is_blocked(x)
    )


def _narrowed(spec: Spec, columns: int) -> bool:
    """Whether so many columns make V's swizzle narrower than its head dim would."""
    value = padded_head_dim(spec.value_dim)
    return swizzle_elements(value, columns) != swizzle_elements(value)


def heads_beside(spec: Spec) -> int:
    """How many heads' items lie beside one another: whole groups, a power of 2 of them."""
    masked = spec.shapes.mask is not None and spec.group == 1
    return spec.group * groups_beside(spec, spec.columns, masked=masked)


def groups_beside(spec: Spec, shared: int, *, masked: bool) -> int:
    """How many key heads lie beside one another, of each of which so many rows are shared in L2."""
    row = (spec.head_dim + spec.value_dim) * jnp.dtype(spec.dtype).itemsize
    fit = (BESIDE_MASKED if masked else BESIDE) // max(1, shared * row)
    fit = max(1, min(MOST_HEADS // spec.group, fit))
    return math.gcd(1 << (fit.bit_length() - 1), spec.batch * spec.key_heads)


def gain_of_parts(spec: Spec, config: ForwardConfig) -> float:
    """The share of a call's time that cutting its walks has to save."""
    if spec.dtype == jnp.float16 and spec.dropout_rate:
        return math.inf  # dropout may divide what float16 holds of a part beyond it
    return 0.05 if config.ahead else 0.0  # items that overlap lose by the larger code


def heads_together(spec: Spec, config: ForwardConfig) -> int:
    """How many heads the programs of a cluster have."""
    return config.cluster if spec.group % config.cluster == 0 else 1


def _mean_walk(mask: Any, rows: Blocks, columns: Blocks) -> float:
    """Tiles that a block of rows visits on average; all of them, where only arrays tell."""
    if jax.tree.leaves(mask):
        return columns.count
    partial, full = visited(mask, rows, columns, "rows", masked=False)
    return float(np.mean(partial + full))


class Way(NamedTuple):
    """How programs share the items, as in `ForwardConfig`."""

    programs: int = 0
    ahead: bool = False
    cluster: int = 1
    query_in_registers: bool = False


def _ways(spec: Spec, tiles: Tiles, kind: str) -> list[Way]:
    """Best first."""
    programs = next((n for end, n in OTHER_PROGRAMS.items() if kind.endswith(end)), PROGRAMS)
    alone, shared, overlapping = Way(), Way(programs), Way(programs, ahead=True)
    rows, columns = Blocks(spec.rows, tiles.rows), Blocks(spec.columns, tiles.columns)
    tiles_a_walk = _mean_walk(spec.shapes.mask, rows, columns)
    known = not jax.tree.leaves(spec.shapes.mask)
    if guards(spec):
        return [alone]
    if rows.count * spec.batch * spec.heads <= programs:
        return [shared, alone] if known and tiles_a_walk > 2 * WORTH else [alone]
    largest = padded_head_dim(max(spec.head_dim, spec.value_dim))
    if largest == HEAD_DIMS[-1]:  # no memory for the queries of two items
        return [alone, shared]
    long = spec.head_dim > 64 and tiles_a_walk > LONG
    ways = [shared, overlapping, alone] if long else [overlapping, shared, alone]
    grouped = spec.group % 2 == 0
    even = grouped or rows.count % 2 == 0 or rows.count > BLOCKS_TO_HIDE_ONE
    if largest in PAIRED and tiles_a_walk > PAIRS_FROM and even and known:
        room = spec.shapes.score is None and not spec.dropout_rate  # of registers
        pair = Way(programs, cluster=2, query_in_registers=grouped and room)
        # A modifier wants the multiply-adds of one item beside the products of another.
        return [pair, *ways] if spec.shapes.score is None else [ways[0], pair, *ways[1:]]
    return ways


def forward_configs(spec: Spec, kind: str) -> tuple[ForwardConfig, ...]:
    """What fits, best first."""
    largest = padded_head_dim(max(spec.head_dim, spec.value_dim))
    shapes, guarded = spec.shapes, guards(spec)
    plain = shapes.mask is None and shapes.bias is None and shapes.score is None
    found = []
    for tiles in FORWARD[largest]:
        # The slow walk takes a slot of the buffers for each consumer, and 64 columns at a time.
        walks = tiles.stages >= tiles.rows // ROWS and tiles.columns % ROWS == 0
        if (tiles.plain and not plain) or (guarded and not walks):
            continue
        if not within_blocks(spec, ROWS, tiles.columns):
            continue
        if ragged(spec) and _narrowed(spec, tiles.columns):  # O has the parts of V
            continue
        for way in _ways(spec, tiles, kind):
            config = ForwardConfig(tiles.rows, tiles.columns, tiles.stages, **way._asdict())
            if shared_memory(spec, config) <= SHARED_MEMORY:
                found.append(config)
    return tuple(sorted(found, key=lambda config: not staged(spec, config)))
