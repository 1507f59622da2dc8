"""Checks a machine: versions, devices, the implementation that each gets, a self-test."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import flashjax
from flashjax.backend import Device
from flashjax.plan import device_of

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "numpy",
    "flax",
    "optax",
)
# The self-test's shape: B, T, N, K, H. Grouped heads, causal, lengths that no tile divides.
SHAPE = (2, 1100, 8, 2, 64)


class SelfTest(NamedTuple):
    """Largest error, relative to the largest reference value, and time of a call."""

    forward: float
    gradient: float
    milliseconds: float

    @property
    def passed(self) -> bool:
        # Against the same inputs in float32: bf16 rounds to 2⁻⁹ of a value, here once for the
        # weights and once for the result; gradients pass through three such roundings.
        return self.forward < 2.0**-7 and self.gradient < 2.0**-6


def self_test(device: jax.Device) -> SelfTest:
    """The best implementation in bf16 against "reference" in float32, on `device`."""
    b, t, n, k, h = SHAPE
    with jax.default_device(device):
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = ((b, t, n, h), (b, t, k, h), (b, t, k, h), (b, t, n, h))
        q, key, v, cotangent = (
            jax.random.normal(r, s, jnp.bfloat16) for r, s in zip(keys, shapes, strict=True)
        )

        def run(implementation: str | None, dtype: Any) -> tuple[jax.Array, ...]:
            def call(*args: jax.Array) -> jax.Array:
                return flashjax.dot_product_attention(
                    *args,
                    is_causal=True,
                    implementation=implementation,
                )

            out, pull = jax.vjp(call, *(x.astype(dtype) for x in (q, key, v)))
            return out, *pull(cotangent.astype(dtype))

        best = jax.jit(lambda: run(None, jnp.bfloat16))
        found = jax.block_until_ready(best())
        start = time.perf_counter()
        jax.block_until_ready(best())
        elapsed = 1e3 * (time.perf_counter() - start)
        wanted = run("reference", jnp.float32)
    errors = [
        float(jnp.abs(a.astype(jnp.float32) - w).max() / jnp.abs(w).max())
        for a, w in zip(found, wanted, strict=True)
    ]
    return SelfTest(errors[0], max(errors[1:]), elapsed)


def report() -> int:
    """Prints the report; returns the exit code, 0 where every self-test passed."""
    print("flashjax doctor\n")
    _table(("package", "version"), _versions())
    rows, reasons, healthy = [], [], True
    for device, name in _distinct_devices():
        explanation = _explain(name)
        test = self_test(device)
        healthy &= test.passed
        rows.append(
            (
                str(name),
                explanation.implementation,
                f"{test.forward:.1e}",
                f"{test.gradient:.1e}",
                f"{test.milliseconds:.1f}",
                "pass" if test.passed else "FAIL",
            )
        )
        if explanation.plan is not None:
            for direction in ("forward", "backward"):
                reasons.append(f"{name}: {direction}: {getattr(explanation.plan, direction)}")
        reasons += [f"{name}: not {other}: {why}" for other, why in explanation.refused]
    b, t, n, k, h = SHAPE
    print(f"\nself-test: bf16, causal, B {b}, T {t}, N {n}, K {k}, H {h}, forward and backward")
    header = ("device", "implementation", "forward error", "gradient error", "ms", "result")
    _table(header, rows)
    print()
    print("\n".join(reasons))
    return 0 if healthy else 1


def _explain(device: Device) -> flashjax.Explanation:
    b, t, n, k, h = SHAPE
    query = jax.ShapeDtypeStruct((b, t, n, h), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((b, t, k, h), jnp.bfloat16)
    return flashjax.explain(query, key, key, is_causal=True, device=device)


def _versions() -> list[tuple[str, str]]:
    rows = [("flashjax", flashjax.__version__), ("python", platform.python_version())]
    for name in PACKAGES:
        try:
            rows.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            rows.append((name, "not installed"))
    return rows


def _distinct_devices() -> Iterable[tuple[jax.Device, Device]]:
    """One of each kind of device: the default backend's, and the CPU."""
    seen = set()
    for device in [*jax.devices(), *jax.devices("cpu")]:
        name = device_of(device)
        if name not in seen:
            seen.add(name)
            yield device, name


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, ["-" * width for width in widths], *rows]:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
