"""Tile configurations of the Triton kernels, and which of them fit a call on a device.

What is offered is a short list in order of preference, made on an H200 (docs/kernel-notes.md,
"triton"), less what does not fit: shared memory and registers are computed from the blocks that the
kernels load and the sums that they keep.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flashjax import backend
from flashjax.kernels.triton.language import parts_of
from flashjax.spec import Spec
from flashjax.structure import is_blocked

LARGEST_HEAD_DIM = 256
# Shared memory that one program can have, in bytes, by compute capability (CUDA C++ Programming
# Guide, "Technical Specifications per Compute Capability").
SHARED_MEMORY = {
    "8.0": 163 * 1024,
    "8.6": 99 * 1024,
    "8.9": 99 * 1024,
    "9.0": 227 * 1024,
    "12.0": 99 * 1024,
}
CAPABILITIES = tuple(SHARED_MEMORY)


@dataclasses.dataclass(frozen=True)
class ForwardConfig(backend.Config):
    """Tile sizes, warps a program, and buffers through which the streamed operands go."""

    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows} × {self.columns}, {self.warps} warps, {self.stages} stages"


@dataclasses.dataclass(frozen=True)
class BackwardConfig(ForwardConfig):
    """The pass over column blocks; ``query`` is that over row blocks."""

    query: ForwardConfig

    def __str__(self) -> str:
        return f"{super().__str__()}; dQ in tiles of {self.query}"


class Need(NamedTuple):
    """What one program takes: bytes of shared memory, 32-bit registers a thread."""

    shared: int
    registers: int


class Sizes(NamedTuple):
    """A call's sizes as a kernel sees them: head dims as powers of two, bytes an element."""

    head: int
    value: int
    item: int
    tile: int  # bytes an element of all operands with rows and columns
    vector: int  # bytes an element of all operands with one of the two
    wgmma: bool

    @staticmethod
    def of(spec: Spec, capability: str) -> Sizes:
        head, value = (sum(parts_of(dim)) for dim in (spec.head_dim, spec.value_dim))
        rest = dataclasses.replace(spec.shapes, query=None, key=None, value=None)
        tile = vector = 0
        for leaf in jax.tree.leaves(rest, is_leaf=is_blocked):
            if not is_blocked(leaf):  # those are gathered from global memory
                spread = sum(size != 1 for size in leaf.shape[2:])
                tile += jnp.dtype(leaf.dtype).itemsize * (spread == 2)
                vector += jnp.dtype(leaf.dtype).itemsize * (spread == 1)
        # Hopper's products read both sides from shared memory; mma.sync reads registers.
        item = jnp.dtype(spec.dtype).itemsize
        return Sizes(head, value, item, tile, vector, capability == "9.0")

    @property
    def products(self) -> str:
        """The kind of products, as `REGISTERS` names it."""
        return "float32" if self.item == 4 else "wgmma" if self.wgmma else "mma"

    def streamed(self, c: ForwardConfig) -> int:
        """Shared memory of the operands beside q, k and v, and alignment."""
        tile = (c.stages - 1) * c.rows * c.columns * self.tile
        return tile + c.stages * max(c.rows, c.columns) * self.vector + 1024

    def kept(self, positions: int, width: int, warps: int) -> Need:
        """A left side of products that stays for all of a loop.

        float32 is taken apart into two TF32, in a second copy. What wgmma does not read from
        shared memory, because the architecture or a tile of under 64 rows has none, is in
        registers.
        """
        wide = 2 if self.item == 4 else 1
        registers = 0
        if not self.wgmma or positions < 64:
            registers = positions * width * self.item * wide // 4 // (32 * warps)
        return Need(positions * width * self.item * wide, registers)


def forward_need(c: ForwardConfig, s: Sizes) -> Need:
    """Q stays, K and V stream; O and a tile of S are in registers."""
    kept = s.kept(c.rows, s.head, c.warps)
    stream = c.stages * c.columns * (s.head + s.value) * s.item
    held = c.rows * (s.value + c.columns) // (32 * c.warps)
    return Need(kept.shared + stream + s.streamed(c), held + kept.registers)


def query_need(c: ForwardConfig, s: Sizes) -> Need:
    """Q and dO stay, K and V stream; dQ, S and dP are in registers."""
    kept = s.kept(c.rows, s.head + s.value, c.warps)
    stream = c.stages * c.columns * (s.head + s.value) * s.item
    held = c.rows * (s.head + 2 * c.columns) // (32 * c.warps)
    return Need(kept.shared + stream + s.streamed(c), held + kept.registers)


def key_need(c: ForwardConfig, s: Sizes) -> Need:
    """K and V stay, Q, dO, LSE and Δ stream; dK, dV, S and dP are in registers."""
    kept = s.kept(c.columns, s.head + s.value, c.warps)
    # Without a second buffer each of Q and dO also has its transpose's.
    stages = max(2, c.stages)
    stream = stages * c.rows * ((s.head + s.value) * s.item + 8)
    held = c.columns * (s.head + s.value + 2 * c.rows) // (32 * c.warps)
    return Need(kept.shared + stream + s.streamed(c), held + kept.registers)


# Of 255 registers a thread, what may be held; addresses, statistics and the right sides of products
# want the rest, in float32 twice over. Found by compiling (`make aot`).
REGISTERS = {"wgmma": 224, "mma": 208, "float32": 112}
QUERY_REGISTERS = {**REGISTERS, "float32": 184}

Tuples = tuple[tuple[int, int, int, int], ...]
# (rows, columns, warps, stages) by bytes an element and the larger head dim up to which they serve,
# best first; what small shared memory or few registers leave is at the end.
FORWARD: dict[tuple[int, int], Tuples] = {
    (2, 64): ((128, 64, 4, 3), (128, 128, 4, 3), (64, 64, 4, 3), (64, 32, 4, 2)),
    (2, 128): (
        (128, 64, 4, 2), (128, 128, 8, 3), (256, 64, 8, 3), (64, 64, 4, 3), (128, 64, 8, 2),
        (64, 32, 4, 2), (64, 32, 4, 1),
    ),
    (2, 256): (
        (128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1),
        (16, 32, 4, 1),
    ),
    (4, 64): ((128, 32, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
    (4, 128): ((128, 64, 8, 1), (128, 32, 8, 1), (64, 32, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1)),
    (4, 256): ((16, 32, 8, 1),),
}  # fmt: skip
QUERY: dict[tuple[int, int], Tuples] = {
    (2, 64): ((128, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
    (2, 128): ((128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 1)),
    (2, 256): ((64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1)),
    (4, 64): ((64, 32, 4, 1), (64, 64, 4, 2), (32, 32, 4, 1)),
    (4, 128): ((32, 32, 4, 1), (32, 16, 8, 1), (16, 64, 8, 1), (16, 32, 4, 1)),
    (4, 256): (),
}
KEY: dict[tuple[int, int], Tuples] = {
    (2, 64): ((64, 64, 4, 2), (32, 128, 4, 3), (32, 64, 4, 2)),
    (2, 128): ((64, 64, 4, 2), (64, 128, 8, 3), (32, 64, 4, 2), (32, 32, 4, 2)),
    (2, 256): ((64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 8, 1)),
    (4, 64): ((32, 64, 4, 2), (32, 32, 4, 2), (32, 32, 4, 1)),
    (4, 128): ((32, 32, 8, 1), (64, 16, 8, 1), (16, 32, 8, 1), (32, 16, 8, 1)),
    (4, 256): (),
}
# Nothing smaller exists: in float32 at a head dim of 256 the compiler spills up to 424 bytes.
SMALLEST = (16, 16, 8, 1)


def _fitting(
    table: dict[tuple[int, int], Tuples],
    need: Callable[[ForwardConfig, Sizes], Need],
    spec: Spec,
    capability: str,
    registers: Mapping[str, int] = REGISTERS,
) -> list[ForwardConfig]:
    sizes, limit = Sizes.of(spec, capability), SHARED_MEMORY.get(capability, 0)
    largest = max(sizes.head, sizes.value)
    listed = next(
        (c for (item, dim), c in table.items() if item == sizes.item and largest <= dim), ()
    )
    fitting = []
    for numbers in dict.fromkeys((*listed, SMALLEST)):
        config = ForwardConfig(*numbers)
        found = need(config, sizes)
        enough = found.registers <= registers[sizes.products] or numbers == SMALLEST
        if found.shared <= limit and enough:
            fitting.append(config)
    # The smallest is for where nothing else is.
    return fitting[:-1] if len(fitting) > 1 else fitting


def forward_configs(spec: Spec, capability: str) -> tuple[ForwardConfig, ...]:
    """What fits, best first."""
    return tuple(_fitting(FORWARD, forward_need, spec, capability))


def backward_configs(spec: Spec, capability: str) -> tuple[BackwardConfig, ...]:
    """Pairs of the two passes' configurations, as many as the longer list has."""
    query = _fitting(QUERY, query_need, spec, capability, QUERY_REGISTERS)
    key = _fitting(KEY, key_need, spec, capability)
    if not query or not key:
        return ()

    def pair(i: int) -> BackwardConfig:
        k, q = key[min(i, len(key) - 1)], query[min(i, len(query) - 1)]
        return BackwardConfig(k.rows, k.columns, k.warps, k.stages, q)

    return tuple(pair(i) for i in range(max(len(query), len(key))))
