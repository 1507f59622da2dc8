"""An attention layer in numpy: projections, norms, rotary embedding and `tests.oracle` between.

`truth` computes in float64; `baseline` sums in float32 and rounds to a dtype what a layer that
computes in it must hand on, which is what the bound of a layer's output is measured by (`hold`).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests import bound, oracle
from tests.oracle import Array, Problem

Params = Mapping[str, Any]
# Brings an array to the working precision, by way of the dtype that it is handed on in.
Low = Callable[[Any], Array]


@dataclasses.dataclass(frozen=True)
class Layer:
    """What shapes the numbers. `frequencies`: radians a position for each turned pair."""

    norm: str | None = None
    frequencies: Array | None = None
    magnitude: float = 1.0
    epsilon: float = 1e-6

    def turned(self, x: Array, positions: Array) -> Array:
        """(B, T, N, H) turned by (T,) or (B, T) positions: a complex product of the two halves."""
        if self.frequencies is None:
            return x
        half = len(self.frequencies)
        angles = positions[..., None].astype(np.float64) * self.frequencies
        turn = self.magnitude * np.exp(1j * angles)[..., None, :]
        pairs = x[..., :half] + 1j * x[..., half : 2 * half]
        pairs = pairs * turn.astype(pairs.dtype)
        return np.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], axis=-1)

    def normalised(self, x: Array, scale: Array) -> Array:
        if self.norm == "layer":
            x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.epsilon) * scale

    def heads(
        self, params: Params, x_q: Array, x_k: Array, positions: tuple[Array, Array], low: Low
    ) -> tuple[Array, Array, Array]:
        names = {"layer": "{}_ln", "rms": "{}_norm"}
        q, k, v = (
            _affine(params[name], x, "btd,dnh->btnh", low)
            for name, x in (("query", x_q), ("key", x_k), ("value", x_k))
        )
        if self.norm is not None:
            q, k = (
                low(self.normalised(x, low(params[names[self.norm].format(name)]["scale"])))
                for name, x in (("query", q), ("key", k))
            )
        return low(self.turned(q, positions[0])), low(self.turned(k, positions[1])), v


def _affine(params: Params, x: Array, product: str, low: Low) -> Array:
    y = low(np.einsum(product, x, low(params["kernel"])))
    return low(y + low(params["bias"])) if "bias" in params else y


def truth(layer: Layer, params: Params, x_q: Any, x_k: Any = None, **given: Any) -> Array:
    """(B, T, out features) in float64. `given`: positions (a pair), and the oracle's options."""

    def wide(x: Any) -> Array:
        return np.asarray(x).astype(np.float64)

    return _run(layer, params, x_q, x_k, wide, oracle.attention, **given)


def baseline(layer: Layer, params: Params, x_q: Any, x_k: Any, dtype: Any, **given: Any) -> Array:
    """As `truth`, in a layer's arithmetic."""

    def low(x: Any) -> Array:
        return np.asarray(x).astype(dtype).astype(np.float32)

    def attention(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, None]:
        q, k, v = (x.astype(dtype) for x in (q, k, v))
        problem = Problem.of(q, k, v, **options, work=np.float32)
        nothing = np.zeros((*q.shape[:3], v.shape[3]), np.float32)
        drawn = bound.baseline(problem, dtype, nothing, np.zeros(q.shape[:3], np.float32))
        return drawn["out"].astype(np.float32), None

    return _run(layer, params, x_q, x_k, low, attention, **given)


def _run(
    layer: Layer, params: Params, x_q: Any, x_k: Any, low: Low, attention: Any,
    positions: Any = None, **options: Any,
) -> Array:  # fmt: skip
    x_q = low(x_q)
    x_k = x_q if x_k is None else low(x_k)
    if positions is None:
        positions = np.arange(x_q.shape[1]), np.arange(x_k.shape[1])
    q, k, v = layer.heads(params, x_q, x_k, positions, low)
    if "sinks" in params:
        options["sinks"] = low(params["sinks"])
    out, _ = attention(q, k, v, **options)
    return _affine(params["out"], out, "btnh,nhd->btd", low)


def hold(actual: Any, reference: Array, drawn: Array, dtype: Any) -> None:
    """Every row within 2 × the baseline's error + one unit in the last place of its maximum.

    A row whose baseline happened to round well would refuse others that are right (tests/bound.py):
    a row's error counts as at least that of the median row.
    """

    def rank4(x: Any) -> Array:
        return np.asarray(x)[:, :, None, :]

    errors = np.abs(drawn - reference).max(-1)
    floor = np.broadcast_to(np.median(errors), rank4(reference).shape)
    bound.assert_close(
        "layer", rank4(actual), rank4(reference), rank4(drawn), np.dtype(dtype), 2.0, floor
    )
