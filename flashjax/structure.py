"""Frozen pytrees with positional operands: the common base of mask terms and score modifiers.

A structure is what a kernel compiles against: its type, its static fields, and the shapes and
dtypes of its arrays. The values of its arrays are operands of the kernel. Hash and equality
therefore look at the former and never at the latter.

A field declared with :func:`operand` may hold an array. :meth:`Structure.aligned` brings each to
the canonical rank 4, broadcastable to the logits (B, N, T, S); a backend then replaces each leaf by
its values on one tile, and the structure's own elementwise method reads them off ``self``. So the
same method serves the dense reference, the chunked path and every kernel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

Kind = Literal["scalar", "head", "row", "column", "tile"]

# Positions and lengths are int32 in every implementation, and T and S stay below 2³⁰. Offsets and
# widths beyond this limit hide or show everything; a position plus two of them still fits.
POSITION_LIMIT = 2**29


class At(NamedTuple):
    """Where the elements of a tile lie: int32 arrays that broadcast to the tile's shape.

    ``batch`` and ``head`` are None where the structure does not ask for them
    (``Structure.uses_ids``). Batch numbers count the flattened batch dimensions, row-major.
    """

    row: jax.Array
    column: jax.Array
    batch: jax.Array | None = None
    head: jax.Array | None = None


class Dims(NamedTuple):
    """The logits' dimensions as the user sees them: any number of batch dims, N, T, S."""

    batch: tuple[int, ...]
    heads: int
    rows: int
    columns: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocked:
    """Values constant on blocks of ``block_rows`` × ``block_columns``: (B|1, N|1, nr, nc)."""

    values: Any
    block_rows: int = dataclasses.field(metadata={"static": True})
    block_columns: int = dataclasses.field(metadata={"static": True})


def is_blocked(x: Any) -> bool:
    return isinstance(x, Blocked)


def operand(kind: Kind, *, integer: bool = False, **kwargs: Any) -> Any:
    """Declares a dataclass field whose value may be an array (or a dict of arrays) of `kind`."""
    return dataclasses.field(metadata={"kind": kind, "integer": integer}, **kwargs)


def nested(**kwargs: Any) -> Any:
    """Declares a dataclass field that holds other structures."""
    return dataclasses.field(metadata={"nested": True}, **kwargs)


class Structure:
    """Base of mask terms and score modifiers. Subclasses are declared with :func:`structure`."""

    # True where the elementwise method reads At.batch or At.head.
    uses_ids = False
    # Operand fields that hold a number or None, compiled in.
    _fixed: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if "kind" in field.metadata:
                where = f"{type(self).__name__}({field.name}=…)"
                value = _as_operand(getattr(self, field.name), field.metadata["integer"], where)
                if value is None and field.default is not None:
                    raise TypeError(f"{where} is None; wanted {_wanted(field)}.")
                if _is_static(value) and value is not None and field.metadata["kind"] != "scalar":
                    raise TypeError(f"{where} is {value!r}; wanted {_wanted(field)}.")
                object.__setattr__(self, field.name, value)
        _fix(self)

    def aligned(self, dims: Dims) -> Self:
        """The same structure with every array in canonical rank 4 for these logits."""
        changed: dict[str, Any] = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if "nested" in field.metadata:
                changed[field.name] = tuple(part.aligned(dims) for part in value)
            elif "kind" in field.metadata and not _is_static(value):
                kind, name = field.metadata["kind"], f"{type(self).__name__}.{field.name}"
                if isinstance(value, dict):
                    changed[field.name] = {
                        key: align(array, kind, dims, f"{name}[{key!r}]")
                        for key, array in value.items()
                    }
                else:
                    changed[field.name] = align(value, kind, dims, name)
        return replace(self, **changed)

    def _signature(self) -> tuple[Any, ...]:
        leaves, treedef = jax.tree.flatten(self)
        return treedef, tuple((getattr(x, "shape", ()), getattr(x, "dtype", None)) for x in leaves)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._signature() == other._signature()

    def __hash__(self) -> int:
        return hash(self._signature())

    def __repr__(self) -> str:
        parts = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if not _equals_default(value, field):
                parts.append(f"{field.name}={describe(value)}")
        return f"{type(self).__name__}({', '.join(parts)})"


S = TypeVar("S", bound=Structure)


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(operand, nested))
def structure[S: Structure](cls: type[S]) -> type[S]:
    """Class decorator: a frozen dataclass that is a pytree of its arrays.

    Python numbers and None in operand fields are static: ``Causal(offset=3)`` compiles the 3 in,
    ``Causal(offset=jnp.int32(3))`` passes it as an operand.
    """
    new = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    fields = dataclasses.fields(new)  # type: ignore[arg-type]
    dynamic = tuple(f.name for f in fields if "kind" in f.metadata or "nested" in f.metadata)
    static = tuple(f.name for f in fields if f.name not in dynamic)

    def flatten_with_keys(self: Any) -> tuple[Any, Any]:
        fixed = self._fixed
        children = [
            (jax.tree_util.GetAttrKey(name), None if name in fixed else getattr(self, name))
            for name in dynamic
        ]
        return children, (fixed, tuple(getattr(self, name) for name in (*sorted(fixed), *static)))

    def unflatten(aux: Any, children: Any) -> Any:
        self = object.__new__(new)
        fixed, rest = aux
        for name, child in zip(dynamic, children, strict=True):
            object.__setattr__(self, name, child)
        for name, value in zip((*sorted(fixed), *static), rest, strict=True):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_fixed", fixed)
        return self

    jax.tree_util.register_pytree_with_keys(new, flatten_with_keys, unflatten)
    return new


def replace[S: Structure](self: S, **changed: Any) -> S:
    """Like dataclasses.replace, without re-checking fields that already hold canonical arrays."""
    new = object.__new__(type(self))
    for field in dataclasses.fields(self):  # type: ignore[arg-type]
        value = changed.get(field.name, getattr(self, field.name))
        object.__setattr__(new, field.name, value)
    _fix(new)
    return new


def _fix(self: Structure) -> None:
    """Records which operand fields are compiled in.

    JAX puts flags of its own in the place of leaves (vmap: which are mapped), so that the values
    cannot tell later.
    """
    fixed = frozenset(
        field.name
        for field in dataclasses.fields(self)  # type: ignore[arg-type]
        if "kind" in field.metadata and _is_static(getattr(self, field.name))
    )
    object.__setattr__(self, "_fixed", fixed)


def describe(value: Any) -> str:
    """Arrays by dtype and shape, functions by name, anything else as repr."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {describe(v)}" for k, v in value.items()) + "}"
    if callable(value) and not isinstance(value, Structure):
        return getattr(value, "__qualname__", repr(value))
    return repr(value)


def align(array: Any, kind: Kind, dims: Dims, name: str) -> jax.Array:
    """Brings a user's array to rank 4, broadcastable to (B, N, T, S), batch dims flattened.

    scalar: (), (*batch,) or (*batch|1, N|1); head: (N,); row: (T,), (*batch, T) or
    (*batch, N|1, T); column likewise with S; tile: any rank up to the logits', right-aligned.
    """
    n_batch = len(dims.batch)
    shape = tuple(array.shape)
    if kind == "head":
        wanted, fits = f"({dims.heads},) (one value per query head)", shape == (dims.heads,)
        lead: tuple[int, ...] = ()
        tail: tuple[int, ...] = (dims.heads, 1, 1)
    elif kind == "tile":
        full = (*dims.batch, dims.heads, dims.rows, dims.columns)
        wanted = f"a shape of rank <= {len(full)} that broadcasts to {full}"
        padded = (1,) * (len(full) - len(shape)) + shape
        fits = len(padded) == len(full) and all(
            have in (1, want) for have, want in zip(padded, full, strict=True)
        )
        lead, tail = padded[:n_batch], padded[n_batch:]
    else:
        length = {"scalar": (), "row": (dims.rows,), "column": (dims.columns,)}[kind]
        options = [length, (*dims.batch, *length), (*dims.batch, dims.heads, *length)]
        wanted = " or ".join(dict.fromkeys(map(str, options)))
        if len(shape) == len(length):
            lead, heads = (), 1
        elif len(shape) == n_batch + len(length):
            lead, heads = shape[:n_batch], 1
        else:
            lead, heads = shape[:n_batch], shape[n_batch] if len(shape) > n_batch else 1
        fits = (
            len(shape) in {len(option) for option in options}
            and shape[len(shape) - len(length) :] == length
            and heads in (1, dims.heads)
            and all(a in (1, b) for a, b in zip(lead, dims.batch, strict=False))
        )
        size = length[0] if length else 1
        tail = (heads, size if kind == "row" else 1, size if kind == "column" else 1)
    if not fits:
        raise ValueError(f"{name} has shape {shape}; wanted {wanted}.")
    return flatten_batch(jnp.asarray(array), lead, tail, dims.batch)


def flatten_batch(
    array: jax.Array, lead: tuple[int, ...], tail: tuple[int, ...], batch: tuple[int, ...]
) -> jax.Array:
    """Merges leading batch dims (each 1 or full) into one that is 1 or B."""
    if all(size == 1 for size in lead):
        return array.reshape(1, *tail)
    if lead != batch:
        array = jnp.broadcast_to(array.reshape(*lead, *tail), (*batch, *tail))
    return array.reshape(math.prod(batch), *tail)


def clipped(x: Any, low: int, high: int) -> Any:
    """Positions as int32. Clipping first keeps wide and unsigned dtypes right."""
    if x is None:
        return None
    if isinstance(x, int):
        return min(max(x, low), high)
    info = jnp.iinfo(x.dtype)
    return jnp.clip(x, max(low, info.min), min(high, info.max)).astype(jnp.int32)


# A tile that no transposition maps to itself: what is not elementwise shows in its shapes.
_TRIAL = (2, 3)
_ACROSS = ("cum", "reduce_", "arg", "sort", "rev", "dot_general", "conv_", "gather", "scatter")


def trial(dtype: Any) -> jax.ShapeDtypeStruct:
    """An abstract tile on which a user's function is tried."""
    return jax.ShapeDtypeStruct(_TRIAL, dtype)


def check_function(
    where: str, fn: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]
) -> jax.ShapeDtypeStruct:
    """Tries a user's elementwise function on an abstract tile; returns what it gives.

    Refuses functions that fail, capture arrays, or look beyond one element.
    """
    tiles = {name: trial(jnp.result_type(x)) for name, x in named.items()}
    try:
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*args, **tiles)
    except Exception as error:
        positions = "row, column" if len(args) == 2 else "score, row, column, batch, head"
        raise TypeError(
            f"{where} failed on a tile: {type(error).__name__}: {error}\nIt is called as "
            f"fn({', '.join([positions, *tiles])}), the names by keyword, and must be elementwise "
            "jnp: jnp.where instead of if."
        ) from error
    for const in closed.consts:
        if isinstance(const, jax.core.Tracer) or getattr(const, "ndim", 0) > 0:
            raise ValueError(
                f"{where}: {describe(fn)} captures an array ({describe(const)}); a kernel cannot "
                "see it. Pass it as an operand: rows=, columns=, scalars= or heads={name: array}, "
                "and take it as a keyword argument of the function."
            )
    across = _looks_across(closed.jaxpr)
    if across is not None or getattr(out, "shape", None) != _TRIAL:
        raise TypeError(
            f"{where} is not elementwise: on a tile of shape {_TRIAL} it "
            + (f"uses {across}" if across else f"returns {describe(out)}")
            + ". It sees one tile at a time, of any size; compute each element from its own "
            "row, column and operands."
        )
    return out


def _looks_across(jaxpr: Any) -> str | None:
    """The first primitive that mixes elements, or None."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name.startswith(_ACROSS) and name != "reduce_precision":
            return str(name)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            found = _looks_across(inner) if hasattr(inner, "eqns") else None
            if found is not None:
                return found
        shapes = {getattr(v.aval, "shape", ()) for v in equation.outvars}
        if not shapes <= {(), _TRIAL}:
            return f"{name} of shape {max(shapes)}"
    return None


def check_named(self: Structure, *groups: str) -> None:
    """Each group is a dict of arrays that a user's function takes by keyword; no name twice."""
    seen: dict[str, str] = {}
    for group in groups:
        named = getattr(self, group)
        if not isinstance(named, dict):
            raise TypeError(
                f"{type(self).__name__}({group}=…) is a {type(named).__name__}; wanted a dict of "
                "named arrays."
            )
        for name in named:
            if name in seen:
                raise ValueError(
                    f"{type(self).__name__} has {name!r} in {seen[name]}= and in {group}=; wanted "
                    "each name once. Rename one."
                )
            seen[name] = group


def _wanted(field: dataclasses.Field[Any]) -> str:
    kind, integer = field.metadata["kind"], field.metadata["integer"]
    if kind == "scalar":
        return "an integer or an integer array" if integer else "a number or an array"
    return f"an {'integer ' if integer else ''}array ({kind} operand)"


def _as_operand(value: Any, integer: bool, where: str) -> Any:
    if isinstance(value, Mapping):
        named = {str(k): _as_operand(v, integer, f"{where}[{k!r}]") for k, v in value.items()}
        return {
            k: np.asarray(v, np.result_type(v)) if _is_static(v) else v for k, v in named.items()
        }
    if isinstance(value, np.generic):
        value = value.item()
    if _is_static(value):
        if integer and value is not None and type(value) is not int:
            raise TypeError(f"{where} is {value!r}; wanted an integer or an integer array.")
        return value
    if isinstance(value, (list, tuple)):
        value = np.asarray(value)
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        raise TypeError(f"{where} is a {type(value).__name__}; wanted a number or an array.")
    if integer and not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{where} has dtype {value.dtype}; wanted an integer dtype. Cast it.")
    return value


def _is_static(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float))


def _equals_default(value: Any, field: dataclasses.Field[Any]) -> bool:
    if field.default is not dataclasses.MISSING:
        return (_is_static(value) or isinstance(value, str)) and value == field.default
    return field.default_factory is not dataclasses.MISSING and value == {}
