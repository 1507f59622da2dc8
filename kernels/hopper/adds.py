"""Sums of dQ in global memory, to which programs add from registers.

They lie as tiles do in a warpgroup's registers: of 64 rows and 16 head dims 1024 float32 are one
piece, of which each thread has twice four neighbours. Thus nothing goes through shared memory, and
nothing waits for it. A kernel of its own writes the zeros, and another makes dQ of the sums.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from flashjax.kernels.hopper.backward_refs import Call
from flashjax.kernels.hopper.config import ROWS, held_head_dim
from flashjax.kernels.hopper.layouts import SCALAR, TILE

DIMS = 16  # of a piece
PIECE = ROWS * DIMS
# Of four floats at a place in bytes, constant but for the thread's own.
ADD = "red.relaxed.gpu.global.add.v4.f32 [$0 + {place}], {{$1, $2, $3, $4}};"
STORE = "st.global.v4.f32 [$0 + {place}], {{$1, $2, $3, $4}};"
LOAD = "ld.global.v4.f32 {{$0, $1, $2, $3}}, [$4 + {place}];"

At = tuple[Any, Any, Any]  # batch member, head and block of 64 rows


def shape(call: Call) -> tuple[int, ...]:
    """(B, N, blocks of 64 rows, pieces, 1024)."""
    spec, rows = call.spec, call.walker.other.padded
    return spec.batch, spec.heads, rows // ROWS, call.buffers.k.dim // DIMS, PIECE


def place(call: Call) -> At:
    """What a program writes or reads."""
    _, heads, slabs, *_ = (jnp.int32(x) for x in shape(call))
    member = lax.div(lax.axis_index("program"), slabs)
    slab = lax.rem(lax.axis_index("program"), slabs)
    return lax.div(member, heads), lax.rem(member, heads), slab


def start(call: Call) -> jax.Array:
    """Zeros."""
    batch, heads, slabs, pieces, _ = shape(call)

    def kernel(there: Any) -> None:
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, pieces * DIMS), jnp.float32), TILE)
        store_tile(there, place(call), 0, zeros)

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(shape(call), jnp.float32),
        grid=(batch * heads * slabs,),
        grid_names=("program",),
        interpret=call.interpret,
        kernel_name="flashjax_zeros",
    )
    found: jax.Array = run()
    return found


def finish(call: Call, sums: jax.Array) -> jax.Array:
    """(B, T, N, H), scaled and in the call's dtype; as many head dims as there are in memory."""
    spec = call.spec
    batch, heads, slabs, *_ = sums.shape
    buffer = dataclasses.replace(call.buffers.q, count=1, rows=ROWS, part=None)
    factor = spec.scale if call.scorer.folded else None

    def kernel(sums: Any, out: Any, memory: Any) -> None:
        (b, n, slab), tiles = place(call), buffer.of(memory)
        # All are under way before the first is awaited.
        found, begin = [], 0
        for width in buffer.widths:
            found.append(load_tile(sums, (b, n, slab), begin, width))
            begin += width
        for x, part in zip(found, tiles.parts(0), strict=True):
            part[...] = (x if factor is None else x * factor).astype(spec.dtype)
        plgpu.commit_smem()
        rows = pl.ds(slab * ROWS, ROWS)
        for dims, part in tiles.copies(0, call.head_dims):
            plgpu.copy_smem_to_gmem(part, out.at[b, rows, n, dims])
        plgpu.wait_smem_to_gmem(0)

    held = held_head_dim(spec.head_dim)
    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((batch, spec.rows, heads, held), spec.dtype),
        scratch_types=[buffer.scratch()],
        grid=(batch * heads * slabs,),
        grid_names=("program",),
        interpret=call.interpret,
        kernel_name="flashjax_query_gradient",
    )
    out: jax.Array = run(sums)
    return out


def add_tile(sums: Any, at: At, first: int, tile: jax.Array) -> None:
    """Adds a tile of 64 rows and the head dims from `first` on."""
    _to_pieces(ADD, "add_tile", sums, at, first, tile)


def store_tile(sums: Any, at: At, first: int, tile: jax.Array) -> None:
    _to_pieces(STORE, "store_tile", sums, at, first, tile)


def _to_pieces(assembly: str, name: str, sums: Any, at: At, first: int, tile: jax.Array) -> None:
    def run(_: Any, sums: Any, index: Any, tile: Any) -> None:
        nothing, begin = ir.Type.parse("!llvm.void"), _of_thread(sums, index, first)
        for place, four in zip(_places(tile.shape), tile.registers.reshape(-1, 2, 2), strict=True):
            for half in range(2):
                floats = [vector.extract(x, [], [i]) for x in four[:, half] for i in range(2)]
                words = assembly.format(place=place + half * PIECE * 2)
                llvm.inline_asm(
                    nothing, [begin, *floats], words, "l,f,f,f,f,~{memory}", has_side_effects=True
                )

    run.__name__ = f"{name} {first}"  # by which the tests' interpreter knows it
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, TILE))(run)(sums, _index(sums, at), tile)


def load_tile(sums: Any, at: At, first: int, dims: int) -> jax.Array:
    """A tile of 64 rows and `dims` head dims from `first` on."""
    shape = ROWS, dims

    def run(_: Any, sums: Any, index: Any) -> Any:
        f32 = ir.F32Type.get()
        four = llvm.StructType.get_literal([f32] * 4)
        two, begin = ir.VectorType.get((2,), f32), _of_thread(sums, index, first)
        registers = np.empty((dims // DIMS, 2, 2), object)
        for place, own in zip(_places(shape), registers, strict=True):
            for half in range(2):
                words = LOAD.format(place=place + half * PIECE * 2)
                found = llvm.inline_asm(
                    four, [begin], words, "=f,=f,=f,=f,l", has_side_effects=True
                )
                floats = [llvm.extractvalue(f32, found, [i]) for i in range(4)]
                for eight in range(2):
                    pair = floats[2 * eight : 2 * eight + 2]
                    own[eight, half] = vector.from_elements(two, pair)
        layout = mgpu.WGMMA_LAYOUT
        return mgpu.FragmentedArray(
            _registers=registers.reshape(layout.registers_shape(shape)),
            _layout=layout,
            _is_signed=None,
        )

    run.__name__ = f"load_tile {first}"
    tile = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout=TILE)
    load = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=tile)(run)
    found: jax.Array = load(sums, _index(sums, at))
    return found


def _index(sums: Any, at: At) -> Any:
    """Of a block of 64 rows, among all."""
    (b, n, slab), (_, heads, slabs, *_) = at, (jnp.int32(x) for x in sums.shape)
    return (b * heads + n) * slabs + slab


def _of_thread(sums: Any, index: Any, first: int) -> Any:
    """Where the pieces begin that a thread has its part of: Mosaic's own offsets have 32 bits."""
    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    _, _, _, pieces, _ = ir.MemRefType(sums.type).shape
    wide = arith.extui(i64, index.registers.item())
    begin = arith.muli(wide, mgpu.utils.c(pieces * PIECE * 4, i64))
    begin = arith.addi(begin, mgpu.utils.c(first // DIMS * PIECE * 4, i64))
    thread = arith.andi(mgpu.utils.thread_idx(), mgpu.utils.c(127, i32))
    own = arith.muli(arith.extui(i64, thread), mgpu.utils.c(16, i64))
    return arith.addi(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(sums)), arith.addi(begin, own))


def _places(shape: tuple[int, ...]) -> list[int]:
    """Of a tile's pieces, in bytes."""
    return [piece * PIECE * 4 for piece in range(shape[1] // DIMS)]
