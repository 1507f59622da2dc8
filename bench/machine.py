"""What a run happened on: device, driver, clocks, versions, and two kernels of known cost."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import flashjax
from bench.programs import JaxProgram
from bench.timing import Rule, measured

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
    "numpy",
    "torch",
    "triton",
    "tokamax",
    "flash-attn3-jax",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "flax",
)
QUERY = ("driver_version", "clocks.sm", "clocks.max.sm", "power.draw", "power.limit")


def describe() -> dict[str, Any]:
    """Device, driver, versions of all that is installed, date, commit."""
    device = jax.devices()[0]
    versions = {"python": platform.python_version(), "flashjax": flashjax.__version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": device.device_kind if device.platform != "cpu" else cpu_name(),
        "platform": device.platform,
        "driver": smi().get("driver_version"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions,
    }


def peak_memory() -> int:
    """The most bytes that JAX has had on the device so far; 0 where it keeps no count."""
    stats = jax.devices()[0].memory_stats() or {}
    return int(stats.get("peak_bytes_in_use", 0))


def cpu_name() -> str:
    return f"cpu {platform.machine()}"


def slug(device: str) -> str:
    """A device's name as part of a file's."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def smi() -> dict[str, str]:
    """What nvidia-smi says of the first GPU; empty where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    try:
        text = subprocess.run(
            [program, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in text.splitlines()[0].split(",")] if text else []
    return dict(zip(QUERY, values, strict=False))


def commit() -> str | None:
    """What is measured; BENCH_COMMIT names it where the files travelled without their history."""
    if named := os.environ.get("BENCH_COMMIT"):
        return named
    git = shutil.which("git")
    if git is None:
        return None
    done = subprocess.run(
        [git, "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or None


def calibrate(rule: Rule, size: int = 8192, copied: int = 2**30) -> dict[str, Any]:
    """A bf16 size³ matrix product in TFLOP/s, a pass over `copied` bytes in GB/s read and written,
    and the clocks while products run."""
    keys = jax.random.split(jax.random.key(0), 2)
    a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
    product = JaxProgram(jnp.dot, (a, b))
    seconds = measured(product, rule).seconds
    # Enough of them that the device is still at work when nvidia-smi looks.
    kept = [product.result() for _ in range(min(500, 1 + int(0.5 / seconds)))]
    clocks = smi()
    jax.block_until_ready(kept)
    x = jnp.ones((copied // 4,), jnp.float32)
    pass_seconds = measured(JaxProgram(jnp.negative, (x,)), rule).seconds
    return {
        "matmul": f"bfloat16 {size}³",
        "matmul_tflops": 2 * size**3 / seconds / 1e12,
        "copy_bytes": copied,
        "copy_gbs": 2 * copied / pass_seconds / 1e9,
        "clocks": clocks,
    }
