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
from collections.abc import Mapping
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


class Place(NamedTuple):
    """Where a call's row 0 and column 0 lie in the whole sequence, and its number of columns."""

    row: Any
    column: Any
    columns: int

    @property
    def is_whole(self) -> bool:
        """Whether the call has every column of the sequence."""
        return isinstance(self.column, int) and self.column == 0

    def columns_of(self, array: Any) -> Any:
        """The call's part of an array over all columns (last axis); 0 where it has none."""
        if self.is_whole:
            return array
        sides = [(0, 0)] * (array.ndim - 1) + [(self.columns, self.columns)]
        begin = self.column + self.columns
        return jax.lax.dynamic_slice_in_dim(jnp.pad(array, sides), begin, self.columns, axis=-1)


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

    def placed(self, place: Place) -> Self:
        """The structure for a call on a part of the sequence, such as decoding over a cache.

        Positions are those of the whole sequence. Row arrays hold the call's rows already; of
        column arrays the call's columns are taken.
        """
        changed: dict[str, Any] = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, kind = getattr(self, field.name), field.metadata.get("kind")
            if "nested" in field.metadata:
                changed[field.name] = tuple(part.placed(place) for part in value)
            elif kind == "column" and isinstance(value, dict):
                changed[field.name] = {n: place.columns_of(x) for n, x in value.items()}
            elif kind in ("column", "tile") and not (
                _is_static(value) or columns_in(value, kind) is None
            ):
                changed[field.name] = place.columns_of(value)
        return replace(self, **changed)

    def column_count(self) -> int | None:
        """How many columns its arrays over columns have, the fewest; None where it has none."""
        counts: list[int | None] = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, kind = getattr(self, field.name), field.metadata.get("kind")
            if "nested" in field.metadata:
                counts += [part.column_count() for part in value]
            elif kind in ("column", "tile") and not _is_static(value):
                arrays = value.values() if isinstance(value, dict) else [value]
                counts += [columns_in(x, kind) for x in arrays]
        return min((n for n in counts if n is not None), default=None)

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
        if n_batch and shape == (*dims.batch, dims.rows, dims.columns):
            wanted += f"; {name}[..., None, :, :] is the same for all heads"
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


def columns_in(array: Any, kind: Kind = "tile") -> int | None:
    """How many columns an array over columns has; None where it is the same for all."""
    if array.ndim == 0 or (kind == "tile" and array.shape[-1] == 1):
        return None
    return int(array.shape[-1])


def moved(x: Any, by: Any) -> Any:
    """A position, or an array of them, moved; None stays."""
    if x is None or (isinstance(by, int) and by == 0):
        return x
    return clipped(x, -POSITION_LIMIT, POSITION_LIMIT) + by


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
