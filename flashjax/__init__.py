"""Exact, IO-aware attention for JAX."""

from flashjax import masks, scores
from flashjax.attention import dot_product_attention
from flashjax.backend import Device
from flashjax.explanation import Explanation, explain
from flashjax.merge import merge
from flashjax.plan import FlashjaxFallbackWarning

__version__ = "0.1.0"

__all__ = [
    "Device",
    "Explanation",
    "FlashjaxFallbackWarning",
    "dot_product_attention",
    "explain",
    "masks",
    "merge",
    "scores",
]
