"""What the Triton kernels are put together from: replay, head dims in parts, configurations."""

import math
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flashjax
from flashjax import scores
from flashjax.backend import Device
from flashjax.bind import Arguments, bind
from flashjax.kernels import softmax
from flashjax.kernels.triton import BACKEND, config
from flashjax.kernels.triton.language import parts_of
from flashjax.kernels.triton.replay import TRITON
from flashjax.kernels.triton.tile import Scorer
from scripts.deviceless import abstract_mesh
from tests.inputs import F32

X = np.concatenate([np.linspace(-5, 5, 4001), [0.5, 1.5, 2.5, -0.5, -1.5, 0.49999997]])
X = X.astype(np.float32)


def select(x: Any) -> Any:
    return jax.lax.select_n((x > 1).astype(np.int32) + (x > 2), x, 2 * x, 3 * x)


def by_numbers(x: Any) -> Any:
    return x * jnp.where(x.sum() > 0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("fn", "ulps"),
    [
        (jnp.round, 0),
        (lambda x: jax.lax.round(x, jax.lax.RoundingMethod.AWAY_FROM_ZERO), 0),
        (select, 0),
        (by_numbers, 0),
        # Both are rational functions in float32, with products in other orders.
        (jax.lax.erf, 4),
        (lambda x: jax.vjp(jax.lax.erf, x)[1](jnp.ones_like(x))[0], 4),
    ],
    ids=["even", "away", "select", "numbers", "erf", "erf's derivative"],
)
def test_replayed_functions_give_the_same(fn: Any, ulps: int) -> None:
    found, expected = np.asarray(TRITON.lowerable(fn)(X)), np.asarray(fn(X))
    np.testing.assert_allclose(found, expected, rtol=ulps * 2**-23, atol=0)
    assert TRITON.unknown(TRITON.lowerable(fn), X) in (None, "reduce_sum")
    names = str(jax.make_jaxpr(TRITON.lowerable(fn))(X))
    assert not any(f" {name}" in names for name in ("erf", "round", "polynomial"))


NARROW: dict[str, Any] = {
    "tanh": jnp.tanh,
    "third": lambda x: x / 3,
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "gelu": jax.nn.gelu,
    "power": lambda x: jnp.abs(x) ** 0.5,
    "logarithm's slope": lambda x: jax.vjp(jnp.log2, jnp.abs(x) + 1)[1](x)[0],
    "round": jnp.round,
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
@pytest.mark.parametrize("name", NARROW)
def test_functions_of_16_bit_arrays_run_in_float32(name: str, dtype: Any) -> None:
    fn, x = NARROW[name], jnp.asarray(X, dtype)
    found = TRITON.lowerable(fn)(x)
    assert found.dtype == dtype
    wanted = np.asarray(fn(jnp.asarray(x, jnp.float32)))
    # A function of several steps rounds after each: at most four halves of an ulp of what went in.
    step = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, rtol=step, atol=step)


def test_a_remainder_replays_numbers_that_reach_an_inner_function() -> None:
    i = np.arange(-20, 20, dtype=np.int32)
    np.testing.assert_array_equal(TRITON.lowerable(lambda x: jnp.fmod(x, 5))(i), np.fmod(i, 5))
    bools = np.array([True, False, True])
    np.testing.assert_array_equal(TRITON.lowerable(jnp.maximum)(bools, ~bools), [True] * 3)


def test_erf_is_right() -> None:
    expected = np.array([math.erf(float(x)) for x in X])
    found = np.asarray(TRITON.lowerable(jax.lax.erf)(X))
    np.testing.assert_allclose(found, expected, rtol=4 * 2**-23, atol=0)


def test_what_the_lowering_lacks_is_named() -> None:
    assert TRITON.unknown(lambda x: jax.lax.lgamma(x) + 1, X) == "lgamma"
    assert TRITON.unknown(jax.lax.erf, X) is None
    assert all(callable(rule) for rule in TRITON.rules.values())


def fused(x: Any, unit: float, shift: Any) -> Any:
    """Exponentials as a multiply-add takes them: the product is not rounded."""
    exact = np.asarray(x, np.float64) * np.float64(np.float32(unit))
    return jnp.asarray(np.exp2(exact - (0.0 if shift is None else np.asarray(shift))), jnp.float32)


@pytest.mark.parametrize("pad", [-1e10, -3.3e12, -1e30, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("arguments", [{"bias": np.zeros((1, 1, 4, 4), np.float32)}, {}])
def test_exponents_far_from_zero(pad: float, arguments: Any) -> None:
    """A tile that a bias of large numbers hides has weights of 1; a unit is faster without."""
    x = np.zeros((1, 4, 1, 64), np.float32)
    bound = bind(x, x, x, Arguments(**arguments))
    chosen = Scorer(bound.spec, bound.operands, interpret=True).exponents
    assert (chosen.unit is None) == bool(arguments)
    if arguments:
        exponents = softmax.Exponents(fused, chosen.unit)
        update = exponents.update(softmax.start((2,), jnp.dtype(F32)), jnp.full((2, 16), pad))
        assert (update.p == 1).all()
        update = exponents.update(update.running, jnp.zeros((2, 16)))
        assert (update.alpha == 0).all()
        factor, lse = exponents.finish(update.running)
        np.testing.assert_allclose(factor, 1 / 16)
        np.testing.assert_allclose(lse, math.log(16), rtol=1e-6)


def test_a_function_out_of_reach_is_a_reason_in_words() -> None:
    gamma = scores.ScoreMod(lambda s, row, column, batch, head: s + jax.lax.lgamma(s))
    x = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)
    found = flashjax.explain(x, x, x, score_mod=gamma, device=Device("cuda", "NVIDIA H200", "9.0"))
    assert found.implementation == "xla"
    assert "lgamma, which the Triton lowering does not have" in dict(found.refused)["triton"]


def test_parts_cover_a_head_dim_with_little_waste() -> None:
    for dim in range(1, 257):
        parts = parts_of(dim)
        assert len(parts) <= 2
        assert all(part & (part - 1) == 0 and part >= 16 for part in parts)
        assert dim <= sum(parts) <= max(16, 1 << (dim - 1).bit_length())


CALLS = [
    (dtype, dims, capability)
    for dtype in (jnp.bfloat16, jnp.float32)
    for dims in ((16, 16), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
    for capability in config.CAPABILITIES
]


@pytest.mark.parametrize(("dtype", "dims", "capability"), CALLS)
def test_what_is_offered_fits(dtype: Any, dims: tuple[int, int], capability: str) -> None:
    """Or nothing is, and the call goes to another implementation with a reason."""
    q, v = (jax.ShapeDtypeStruct((1, 512, 2, dim), dtype) for dim in dims)
    device = Device("cuda", "NVIDIA", capability)
    spec = flashjax.explain(q, q, v, device=device).spec
    sizes = config.Sizes.of(spec, capability)
    forward = BACKEND.configs(spec, device)
    backward: Any = BACKEND.configs(spec, device, backward=True)
    needs = [config.forward_need(c, sizes) for c in forward]
    needs += [config.key_need(c, sizes) for c in backward]
    needs += [config.query_need(c.query, sizes) for c in backward]
    assert all(need.shared <= config.SHARED_MEMORY[capability] for need in needs)
    reason = BACKEND.unsupported(spec, device)
    assert (reason is None) == bool(forward and backward)
    if dtype == jnp.bfloat16:
        assert reason is None


def test_operands_of_rows_and_columns_count() -> None:
    x = np.zeros((1, 300, 2, 128), np.float32)
    plain = bind(x, x, x, Arguments()).spec
    biased = bind(x, x, x, Arguments(bias=np.zeros((300, 300), np.float32))).spec
    device = Device("cuda", "NVIDIA", "9.0")
    assert config.Sizes.of(biased, "9.0").tile == 4
    assert config.Sizes.of(plain, "9.0").tile == 0
    assert BACKEND.configs(biased, device)


def lowered(x64: bool = False, **arguments: Any) -> None:
    """Lowers a call and the gradients of all its floating arrays for CUDA, with no GPU."""
    shape = ((2, 72, 4, 16), (2, 40, 2, 16), (2, 40, 2, 16))
    q, k, v = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shape)
    make = arguments.pop("make", lambda x: {})
    operands = arguments

    def call(q: Any, k: Any, v: Any, operands: Any) -> Any:
        named = make(operands) or operands
        out = flashjax.dot_product_attention(q, k, v, implementation="triton", **named)
        return out.astype(jnp.float32).sum()

    with jax.enable_x64(x64), jax.sharding.use_abstract_mesh(abstract_mesh("9.0")):
        step = jax.jit(jax.grad(call, argnums=(0, 1, 2, 3), allow_int=True))
        step.trace(q, k, v, operands).lower(lowering_platforms=("cuda",))


def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float64], ids=str)
def test_gradients_come_in_their_operands_dtypes_on_a_gpu_too(dtype: Any) -> None:
    """There both the kernels and "xla" are traced, for one program, and have to agree."""
    wide = dtype == jnp.float64
    for shape in ((1, 1, 1, 40), (2, 4, 72, 1), (1, 4, 72, 40)):
        lowered(wide, bias=array(*shape, dtype=dtype))
    lowered(wide, scale=array(dtype=dtype))
    lowered(wide, logits_soft_cap=array(dtype=dtype))
    slopes = {"slopes": array(4, dtype=dtype), "offset": array(2, dtype=jnp.int32)}
    lowered(wide, make=lambda x: {"score_mod": scores.Alibi(**x)}, **slopes)


LOWER = """
import warnings
warnings.simplefilter("error")
import dataclasses, jax, jax.numpy as jnp, flashjax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

@dataclasses.dataclass(frozen=True)
class Target(AbstractDevice):
    compute_capability: str = "9.0"

x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
device = Target("NVIDIA H200", 132, "gpu")
mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
with jax.sharding.use_abstract_mesh(mesh):
    fn = lambda q, k, v: flashjax.dot_product_attention(q, k, v, implementation="triton")
    text = jax.jit(fn).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
assert "triton" in text, text[:500]
"""


def test_the_deprecation_of_the_lowering_is_not_the_users_concern() -> None:
    """In a process where every warning is an error; this one's own filters may hide it."""
    ran = subprocess.run([sys.executable, "-c", LOWER], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
