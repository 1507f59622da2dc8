"""Exact, IO-aware attention for JAX."""

from flashjax import masks, scores
from flashjax.attention import dot_product_attention
from flashjax.merge import merge
from flashjax.plan import FlashjaxFallbackWarning

__version__ = "0.1.0"

__all__ = [
    "FlashjaxFallbackWarning",
    "dot_product_attention",
    "masks",
    "merge",
    "scores",
]
