"""Rotary position embedding (RoFormer, arXiv:2104.09864), half-split, and its length scalings.

Component i and component i + H/2 of a head turn together by position · base^(−2i/H), as in GPT-NeoX
and Llama checkpoints.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

Frequencies = np.ndarray[Any, np.dtype[np.float64]]


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Turns queries and keys by their positions, so that scores depend on distances.

    >>> import jax.numpy as jnp, flashjax
    >>> rotary = flashjax.Rotary(base=500_000.0)
    >>> rotary(jnp.ones((2, 5, 4, 64)), jnp.arange(5)).shape
    (2, 5, 4, 64)

    Attributes:
      base: of the geometric series of frequencies.
      dims: how many of the first components turn; None for all. Even.
      scaling: None, or a hashable function from the frequencies, float64 (dims / 2,) in radians a
        position, descending, to those to use: :class:`Linear`, :class:`Llama3`, :class:`Yarn`
        or your own.
      magnitude: factor on the turned components; YaRN's attention factor.

    Raises:
      ValueError, TypeError: an attribute is out of range.
    """

    base: float = 10_000.0
    dims: int | None = None
    scaling: Callable[[Frequencies], Frequencies] | None = None
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self, "base", "magnitude")
        dims: Any = self.dims
        if dims is not None and (
            isinstance(dims, bool)
            or not isinstance(dims, (int, np.integer))
            or dims < 2
            or dims % 2
        ):
            raise ValueError(f"Rotary(dims=…) is {dims!r}; wanted an even int >= 2, or None.")
        if self.scaling is not None and not callable(self.scaling):
            raise TypeError(
                f"Rotary(scaling=…) is {self.scaling!r}; wanted a function of the frequencies, "
                "such as flashjax.rotary.Linear(4.0)."
            )

    def frequencies(self, head_dim: int) -> Frequencies:
        """Radians a position, float64 (dims / 2,), after scaling.

        Raises:
          ValueError: `head_dim` is odd or below `dims`; `scaling` gives another shape.
        """
        dims = head_dim if self.dims is None else self.dims
        if dims % 2 or dims > head_dim:
            raise ValueError(
                f"rotary turns {dims} components of a head dim of {head_dim}; wanted an even "
                "number, at most the head dim. Pass Rotary(dims=…)."
            )
        plain = self.base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
        if self.scaling is None:
            return plain
        scaled = np.asarray(self.scaling(plain), np.float64)
        if scaled.shape != plain.shape:
            raise ValueError(
                f"Rotary(scaling=…) gave frequencies of shape {scaled.shape}; wanted {plain.shape}."
            )
        if not np.isfinite(scaled).all():
            raise ValueError(f"Rotary(scaling=…) gave {scaled}; wanted finite frequencies.")
        return scaled

    def __call__(self, x: Array, positions: Array) -> Array:
        """The same array, turned.

        Args:
          x: (…, T, N, H), float.
          positions: (T,), or (…, T) with x's leading dims; of any integer dtype, negative too.

        Returns:
          (…, T, N, H) in the dtype of `x`; computed in float32 (float64 for float64 `x`).

        Raises:
          ValueError, TypeError: `positions` does not fit `x` or is not of integers.
        """
        x, positions = jnp.asarray(x), jnp.asarray(positions)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"x has dtype {x.dtype}; wanted floats.")
        if not jnp.issubdtype(positions.dtype, jnp.integer):
            raise TypeError(f"positions has dtype {positions.dtype}; wanted integers.")
        if positions.shape not in (x.shape[-3:-2], x.shape[:-2]):
            raise ValueError(
                f"positions has shape {positions.shape}; wanted {x.shape[-3:-2]} or "
                f"{x.shape[:-2]}, one position a token."
            )
        frequencies = self.frequencies(x.shape[-1])
        wide = jnp.promote_types(x.dtype, jnp.float32)
        angles = _angles(positions, frequencies, wide)[..., None, :]
        sin, cos = self.magnitude * jnp.sin(angles), self.magnitude * jnp.cos(angles)
        half = frequencies.size
        first, second = x[..., :half].astype(wide), x[..., half : 2 * half].astype(wide)
        turned = [first * cos - second * sin, second * cos + first * sin]
        return jnp.concatenate([*(t.astype(x.dtype) for t in turned), x[..., 2 * half :]], axis=-1)


def _check_positive(self: Any, *names: str) -> None:
    for name in names:
        value, where = getattr(self, name), f"{type(self).__name__}({name}=…)"
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
            raise TypeError(f"{where} is {value!r}; wanted a Python number.")
        if not 0 < value < math.inf:
            raise ValueError(f"{where} is {value!r}; wanted a finite number > 0.")


def _angles(positions: jax.Array, frequencies: Frequencies, dtype: Any) -> jax.Array:
    """(…, T) positions to (…, T, number of frequencies) angles, up to whole turns.

    A float32 product is wrong by half a unit of its last place, 0.03 at position 2¹⁹ and frequency
    1. Turns as 32-bit fractions wrap at whole turns by themselves; the error is at most
    position · 2π · 2⁻³³, 0.0004 there.
    """
    if dtype == jnp.float64:
        return positions[..., None].astype(dtype) * frequencies
    turns = np.round(frequencies / (2 * np.pi) * 2.0**32) % 2.0**32
    wrapped = positions[..., None].astype(jnp.uint32) * turns.astype(np.uint32)
    return wrapped.astype(jnp.int32).astype(dtype) * (2 * np.pi / 2.0**32)


@dataclasses.dataclass(frozen=True)
class Linear:
    """Position interpolation (arXiv:2306.15595): every frequency divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        _check_positive(self, "factor")

    def __call__(self, frequencies: Frequencies) -> Frequencies:
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3:
    """Llama 3.1's scaling: slow components by `factor`, fast ones not at all, a ramp between.

    A component that turns fewer than `low_turns` times in `original_length` positions is slow, one
    that turns more than `high_turns` times fast.
    """

    factor: float = 8.0
    low_turns: float = 1.0
    high_turns: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "low_turns", "high_turns", "original_length")
        if self.low_turns >= self.high_turns:
            raise ValueError(
                f"Llama3(low_turns=…) is {self.low_turns} and high_turns {self.high_turns}; wanted "
                "fewer."
            )

    def __call__(self, frequencies: Frequencies) -> Frequencies:
        turns = self.original_length * frequencies / (2 * np.pi)
        fast = np.clip((turns - self.low_turns) / (self.high_turns - self.low_turns), 0, 1)
        return frequencies * (fast + (1 - fast) / self.factor)


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv:2309.00071): as `Llama3`, with the ramp linear in the component's number.

    Its attention factor is ``Rotary(magnitude=0.1 · ln(factor) + 1)``.
    `truncate` rounds the ramp's ends outwards to whole components, as most checkpoints expect;
    gpt-oss is trained without.
    """

    factor: float
    original_length: int
    slow_turns: float = 1.0
    fast_turns: float = 32.0
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "original_length", "slow_turns", "fast_turns")

    def __call__(self, frequencies: Frequencies) -> Frequencies:
        if frequencies.size < 2 or frequencies[0] <= frequencies[1]:
            raise ValueError(
                "Yarn needs frequencies that fall from component to component; wanted "
                "Rotary(base=…) above 1 and a head dim of 4 or more."
            )
        step = math.log(frequencies[0] / frequencies[1])

        def component(turns: float) -> float:
            """Where along the series a component turns so often in the original length."""
            return math.log(self.original_length * frequencies[0] / (2 * math.pi * turns)) / step

        begin, end = component(self.fast_turns), component(self.slow_turns)
        if self.truncate:
            begin, end = math.floor(begin), math.ceil(end)
        # HF's and the authors' code keep the ramp's ends within 0 … dims − 1.
        begin, end = max(begin, 0), min(end, 2 * frequencies.size - 1)
        numbers = np.arange(frequencies.size)
        slow = np.clip((numbers - begin) / max(end - begin, 1e-3), 0, 1)
        return frequencies * ((1 - slow) + slow / self.factor)
