"""Exact, IO-aware attention for JAX."""

from flashjax import masks, rotary, scores
from flashjax.attention import dot_product_attention
from flashjax.backend import Device
from flashjax.explanation import Explanation, explain
from flashjax.merge import merge
from flashjax.plan import FlashjaxFallbackWarning
from flashjax.rotary import Rotary

__version__ = "0.1.0"

__all__ = [
    "Device",
    "Explanation",
    "FlashjaxFallbackWarning",
    "Rotary",
    "dot_product_attention",
    "explain",
    "masks",
    "merge",
    "rotary",
    "scores",
]
