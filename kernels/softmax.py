"""The online softmax as a small monoid: running maximum m, sum l, rescaling of what came before.

Milakov & Gimelshein 2018 (arXiv:1805.02867); as used by FlashAttention (arXiv:2205.14135, Alg. 1).
Hidden scores are −inf. A row that has seen none but hidden ones has m = −inf; every exponent
then subtracts 0 instead, so that no inf − inf can arise.
"""

from __future__ import annotations

import dataclasses
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


# The same as kernels take it: GPUs have exp2 alone.

LN_2 = math.log(2)
LOG2_E = math.log2(math.e)


class Exp2(Protocol):
    """2^(x · unit − shift), each architecture's own way; `shift` broadcasts to `x`, None is 0."""

    def __call__(self, x: jax.Array, unit: float, shift: jax.Array | None) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Exponents:
    """How a kernel takes the exponentials of scores.

    With a `unit`, positive, score · unit is the exponent of 2, and so are maxima: one multiply-add
    with the subtraction of the maximum. Its rounding counts where scores are far from 0, as with
    a bias of −1e10 for what is hidden: at a maximum m the difference is off by up to 2⁻²⁴ m. With
    None the maximum is subtracted first, exactly, and maxima are natural exponents, as scores are.
    """

    exp2: Exp2
    unit: float | None

    @property
    def doubling(self) -> float:
        """What doubles a weight, in units of maxima."""
        return LN_2 if self.unit is None else 1.0

    def maxima(self, scores: jax.Array) -> jax.Array:
        """Of each row, (rows,)."""
        return self.of_maximum(scores.max(-1))

    def of_maximum(self, scores: jax.Array) -> jax.Array:
        """In units of maxima."""
        return scores if self.unit is None else scores * self.unit

    def decay(self, m: jax.Array, shift: jax.Array) -> jax.Array:
        """The factor that takes sums under the maximum `m` to those under `shift`."""
        return self.exp2(m - shift, LOG2_E, None) if self.unit is None else self.exp2(m, 1.0, shift)

    def weights(self, scores: jax.Array, shift: jax.Array | None) -> jax.Array:
        """Of a tile of scores; `shift` broadcasts to it, and is None where they hold it already."""
        if shift is None:
            return self.exp2(scores, LOG2_E if self.unit is None else self.unit, None)
        if self.unit is None:
            return self.exp2(scores - shift, LOG2_E, None)
        return self.exp2(scores, self.unit, shift)

    def update(self, running: Running, scores: jax.Array) -> Update:
        """:func:`update`."""
        m = jnp.maximum(running.m, self.maxima(scores))
        shift = _finite(m)
        alpha = self.decay(running.m, shift)
        p = self.weights(scores, shift[..., None])
        return Update(Running(m, running.l * alpha + p.sum(-1)), alpha, p)

    def finish(
        self, running: Running, sink: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """:func:`finish`."""
        m = running.m if self.unit is None else running.m * LN_2
        return finish(Running(m, running.l), sink)

    def shift(self, lse: jax.Array) -> jax.Array:
        """What :func:`probabilities` subtracts; 0 where a row has LSE −inf."""
        return _finite(lse) if self.unit is None else _finite(lse) * (1 / LN_2)
