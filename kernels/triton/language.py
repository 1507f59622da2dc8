"""All contact with Pallas's Triton lowering: the only module of flashjax that names its API.

JAX has marked this lowering deprecated since 0.11 (docs/design.md, "When JAX drops the Triton
lowering", says what happens then). Its warning comes where XLA lowers a program, out of reach of
any context manager of ours, so that one message is silenced for the process, at every trace: test
runners put the filters back in between.
"""

from __future__ import annotations

import dataclasses
import math
import struct
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.sharding import ManualAxisType

from flashjax.kernels.softmax import Exp2
from flashjax.varying import cast_varying

LEAST = 16  # Triton's products want at least 16 in every dimension
IndexMap = Callable[..., tuple[Any, ...]]


class Grid(NamedTuple):
    """A program for each block of each head of each batch member, in this order.

    In one dimension, since CUDA's second and third end at 65535 programs.
    """

    blocks: int
    heads: int
    batches: int

    def place(self, program: Any) -> tuple[Any, Any, Any]:
        """Block, head and batch member of a program."""
        blocks, heads = jnp.int32(self.blocks), jnp.int32(self.heads)
        member = lax.div(program, blocks)
        return lax.rem(program, blocks), lax.rem(member, heads), lax.div(member, heads)


@dataclasses.dataclass(frozen=True)
class Block:
    """One array of a kernel and the block of it that a program sees; None takes one index away.

    ``index`` gives the block's place from the program's grid position; the dims that it does not
    tell apart are whole.
    """

    array: Any  # an array, or the ShapeDtypeStruct of an output
    shape: tuple[int | None, ...]
    index: IndexMap

    def spec(self, grid: Grid) -> pl.BlockSpec:
        return pl.BlockSpec(self.shape, lambda program: self.index(*grid.place(program)))


def broadcast_block(array: Any, heads: int, batches: int) -> Block:
    """A block of an array (B|1, N|1, …): so many members and heads of it, or the one it has."""
    b, n = array.shape[:2]
    shape = (1 if b == 1 else batches, 1 if n == 1 else heads, *array.shape[2:])
    rest = (0,) * (len(array.shape) - 2)

    def index(_: Any, head: Any, batch: Any) -> tuple[Any, ...]:
        return (0 if b == 1 else batch, 0 if n == 1 else head, *rest)

    return Block(array, shape, index)


def silence() -> None:
    warnings.filterwarnings(
        "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
    )


def launch(
    kernel: Callable[..., None],
    name: str,
    grid: Grid,
    inputs: Sequence[Block],
    outputs: Sequence[Block],
    *,
    warps: int,
    stages: int,
    axes: frozenset[str],
    interpret: bool,
) -> list[jax.Array]:
    """Runs ``kernel(position, *input refs, *output refs)`` on a grid: see :meth:`Grid.place`."""
    silence()
    varying: dict[str, Any] = {"manual_axis_type": ManualAxisType(varying=axes)} if axes else {}
    shapes = [jax.ShapeDtypeStruct(out.array.shape, out.array.dtype, **varying) for out in outputs]
    call = pl.pallas_call(
        lambda *refs: kernel(grid.place(pl.program_id(0)), *refs),
        out_shape=shapes,
        grid=(math.prod(grid),),
        in_specs=[x.spec(grid) for x in inputs],
        out_specs=[x.spec(grid) for x in outputs],
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )
    found: list[jax.Array] = call(*cast_varying([x.array for x in inputs], axes))
    return found


def load(ref: Any, index: tuple[Any, ...], mask: jax.Array | None = None) -> jax.Array:
    """Values at `index`; 0 where `mask` is False."""
    index = _traced(index)
    if mask is None:
        return plt.load(ref.at[index])
    other = False if ref.dtype == jnp.bool_ else jnp.zeros((), ref.dtype)
    return plt.load(ref.at[index], mask=mask, other=other)


def store(ref: Any, index: tuple[Any, ...], value: jax.Array, mask: jax.Array | None) -> None:
    plt.store(ref.at[_traced(index)], value.astype(ref.dtype), mask=mask)


def _traced(index: tuple[Any, ...]) -> tuple[Any, ...]:
    """JAX 0.12's interpreter wants arrays for numbers in an index."""
    return tuple(jnp.int32(i) if isinstance(i, int) else i for i in index)


def span(start: Any, size: int) -> Any:
    return pl.ds(start, size)


def power_of_two(n: int) -> int:
    return max(LEAST, 1 << (n - 1).bit_length())


def parts_of(dim: int) -> tuple[int, ...]:
    """Powers of two that cover a head dim: one, or two where that wastes less.

    96 is 64 + 32 and not 128: every array in a Triton kernel has a power of two of elements.
    """
    whole = power_of_two(dim)
    half = whole // 2
    if half < LEAST or dim <= half:
        return (whole,)
    rest = power_of_two(dim - half)
    return (whole,) if rest >= half else (half, rest)


def dot(a: jax.Array, b: jax.Array, precision: Any) -> jax.Array:
    """a @ b with a float32 sum."""
    return lax.dot_general(
        a,
        b,
        (((1,), (0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def exp2_of(*, interpret: bool) -> Exp2:
    """2^(x · unit − shift) in two instructions, with results below 2⁻¹²⁶ as 0.

    The compiler does not contract a product and a difference, and libdevice's exp2 takes four
    instructions, three of them for results that small.
    """
    if interpret:
        return lambda x, unit, shift: jnp.exp2(x * unit - (0.0 if shift is None else shift))

    def exp2(x: jax.Array, unit: float, shift: jax.Array | None) -> jax.Array:
        less = jnp.float32(0) if shift is None else -shift
        factor = struct.pack(">f", unit).hex()
        (found,) = plt.elementwise_inline_asm(
            "{ .reg .f32 power; "
            f"fma.rn.f32 power, $1, 0f{factor}, $2; "
            "ex2.approx.ftz.f32 $0, power; }",
            args=[x, jnp.broadcast_to(less, x.shape)],
            constraints="=f,f,f",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
        )
        return found

    return exp2


def precision_of(dtype: Any, precision: Any, *, interpret: bool) -> Any:
    """What a product of this dtype is asked for; only float32 has a choice.

    "highest" takes three TF32 products on the tensor cores: as near to float32 as float32's own
    sums are (docs/kernel-notes.md, "float32").
    """
    if dtype != jnp.float32:
        return None
    if precision == lax.Precision.HIGHEST and not interpret:
        return lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return precision


def addressable(x: jax.Array) -> jax.Array:
    """`x` in a form whose every element Triton's lowering can address.

    It counts elements in 32 signed bits unless the array has more than 2³² bytes; an array of
    bytes can have more elements than that counts without being so large.
    """
    if x.dtype.itemsize == 1 and 2**31 <= x.size <= 2**32:
        return x.astype(jnp.int16)
    return x
