"""Attention as Mosaic GPU kernels for Hopper (compute capability 9.0)."""

from flashjax.kernels.hopper.backend import BACKEND, Hopper

__all__ = ["BACKEND", "Hopper"]
