"""Mask terms and their algebra: ``masks.Causal() & masks.Window(256, 0)``."""

from flashjax.masks.algebra import EMPTY, FULL, PARTIAL, And, Mask, Not, Or
from flashjax.masks.array_terms import BlockSparse, Dense, Intervals, Predicate, Segments
from flashjax.masks.bounds import Blocks
from flashjax.masks.schedule import Lists, Ranges, Schedule, schedule
from flashjax.masks.terms import Causal, Chunked, Lengths, Prefix, Window

__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "And",
    "BlockSparse",
    "Blocks",
    "Causal",
    "Chunked",
    "Dense",
    "Intervals",
    "Lengths",
    "Lists",
    "Mask",
    "Not",
    "Or",
    "Predicate",
    "Prefix",
    "Ranges",
    "Schedule",
    "Segments",
    "Window",
    "schedule",
]
