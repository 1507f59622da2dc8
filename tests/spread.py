"""The standard deviation that rounding gives each result, to first order in the roundings.

A rounding to nearest errs by ulp / √12. A float32 sum of n terms, in whatever order, errs by about
ε √n / 2 × the root of the sum of its squared terms, ε = 2⁻²⁴ (n like terms in sequence: √(n / 6)).
Roundings are taken as independent, except two that a whole row shares: Δ, which moves every dS of
the row by −P δΔ, and LSE, which scales every P of it. They matter where a gradient cancels along
the row. Only the roundings of the bound's baseline count: float32 scores, exponents and sums, P, dS
and O to the input dtype.
"""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tests import oracle
from tests.dense import Dense, by_position, sink_weight
from tests.oracle import Array, Problem


class Forward(NamedTuple):
    """Values in float64, and variances (`…_var`)."""

    lse: Array
    weights: Array
    dropped: Array
    out: Array
    out_var: Array
    dot_var: Array
    exponent_var: Array
    shared_var: Array  # of log P, common to a row
    lse_var: Array


class Backward(NamedTuple):
    """dF = d_f, dZ = d_z; per_delta is −∂dF/∂Δ."""

    delta: Array
    delta_var: Array
    d_f: Array
    f_var: Array
    d_z: Array
    z_var: Array
    per_delta: Array


class Rounding(NamedTuple):
    """Variances of single roundings and of sums, for one input dtype."""

    dtype: Any

    @property
    def unit(self) -> float:
        """ε² of the arithmetic."""
        return (2.0**-53 if self.dtype == np.float64 else 2.0**-24) ** 2

    def stored(self, values: Array) -> Array:
        info = ml_dtypes.finfo(self.dtype)
        ulp = np.ldexp(float(info.eps), np.frexp(values)[1] - 1)
        ulp = np.maximum(ulp, float(info.smallest_subnormal))
        return np.where(values == 0, 0, ulp**2 / 12)

    def summed(self, count: Any, squares: Any) -> Any:
        return self.unit * count / 4 * squares


def spread(problem: Problem, dtype: Any, d_out: Array, d_lse: Array) -> dict[str, Array]:
    """Standard deviations by name, in the results' shapes. `problem` in float64."""
    rounding = Rounding(np.dtype(dtype))
    x = Dense.of(problem, d_out, d_lse)
    forward = _forward(problem, x, rounding)
    backward = _backward(problem, x, forward, rounding)
    variances = {
        "out": by_position(forward.out_var, 1),
        "lse": forward.lse_var.transpose(0, 2, 1),
        **_matrices(problem, x, forward, backward, rounding),
        **_broadcast(problem, x, forward, backward, rounding),
    }
    return {name: np.sqrt(variance) for name, variance in variances.items()}


def _forward(p: Problem, x: Dense, rounding: Rounding) -> Forward:
    kept = x.e > -np.inf
    top = x.e.max(-1, initial=-np.inf)
    if x.sinks is not None:
        top = np.maximum(top, x.sinks[None, :, None])
    some = top > -np.inf
    top = np.where(some, top, 0)
    above = x.exp_below(top)
    total = above.sum(-1) + (0 if x.sinks is None else np.exp(x.sinks[None, :, None] - top))
    lse = top + np.log(np.where(some, total, 1))
    weights = x.exp_below(lse)
    dropped = weights * x.keep_scale
    out = dropped @ x.v

    dot_var, exponent_var = _exponents(p, x, np.where(kept, lse[..., None], 0), kept, rounding)
    moved = weights**2 * exponent_var
    count = kept.sum(-1)
    total_var = rounding.summed(count, (weights**2).sum(-1))
    # ∂out/∂e_j = p_j (r_j v_j − out)
    out_var = (moved * x.keep_scale**2) @ x.v**2 - 2 * out * ((moved * x.keep_scale) @ x.v)
    out_var = np.maximum(out_var + out**2 * moved.sum(-1)[..., None], 0)
    p_var = rounding.stored(above * x.keep_scale) * np.exp(2 * (top - lse))[..., None]
    out_var += p_var @ x.v**2 + rounding.summed(count[..., None], dropped**2 @ x.v**2)
    out_var += (total_var + 4 * rounding.unit)[..., None] * out**2
    shared_var = total_var + rounding.unit * (4 + lse**2 + top**2)
    lse_var = shared_var + moved.sum(-1)
    return Forward(
        lse, weights, dropped, out, out_var, dot_var, exponent_var,
        np.where(some, shared_var, 0), np.where(some, lse_var, 0),
    )  # fmt: skip


def _exponents(
    p: Problem, x: Dense, lse: Array, kept: Array, rounding: Rounding
) -> tuple[Array, Array]:
    """Variances of q·k and of log P (from dot, scale, bias, score, cap, difference, exp)."""
    unit = rounding.unit
    dot_var = rounding.summed(x.q.shape[-1], x.q**2 @ (x.k**2).swapaxes(2, 3))
    var = p.scale**2 * dot_var + unit * (2 * (p.scale * x.dot) ** 2 + x.z**2)
    f, e = (np.where(kept, values, 0) for values in (x.f, x.e))
    if p.score is not oracle.IDENTITY:
        var = x.score_slope**2 * var + 4 * unit * (x.z**2 + f**2)
    if p.soft_cap is not None:
        var = x.cap_slope**2 * var + 4 * unit * e**2
    return dot_var, np.where(kept, var + unit * ((e - lse) ** 2 + 4), 0)


def _backward(p: Problem, x: Dense, forward: Forward, rounding: Rounding) -> Backward:
    unit, width = rounding.unit, x.v.shape[-1]
    squares = x.d_out**2 @ (x.v**2).swapaxes(2, 3) * x.keep_scale**2
    d_p = (x.d_out @ x.v.swapaxes(2, 3)) * x.keep_scale
    delta = (forward.out * x.d_out).sum(-1) - x.d_lse
    out_var = forward.out_var + rounding.stored(forward.out)
    delta_var = (out_var * x.d_out**2).sum(-1) + unit * x.d_lse**2
    delta_var += rounding.summed(width, (forward.out**2 * x.d_out**2).sum(-1))
    d_e = forward.weights * (d_p - delta[..., None])
    var = d_e**2 * (forward.exponent_var + 4 * unit)
    var += forward.weights**2 * (rounding.summed(width, squares) + unit * d_p**2)
    var *= x.cap_slope**2
    if p.soft_cap is not None:
        var += 16 * unit * d_e**2  # 1 − tanh² has tanh's error, however small it is
    d_f = d_e * x.cap_slope
    d_z = d_f * x.score_slope
    z_var = var * x.score_slope**2 + rounding.stored(d_z)
    return Backward(delta, delta_var, d_f, var, d_z, z_var, forward.weights * x.cap_slope)


def _matrices(
    p: Problem, x: Dense, forward: Forward, backward: Backward, rounding: Rounding
) -> dict[str, Array]:
    """Variances of dQ, dK and dV."""
    kept = x.e > -np.inf
    d_z, per_delta = backward.d_z, backward.per_delta * x.score_slope
    delta_var, shared_var = backward.delta_var[..., None], forward.shared_var[..., None]

    def transposed_sum(own: Array, terms: Array, width: Array) -> Array:
        added = own.swapaxes(2, 3) @ width**2
        count = kept.sum(2)[..., None] * p.groups
        added += rounding.summed(count, (terms**2).swapaxes(2, 3) @ width**2)
        return by_position(added, p.groups)

    d_q = backward.z_var @ x.k**2
    d_q += rounding.summed(kept.sum(3)[..., None], d_z**2 @ x.k**2)
    d_q += delta_var * (per_delta @ x.k) ** 2 + shared_var * (d_z @ x.k) ** 2
    d_z_var = backward.z_var + delta_var * per_delta**2 + shared_var * d_z**2
    p_var = rounding.stored(forward.dropped)
    p_var += forward.dropped**2 * (forward.exponent_var + shared_var)
    return {
        "query": p.scale**2 * by_position(d_q, 1),
        "key": p.scale**2 * transposed_sum(d_z_var, d_z, x.q),
        "value": transposed_sum(p_var, forward.dropped, x.d_out),
    }


def _broadcast(
    p: Problem, x: Dense, forward: Forward, backward: Backward, rounding: Rounding
) -> dict[str, Array]:
    """Variances of the gradients that sum over the logits: bias, scale, operands, sinks."""
    b, unit = backward, rounding.unit
    per_delta = b.per_delta * x.score_slope
    scale_var = b.z_var * x.dot**2 + b.d_z**2 * forward.dot_var
    sources = {
        "bias": (b.d_z, b.z_var, per_delta),
        "scale": (b.d_z * x.dot, scale_var, per_delta * x.dot),
    }
    for name, slope in x.operand_slopes.items():
        terms = b.d_f * slope
        var = (b.f_var + rounding.stored(b.d_f)) * slope**2 + 4 * unit * terms**2
        sources[name] = (terms, var, b.per_delta * slope)
    variances = {}
    for name, shape in p.shapes.items():
        if p.sinks is not None and name == "sinks":
            weight = sink_weight(p.sinks, forward.lse)
            log_var = forward.lse_var + 4 * unit
            var = weight**2 * (b.delta_var + b.delta**2 * log_var)
            count = var[:, 0].size
            var += rounding.summed(count, (weight * b.delta) ** 2)
            variances[name] = var.sum((0, 2))
            continue
        terms, var, shared = sources[name]
        count = terms.size // max(1, int(np.prod(shape)))
        var = var + rounding.summed(count, terms**2)
        if not shape or shape[-1] == 1:
            # All of a row's columns meet in one sum, and what they share adds up before squaring.
            shared, terms, var = (a.sum(3, keepdims=True) for a in (shared, terms, var))
        var = var + shared**2 * b.delta_var[..., None] + terms**2 * forward.shared_var[..., None]
        variances[name] = oracle.summed_to(var, shape)
    return variances
