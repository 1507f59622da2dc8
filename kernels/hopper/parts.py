"""The parts of items that are cut: where the kernel leaves them, and their merge afterwards."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flashjax.kernels.hopper.config import held_head_dim
from flashjax.kernels.hopper.refs import Call


def part_types(call: Call) -> list[Any]:
    """O in two numbers (parts, 2, rows, Hv) and LSE (parts, rows), as `refs.Parts` has them."""
    items, rows = call.items, call.walker.own.size
    n = len(items.parts) * items.together
    if not n:
        return []
    shape = n, 2, rows, held_head_dim(call.spec.value_dim)
    return [
        jax.ShapeDtypeStruct(shape, call.spec.dtype),
        jax.ShapeDtypeStruct((n, rows), jnp.dtype(jnp.float32)),
    ]


def merged(
    call: Call, out: jax.Array, lse: jax.Array, parts: jax.Array, part_lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Output and LSE with the items that were cut."""
    numbers, items = _numbers(call), call.items
    # (parts of an item, items, rows); what is missing of the parts weighs nothing.
    each = jnp.where(numbers[..., None] < 0, -jnp.inf, part_lse[numbers])
    largest = each.max(0)
    weights = jnp.exp(each - jnp.where(largest == -jnp.inf, 0.0, largest))
    total = weights.sum(0)
    safe = jnp.where(total == 0, 1.0, total)
    dims = out.shape[-1]

    def weighed(i: int) -> jax.Array:
        both = parts[numbers[i], :, :, :dims].astype(jnp.float32)
        there = (numbers[i] >= 0)[:, None, None]  # what stands for a missing part may be NaN
        return jnp.where(there, both.sum(1) * (weights[i] / safe)[..., None], 0.0)

    # One loop over what comes in, with no array of all parts in between.
    found = sum((weighed(i) for i in range(1, len(numbers))), weighed(0))
    found_lse = jnp.where(total == 0, -jnp.inf, largest + jnp.log(safe))

    block, head, batch = items.places(np.array(sorted({part.item for part in items.parts})))
    if items.together > 1:
        block, batch = (np.repeat(x, items.together) for x in (block, batch))
        head = (head[:, None] + np.arange(items.together)).reshape(-1)
    size = call.walker.own.size
    rows = (block[:, None] * size + np.arange(size)).astype(np.int32)
    batch, head = batch[:, None], head[:, None]
    where: dict[str, Any] = {"mode": "drop", "unique_indices": True}
    return (
        out.at[batch, rows, head].set(found.astype(out.dtype), **where),
        lse.at[batch, head, rows].set(found_lse, **where),
    )


def _numbers(call: Call) -> np.ndarray[Any, Any]:
    """(most parts of an item, items that are cut): numbers of parts, −1 where none is left."""
    items = call.items
    by_item: dict[int, list[int]] = {}
    for number, part in enumerate(items.parts):
        by_item.setdefault(part.item, []).append(number)
    most = max(map(len, by_item.values()))
    rows = [by_item[item] + [-1] * (most - len(by_item[item])) for item in sorted(by_item)]
    found = np.array(rows, np.int32).T
    if items.together == 1:
        return found
    every = found[..., None] * items.together + np.arange(items.together, dtype=np.int32)
    return np.where(found[..., None] < 0, -1, every).reshape(most, -1)
