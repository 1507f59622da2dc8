"""This library's implementations, and the peers that are JAX functions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import flashjax
from bench.peers.base import (
    JaxContender,
    Missing,
    absent,
    document_ends,
    flash_refusal,
    load,
    parted,
    version_of,
)
from bench.programs import Attention, Inputs, JaxProgram
from flashjax.cases import Workload, near_or_strided

GIB = 2**30
# Dense arrays of T × S: what a GPU of 140 GiB holds several of.
MOST_SCORES = 20 * GIB
MOST_MASK = 4 * GIB


class Flashjax(JaxContender):
    """This library, one implementation."""

    ours = True

    def __init__(self, implementation: str) -> None:
        self.implementation = implementation
        self.name = f"flashjax {implementation}"

    def version(self) -> str:
        return flashjax.__version__

    def unsupported(self, workload: Workload) -> str | None:
        return None  # the call itself says so, in NotImplementedError

    def deterministic(self, inputs: Inputs) -> JaxProgram:
        arguments = inputs.arguments | {"deterministic_backward": True}
        return self.backward(dataclasses.replace(inputs, arguments=arguments))

    def call(self, inputs: Inputs) -> tuple[Attention, dict[str, Any]]:
        arrays, static = parted(inputs.arguments)
        whole = functools.partial(
            flashjax.dot_product_attention, implementation=self.implementation, **static
        )
        return lambda q, k, v, arrays: whole(q, k, v, **arrays), arrays


class _WithDenseMasks(JaxContender):
    """One with jax.nn's arguments: masks beyond causal and window are T × S arrays."""

    def takes(self, workload: Workload) -> str | None:
        """Why an argument is none of its own."""
        raise NotImplementedError

    def function(self) -> Callable[..., Any]:
        raise NotImplementedError

    def unsupported(self, workload: Workload) -> str | None:
        refused = self.takes(workload)
        if refused is None and _needs_mask(workload) and _mask_bytes(workload) > MOST_MASK:
            refused = f"its mask would be a {_mask_bytes(workload) / GIB:.0f} GiB array"
        return refused

    def call(self, inputs: Inputs) -> tuple[Attention, dict[str, Any]]:
        given = dict(inputs.arguments)
        for name in ("segment_ids", "mask", "precision"):
            given.pop(name, None)
        if _needs_mask(inputs.workload):
            given["mask"] = dense_mask(inputs)
            given.pop("is_causal", None)
        arrays, static = parted(given)
        function = functools.partial(self.function(), **static)
        return lambda q, k, v, arrays: function(q, k, v, **arrays), arrays


def _needs_mask(workload: Workload) -> bool:
    return workload.mask in ("packed", "prefix", "predicate")


def _mask_bytes(workload: Workload) -> int:
    batch = workload.batch if workload.mask == "packed" else 1
    return batch * workload.rows * workload.columns


def dense_mask(inputs: Inputs) -> jax.Array:
    """The workload's mask as (B|1, 1, T, S) bool, made on the device."""
    workload, arguments = inputs.workload, inputs.arguments

    @jax.jit
    def make(ids: Any) -> jax.Array:
        row = jnp.arange(workload.rows)[:, None]
        column = jnp.arange(workload.columns)[None, :]
        if workload.mask == "packed":
            return ((column <= row) & (ids[:, :, None] == ids[:, None, :]))[:, None]
        if workload.mask == "prefix":
            return ((column <= row) | (column < workload.extent))[None, None]
        return ((column <= row) & near_or_strided(row, column))[None, None]

    return make(arguments.get("segment_ids", jnp.zeros((1, 1), jnp.int32)))


class JaxNn(_WithDenseMasks):
    """jax.nn.dot_product_attention."""

    def __init__(self, implementation: str) -> None:
        self.implementation = implementation
        self.name = f"jax.nn {implementation}"
        # XLA tries its matrix products out on arrays of T × S: not several at once.
        self.compiles_ahead = implementation != "xla"

    def version(self) -> str:
        if self.implementation == "cudnn" and jax.default_backend() != "gpu":
            raise Missing("needs an NVIDIA GPU")
        return f"jax {jax.__version__}"

    def takes(self, w: Workload) -> str | None:
        scores = 4 * w.batch * w.heads * w.rows * w.columns
        if self.implementation == "xla" and scores > MOST_SCORES:
            return f"its scores would take {scores / GIB:.0f} GiB"
        if w.head_dim != w.value_dim:
            return "wants H = Hv"
        if self.implementation == "cudnn" and w.dtype == "float32":
            return "takes no float32"
        return absent(w, "sinks", "alibi", "soft cap")

    def function(self) -> Callable[..., Any]:
        return functools.partial(jax.nn.dot_product_attention, implementation=self.implementation)


class Tokamax(_WithDenseMasks):
    """tokamax.dot_product_attention."""

    def __init__(self, implementation: str) -> None:
        self.implementation = implementation
        self.name = f"tokamax {implementation}"

    def version(self) -> str:
        load("tokamax")
        return f"tokamax {version_of('tokamax')}"

    def takes(self, w: Workload) -> str | None:
        return absent(w, "sinks", "alibi")

    def function(self) -> Callable[..., Any]:
        return functools.partial(
            load("tokamax").dot_product_attention, implementation=self.implementation
        )


class FlashAttention3(JaxContender):
    """FlashAttention-3 as a JAX custom call (the package flash-attn3-jax)."""

    name = "FlashAttention-3"

    def version(self) -> str:
        load("flash_attn3_jax")
        if jax.default_backend() != "gpu":
            raise Missing("needs an NVIDIA GPU")
        return f"flash-attn3-jax {version_of('flash-attn3-jax')}"

    def unsupported(self, w: Workload) -> str | None:
        if (w.head_dim, w.value_dim) != (128, 128):
            return "the wheel holds H 128 only"
        return flash_refusal(w, "soft cap", "sinks")

    def call(self, inputs: Inputs) -> tuple[Attention, dict[str, Any]]:
        w, package = inputs.workload, load("flash_attn3_jax")
        causal = w.mask != "full"
        if w.mask != "packed":
            window = (w.extent - 1, 0) if w.mask == "window" else (-1, -1)
            causal = causal and w.mask != "window"
            options = {"is_causal": causal, "window_size": window}
            return lambda q, k, v, _: package.flash_mha(q, k, v, **options), {}
        longest = int(max(n.max() for n in w.document_lengths()))

        def packed(q: Any, k: Any, v: Any, arrays: dict[str, Any]) -> Any:
            flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
            out = package.flash_mha_varlen(
                *flat,
                arrays["ends"],
                max_seqlen_q=longest,
                max_seqlen_k=longest,
                is_causal=True,
            )
            return out.reshape(w.out_shape)

        return packed, {"ends": jnp.asarray(document_ends(w))}
