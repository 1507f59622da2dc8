"""Who is measured: this library's implementations and the others, each as a small class.

A contender makes programs of the forward, of the backward alone and of both, from the same inputs.
A package that is missing, or too old, shows when it is loaded: `Missing`, with the reason.
"""

from collections.abc import Callable

from bench.peers.base import Contender, Missing, Program
from bench.peers.jax_functions import FlashAttention3, Flashjax, JaxNn, Tokamax
from bench.peers.torch_functions import FlashAttention4, TorchSdpa

PEERS: dict[str, Callable[[], Contender]] = {
    "jax.nn-xla": lambda: JaxNn("xla"),
    "jax.nn-cudnn": lambda: JaxNn("cudnn"),
    "tokamax-mosaic": lambda: Tokamax("mosaic"),
    "tokamax-triton": lambda: Tokamax("triton"),
    "fa3": FlashAttention3,
    "fa4": FlashAttention4,
    "torch": TorchSdpa,
}

__all__ = ["PEERS", "Contender", "Flashjax", "Missing", "Program"]
