"""Tiled attention in pure JAX, the implementation named "xla": any platform, O(T + S) memory.

Forward: online softmax over the tiles of the schedule (FlashAttention-2, arXiv:2307.08691,
Alg. 1). Backward: recomputation, one pass over column blocks (Alg. 2): five products a tile, dK
and dV held while row tiles stream, dQ added to in place. EMPTY tiles are not visited; FULL tiles
evaluate no mask.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from flashjax.backend import Config, Device
from flashjax.masks import Blocks, Schedule, schedule
from flashjax.masks.schedule import groups
from flashjax.passes import backward_pass, forward_pass
from flashjax.spec import Operands, Spec
from flashjax.tiles import Group, add_member, member
from flashjax.varying import cast_varying, varying_axes

# Rows × columns, best first; measured on CPU (docs/kernel-notes.md, "chunked").
CONFIGS = (Config(512, 256), Config(128, 128), Config(64, 256), Config(256, 64))


class Chunked:
    """The backend "xla"."""

    name = "xla"
    platform: str | None = None

    def unsupported(self, spec: Spec, device: Device, *, backward: bool = False) -> str | None:
        return None

    def configs(self, spec: Spec, device: Device, *, backward: bool = False) -> tuple[Config, ...]:
        fitting = (
            Config(_even(spec.rows, config.rows), _even(spec.columns, config.columns))
            for config in CONFIGS
        )
        return tuple(dict.fromkeys(fitting))

    def forward(
        self, spec: Spec, config: Config, operands: Operands
    ) -> tuple[jax.Array, jax.Array]:
        walk = _walk(spec, config, operands, "rows")
        n_batch, n_heads = groups(walk)
        if n_batch == n_heads == 1:
            return forward_pass(spec, config, operands, walk)

        def one(index: jax.Array) -> tuple[jax.Array, jax.Array]:
            group = Group.of(index, n_batch, n_heads)
            part = member(operands, group, spec.group)
            return forward_pass(spec.at(part), config, part, member(walk, group, spec.group))

        out, lse = lax.map(one, jnp.arange(n_batch * n_heads, dtype=jnp.int32))
        b, n = (1 if n_batch > 1 else spec.batch), (1 if n_heads > 1 else spec.heads)
        out = out.reshape(n_batch, n_heads, b, spec.rows, n, spec.value_dim)
        lse = lse.reshape(n_batch, n_heads, b, n, spec.rows)
        return (
            out.transpose(0, 2, 3, 1, 4, 5).reshape(spec.out.shape),
            lse.transpose(0, 2, 1, 3, 4).reshape(spec.lse.shape),
        )

    def backward(
        self,
        spec: Spec,
        config: Config,
        operands: Operands,
        lse: jax.Array,
        delta: jax.Array,
        d_out: jax.Array,
    ) -> Operands:
        walk = _walk(spec, config, operands, "columns")
        n_batch, n_heads = groups(walk)
        if n_batch == n_heads == 1:
            return _rounded(
                backward_pass(spec, config, operands, walk, lse, delta, d_out), operands
            )
        # The output's gradient has the query's layout: it is cut like one.
        d_operands = Operands(query=d_out, key=d_out[:, :0], value=d_out[:, :0])

        def one(total: Operands, index: jax.Array) -> tuple[Operands, None]:
            group = Group.of(index, n_batch, n_heads)
            part = member(operands, group, spec.group)
            part_walk, part_lse, part_delta = member((walk, lse, delta), group, spec.group)
            part_d_out = member(d_operands, group, spec.group).query
            grads = backward_pass(
                spec.at(part), config, part, part_walk, part_lse, part_delta, part_d_out
            )
            return add_member(total, grads, group, spec.group), None

        index = jnp.arange(n_batch * n_heads, dtype=jnp.int32)
        total, _ = lax.scan(one, _zeros(spec, operands), index)
        return _rounded(total, operands)


BACKEND = Chunked()


def _even(length: int, size: int) -> int:
    """A tile size of at most `size` that leaves little of the last tile empty."""
    count = max(1, -(-length // size))
    unit = 64 if length > 256 else 8
    return min(size, max(8, -(-length // (count * unit)) * unit))


def _walk(spec: Spec, config: Config, operands: Operands, axis: Any) -> Schedule:
    rows, columns = Blocks(spec.rows, config.rows), Blocks(spec.columns, config.columns)
    # With one tile there is nothing to skip, nor members to part.
    mask = None if rows.count * columns.count == 1 else operands.mask
    return schedule(mask, rows, columns, axis)


def _zeros(spec: Spec, operands: Operands) -> Operands:
    """Accumulators of the wanted gradients, in the accumulator's dtype."""

    def zeros(x: jax.Array) -> jax.Array | None:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return None
        return jnp.zeros(x.shape, spec.accumulator)

    total = {
        name: tuple(map(zeros, jax.tree.leaves(getattr(operands, name))))
        for name in spec.wanted - {"sinks"}
    }
    flat = {name: value if name == "score" else value[0] for name, value in total.items()}
    empty: dict[str, Any] = {"query": None, "key": None, "value": None}
    return cast_varying(Operands(**{**empty, **flat}), varying_axes(operands.query))


def _rounded(total: Operands, operands: Operands) -> Operands:
    """Gradients in their operands' dtypes."""
    rounded: dict[str, Any] = {}
    for field in dataclasses.fields(total):
        grads = getattr(total, field.name)
        if field.name == "score" and grads is not None:
            leaves = jax.tree.leaves(operands.score)
            rounded["score"] = tuple(
                None if g is None else g.astype(x.dtype) for g, x in zip(grads, leaves, strict=True)
            )
        else:
            rounded[field.name] = (
                None if grads is None else grads.astype(getattr(operands, field.name).dtype)
            )
    return Operands(**rounded)
