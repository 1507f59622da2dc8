"""Tables of tuned configurations: one shipped per kind of device, one of this user before it.

An entry says which configuration was fastest for a kind of call at a size. Sizes are powers of
two, so that nearby shapes share an entry; a call takes the nearest entry within a factor of 4 in
each. Where there is none, or its configuration is no longer offered, the call takes the first
configuration that its backend offers.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from flashjax.backend import Config, Device
from flashjax.masks import Blocks, Ranges, schedule
from flashjax.spec import Spec

Direction = Literal["forward", "backward"]
FORMAT = 2
NEAR = 2  # in powers of two
USERS, SHIPPED, DEFAULT = "tuned on this machine", "shipped table", "default"


@dataclasses.dataclass(frozen=True, order=True)
class Kind:
    """What an entry and a call must agree in."""

    backend: str
    direction: str
    dtype: str
    precision: str  # of float32's products; else empty
    head_dim: int
    value_dim: int
    schedule: str  # "none", "ranges" or "lists"
    scores: str  # of "bias" and "score" those that the call has
    grouped: bool  # G > 1
    default: str  # what is offered first: where that differs, so does what is worth trying

    @classmethod
    def of(cls, backend: str, direction: Direction, spec: Spec, default: Config) -> Kind:
        has = {"bias": spec.shapes.bias is not None, "score": spec.shapes.score is not None}
        return cls(
            backend,
            direction,
            str(spec.dtype),
            spec.precision.name if spec.precision and spec.dtype == jnp.float32 else "",
            spec.head_dim,
            spec.value_dim,
            _schedule_kind(spec, direction),
            " ".join(name for name, there in has.items() if there),
            spec.group > 1,
            str(default),
        )


class Size(NamedTuple):
    """Powers of two nearest to T, S and B·N, as exponents."""

    rows: int
    columns: int
    heads: int

    @classmethod
    def of(cls, spec: Spec) -> Size:
        return cls(*map(bucket, (spec.rows, spec.columns, spec.batch * spec.heads)))

    def distance(self, other: Size) -> int | None:
        """None where the two are too far from each other to share an entry."""
        apart = [abs(a - b) for a, b in zip(self, other, strict=True)]
        return sum(apart) if max(apart) <= NEAR else None


def bucket(n: int) -> int:
    return round(math.log2(max(n, 1)))


def _schedule_kind(spec: Spec, direction: Direction) -> str:
    mask = spec.shapes.mask
    if mask is None:
        return "none"
    rows, columns = Blocks(spec.rows, 128), Blocks(spec.columns, 128)
    axis: Any = "rows" if direction == "forward" else "columns"
    made = jax.eval_shape(lambda m: schedule(m, rows, columns, axis), mask)
    return "ranges" if isinstance(made, Ranges) else "lists"


# A configuration as JSON has it: dataclasses.asdict. Entries are sorted by size, so that of two
# equally near ones always the same is taken.
Entries = dict[Kind, dict[Size, dict[str, Any]]]


class Table(NamedTuple):
    """Entries, and where they are from, in words."""

    source: str
    entries: Entries

    def find(self, kind: Kind, size: Size) -> dict[str, Any] | None:
        near = [
            (distance, at)
            for at in self.entries.get(kind, {})
            if (distance := size.distance(at)) is not None
        ]
        return self.entries[kind][min(near)[1]] if near else None


def chosen(
    backend: str, spec: Spec, device: Device, direction: Direction, offered: Sequence[Config]
) -> tuple[Config, str]:
    """The configuration to take among those offered, and where it is from, in words."""
    if len(offered) > 1:
        for table in tables(device.kind):
            if not any(kind.backend == backend for kind in table.entries):
                continue
            kind = Kind.of(backend, direction, spec, offered[0])
            found = table.find(kind, Size.of(spec))
            config = found and resolved(found, offered)
            if config:
                return config, table.source
    return offered[0], DEFAULT


def resolved(found: Mapping[str, Any], offered: Sequence[Config]) -> Config | None:
    """The configuration that an entry describes; None where a pass of it is not offered.

    Passes are found apart (`flashjax.backend.Config`): a backward may pair the passes of two that
    are offered.
    """
    own = {name: x for name, x in found.items() if not isinstance(x, dict)}
    config = next((c for c in offered if plain(c) == own), None)
    if config is None:
        return None
    for name in found.keys() - own.keys():
        passes = [getattr(c, name, None) for c in offered]
        it = next((p for p in passes if p is not None and plain(p) == found[name]), None)
        if it is None:
            return None
        config = dataclasses.replace(config, **{name: it})
    return config


def plain(config: Config) -> dict[str, Any]:
    """The fields of a configuration's own pass."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {name: x for name, x in values.items() if not isinstance(x, Config)}


@functools.cache
def tables(device_kind: str) -> tuple[Table, ...]:
    """This user's table and the shipped one, read once a process, where they exist."""
    if not device_kind:
        return ()
    places = {USERS: users_path(device_kind), SHIPPED: shipped_path(device_kind)}
    read = ((source, read_entries(path, device_kind)) for source, path in places.items() if path)
    return tuple(Table(source, entries) for source, entries in read if entries)


def file_name(device_kind: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_") + ".json"


def shipped_path(device_kind: str) -> Path:
    return Path(__file__).with_name(file_name(device_kind))


def users_path(device_kind: str) -> Path | None:
    """Where this user's table is kept; None for a user without a home."""
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(cache) if cache else Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / "flashjax" / "tuning" / file_name(device_kind)


def read_entries(path: Path, device_kind: str) -> Entries:
    """A file's entries; none, and a warning, where it cannot be read as a table of this device."""
    try:
        return parsed(json.loads(path.read_text("utf-8")), device_kind)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
    warnings.warn(
        f"flashjax ignores its tuning table {path}, which it cannot read ({reason}). Delete it, or "
        "make a new one with `python -m flashjax tune`.",
        UserWarning,
        stacklevel=2,
    )
    return {}


def parsed(data: Any, device_kind: str) -> Entries:
    """Raises ValueError, TypeError, KeyError or AttributeError for what is no such table."""
    if data["format"] != FORMAT or data["device"] != device_kind:
        raise ValueError(
            f"it is of format {data['format']!r} for {data['device']!r}; wanted format {FORMAT} "
            f"for {device_kind!r}"
        )
    found: Entries = {}
    for entry in data["entries"]:
        fields = {f.name: entry[f.name] for f in dataclasses.fields(Kind)}
        size = Size(*(bucket(entry[name]) for name in Size._fields))
        found.setdefault(Kind(**fields), {})[size] = dict(entry["config"])
    return found


def write_entries(path: Path, device_kind: str, entries: Entries) -> None:
    """Replaces the file at once: a reader sees the old table or the new one."""
    rows = [
        dataclasses.asdict(kind)
        | {name: 2**exponent for name, exponent in size._asdict().items()}
        | {"config": config}
        for kind, sizes in sorted(entries.items())
        for size, config in sorted(sizes.items())
    ]
    # One line an entry, so that a change of a shipped table can be reviewed.
    lines = ",\n".join(f"    {json.dumps(row, ensure_ascii=False)}" for row in rows)
    head = f'  "format": {FORMAT},\n  "device": {json.dumps(device_kind)}'
    text = f'{{\n{head},\n  "entries": [{chr(10) + lines + chr(10) + "  " if rows else ""}]\n}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        # A temporary file is this user's alone; a shipped table is everybody's.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def merged(old: Entries, new: Entries) -> Entries:
    return {kind: old.get(kind, {}) | new.get(kind, {}) for kind in old.keys() | new.keys()}
