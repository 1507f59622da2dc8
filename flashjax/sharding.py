"""The sharding rule: attention splits over batch and heads without a collective.

Explicit meshes: ``jax.shard_map`` over the operands' own sharding. Auto meshes, where shardings
are known only to the compiler: ``custom_partitioning``. Under a user's ``shard_map`` there is
nothing left to split. In both rules gradients of operands that are broadcast over a sharded axis
(bias, sinks, arrays of scores, K/V whose heads the shards do not divide) cost one all-reduce each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flashjax.batching import Backward, Forward
from flashjax.spec import Operands, Spec
from flashjax.varying import cast_varying, varying_axes

# Roles stand in a PartitionSpec where mesh axes will: batch, query heads, key heads.
OUT, LSE = P("b", None, "n", None), P("b", "n", None)


def roles(spec: Spec) -> Operands:
    """Each operand's dims by role; None where it is broadcast, or a sequence or head dim."""

    def one(x: jax.ShapeDtypeStruct) -> P:
        ends = ("b" if x.shape[0] != 1 else None, "n" if x.shape[1] != 1 else None)
        return P(*ends, *[None] * (len(x.shape) - 2))

    rest = jax.tree.map(one, dataclasses.replace(spec.shapes, query=None, key=None, value=None))
    key = P("b", None, "k", None)
    return dataclasses.replace(rest, query=OUT, key=key, value=key)


def gradient_roles(spec: Spec) -> Operands:
    """The roles of what a backward returns, in its structure."""
    all_roles, found = roles(spec), dict.fromkeys(("query", "key", "value"))
    for name in spec.wanted - {"sinks"}:
        places = jax.tree.leaves(getattr(all_roles, name), is_leaf=_is_role)
        if name == "score":
            leaves = jax.tree.leaves(spec.shapes.score)
            found[name] = tuple(
                place if jnp.issubdtype(x.dtype, jnp.floating) else None
                for place, x in zip(places, leaves, strict=True)
            )
        else:
            found[name] = places[0]
    return Operands(**found)


def _is_role(x: Any) -> bool:
    return isinstance(x, P)


@dataclasses.dataclass(frozen=True)
class Split:
    """A call split over mesh axes, and what one shard must do beyond the call itself."""

    spec: Spec  # of the whole call
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    head_shards: int

    @property
    def keys_divide(self) -> bool:
        return self.spec.key_heads % self.head_shards == 0

    def resolve(self, role: P) -> P:
        axes = {"b": self.batch, "n": self.heads, "k": self.heads if self.keys_divide else ()}
        return P(*[axes[part] or None if part else None for part in role])

    def own_key_heads(self, x: jax.Array) -> jax.Array:
        """On one shard: of a K or V with all key heads, those of the query heads that lie here."""
        if self.keys_divide:
            return x
        group, heads = self.spec.group, self.spec.heads // self.head_shards
        first = lax.axis_index(self.heads) * heads
        if group % heads == 0:
            return lax.dynamic_slice_in_dim(x, first // group, 1, 2)
        return jnp.take(x, (first + jnp.arange(heads, dtype=jnp.int32)) // group, axis=2)

    def localized(self, operands: Operands) -> Operands:
        own = self.own_key_heads
        return dataclasses.replace(operands, key=own(operands.key), value=own(operands.value))

    def all_key_heads(self, grad: jax.Array | None) -> jax.Array | None:
        """The transpose of `own_key_heads`."""
        if grad is None or self.keys_divide:
            return grad
        whole = jax.ShapeDtypeStruct(
            (*grad.shape[:2], self.spec.key_heads, grad.shape[3]), grad.dtype
        )
        return jax.linear_transpose(self.own_key_heads, whole)(grad)[0]

    def summed(self, grad: jax.Array, role: P) -> jax.Array:
        """On one shard: a gradient summed over the mesh axes over which its operand is whole."""
        used = {axis for part in self.resolve(role) for axis in _axes_of(part)}
        axes = tuple(axis for axis in (*self.batch, *self.heads) if axis not in used)
        return lax.psum(grad, axes) if axes else grad


def _split(spec: Spec, mesh: Any, place: Any) -> Split:
    """The split that the query's sharding asks for; axes that do not divide are left out."""

    def names(part: Any, size: int) -> tuple[str, ...]:
        axes = _axes_of(part)
        return axes if size % math.prod(mesh.shape[a] for a in axes) == 0 else ()

    batch, heads = names(place[0], spec.batch), names(place[2], spec.heads)
    return Split(spec, batch, heads, math.prod(mesh.shape[a] for a in heads))


def over_explicit_mesh(
    fn: Callable[[Spec, Operands], tuple[jax.Array, jax.Array]], spec: Spec, operands: Operands
) -> tuple[jax.Array, jax.Array]:
    """``fn(spec, operands)`` on each shard of an Explicit mesh; differentiable like `fn`."""
    sharding = jax.typeof(operands.query).sharding
    mesh = sharding.mesh
    explicit = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }
    if not explicit:
        return fn(spec, cast_varying(operands, varying_axes(operands)))
    _refuse_split_sequences(operands)
    split = _split(spec, mesh, sharding.spec)

    wanted = jax.tree.map(split.resolve, roles(spec), is_leaf=_is_role)
    # What comes whole goes in whole and is cut inside: its gradient is then one all-reduce, where
    # resharding outside would add an all-gather.
    given = jax.tree.map(lambda x, place: _given(jax.typeof(x), place), operands, wanted)
    given = dataclasses.replace(given, query=wanted.query, key=wanted.key, value=wanted.value)
    operands = jax.tree.map(
        lambda x, place: jax.sharding.reshard(x, NamedSharding(mesh, place)), operands, given
    )

    def on_shard(operands: Operands) -> tuple[jax.Array, jax.Array]:
        # One cast over all axes, whose transpose is one sum, before anything is cut.
        operands = cast_varying(operands, frozenset((*split.batch, *split.heads)))
        local = split.localized(jax.tree.map(_cut, operands, given, wanted))
        return fn(spec.at(local), local)

    return jax.shard_map(
        on_shard,
        mesh=mesh,
        in_specs=(given,),
        out_specs=(split.resolve(OUT), split.resolve(LSE)),
        axis_names=explicit,
    )(operands)


def _axes_of(part: Any) -> tuple[str, ...]:
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def _given(aval: Any, wanted: P) -> P:
    """The operand's own sharding where it is the wanted one, whole elsewhere."""
    return P(
        *[
            want if want and _axes_of(have) == _axes_of(want) else None
            for have, want in zip(aval.sharding.spec, wanted, strict=True)
        ]
    )


def _cut(x: jax.Array, given: P, wanted: P) -> jax.Array:
    """On one shard: the part of `x` that lies here, in the dims where it came whole."""
    for dim, (have, want) in enumerate(zip(given, wanted, strict=True)):
        if want and not have:
            size = x.shape[dim] // math.prod(lax.axis_size(axis) for axis in _axes_of(want))
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(_axes_of(want)) * size, size, dim)
    return x


def _refuse_split_sequences(operands: Operands) -> None:
    for name in ("query", "key", "value"):
        spec = jax.typeof(getattr(operands, name)).sharding.spec
        for axis, what in ((1, "sequence"), (3, "head-dim")):
            if spec[axis]:
                raise ValueError(
                    f"{name} is sharded as {spec} over its {what} axis; wanted only batch and head "
                    "axes sharded. Call jax.sharding.reshard on it first."
                )


def forward(run: Forward, spec: Spec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """``run(spec, operands)``, which an Auto mesh's partitioner can split."""
    if not _split_by_compiler(operands):
        return run(spec, operands)
    leaves, treedef = jax.tree.flatten(operands)

    def whole(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        return run(spec, jax.tree.unflatten(treedef, leaves))

    def on_shard(split: Split, *leaves: jax.Array) -> tuple[jax.Array, ...]:
        local = split.localized(jax.tree.unflatten(treedef, leaves))
        return run(spec.at(local), local)

    places = jax.tree.leaves(roles(spec), is_leaf=_is_role)
    out, lse = _partitioned(spec, whole, on_shard, places, [OUT, LSE], leaves)
    return out, lse


def backward(
    run: Backward,
    spec: Spec,
    operands: Operands,
    lse: jax.Array,
    delta: jax.Array,
    d_out: jax.Array,
) -> Operands:
    """``run(spec, operands, lse, delta, d_out)``, which an Auto mesh's partitioner can split."""
    if not _split_by_compiler(operands):
        return run(spec, operands, lse, delta, d_out)
    args = (operands, lse, delta, d_out)
    leaves, treedef = jax.tree.flatten(args)
    grad_places, grad_tree = jax.tree.flatten(gradient_roles(spec), is_leaf=_is_role)

    def whole(*leaves: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(run(spec, *jax.tree.unflatten(treedef, leaves)))

    def on_shard(split: Split, *leaves: jax.Array) -> list[jax.Array]:
        operands, *rows = jax.tree.unflatten(treedef, leaves)
        local = split.localized(operands)
        grads = run(spec.at(local), local, *rows)
        grads = dataclasses.replace(
            grads, key=split.all_key_heads(grads.key), value=split.all_key_heads(grads.value)
        )
        return [
            split.summed(grad, role)
            for grad, role in zip(jax.tree.leaves(grads), grad_places, strict=True)
        ]

    places = jax.tree.leaves((roles(spec), LSE, LSE, OUT), is_leaf=_is_role)
    found = _partitioned(spec, whole, on_shard, places, grad_places, leaves)
    return jax.tree.unflatten(grad_tree, found)


def _split_by_compiler(operands: Operands) -> bool:
    """Whether this call may end up on several devices of an Auto mesh.

    Arrays that carry no mesh may still get one from jit's in_shardings. On one device JAX lowers
    the partitioned call as if it were not partitioned.
    """
    mesh = jax.typeof(operands.query).sharding.mesh
    if mesh.empty:
        return jax.sharding.get_abstract_mesh().empty and jax.device_count() > 1
    return mesh.size > 1 and all(kind == AxisType.Auto for kind in mesh.axis_types)


def _partitioned(
    spec: Spec,
    whole: Callable[..., Any],
    on_shard: Callable[..., Any],
    places: list[P],
    out_places: list[P],
    leaves: list[jax.Array],
) -> tuple[jax.Array, ...]:
    """``whole(*leaves)``, split by role as the query's sharding (leaf 0) asks for.

    Operand shardings are built here, not echoed: what comes may be split over a sequence.
    """

    def partition(mesh: Any, args: Any, result: Any) -> Any:
        split = _split(spec, mesh, args[0].sharding.spec)

        def at(place: P) -> NamedSharding:
            return NamedSharding(mesh, split.resolve(place))

        def lower(*leaves: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(on_shard(split, *leaves))

        return mesh, lower, tuple(map(at, out_places)), tuple(map(at, places))

    mesh = jax.typeof(leaves[0]).sharding.mesh
    rule, whole_dims, sizes = _rule(spec, _keys_follow(spec, mesh), places, out_places)
    call = custom_partitioning(lambda *leaves: tuple(whole(*leaves)))
    call.def_partition(partition, sharding_rule=rule, need_replication_factors=whole_dims, **sizes)
    return call(*leaves)


def _keys_follow(spec: Spec, mesh: Any) -> bool:
    """Whether the key heads may be sharded as the leading part of the query heads.

    Where an axis and K share a divisor but the axis does not divide K, Shardy would cut the axis
    in two, and a NamedSharding cannot say that.
    """
    if spec.group == 1 or spec.key_heads == 1 or mesh.empty:
        return False
    return all(math.gcd(spec.key_heads, size) in (1, size) for size in mesh.axis_sizes)


def _rule(
    spec: Spec, keys_follow: bool, places: list[P], out_places: list[P]
) -> tuple[str, tuple[str, ...], dict[str, int]]:
    """Shardy's rule: batch and heads pass through, every other dim stays whole."""
    heads = "(k g)" if keys_follow else "n"
    factors = {"b": "b", "n": heads, "k": "n" if spec.group == 1 else "k"}
    whole_dims: list[str] = []

    def dims(place: P) -> str:
        names = []
        for part in place:
            if part is None:
                whole_dims.append(f"w{len(whole_dims)}")
            names.append(factors[part] if part else whole_dims[-1])
        return " ".join(names)

    inputs, outputs = (", ".join(map(dims, group)) for group in (places, out_places))
    sizes = {"g": spec.group} if keys_follow else {}
    return f"{inputs} -> {outputs}", tuple(whole_dims), sizes
