"""Documents to rows of tokens: the packer, and batches by step number.

A document of n bytes is the token stream `BEGIN, byte 1, …, byte n, END`. Each token but END is
an input once, and its target is the token after it, so every byte is an input once and a target
once. A stretch of a stream of at most `length` inputs is a piece, and a piece in a row is a segment
with its own segment id, and positions counted from 0.

A document longer than a row is cut at row ends: it fills whole rows, and its remainder is a
piece like any short document. The first input of a later piece is the last target of the piece
before it, so no target is lost; what is lost is the context from before the cut. Pieces shorter
than a row are packed best-fit decreasing and never cut.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

BEGIN = 256
END = 257
# 256 bytes and the two above, rounded up to a multiple of 8 for the matrix units of a GPU.
VOCABULARY = 264
PADDING_SEGMENT = -1


class Batch(NamedTuple):
    """Each (B, T) int32. Where the segment id is -1, the others are 0 and count for nothing."""

    inputs: np.ndarray
    targets: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True)
class PackedRows:
    """Rows as lists of pieces of one flat token array; batches are cut from it when asked for.

    `pieces[i]` is (begin in `tokens`, number of inputs); row r holds the pieces from
    `row_begins[r]` to `row_begins[r + 1]`. So text costs two bytes a token, however many rows.
    """

    length: int
    tokens: np.ndarray
    pieces: np.ndarray
    row_begins: np.ndarray

    def __len__(self) -> int:
        return len(self.row_begins) - 1

    @property
    def fill(self) -> float:
        """The share of the rows' places that hold a token."""
        return float(self.pieces[:, 1].sum() / (len(self) * self.length))

    def batch(self, rows: Sequence[int] | np.ndarray) -> Batch:
        """The rows of these numbers; a negative number gives a row of padding."""
        shape = (len(rows), self.length)
        batch = Batch(*(np.zeros(shape, np.int32) for _ in Batch._fields))
        batch.segment_ids.fill(PADDING_SEGMENT)
        for b, row in enumerate(rows):
            if row >= 0:
                self._fill_row(batch, b, row)
        return batch

    def _fill_row(self, batch: Batch, b: int, row: int) -> None:
        at = 0
        for segment, piece in enumerate(range(self.row_begins[row], self.row_begins[row + 1])):
            begin, count = self.pieces[piece]
            places = slice(at, at + count)
            batch.inputs[b, places] = self.tokens[begin : begin + count]
            batch.targets[b, places] = self.tokens[begin + 1 : begin + 1 + count]
            batch.segment_ids[b, places] = segment
            batch.positions[b, places] = np.arange(count)
            at += count

    def train_batch(self, step: int, size: int, seed: int) -> Batch:
        """The batch of this step: a pure function of (seed, step), so that a resumed run
        sees what an unbroken one would. Every row comes once an epoch, in an order of its own."""
        wanted = np.arange(step * size, (step + 1) * size)
        epochs, places = np.divmod(wanted, len(self))
        orders = {
            epoch: np.random.default_rng((seed, epoch)).permutation(len(self))
            for epoch in np.unique(epochs).tolist()
        }
        return self.batch([orders[e][p] for e, p in zip(epochs.tolist(), places, strict=True)])

    def evaluation_batches(self, rows: int, size: int) -> list[Batch]:
        """The first `rows` rows of one fixed order, the last batch filled up with padding."""
        chosen = np.random.default_rng(0).permutation(len(self))[:rows]
        padded = np.full(-(-len(chosen) // size) * size, -1)
        padded[: len(chosen)] = chosen
        return [self.batch(part) for part in padded.reshape(-1, size)]


def pack(documents: Sequence[bytes], length: int) -> PackedRows:
    """The documents in rows of `length` inputs, the same rows for the same documents."""
    tokens, begins = _streams(documents)
    whole_rows, remainders = _cut(begins, tokens.size, length)
    bins = _best_fit(remainders[:, 1], length)
    pieces = np.concatenate([whole_rows, *(remainders[members] for members in bins)])
    sizes = np.concatenate(
        [np.ones(len(whole_rows), np.int64), np.array([len(m) for m in bins], np.int64)]
    )
    row_begins = np.concatenate([[0], np.cumsum(sizes)])
    return PackedRows(length, tokens, pieces, row_begins)


def _streams(documents: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """All token streams end to end, and where each begins."""
    sizes = np.array([len(document) + 2 for document in documents], np.int64)
    ends = np.cumsum(sizes)
    begins = ends - sizes
    tokens = np.empty(int(sizes.sum()), np.uint16)
    for document, begin, end in zip(documents, begins, ends, strict=True):
        tokens[begin] = BEGIN
        tokens[begin + 1 : end - 1] = np.frombuffer(document, np.uint8)
        tokens[end - 1] = END
    return tokens, begins


def _cut(begins: np.ndarray, total: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Pieces (begin, inputs) that fill a row each, and those that do not."""
    inputs = np.diff(begins, append=total) - 1
    whole, rest = np.divmod(inputs, length)
    first = np.repeat(np.cumsum(whole) - whole, whole)
    nth = np.arange(whole.sum()) - first
    whole_begins = np.repeat(begins, whole) + nth * length
    whole_rows = np.stack([whole_begins, np.full_like(whole_begins, length)], axis=1)
    remainders = np.stack([begins + whole * length, rest], axis=1)
    return whole_rows, remainders[rest > 0]


def _best_fit(sizes: np.ndarray, length: int) -> list[list[int]]:
    """Longest first, each into the open row that it leaves fullest: the members of each row."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (places left, row), sorted
    for member in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[member])
        found = bisect_left(room, (size, 0))
        if found < len(room):
            left, row = room.pop(found)
            rows[row].append(member)
        else:
            left, row = length, len(rows)
            rows.append([member])
        if left > size:
            insort(room, (left - size, row))
    return rows
