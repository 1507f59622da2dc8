"""What a run costs: its model FLOPs, the share of the device's peak that they make, its memory."""

import os
import resource
import sys
from typing import Any, NamedTuple

import jax
import numpy as np

from lm.config import Config
from lm.packing import PADDING_SEGMENT, Batch

# Dense bf16 products with float32 sums, without sparsity, in FLOP/s, by JAX's `device_kind`. From
# NVIDIA's data sheets (H100, H200, B200 from HGX B200's, A100, A10G, L4, L40S) and the white papers
# of the GA102 and AD102 architectures (RTX 3090, RTX 4090).
PEAK_FLOPS = {
    "NVIDIA B200": 2250e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA GeForce RTX 4090": 165e12,
    "NVIDIA GeForce RTX 3090": 71e12,
}


class Work(NamedTuple):
    """Real tokens, and the (row, column) pairs that attention lets see each other."""

    tokens: int
    pairs: int

    def __add__(self, other: tuple) -> "Work":
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


def work_of(batch: Batch) -> Work:
    """Exact: causal within its segment, a token sees as many columns as its position says, and
    itself."""
    real = batch.segment_ids != PADDING_SEGMENT
    tokens = int(real.sum())
    return Work(tokens, int(batch.positions[real].sum(dtype=np.int64)) + tokens)


def model_flops(config: Config, params: Any, work: Work) -> int:
    """The FLOPs of forward and backward that the model asks for, as in PaLM (arXiv:2204.02311,
    appendix B), but with attention's pairs counted, not bounded by T².

    A matrix parameter costs 2 a token forward and 4 backward. The embedding's table counts once, as
    the logits' matrix: looking up a row is free. A pair costs 4 H a head and layer forward (its
    score and its share of the output) and 8 H backward. What is computed twice, by remat or in
    attention's own backward, counts once.
    """
    pair = 12 * config.layers * config.heads * config.head_dim
    return 6 * matrix_parameters(params) * work.tokens + pair * work.pairs


def matrix_parameters(params: Any) -> int:
    """How many parameters lie in kernels and in the embedding's table."""
    leaves, _ = jax.tree.flatten_with_path(params)
    names = ("kernel", "embedding")
    return sum(leaf.size for path, leaf in leaves if _last_name(path) in names)


def peak_flops(config: Config, device: jax.Device) -> float | None:
    """The device's FLOP/s in the run's dtype, or None where the table does not hold it."""
    return PEAK_FLOPS.get(device.device_kind) if config.dtype == "bfloat16" else None


def planned_memory(step: jax.stages.Compiled) -> int:
    """The bytes that the compiler plans for one step: state, batch and temporary arrays."""
    plan = step.memory_analysis()
    assert plan is not None
    kept = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
    return kept + plan.temp_size_in_bytes


def peak_memory(device: jax.Device) -> int:
    """The most bytes in use so far: on the device, or by the process where the device is a CPU."""
    stats = device.memory_stats()
    if stats is not None and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, Linux KiB.
    return most if sys.platform == "darwin" else most * 1024


def device_memory(device: jax.Device) -> int:
    """The bytes that JAX may use on the device, or the machine's memory where that is a CPU."""
    stats = device.memory_stats()
    if stats is not None and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _last_name(path: tuple) -> str:
    keys = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
    return keys[-1] if keys else ""
