"""Named workloads, shared by tests, bench and tuning: shapes, masks, scores, and what they cost.

Arrays are made when a workload is asked for its operands or arguments, not before.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from flashjax.masks import Causal, Predicate, Prefix
from flashjax.scores import Alibi, alibi_slopes

Direction = Literal["forward", "backward", "both"]
MaskKind = Literal["full", "causal", "window", "packed", "prefix", "predicate"]
Bools = np.ndarray[Any, np.dtype[np.bool_]]

# What a pass costs in units of its forward's FLOPs: the backward's five products against two.
COST: dict[Direction, float] = {"forward": 1.0, "backward": 2.5, "both": 3.5}


def near_or_strided(row: Any, column: Any) -> Any:
    """The predicate of the workload of that name: all near columns, every fourth far one."""
    distance = row - column
    return (distance < 256) | (distance % 4 == 0)


@dataclasses.dataclass(frozen=True)
class Workload:
    """One call of ``dot_product_attention``, by value.

    `extent` is the mask's size: columns that a row of a window sees, the mean length of packed
    documents, or the columns of a prefix. `window`, `packed`, `prefix` and `predicate` are causal
    besides.
    """

    name: str
    batch: int
    rows: int
    columns: int
    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    mask: MaskKind = "causal"
    dtype: str = "bfloat16"
    extent: int = 0
    soft_cap: float | None = None
    alibi: bool = False
    bias: bool = False
    sinks: bool = False
    precision: str | None = None

    @property
    def query_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.rows, self.heads, self.head_dim

    @property
    def key_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.columns, self.key_heads, self.head_dim

    @property
    def value_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.columns, self.key_heads, self.value_dim

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.rows, self.heads, self.value_dim

    @property
    def features(self) -> tuple[str, ...]:
        """What the call asks for beyond q, k, v and a plain causal mask, in words."""
        words: list[str] = [] if self.mask in ("full", "causal") else [self.mask]
        words += ["soft cap"] if self.soft_cap is not None else []
        return (*words, *(name for name in ("alibi", "bias", "sinks") if getattr(self, name)))

    def operands(self, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """q, k, v and an output gradient, standard normal, on the default device."""
        keys = jax.random.split(jax.random.key(seed), 4)
        shapes = (self.query_shape, self.key_shape, self.value_shape, self.out_shape)
        q, k, v, d_out = (_normal(x, s, self.dtype) for x, s in zip(keys, shapes, strict=True))
        return q, k, v, d_out

    def arguments(self, seed: int = 1) -> dict[str, Any]:
        """The call's keyword arguments, arrays among them; without q, k, v and implementation."""
        found: dict[str, Any] = {}
        if self.mask in ("causal", "window", "packed"):
            found["is_causal"] = True
        if self.mask == "window":
            found["local_window_size"] = (self.extent - 1, 0)
        elif self.mask == "packed":
            found["segment_ids"] = jnp.asarray(self.segment_ids())
        elif self.mask == "prefix":
            found["mask"] = Causal() | Prefix(self.extent)
        elif self.mask == "predicate":
            found["mask"] = Causal() & Predicate(near_or_strided)
        if self.soft_cap is not None:
            found["logits_soft_cap"] = self.soft_cap
        if self.alibi:
            found["score_mod"] = Alibi()
        bias, sinks = jax.random.split(jax.random.key(seed))
        if self.bias:
            found["bias"] = _normal(bias, (1, self.heads, self.rows, self.columns), self.dtype)
        if self.sinks:
            found["sinks"] = _normal(sinks, (self.heads,), "float32")
        if self.precision is not None:
            found["precision"] = self.precision
        return found

    def slopes(self) -> np.ndarray[Any, Any]:
        """Alibi's, (N,)."""
        return alibi_slopes(self.heads)

    def document_lengths(self) -> list[np.ndarray[Any, Any]]:
        """Per row of the batch, lengths of its documents: exponential, of mean `extent`, filling
        the row; the last document is cut at its end."""
        random = np.random.default_rng(0)
        found = []
        for _ in range(self.batch):
            draws = 1 + random.exponential(self.extent, 4 * self.rows // self.extent + 64)
            ends = np.minimum(np.cumsum(draws.astype(np.int64)), self.rows)
            lengths = np.diff(ends, prepend=0)
            lengths = lengths[lengths > 0]
            lengths[-1] += self.rows - lengths.sum()
            found.append(lengths)
        return found

    def segment_ids(self) -> np.ndarray[Any, Any]:
        """(B, T) int32: the number of each position's document in its row."""
        rows = [np.repeat(np.arange(len(n)), n) for n in self.document_lengths()]
        return np.stack(rows).astype(np.int32)

    def visible(self, rows: np.ndarray[Any, Any], columns: np.ndarray[Any, Any]) -> Bools:
        """Which of these positions see each other in batch member 0, (rows, columns)."""
        row, column = np.asarray(rows)[:, None], np.asarray(columns)[None, :]
        causal = column <= row
        if self.mask == "full":
            return np.ones_like(causal)
        if self.mask == "causal":
            return causal
        if self.mask == "window":
            return causal & (row - column < self.extent)
        if self.mask == "packed":
            ids = self.segment_ids()[0]
            return causal & (ids[rows][:, None] == ids[columns][None, :])
        if self.mask == "prefix":
            return causal | (column < self.extent)
        return causal & near_or_strided(row, column)

    def elements(self) -> float:
        """The (row, column) pairs that count as work, over the batch, for one head.

        A causal mask counts half of all, as published figures do; a predicate, which tells no
        tile apart, counts as the causal mask beside it. Others count what they leave visible.
        """
        if self.mask == "packed":
            return float(sum((n * (n + 1) // 2).sum() for n in self.document_lengths()))
        row = np.arange(self.rows, dtype=np.int64)
        seen = np.minimum(row + 1, self.columns)
        if self.mask == "window":
            gone = np.clip(row + 1 - self.extent, 0, self.columns)
            return float(self.batch * (seen - gone).sum())
        if self.mask == "prefix":
            return float(self.batch * np.maximum(seen, min(self.extent, self.columns)).sum())
        whole = float(self.batch * self.rows * self.columns)
        return whole if self.mask == "full" else whole / 2

    def flops(self, direction: Direction = "forward") -> float:
        """2 (H + Hv) a visited element and head forward, 2.5 times that backward."""
        products = 2.0 * (self.head_dim + self.value_dim)
        return COST[direction] * products * self.heads * self.elements()

    def traffic(self, direction: Direction = "forward") -> int:
        """Bytes that any implementation has to move: operands read once, results written once."""
        sizes = [np.prod(s) for s in (self.query_shape, self.key_shape, self.value_shape)]
        inputs, out = int(sum(sizes)), int(np.prod(self.out_shape))
        bias = self.heads * self.rows * self.columns if self.bias else 0
        forward = inputs + out + bias
        backward = 2 * (inputs + out + bias)
        count = {"forward": forward, "backward": backward, "both": forward + backward}
        return count[direction] * jnp.dtype(self.dtype).itemsize

    @property
    def memory_bound(self) -> bool:
        """Whether moving the bytes takes longer than the products: below about 180 FLOPs a byte
        (790 TFLOP/s and 4.3 TB/s on an H200)."""
        return self.flops() < 180 * self.traffic()


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    # Drawn in float32: bfloat16 draws would take few distinct values.
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def _square(
    name: str,
    batch: int,
    length: int,
    heads: int,
    head_dim: int,
    mask: MaskKind = "causal",
    *,
    key_heads: int | None = None,
    value_dim: int | None = None,
    **rest: Any,
) -> Workload:
    return Workload(
        name,
        batch,
        length,
        length,
        heads,
        key_heads or heads,
        head_dim,
        value_dim or head_dim,
        mask,
        **rest,
    )


def _thousands(length: int) -> str:
    return f"{length // 1024}k" if length < 2**20 else f"{length // 2**20}M"


TARGETS = (
    _square("h128-4k-full", 4, 4096, 16, 128, "full"),
    _square("h128-4k-causal", 4, 4096, 16, 128),
    _square("h128-16k-full", 1, 16384, 16, 128, "full"),
    _square("h128-16k-causal", 1, 16384, 16, 128),
    _square("h128-8k-causal-gqa", 2, 8192, 32, 128, key_heads=8),
    _square("h128-1k-causal", 16, 1024, 16, 128),
    _square("h64-4k-causal", 4, 4096, 32, 64),
    _square("h64-4k-full", 4, 4096, 32, 64, "full"),
    _square("h256-4k-causal", 4, 4096, 8, 256),
    _square("h256-4k-full", 4, 4096, 8, 256, "full"),
)

VARIANTS = (
    *(
        _square(f"gqa-64-8-{_thousands(length)}", 2, length, 64, 128, key_heads=8)
        for length in (2048, 8192, 32768)
    ),
    _square("h96", 4, 4096, 16, 96),
    _square("h192-hv128", 4, 4096, 16, 192, value_dim=128),
    # The first is what the two after it are held against.
    _square("causal-32k", 1, 32768, 16, 128),
    _square("window-1024-32k", 1, 32768, 16, 128, "window", extent=1024),
    _square("packed-2k-32k", 1, 32768, 16, 128, "packed", extent=2048),
    _square("prefix-1k", 4, 4096, 16, 128, "prefix", extent=1024),
    _square("soft-cap", 4, 4096, 16, 128, soft_cap=30.0),
    _square("alibi", 4, 4096, 16, 128, alibi=True),
    _square("predicate", 4, 4096, 16, 128, "predicate"),
    _square("bias", 4, 4096, 16, 128, "full", bias=True),
    _square("sinks", 4, 4096, 16, 128, sinks=True),
)

PRECISION = tuple(
    _square(f"float32-h{h}", 2, 4096, 16, h, dtype="float32", precision="highest")
    for h in (64, 128)
)

MEMORY = tuple(
    _square(f"memory-{_thousands(length)}", 1, length, 8, 128)
    for length in (8192, 16384, 32768, 65536, 131072)
)

# Apart from the others: forward and backward are 8 PFLOP.
MILLION = (_square("memory-1M", 1, 2**20, 8, 128),)

# Where T is small, K and V repeated for all query heads would be most of the memory.
GROUPED = (
    Workload("grouped-1k-32k", 1, 1024, 32768, 64, 8, 128, 128, "full"),
    _square("grouped-16k", 1, 16384, 64, 128, key_heads=8),
)

# 16k tokens a batch and 2048 features, as in published plots of speed against length.
LENGTHS = tuple(
    _square(f"length-h{h}-{_thousands(n)}", max(1, 16384 // n), n, 2048 // h, h)
    for h in (64, 128, 256)
    for n in (1024, 2048, 4096, 8192, 16384, 32768)
)

TINY = (
    _square("tiny-causal", 1, 128, 2, 16, dtype="float32"),
    _square("tiny-packed", 2, 128, 4, 16, "packed", key_heads=2, extent=40, dtype="float32"),
)

GROUPS: dict[str, tuple[Workload, ...]] = {
    "targets": TARGETS,
    "variants": VARIANTS,
    "precision": PRECISION,
    "memory": MEMORY,
    "million": MILLION,
    "grouped": GROUPED,
    "lengths": LENGTHS,
    "tiny": TINY,
}
BY_NAME: dict[str, Workload] = {w.name: w for group in GROUPS.values() for w in group}
