"""What a model without a context would reach: the byte entropies of the training text."""

from typing import NamedTuple

import numpy as np

from lm.packing import VOCABULARY

# Bounds the temporary arrays; the counts are exact for any value.
TOKENS_AT_ONCE = 1 << 22


class Entropy(NamedTuple):
    """Nats per byte."""

    order0: float
    order1: float


def byte_entropy(tokens: np.ndarray) -> Entropy:
    """The empirical H(byte) and H(byte | byte before it) of token streams, exact from the counts.

    A pair counts only within a document: those that hold BEGIN or END are dropped. A model that
    sees just the byte before cannot do better on this text than `order1`, so a lower loss shows
    that a longer context is used.
    """
    pairs = np.zeros(VOCABULARY * VOCABULARY, np.int64)
    for at in range(0, tokens.size - 1, TOKENS_AT_ONCE):
        part = tokens[at : at + TOKENS_AT_ONCE + 1].astype(np.int64)
        pairs += np.bincount(part[:-1] * VOCABULARY + part[1:], minlength=pairs.size)
    square = pairs.reshape(VOCABULARY, VOCABULARY)
    singles = square[:, :256].sum(axis=0)
    within = square[:256, :256]
    order1 = _entropy(within) - _entropy(within.sum(axis=1))
    return Entropy(_entropy(singles), order1)


def _entropy(counts: np.ndarray) -> float:
    total = counts.sum()
    if total == 0:
        return 0.0
    p = counts[counts > 0] / total
    return float(-(p * np.log(p)).sum())
