"""``flashjax.explain``: which kernel a call runs, why the others do not, what its tiles are."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from flashjax import bind as binding
from flashjax import cudnn
from flashjax.backend import Config, Device
from flashjax.bind import Arguments
from flashjax.masks import Blocks, Mask, Predicate, Ranges, schedule
from flashjax.masks.bounds import Axis
from flashjax.masks.schedule import size_bytes, tiles
from flashjax.plan import (
    Plan,
    check_implementation,
    current_device,
    device_of,
    implementations,
    plan,
)
from flashjax.spec import Spec
from flashjax.structure import Dims


@dataclasses.dataclass(frozen=True)
class Tiling:
    """One direction's tile schedule. Counts are per batch member and head, on average."""

    total: int
    kind: str  # "ranges" or "lists"
    bytes: int
    visited: float | None  # None where it depends on values that are not known
    full: float | None

    def __str__(self) -> str:
        if self.visited is None:
            return f"{self.total} tiles; how many are visited depends on the mask's values"
        share = self.visited / self.total if self.total else 0.0
        return (
            f"{self.visited:.5g} of {self.total} tiles visited ({share:.1%}), "
            f"{self.full:.5g} of them without an element mask; schedule of {self.kind}, "
            f"{self.bytes} bytes"
        )


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a call does; ``print`` it. ``implementation`` is the forward's."""

    implementation: str
    plan: Plan | None
    spec: Spec
    refused: tuple[tuple[str, str], ...]
    forward: Tiling | None
    backward: Tiling | None
    notes: tuple[str, ...]

    def __str__(self) -> str:
        s = self.spec
        lines = [
            f"flashjax attention: implementation {self.implementation!r}",
            f"call: B {s.batch}, T {s.rows}, S {s.columns}, N {s.heads}, K {s.key_heads}, "
            f"H {s.head_dim}, Hv {s.value_dim}, {s.dtype}",
            f"mask: {s.shapes.mask if s.shapes.mask is not None else 'none'}",
        ]
        if s.shapes.score is not None:
            lines.append(f"score: {s.shapes.score}")
        if self.plan is not None:
            lines.append(f"device: {self.plan.device}")
            for name in ("forward", "backward"):
                lines.append(f"{name}: {getattr(self.plan, name)}")
                lines.append(f"  {getattr(self, name)}")
        lines += [f"not {name!r}: {reason}" for name, reason in self.refused]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def explain(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    implementation: str | None = None,
    device: jax.Device | Device | None = None,
    return_residual: bool = False,
    **arguments: Any,
) -> Explanation:
    """Which kernel a call of ``dot_product_attention`` runs, why others do not, tiles skipped.

    Takes the same arguments; arrays may be :class:`jax.ShapeDtypeStruct`. Runs no attention.

    Args:
      device: a ``jax.Device`` or ``flashjax.Device`` to explain for; by default the one that the
        call would run on.

    Returns:
      An :class:`Explanation`: print it, or read its fields.

    Raises:
      As ``dot_product_attention``, for the same reasons.
    """
    del return_residual
    check_implementation(implementation)
    known = {f.name for f in dataclasses.fields(Arguments)}
    for name in arguments:
        if name not in known:
            raise TypeError(f"explain() got {name}=…; wanted an argument of dot_product_attention.")
    given = Arguments(bias=bias, mask=mask, **arguments)
    spec = _spec_of(query, key, value, given)
    on = current_device() if device is None else device
    if not isinstance(on, (Device, jax.Device)):
        raise TypeError(
            f"device is {on!r}; wanted a jax.Device or flashjax.Device(platform, kind, capability)."
        )
    on = device_of(on)
    notes = _notes(spec.shapes.mask)
    if implementation in ("reference", "cudnn"):
        reason = cudnn.refusal(given, on) if implementation == "cudnn" else None
        if reason is not None:
            raise NotImplementedError(f"implementation='cudnn' cannot do this call: {reason}.")
        return Explanation(implementation, None, spec, (), None, None, notes)
    made = plan(spec, implementation, on)
    chosen = made.forward.implementation
    refused = [(n, str(why)) for n, why in implementations(spec, on) if why and n != chosen]
    reason = cudnn.refusal(given, on)
    if reason is None:
        notes = (*notes, "'cudnn' may take this call too; it runs only where it is named")
    else:
        refused.append(("cudnn", reason))
    concrete = _concrete_mask(given, query, key)
    forward = _tiling(spec, made.forward.config, concrete, "rows")
    backward = _tiling(spec, made.backward.config, concrete, "columns")
    return Explanation(chosen, made, spec, tuple(refused), forward, backward, notes)


def _spec_of(query: Any, key: Any, value: Any, given: Arguments) -> Spec:
    """The call's Spec, by tracing bind: shapes are enough."""
    found: list[Spec] = []
    leaves, treedef = jax.tree.flatten((query, key, value, given), is_leaf=lambda x: x is None)
    dynamic = [hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves]

    def trace(arrays: list[Any]) -> int:
        rest = iter(arrays)
        filled = [next(rest) if d else x for d, x in zip(dynamic, leaves, strict=True)]
        q, k, v, arguments = jax.tree.unflatten(treedef, filled)
        found.append(binding.bind(q, k, v, arguments).spec)
        return 0

    jax.eval_shape(trace, [x for d, x in zip(dynamic, leaves, strict=True) if d])
    return found[0]


def _concrete_mask(given: Arguments, query: Any, key: Any) -> Mask | None:
    """The call's mask with its values, or None where they are not all known (or there is none)."""
    parts = (given.mask, given.query_seq_lengths, given.key_value_seq_lengths, given.segment_ids)
    abstract = (jax.ShapeDtypeStruct, jax.core.Tracer)
    if any(isinstance(x, abstract) for x in jax.tree.leaves(parts)):
        return None
    dims = Dims(tuple(query.shape[:-3]), query.shape[-2], query.shape[-3], key.shape[-3])
    return binding.mask_of(given, dims)


def _tiling(spec: Spec, config: Config, mask: Mask | None, axis: Axis) -> Tiling:
    rows, columns = Blocks(spec.rows, config.rows), Blocks(spec.columns, config.columns)
    total = rows.count * columns.count
    if mask is None and spec.shapes.mask is not None:
        shape = jax.eval_shape(lambda m: schedule(m, rows, columns, axis), spec.shapes.mask)
        return Tiling(total, _kind(shape), size_bytes(shape), None, None)
    if total == 0:
        return Tiling(0, "ranges", 0, 0.0, 0.0)
    walk, visited, full = _counted(mask, rows, columns, axis)
    return Tiling(total, _kind(walk), size_bytes(walk), float(visited), float(full))


# One function for all calls, so that explaining the same kind of call again compiles nothing.
@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _counted(mask: Mask | None, rows: Blocks, columns: Blocks, axis: Axis) -> Any:
    walk = schedule(mask, rows, columns, axis)
    own, other = (rows, columns) if axis == "rows" else (columns, rows)
    return walk, *tiles(walk, own, other)


def _kind(walk: Any) -> str:
    return "ranges" if isinstance(walk, Ranges) else "lists"


def _notes(mask: Mask | None) -> tuple[str, ...]:
    terms = [mask] if mask is not None else []
    notes: list[str] = []
    while terms:
        term = terms.pop()
        terms += getattr(term, "parts", ())
        if isinstance(term, Predicate) and term.tile_verdict is None:
            notes.append(
                f"{term} brings no tile_verdict: by itself it skips no tile and every tile "
                "evaluates it"
            )
    return tuple(dict.fromkeys(notes))
