"""Tile configurations of the Triton kernels, and which of them fit a call on a device.

What is offered is a short list in order of preference, made on an H200 (docs/kernel-notes.md,
"triton"), less what does not fit: shared memory and registers are computed from the blocks that the
kernels load and the sums that they keep.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from flashjax import backend
from flashjax.kernels.triton.language import parts_of
from flashjax.spec import Spec

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
# Of 255 registers a thread, what sums and tiles of scores may take; addresses, statistics and the
# operands of products want the rest.
REGISTERS = 200


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
    wgmma: bool

    @staticmethod
    def of(spec: Spec, capability: str) -> Sizes:
        head, value = (sum(parts_of(dim)) for dim in (spec.head_dim, spec.value_dim))
        # Hopper's products read both sides from shared memory; mma.sync reads registers.
        return Sizes(head, value, jnp.dtype(spec.dtype).itemsize, capability == "9.0")


def forward_need(c: ForwardConfig, s: Sizes) -> Need:
    """Q stays, K and V stream in `stages` buffers; O and a tile of S are in registers."""
    shared = c.rows * s.head * s.item + c.stages * c.columns * (s.head + s.value) * s.item
    held = c.rows * (s.value + c.columns)
    held += 0 if s.wgmma else c.rows * s.head * s.item // 4
    return Need(shared, held // (32 * c.warps))


def query_need(c: ForwardConfig, s: Sizes) -> Need:
    """Q and dO stay, K and V stream; dQ, S and dP are in registers."""
    shared = (c.rows + c.stages * c.columns) * (s.head + s.value) * s.item
    held = c.rows * (s.head + 2 * c.columns)
    held += 0 if s.wgmma else c.rows * (s.head + s.value) * s.item // 4
    return Need(shared, held // (32 * c.warps))


def key_need(c: ForwardConfig, s: Sizes) -> Need:
    """K and V stay, Q, dO, LSE and Δ stream; dK, dV, S and dP are in registers."""
    shared = (c.columns + c.stages * c.rows) * (s.head + s.value) * s.item
    shared += c.stages * c.rows * 8
    held = c.columns * (s.head + s.value + 2 * c.rows)
    held += 0 if s.wgmma else c.columns * (s.head + s.value) * s.item // 4
    return Need(shared, held // (32 * c.warps))


Tuples = tuple[tuple[int, int, int, int], ...]
# (rows, columns, warps, stages) by the larger head dim up to which they serve.
FORWARD: dict[int, Tuples] = {
    64: ((128, 128, 4, 3), (128, 64, 4, 3), (64, 64, 4, 3), (128, 32, 4, 2), (64, 32, 4, 2)),
    128: ((128, 128, 8, 3), (128, 64, 4, 2), (256, 64, 8, 3), (64, 64, 4, 3), (128, 64, 8, 2)),
    256: ((128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (128, 32, 8, 2)),
}
QUERY: dict[int, Tuples] = {
    64: ((128, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
    128: ((128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
    256: ((64, 64, 4, 2), (128, 64, 8, 1), (64, 32, 4, 1)),
}
KEY: dict[int, Tuples] = {
    64: ((64, 64, 4, 2), (32, 128, 4, 3), (32, 64, 4, 2)),
    128: ((64, 64, 4, 2), (64, 128, 8, 3), (32, 64, 4, 2)),
    256: ((64, 32, 4, 2), (64, 64, 8, 2), (32, 32, 4, 2)),
}
# Where the preferred ones are too large: small shared memory, float32.
SMALL: Tuples = ((64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1))
SMALL_KEY: Tuples = (
    (32, 64, 4, 2),
    (32, 32, 4, 2),
    (32, 32, 4, 1),
    (32, 32, 8, 1),
    (16, 32, 4, 1),
    (16, 16, 4, 1),
)


def _fitting(
    table: dict[int, Tuples], small: Tuples, need: Any, spec: Spec, capability: str
) -> Any:
    sizes, limit = Sizes.of(spec, capability), SHARED_MEMORY.get(capability, 0)
    largest = max(sizes.head, sizes.value)
    preferred = next((c for dim, c in table.items() if largest <= dim), ())
    fitting = []
    for sizes_of in dict.fromkeys((*preferred, *small)):
        config = ForwardConfig(*sizes_of)
        shared, registers = need(config, sizes)
        if shared <= limit and registers <= REGISTERS:
            fitting.append(config)
    return fitting[:OFFERED]


# How many of what fits are offered: each is tested, compiled ahead of time and tuned over.
OFFERED = 5


def forward_configs(spec: Spec, capability: str) -> tuple[ForwardConfig, ...]:
    return tuple(_fitting(FORWARD, SMALL, forward_need, spec, capability))


def backward_configs(spec: Spec, capability: str) -> tuple[BackwardConfig, ...]:
    """Pairs of the two passes' configurations, as many as the longer list has."""
    query = _fitting(QUERY, SMALL, query_need, spec, capability)
    key = _fitting(KEY, SMALL_KEY, key_need, spec, capability)
    if not query or not key:
        return ()
    count = max(len(query), len(key))
    return tuple(
        BackwardConfig(k.rows, k.columns, k.warps, k.stages, q)
        for q, k in (
            (query[min(i, len(query) - 1)], key[min(i, len(key) - 1)]) for i in range(count)
        )
    )
