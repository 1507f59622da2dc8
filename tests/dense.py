"""An oracle problem laid out densely, (B, N, T, S): what the bound's arithmetic works on."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from tests import oracle
from tests.oracle import Array, Problem


@dataclasses.dataclass(frozen=True)
class Dense:
    """A problem's elementwise quantities, in the problem's own precision.

    q, k, v, d_out are (B, N, T or S, width), d_lse (B, N, T), the others (B, N, T, S). What no row
    sees, and rows that see nothing, are set to 0, so that they cannot come back as 0 · NaN.
    """

    q: Array
    k: Array
    v: Array
    d_out: Array
    d_lse: Array
    dot: Array
    z: Array  # scale · dot + bias
    f: Array  # score(z)
    e: Array  # cap(f), −inf where hidden
    cap_slope: Array
    score_slope: Array
    operand_slopes: Mapping[str, Array]
    keep_scale: Array
    sinks: Array | None

    @classmethod
    def of(cls, p: Problem, d_out: Array, d_lse: Array) -> "Dense":
        work = p.query.dtype
        rows, columns = p.keep.any(3), p.keep.any(2)

        def by_head(x: Array, seen: Array) -> Array:
            copies = p.logits[1] // max(x.shape[2], 1)
            x = x.astype(work).transpose(0, 2, 1, 3).repeat(copies, axis=1)
            return np.where(seen[..., None], x, 0)

        q, d_out = by_head(p.query, rows), by_head(d_out, rows)
        k, v = by_head(p.key, columns), by_head(p.value, columns)
        dot = q @ k.swapaxes(2, 3)
        z = dot * p.scale
        if p.bias is not None:
            z = z + np.where(p.keep, p.bias, 0)
        batch, head, row, column = np.ogrid[tuple(slice(n) for n in p.logits)]
        f = np.asarray(p.score.value(z, row, column, batch, head)).astype(work)
        slopes = {
            name: np.where(p.keep, slope, 0).astype(work)
            for name, slope in p.score.partials(z, row, column, batch, head).items()
        }
        e, cap_slope = oracle.capped(f, None if p.soft_cap is None else work.type(p.soft_cap))
        return cls(
            q,
            k,
            v,
            d_out,
            np.where(rows, d_lse.astype(work).transpose(0, 2, 1), 0),
            dot,
            z,
            f,
            np.where(p.keep & (f > -np.inf), e, -np.inf),
            cap_slope,
            slopes.pop("score"),
            slopes,
            np.ones_like(e) if p.keep_scale is None else p.keep_scale.astype(work),
            p.sinks,
        )

    def exp_below(self, top: Array) -> Array:
        """exp(e − top); 0 in a row whose top is −inf."""
        return np.exp(self.e - np.where(top > -np.inf, top, 0)[..., None])


def sink_weight(sinks: Array, lse: Array) -> Array:
    """exp(sink − lse), (B, N, T)."""
    return np.exp(sinks[None, :, None] - np.where(lse > -np.inf, lse, np.inf))


def by_position(x: Array, groups: int) -> Array:
    """(B, N, T, H) -> (B, T, N // groups, H), summed over the heads of each group."""
    batch, heads, rows, width = x.shape
    return x.reshape(batch, heads // groups, groups, rows, width).sum(2).transpose(0, 2, 1, 3)
