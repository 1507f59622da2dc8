"""What a contender is, and what several of them share."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from bench.programs import (
    Attention,
    Inputs,
    JaxProgram,
    TorchProgram,
    jax_backward,
    jax_forward,
    jax_gradient,
)
from flashjax.cases import Workload

Program = JaxProgram | TorchProgram


class Missing(Exception):
    """A contender cannot be had here; the message says why, in a few words."""


def load(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a binary package can fail in ways of its own
        raise Missing(f"{module}: {type(error).__name__}: {str(error).strip()}"[:160]) from error


def version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"


class Contender:
    """One way to do a workload. `ours` says whether it is this library's; `compiles_ahead`, whether
    making its programs compiles only, so that several can be made at once."""

    name: str
    ours = False
    compiles_ahead = False

    def version(self) -> str:
        """Loads it; raises Missing if that fails."""
        raise NotImplementedError

    def unsupported(self, workload: Workload) -> str | None:
        """Why it cannot do the workload, where that is known without trying."""
        raise NotImplementedError

    def forward(self, inputs: Inputs) -> Program:
        raise NotImplementedError

    def backward(self, inputs: Inputs) -> Program:
        raise NotImplementedError

    def deterministic(self, inputs: Inputs) -> Program:
        """The backward, its sums always in one order."""
        raise NotImplementedError

    def gradient(self, inputs: Inputs) -> Program:
        """Forward and backward, (out, (dq, dk, dv))."""
        raise NotImplementedError

    def release(self) -> None:
        """Gives memory back that it holds after its programs are gone."""


class JaxContender(Contender):
    """One that is a JAX function."""

    compiles_ahead = True

    def call(self, inputs: Inputs) -> tuple[Attention, dict[str, Any]]:
        """f(q, k, v, arrays), and the arrays."""
        raise NotImplementedError

    def forward(self, inputs: Inputs) -> JaxProgram:
        with _precision(inputs.workload):
            return jax_forward(*self._for(inputs))

    def backward(self, inputs: Inputs) -> JaxProgram:
        with _precision(inputs.workload):
            return jax_backward(*self._for(inputs))

    def gradient(self, inputs: Inputs) -> JaxProgram:
        with _precision(inputs.workload):
            return jax_gradient(*self._for(inputs))

    def _for(self, inputs: Inputs) -> tuple[Attention, Inputs, dict[str, Any]]:
        attention, arrays = self.call(inputs)
        return attention, inputs, arrays


@contextlib.contextmanager
def _precision(workload: Workload) -> Iterator[None]:
    """For functions that have no such argument."""
    if workload.precision is None:
        yield
    else:
        with jax.default_matmul_precision(workload.precision):
            yield


def parted(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays, and what is compiled in."""
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.Array)}
    return arrays, {name: x for name, x in arguments.items() if name not in arrays}


def absent(workload: Workload, *features: str) -> str | None:
    found = [feature for feature in features if feature in workload.features]
    return f"has no {found[0]}" if found else None


def flash_refusal(w: Workload, *also: str) -> str | None:
    """What no FlashAttention package takes."""
    if w.dtype == "float32":
        return "takes no float32"
    return absent(w, "bias", "prefix", "predicate", "alibi", *also)


def document_ends(workload: Workload) -> np.ndarray[Any, Any]:
    """Cumulative lengths of all documents of the batch, from 0, int32."""
    lengths = np.concatenate(workload.document_lengths())
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
