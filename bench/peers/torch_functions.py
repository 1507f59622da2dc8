"""The peers that are torch functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench.peers.base import (
    Contender,
    Missing,
    absent,
    document_ends,
    flash_refusal,
    load,
    version_of,
)
from bench.programs import Inputs, TorchProgram
from flashjax.cases import Workload


class TorchContender(Contender):
    """One that is a function of torch tensors."""

    def attention(self, inputs: Inputs, torch: Any) -> Callable[[Any, Any, Any], Any]:
        """f(q, k, v) -> out, in the workload's layout."""
        raise NotImplementedError

    def forward(self, inputs: Inputs) -> TorchProgram:
        torch, f, (q, k, v, _) = self._for(inputs)

        def call() -> Any:
            with torch.no_grad():
                return f(q, k, v)

        return TorchProgram(torch, call)

    def backward(self, inputs: Inputs) -> TorchProgram:
        torch, f, (q, k, v, d_out) = self._for(inputs)
        out = f(q, k, v)

        def call() -> Any:
            return torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)

        return TorchProgram(torch, call)

    def gradient(self, inputs: Inputs) -> TorchProgram:
        torch, f, (q, k, v, d_out) = self._for(inputs)

        def call() -> Any:
            out = f(q, k, v)
            return out, torch.autograd.grad(out, (q, k, v), d_out)

        return TorchProgram(torch, call)

    def release(self) -> None:
        torch = load("torch")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _for(self, inputs: Inputs) -> tuple[Any, Callable[..., Any], list[Any]]:
        torch = load("torch")
        tensors = [torch_of(torch, x) for x in (inputs.q, inputs.k, inputs.v, inputs.d_out)]
        for x in tensors[:3]:
            x.requires_grad_()
        return torch, self.attention(inputs, torch), tensors


def torch_of(torch: Any, x: jax.Array) -> Any:
    """A tensor of its own with the same values, on the same device."""
    return torch.from_dlpack(x).detach().clone()


class TorchSdpa(TorchContender):
    """torch.nn.functional.scaled_dot_product_attention, with the backend that torch takes."""

    name = "torch sdpa"

    def version(self) -> str:
        torch = load("torch")
        if jax.default_backend() == "gpu" and not torch.cuda.is_available():
            raise Missing("this torch sees no GPU")
        return f"torch {torch.__version__}"

    def unsupported(self, w: Workload) -> str | None:
        if w.mask not in ("full", "causal"):
            return f"has no {w.mask} mask but as a T × S array"
        return absent(w, "bias", "soft cap", "sinks", "alibi")

    def attention(self, inputs: Inputs, torch: Any) -> Callable[[Any, Any, Any], Any]:
        w = inputs.workload
        function = functools.partial(
            torch.nn.functional.scaled_dot_product_attention,
            is_causal=w.mask == "causal",
            enable_gqa=w.heads != w.key_heads,
        )

        def call(q: Any, k: Any, v: Any) -> Any:
            return function(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

        return call


class FlashAttention4(TorchContender):
    """FlashAttention-4 (CuTe DSL) through torch; on Hopper too."""

    name = "FlashAttention-4"

    def version(self) -> str:
        torch = load("torch")
        if not torch.cuda.is_available():
            raise Missing("needs an NVIDIA GPU")
        load("flash_attn.cute")
        return f"flash-attn-4 {version_of('flash-attn-4')}"

    def unsupported(self, w: Workload) -> str | None:
        return flash_refusal(w)

    def attention(self, inputs: Inputs, torch: Any) -> Callable[[Any, Any, Any], Any]:
        w, package = inputs.workload, load("flash_attn.cute")
        options: dict[str, Any] = {"causal": w.mask != "full"}
        if w.mask == "window":
            options["window_size"] = (w.extent - 1, 0)
        if w.soft_cap is not None:
            options["softcap"] = w.soft_cap
        if w.sinks:
            options["learnable_sink"] = torch_of(torch, inputs.arguments["sinks"])
        if w.mask != "packed":
            return lambda q, k, v: package.flash_attn_func(q, k, v, **options)[0]
        ends = torch_of(torch, jnp.asarray(document_ends(w)))
        longest = int(max(n.max() for n in w.document_lengths()))

        def packed(q: Any, k: Any, v: Any) -> Any:
            out = package.flash_attn_varlen_func(
                *(x.flatten(0, 1) for x in (q, k, v)),
                cu_seqlens_q=ends,
                cu_seqlens_k=ends,
                max_seqlen_q=longest,
                max_seqlen_k=longest,
                **options,
            )
            return out[0].reshape(w.out_shape)

        return packed
