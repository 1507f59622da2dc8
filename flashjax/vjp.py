"""The one derivative. O = P V with P = softmax(S), S = mod(scale · QKᵀ + bias) masked, and LSE.

With cotangents dO and dLSE, per row:

    dV = Pᵀ dO        dP = dO Vᵀ        Δ = rowsum(P ∘ dP) − dLSE = rowsum(O ∘ dO) − dLSE
    dS = P ∘ (dP − Δ)      dQ = scale · dS' K      dK = scale · dS'ᵀ Q      dBias = dS'

where dS' is dS taken back through the score modifier, and P is recomputed from S and LSE
(FlashAttention-2, arXiv:2307.08691, §2.3; dLSE enters since ∂LSE/∂S = P). A sink is one more
logit with no value: dSink = −Σ_rows exp(sink − LSE) · Δ. Dropout multiplies P by a factor D in
O and dV, and dP by the same D; Δ = rowsum(O ∘ dO) holds as it stands.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from flashjax import batching, sharding
from flashjax.plan import current_device, plan, run_backward, run_forward, warn_of_fallback
from flashjax.spec import DIFFERENTIABLE, Operands, Spec
from flashjax.varying import cast_varying, varying_axes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(
    spec: Spec, implementation: str | None, operands: Operands
) -> tuple[jax.Array, jax.Array]:
    """Output (B, T, N, Hv) and LSE (B, N, T) of operands in canonical form."""
    return _forward_once(spec, implementation, operands)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Names of operands that need a gradient; travels with the residuals as structure."""

    names: frozenset[str]


def _fwd(spec: Spec, implementation: str | None, primals: Operands) -> tuple[Any, Any]:
    def is_primal(x: Any) -> bool:
        return hasattr(x, "perturbed")

    operands = jax.tree.map(lambda x: x.value, primals, is_leaf=is_primal)
    wanted = frozenset(
        name
        for name in DIFFERENTIABLE
        if any(
            x.perturbed and jnp.issubdtype(x.value.dtype, jnp.floating)
            for x in jax.tree.leaves(getattr(primals, name), is_leaf=is_primal)
        )
    )
    out, lse = _forward_once(spec, implementation, operands)
    # Named on what is both returned and kept: a policy that saves them needs no second forward.
    out, lse = checkpoint_name(out, "flashjax_out"), checkpoint_name(lse, "flashjax_lse")
    return (out, lse), (operands, out, lse, _Wanted(wanted))


def _bwd(spec: Spec, implementation: str | None, residuals: Any, cotangents: Any) -> Any:
    operands, out, lse, wanted = residuals
    d_out, d_lse = cotangents
    none = Operands(query=None, key=None, value=None)
    if not wanted.names or (isinstance(d_out, SymbolicZero) and isinstance(d_lse, SymbolicZero)):
        return (none,)
    if isinstance(d_out, SymbolicZero):
        d_out = jnp.zeros_like(out)
    # A row that sees nothing has O = 0: there its dO, NaN perhaps, must not enter.
    products = jnp.where(out == 0, 0, out.astype(lse.dtype) * d_out.astype(lse.dtype))
    delta = products.sum(-1).swapaxes(1, 2)
    if not isinstance(d_lse, SymbolicZero):
        delta = delta - d_lse
    delta = jnp.where(lse == -jnp.inf, 0, delta)

    spec = dataclasses.replace(spec, wanted=wanted.names)
    found: dict[str, Any] = {}
    if wanted.names - {"sinks"}:
        grads = _backward_once(spec, implementation, operands, lse, delta, d_out)
        found = {name: getattr(grads, name) for name in wanted.names - {"sinks"}}
    if "sinks" in wanted.names:
        found["sinks"] = _sink_gradient(operands.sinks, lse, delta)
    rounded = {name: _cotangent(getattr(operands, name), grad) for name, grad in found.items()}
    return (dataclasses.replace(none, **rounded),)


attend.defvjp(_fwd, _bwd, symbolic_zeros=True)


def _sink_gradient(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    p = jnp.exp(sinks[..., 0].astype(lse.dtype) - jnp.where(lse == -jnp.inf, jnp.inf, lse))
    grad = -(p * delta).sum(-1)[..., None, None]
    return grad.sum(0, keepdims=True) if sinks.shape[0] == 1 else grad


def _cotangent(primal: Any, grad: Any) -> Any:
    """Gradients rounded to their operands' dtypes; float0 for integer leaves of a score."""
    leaves, treedef = jax.tree.flatten(primal)
    grads = grad if isinstance(grad, tuple) else (grad,)
    return jax.tree.unflatten(
        treedef,
        [
            np.zeros(x.shape, jax.dtypes.float0) if g is None else g.astype(x.dtype)
            for x, g in zip(leaves, grads, strict=True)
        ],
    )


def _refuse(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "flashjax differentiates its tiled implementations once, in reverse mode. For jax.hessian, "
        "grad of grad, or jvp of grad pass implementation='reference', which is dense and "
        "differentiable any number of times."
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _forward_once(
    spec: Spec, implementation: str | None, operands: Operands
) -> tuple[jax.Array, jax.Array]:
    device = current_device()

    def run(spec: Spec, operands: Operands) -> tuple[jax.Array, jax.Array]:
        if 0 in spec.out.shape or spec.columns == 0:
            return _nothing(spec, operands)
        made = plan(spec, implementation, device)
        warn_of_fallback(made)
        return run_forward(made, spec, operands)

    return batching.forward(functools.partial(sharding.forward, run), spec, operands)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _backward_once(
    spec: Spec,
    implementation: str | None,
    operands: Operands,
    lse: jax.Array,
    delta: jax.Array,
    d_out: jax.Array,
) -> Operands:
    device = current_device()

    def run(
        spec: Spec, operands: Operands, lse: jax.Array, delta: jax.Array, d_out: jax.Array
    ) -> Operands:
        if 0 in spec.out.shape or spec.columns == 0:
            return _no_gradients(spec, operands)
        made = plan(spec, implementation, device)
        return run_backward(made, spec, operands, lse, delta, d_out)

    partitioned = functools.partial(sharding.backward, run)
    return batching.backward(partitioned, spec, operands, lse, delta, d_out)


_forward_once.defjvp(_refuse)
_backward_once.defjvp(_refuse)


def _nothing(spec: Spec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Attention without rows or without columns: output 0, LSE −inf or the sink."""
    lse = jnp.full(spec.lse.shape, -jnp.inf, spec.lse.dtype)
    if operands.sinks is not None:
        lse = jnp.broadcast_to(operands.sinks[..., 0].astype(lse.dtype), lse.shape)
    nothing = (jnp.zeros(spec.out.shape, spec.dtype), lse)
    return cast_varying(nothing, varying_axes(operands.query))


def _no_gradients(spec: Spec, operands: Operands) -> Operands:
    def zeros(name: str) -> Any:
        leaves = [
            jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else None
            for x in jax.tree.leaves(getattr(operands, name))
        ]
        return tuple(leaves) if name == "score" else leaves[0]

    empty: dict[str, Any] = dict.fromkeys(("query", "key", "value"))
    return Operands(**{**empty, **{name: zeros(name) for name in spec.wanted - {"sinks"}}})
