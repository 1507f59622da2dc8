"""What a sceptical user found: each once failed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flashjax
from flashjax import masks, scores
from tests.inputs import F32, IMPLEMENTATIONS, USUAL

EACH = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
Q = jax.random.normal(jax.random.key(0), (2, 8, 2, 8), USUAL)
IDS = jnp.array([[0, 0, 1, 1, 1, 2, 2, -1], [0] * 8])


def attend(implementation: str, **arguments: Any) -> jax.Array:
    return flashjax.dot_product_attention(Q, Q, Q, implementation=implementation, **arguments)


@EACH
@pytest.mark.parametrize(
    ("make", "mapped"),
    [
        (lambda x: {"segment_ids": x}, jnp.stack([IDS, IDS[::-1], IDS * 0])),
        (lambda x: {"mask": masks.Prefix(x) | masks.Causal(x)}, jnp.arange(3)),
        (lambda x: {"mask": masks.Intervals(x, x + 3)}, jnp.arange(24).reshape(3, 8) % 6),
        (lambda x: {"key_value_seq_lengths": x}, jnp.array([[3, 8], [0, 1], [9, 2]])),
        (lambda x: {"logits_soft_cap": x}, jnp.array([1.0, 5.0, 50.0])),
        (lambda x: {"score_mod": scores.Alibi(x)}, jnp.ones((3, 2)) / 3),
    ],
    ids=["ids", "offsets", "intervals", "lengths", "cap", "slopes"],
)
def test_vmap_over_the_arrays_of_terms_equals_the_loop(
    make: Any, mapped: Any, implementation: str
) -> None:
    found = jax.vmap(lambda x: attend(implementation, **make(x)))(mapped)
    wanted = jnp.stack([attend(implementation, **make(x)) for x in mapped])
    np.testing.assert_allclose(found.astype(F32), wanted.astype(F32), rtol=0, atol=1e-6)


def test_flags_in_the_place_of_leaves_leave_a_term_its_structure() -> None:
    mask = masks.Causal(IDS[:, 0]) & masks.Lengths(key=IDS[:, 0])
    for other in (True, 0, None.__class__):
        flags = jax.tree.map(lambda _, other=other: other, mask)
        assert jax.tree.structure(flags) == jax.tree.structure(mask)


@EACH
def test_an_inf_in_the_gradient_of_an_empty_row_stays_there(implementation: str) -> None:
    def call(v: jax.Array) -> jax.Array:
        return flashjax.dot_product_attention(
            Q, Q, v, query_seq_lengths=jnp.array([4, 4]), implementation=implementation
        )

    _, pull = jax.vjp(call, Q)
    gradient = pull(jnp.ones_like(Q).at[:, 6].set(jnp.inf))[0]
    assert bool(jnp.isfinite(gradient).all())


@EACH
def test_strict_promotion(implementation: str) -> None:
    bf16 = Q.astype(jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        out, pull = jax.vjp(
            lambda q: flashjax.dot_product_attention(
                q, bf16, bf16, is_causal=True, implementation=implementation
            ),
            bf16,
        )
        assert pull(out)[0].dtype == jnp.bfloat16


def test_vmap_over_nothing() -> None:
    assert jax.vmap(lambda q: flashjax.dot_product_attention(q, q, q))(Q[None][:0]).shape == (
        0,
        *Q.shape,
    )


def test_jax_nns_lengths_without_a_batch() -> None:
    lengths = jnp.array([3], jnp.int32)
    found = flashjax.dot_product_attention(Q[0], Q[0], Q[0], key_value_seq_lengths=lengths)
    wanted = jax.nn.dot_product_attention(Q[0], Q[0], Q[0], key_value_seq_lengths=lengths)
    np.testing.assert_allclose(found.astype(F32), wanted.astype(F32), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "fn",
    [
        lambda s, *_: s - s.max(-1, keepdims=True),
        lambda s, *_: jax.nn.softmax(s),
        lambda s, *_: jnp.cumsum(s, -1),
        lambda s, *_: s[::-1],
        lambda s, *_: s.sum(),
    ],
    ids=["max", "softmax", "cumsum", "reversed", "sum"],
)
def test_functions_that_look_across_a_tile_are_refused(fn: Any) -> None:
    with pytest.raises(TypeError, match=r"ScoreMod\(fn=…\) is not elementwise"):
        attend("xla", score_mod=scores.ScoreMod(fn))


@pytest.mark.parametrize(
    "fn",
    [
        jax.nn.relu,
        jnp.tanh,
        lambda s: jnp.where(s > 0, s, 0.1 * s),
        lambda s: s // 2 + s % 3,
        jax.nn.gelu,
    ],
    ids=["relu", "tanh", "leaky", "integer", "gelu"],
)
def test_elementwise_functions_are_not(fn: Any) -> None:
    attend("reference", score_mod=scores.ScoreMod(lambda s, *_: fn(s)))


def test_arrays_on_the_left_of_a_mask_say_how_to_wrap_them() -> None:
    for array in (np.ones((8, 8), bool), jnp.ones((8, 8), bool)):
        for combine in (lambda a, b: a & b, lambda a, b: a | b):
            with pytest.raises(TypeError, match=r"flashjax\.masks\.Dense"):
                combine(array, masks.Causal())


def test_a_flax_parameter_gets_its_gradient() -> None:
    class Layer(nnx.Module):
        def __init__(self) -> None:
            self.sinks = nnx.Param(jnp.zeros(2))

        def __call__(self) -> jax.Array:
            return attend("xla", sinks=self.sinks).sum()

    found = jax.tree.leaves(nnx.grad(lambda layer: layer())(Layer()))
    wanted = jax.grad(lambda sinks: attend("xla", sinks=sinks).sum())(jnp.zeros(2))
    np.testing.assert_array_equal(np.asarray(found[0]), np.asarray(wanted))
