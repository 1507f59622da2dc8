"""The online softmax as a small monoid: running maximum m, sum l, rescaling of what came before.

Milakov & Gimelshein 2018 (arXiv:1805.02867); as used by FlashAttention (arXiv:2205.14135, Alg. 1).
Hidden scores are −inf. A row that has seen none but hidden ones has m = −inf; every exponent
then subtracts 0 instead, so that no inf − inf can arise.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp


class Running(NamedTuple):
    """Row statistics over the columns seen so far: maximum and sum of exp(score − maximum)."""

    m: jax.Array
    l: jax.Array


class Update(NamedTuple):
    """What a new tile does: the statistics after it, and the factors it brings."""

    running: Running
    alpha: jax.Array  # factor for everything summed before, per row
    p: jax.Array  # exp(score − m), the new columns' unnormalised weights


def start(shape: tuple[int, ...], dtype: jnp.dtype) -> Running:
    return Running(jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype))


def _finite(m: jax.Array) -> jax.Array:
    return jnp.where(m == -jnp.inf, jnp.zeros_like(m), m)


def update(running: Running, scores: jax.Array) -> Update:
    """Takes in a tile of scores (…, columns); statistics have one dim less."""
    m = jnp.maximum(running.m, scores.max(-1))
    alpha = jnp.exp(running.m - _finite(m))
    p = jnp.exp(scores - _finite(m)[..., None])
    return Update(Running(m, running.l * alpha + p.sum(-1)), alpha, p)


def finish(running: Running, sink: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """The factor that turns the weighted sum into the output, and the LSE (natural log).

    A sink is one more logit without a value; counted here, once. A row with nothing in it gets
    factor 0 and LSE −inf.
    """
    m, l = running
    factor = jnp.ones_like(l)
    if sink is not None:
        largest = jnp.maximum(m, sink)
        factor = jnp.exp(m - _finite(largest))
        l = l * factor + jnp.exp(sink - _finite(largest))
        m = largest
    empty = l == 0
    safe = jnp.where(empty, jnp.ones_like(l), l)
    return (
        jnp.where(empty, jnp.zeros_like(l), factor / safe),
        jnp.where(empty, -jnp.inf, m + jnp.log(safe)),
    )


def probabilities(scores: jax.Array, lse: jax.Array) -> jax.Array:
    """exp(score − LSE) as the backward recomputes it; 0 throughout a row with LSE −inf."""
    return jnp.exp(scores - _finite(lse)[..., None])


# The same in base 2, as kernels take it: GPUs have exp2, and score · unit costs one multiply-add
# with the subtraction of the maximum. `unit` is log2(e) times whatever factor scores still want,
# and positive, so that it can be applied to the maximum alone.

LN_2 = math.log(2)


class Exp2(Protocol):
    """2^(x · unit − shift), each architecture's own way; `shift` broadcasts to `x`."""

    def __call__(self, x: jax.Array, unit: float, shift: jax.Array) -> jax.Array: ...


def update_base2(running: Running, scores: jax.Array, unit: float, exp2: Exp2) -> Update:
    """:func:`update` for scores (rows, columns) in units of `unit`; m is a power of 2."""
    m = jnp.maximum(running.m, scores.max(-1) * unit)
    shift = _finite(m)
    alpha = exp2(running.m, 1.0, shift)
    p = exp2(scores, unit, shift[..., None])
    return Update(Running(m, running.l * alpha + p.sum(-1)), alpha, p)


def finish_base2(running: Running, sink: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """:func:`finish`, from base 2 to the natural log."""
    return finish(Running(running.m * LN_2, running.l), sink)


def shift_base2(lse: jax.Array) -> jax.Array:
    """What :func:`probabilities` subtracts, for `Exp2`; 0 where a row has LSE −inf."""
    return _finite(lse) * (1 / LN_2)
