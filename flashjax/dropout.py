"""Dropout by a counter hash: every weight's fate is a function of where it is.

The pattern depends on (seed, batch, head, row, column) alone, so tile sizes, sharding, vmap and
the backward's recomputation cannot change it. Two seed words per batch member and head travel as
operands; all heads and batch members share a pattern where those words are the same.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

# Odd constants with well-spread bits: the golden ratio, and two from MurmurHash3's finaliser.
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which each input bit moves about half of the output bits."""
    x = x ^ (x >> jnp.uint32(16))
    x = x * jnp.uint32(_MIX_1)
    x = x ^ (x >> jnp.uint32(13))
    x = x * jnp.uint32(_MIX_2)
    return x ^ (x >> jnp.uint32(16))


def seeds(key: jax.Array, batch: int, heads: int, *, shared: bool = False) -> jax.Array:
    """Seed words (2, batch, heads, 1, 1), uint32; (2, 1, 1, 1, 1) where `shared`."""
    words = jax.random.bits(key, (2,), jnp.uint32)
    if shared:
        batch = heads = 1
    b = jnp.arange(batch, dtype=jnp.uint32)[:, None]
    n = jnp.arange(heads, dtype=jnp.uint32)[None, :]
    first = _mix(_mix(words[0] + b * jnp.uint32(_GOLDEN)) + n * jnp.uint32(_MIX_2))
    second = _mix(_mix(words[1] ^ first) + n * jnp.uint32(_GOLDEN) + b)
    return jnp.stack([first, second])[..., None, None]


def keep(
    seed: tuple[jax.Array, jax.Array], row: jax.Array, column: jax.Array, rate: float
) -> jax.Array:
    """True where a weight stays, with probability 1 − rate. All arguments broadcast together."""
    r = _mix(seed[0] + row.astype(jnp.uint32) * jnp.uint32(_GOLDEN)) ^ seed[1]
    # Xor, not +: a sum would give rows whose hashes lie near each other shifted copies.
    bits = _mix(r ^ (column.astype(jnp.uint32) * jnp.uint32(_MIX_1)))
    return bits >= jnp.uint32(threshold(rate))


def threshold(rate: float) -> int:
    """Weights whose bits lie below this are dropped."""
    return int(np.floor(rate * 2.0**32))
