"""Rematerialisation: the checkpoint names spare the backward a second forward."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core

import flashjax

# Without a mask a tile has one variant of code: two products forward, five backward.
FORWARD, BACKWARD = 2, 5
SAVE = jax.checkpoint_policies.save_only_these_names("flashjax_out", "flashjax_lse")


def products(jaxpr: Any) -> int:
    """How many dot_general a jaxpr holds, in whatever it nests."""
    count = 0
    for equation in jaxpr.eqns:
        count += equation.primitive.name == "dot_general"
        for value in jax.tree.leaves(
            tuple(equation.params.values()),
            is_leaf=lambda x: isinstance(x, (core.Jaxpr, core.ClosedJaxpr)),
        ):
            if isinstance(value, core.ClosedJaxpr):
                count += products(value.jaxpr)
            elif isinstance(value, core.Jaxpr):
                count += products(value)
    return count


def products_of_gradient(wrap: Callable[..., Any]) -> int:
    x = jnp.ones((1, 16, 2, 8))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return flashjax.dot_product_attention(q, k, v, implementation="xla").sum()

    # Dead code is left to XLA: make_jaxpr shows what was traced, DCE what would run.
    traced = jax.make_jaxpr(jax.jit(jax.grad(wrap(loss), argnums=(0, 1, 2))))(x, x, x)
    return products(traced.jaxpr)


@pytest.mark.parametrize(
    ("wrap", "wanted"),
    [
        (lambda loss: loss, FORWARD + BACKWARD),
        (lambda loss: jax.checkpoint(loss, policy=SAVE), FORWARD + BACKWARD),
        (jax.checkpoint, 2 * FORWARD + BACKWARD),
    ],
    ids=["plain", "names saved", "nothing saved"],
)
def test_the_gradient_holds_one_forward_where_the_names_are_saved(
    wrap: Callable[..., Any], wanted: int
) -> None:
    assert products_of_gradient(wrap) == wanted
