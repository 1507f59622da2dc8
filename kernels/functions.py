"""Whether a kernel's lowering has what the users' functions of a call need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from flashjax.kernels.replay import Lowering
from flashjax.masks import Mask, Predicate
from flashjax.scores import pulled_back
from flashjax.spec import Aval, Spec
from flashjax.structure import At


def unknown_function(spec: Spec, lowering: Lowering, *, backward: bool) -> str | None:
    """A user's function with a primitive that a lowering lacks, in words.

    With `backward` its derivative counts too.
    """
    tile: Any = Aval((16, 16), jnp.int32)
    at = At(tile, tile, tile, tile)
    for term in _terms(spec.shapes.mask):
        if isinstance(term, Predicate):
            name = lowering.unknown(lambda term, at: term.keep(at), _on_tile(term), at)
            if name is not None:
                return f"mask={term} uses {name}, which the {lowering.title} lowering does not have"
    score = spec.shapes.score
    if score is not None:
        values = Aval((16, 16), jnp.float32)
        name = lowering.unknown(
            lambda score, s, at: score.apply(s, at), _on_tile(score), values, at
        )
        if name is None and backward:
            name = lowering.unknown(
                lambda score, s, at: pulled_back(score, s, at, s), _on_tile(score), values, at
            )
        if name is not None:
            return (
                f"score_mod={score} uses {name}, which the {lowering.title} lowering does not have"
            )
    return None


def _on_tile(structure: Any) -> Any:
    return jax.tree.map(lambda x: Aval((16, 16), x.dtype), structure)


def _terms(mask: Mask | None) -> Iterator[Mask]:
    waiting = [] if mask is None else [mask]
    while waiting:
        term = waiting.pop()
        waiting += getattr(term, "parts", ())
        yield term
