"""Attention through Pallas's Triton lowering, for NVIDIA GPUs from Ampere on."""

from flashjax.kernels.triton.backend import BACKEND, Triton

__all__ = ["BACKEND", "Triton"]
