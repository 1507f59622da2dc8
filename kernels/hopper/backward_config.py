"""Configurations of the Hopper backward, and which of them fit a call."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from flashjax import backend
from flashjax.kernels.hopper.config import (
    ALIGNMENT,
    ROWS,
    SHARED_MEMORY,
    groups_beside,
    padded_head_dim,
    within_blocks,
)
from flashjax.kernels.sums import all_sums
from flashjax.spec import Spec

CONSUMERS = 2
# Of a program: 64 for each consumer. Above 128 head dims no consumer's registers hold dK and dV of
# 64 columns: both share out 64 by head dims.
COLUMNS = CONSUMERS * ROWS
SCORES = 2  # tiles of dS, and of P, that there is memory for
SENT = 96  # dims of dQ that leave at once, or half of a consumer's share


@dataclasses.dataclass(frozen=True)
class BackwardConfig(backend.Config):
    """A program keeps `columns` while blocks of `rows` stream through `stages` buffers."""

    stages: int

    @property
    def by_dims(self) -> bool:
        """Whether both consumers have all columns, and each half of the head dims of dK and dV."""
        return self.columns == ROWS

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.stages} stages"


# Rows, columns and stages by the larger of the padded head dims, best first.
BACKWARD: dict[int, tuple[tuple[int, int, int], ...]] = {
    64: ((128, COLUMNS, 2), (64, COLUMNS, 2)),
    96: ((64, COLUMNS, 2),),
    128: ((64, COLUMNS, 2),),
    192: ((64, ROWS, 2),),
    256: ((64, ROWS, 2),),
}


def sent(dims: int) -> int:
    """How many of a consumer's dims of dQ leave at once."""
    return dims if dims <= SENT else dims // 2


def _register_rich(spec: Spec, rows: int) -> bool:
    """Whether so many rows take more registers than there are: tiles of what is not plain do."""
    shapes = spec.shapes
    plain = shapes.bias is None and shapes.score is None and not spec.dropout_rate
    plain = plain and not all_sums(spec)
    return rows > ROWS and not plain


def shared_memory(spec: Spec, config: BackwardConfig) -> int:
    """Bytes that one program takes."""
    head, value = padded_head_dim(spec.head_dim), padded_head_dim(spec.value_dim)
    item = jnp.dtype(spec.dtype).itemsize
    parts = [
        config.columns * head * item,
        config.columns * value * item,
        config.stages * config.rows * head * item,
        config.stages * config.rows * value * item,
        SCORES * config.rows * config.columns * item * (2 if config.by_dims else 1),
        *[4 * config.stages * config.rows] * 2,
        4 * len(all_sums(spec)) * CONSUMERS * ROWS,
        ALIGNMENT,  # barriers
    ]
    return sum(-(-part // ALIGNMENT) * ALIGNMENT for part in parts)


def backward_configs(spec: Spec) -> tuple[BackwardConfig, ...]:
    """What fits, best first."""
    largest = padded_head_dim(max(spec.head_dim, spec.value_dim))
    found = (BackwardConfig(*sizes) for sizes in BACKWARD[largest])
    fit = (
        config
        for config in found
        if shared_memory(spec, config) <= SHARED_MEMORY and within_blocks(spec, config.rows, ROWS)
    )
    return tuple(sorted(fit, key=lambda config: _register_rich(spec, config.rows)))


def key_heads_beside(spec: Spec) -> int:
    """How many key heads' blocks lie beside one another: what they share are queries and dO."""
    masked = spec.shapes.mask is not None
    return groups_beside(spec, spec.rows * spec.group, masked=masked)
