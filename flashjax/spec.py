"""``Operands``: every array of a call in canonical form. ``Spec``: all that is static about it.

All operands but query, key and value have rank 4 and broadcast to the logits (B, N, T, S); a
dimension of 1 in the two last places tells a scalar, row, column or tile operand. Together with
the batch as axis 0 of everything, that makes vmap, sharding and tiling the same for all of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from flashjax.masks import Mask
from flashjax.scores import Score

Aval = jax.ShapeDtypeStruct


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """The arrays of one call. In a ``Spec`` the same tree holds their shapes and dtypes."""

    query: Any  # (B, T, N, H)
    key: Any  # (B, S, K, H)
    value: Any  # (B, S, K, Hv)
    scale: Any = None  # (B|1, N|1, 1, 1) float; None where the scale is static
    bias: Any = None  # (B|1, N|1, T|1, S|1)
    mask: Mask | None = None
    score: Score | None = None
    sinks: Any = None  # (B|1, N, 1, 1)
    seed: Any = None  # two of (B|1, N|1, 1, 1) uint32, for dropout
    batch_id: Any = None  # (B, 1, 1, 1) int32
    head_id: Any = None  # (1, N, 1, 1) int32


# The operands that can have a gradient, in the order of their fields.
DIFFERENTIABLE = ("query", "key", "value", "scale", "bias", "score", "sinks")


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static description of a call; with a device it determines the kernel.

    ``wanted`` names the operands whose gradients a backward must make.
    """

    shapes: Operands
    scale: float | None = None  # None where the scale is an operand
    dropout_rate: float = 0.0
    precision: jax.lax.Precision | None = None
    deterministic_backward: bool = False
    wanted: frozenset[str] = frozenset()

    def at(self, operands: Operands) -> Spec:
        """The same call on operands of other shapes: a shard, or a batch that vmap grew."""
        return dataclasses.replace(self, shapes=shapes_of(operands))

    @property
    def batch(self) -> int:
        return int(self.shapes.query.shape[0])

    @property
    def rows(self) -> int:
        """T."""
        return int(self.shapes.query.shape[1])

    @property
    def columns(self) -> int:
        """S."""
        return int(self.shapes.key.shape[1])

    @property
    def heads(self) -> int:
        """N."""
        return int(self.shapes.query.shape[2])

    @property
    def key_heads(self) -> int:
        """K."""
        return int(self.shapes.key.shape[2])

    @property
    def group(self) -> int:
        """G = N // K."""
        return self.heads // self.key_heads

    @property
    def head_dim(self) -> int:
        """H."""
        return int(self.shapes.query.shape[3])

    @property
    def value_dim(self) -> int:
        """Hv."""
        return int(self.shapes.value.shape[3])

    @property
    def dtype(self) -> Any:
        return self.shapes.query.dtype

    @property
    def accumulator(self) -> Any:
        """The dtype of scores, sums and LSE: float32, or float64 for float64 inputs."""
        return jnp.dtype(jnp.float64 if self.dtype == jnp.float64 else jnp.float32)

    @property
    def out(self) -> Aval:
        return Aval((self.batch, self.rows, self.heads, self.value_dim), self.dtype)

    @property
    def lse(self) -> Aval:
        return Aval((self.batch, self.heads, self.rows), self.accumulator)


def shapes_of(operands: Operands) -> Operands:
    return jax.tree.map(lambda x: Aval(x.shape, x.dtype), operands)
