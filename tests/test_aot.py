"""Kernels without a GPU: they lower for CUDA, and `make aot` reads what the compilers say."""

import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from flashjax import dot_product_attention, scores
from flashjax.kernels.triton.config import (
    CAPABILITIES,
    SMALLEST,
    BackwardConfig,
    ForwardConfig,
)
from scripts import aot
from scripts.deviceless import (
    TARGETS,
    Measured,
    abstract_mesh,
    read_ptxas,
    read_thunks,
    target_text,
)
from tests.features import build
from tests.inputs import BF16, F16, F32, Shape, arrays_of, step_of

# Every kind of operand and of schedule, every dtype, head dims that are no power of two, each in
# some case; lengths that no tile divides.
CASES: dict[str, tuple[tuple[str, ...], Shape, Any]] = {
    "plain": ((), Shape(1, 300, 300, 2, 2, 64, 64), BF16),
    "grouped": (("is_causal",), Shape(2, 257, 257, 4, 2, 128, 128), BF16),
    "H 96": (("window", "sinks"), Shape(1, 200, 333, 2, 1, 96, 96), BF16),
    "H 192, Hv 128": (("is_causal", "soft_cap"), Shape(1, 130, 260, 2, 2, 192, 128), F16),
    "H 256": (("prefix", "chunks"), Shape(1, 130, 260, 2, 2, 256, 256), BF16),
    "float32": (("is_causal", "traced_scale"), Shape(1, 200, 200, 2, 2, 64, 40), F32),
    "documents": (("segments", "dropout", "alibi"), Shape(2, 200, 200, 4, 2, 64, 64), BF16),
    "lengths": (("lengths", "causal_offset_per_batch", "predicate"), Shape(2, 99), F16),
    "arrays": (("boolean_per_head", "bias (1,N,T,S)", "score_mod"), Shape(2, 150, 70), F32),
    "row bias": (("boolean_of_columns", "bias (N,1,S)", "complement"), Shape(2, 150, 70), BF16),
    "lists": (("block_sparse", "intervals", "unsorted_segments"), Shape(2, 150, 150), BF16),
    "two ranges": (("sink_tokens_and_window", "dropout", "sinks"), Shape(2, 150, 150), BF16),
}


def lowered(capability: str, step: Any, *operands: Any) -> str:
    with jax.sharding.use_abstract_mesh(abstract_mesh(capability)):
        return step.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


# What a capability changes is which tile sizes are offered: a few cases show that.
ON = [("9.0", name) for name in CASES] + [("8.0", name) for name in ("H 256", "float32")]


@pytest.mark.parametrize(("capability", "name"), ON)
def test_forward_and_backward_lower_for_cuda(capability: str, name: str) -> None:
    names, shape, dtype = CASES[name]
    case = build(shape, names, dtype)
    inputs = (case.query, case.key, case.value, dict(case.operands))
    step = step_of("triton", case)
    try:
        text = lowered(capability, step, inputs, arrays_of(case.arguments), case.cotangents)
    except pytest.skip.Exception as refusal:
        pytest.fail(f"refused: {refusal}")
    kernels = set(re.findall(r'name = "(flashjax_\w+)"', text))
    wanted = {"flashjax_forward", "flashjax_backward_query", "flashjax_backward_key"}
    assert wanted <= kernels


def erf_and_round(score: Any, row: Any, column: Any, batch: Any, head: Any) -> Any:
    """Primitives that the Triton lowering lacks."""
    return jax.lax.erf(score) * jnp.round(score) + 0.5 * score


def test_a_score_modifier_with_round_and_erf_lowers() -> None:
    score = scores.ScoreMod(erf_and_round)

    def loss(q: Any, k: Any, v: Any) -> Any:
        out = dot_product_attention(q, k, v, score_mod=score, implementation="triton")
        return out.astype(jnp.float32).sum()

    x = jax.ShapeDtypeStruct((1, 130, 2, 64), jnp.bfloat16)
    text = lowered("9.0", jax.jit(jax.grad(loss, argnums=(0, 1, 2))), x, x, x)
    assert "flashjax_backward_key" in text


PTXAS = """ptxas warning : Registers are spilled to local memory in function 'flashjax_forward', 12
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'flashjax_forward' for 'sm_90a'
ptxas info    : Function properties for flashjax_forward
    88 bytes stack frame, 108 bytes spill stores, 104 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 88 bytes cumulative stack size
ptxas info    : Compiling entry function 'input_concatenate_fusion' for 'sm_90a'
ptxas info    : Function properties for input_concatenate_fusion
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
ptxas info    : Compile time = 3.462 ms
"""
THUNKS = (
    "001: kCustomKernel [source       | next=002 (1)] input_concatenate_fusion grid: [1, 1, 1] "
    "threads: [32, 1, 1]  shared_memory: 0 bytes\n"
    "002: kCustomKernel [prev=001 (1) | sink        ] flashjax_forward grid: [16, 4, 1] "
    "threads: [256, 1, 1]  shared_memory: 229376 bytes\n"
)


def test_what_ptxas_says_is_read() -> None:
    assert read_ptxas(PTXAS) == {
        "flashjax_forward": (255, 88, 108),
        "input_concatenate_fusion": (12, 0, 0),
    }
    assert read_ptxas("ptxas fatal : Unsupported .version 9.9") == {}


def test_the_shared_memory_of_launches_is_read() -> None:
    assert read_thunks(THUNKS) == {"input_concatenate_fusion": 0, "flashjax_forward": 229376}


def program(capability: str = "9.0", *sizes: int) -> aot.Program:
    call = aot.Call(capability, "bfloat16", 128, 128, "causal", 1)
    made = ForwardConfig(*(sizes or (64, 64, 4, 2)))
    return aot.Program(call, "forward", made)


def test_a_fault_is_a_spill_unforeseen_memory_or_an_error() -> None:
    one = program()
    fine = Measured(registers=255, stack=64, spilled=aot.SPILL_LIMIT, shared=one.estimate)
    assert aot.fault(one, fine) is None
    assert aot.fault(one, fine._replace(spilled=257)) == "spills 257 bytes"
    over = aot.fault(one, fine._replace(shared=one.estimate + 8))
    assert over == "8 bytes of shared memory unforeseen"
    assert aot.fault(one, Measured(error="no")) == "no"
    smallest = aot.Call("9.0", "float32", 256, 256, "causal", 1)
    key = aot.Program(smallest, "key", BackwardConfig(*SMALLEST, ForwardConfig(*SMALLEST)))
    most = fine._replace(spilled=aot.SMALLEST_SPILL_LIMIT, shared=0)
    assert aot.fault(key, most) is None
    assert aot.fault(key, most._replace(spilled=449)) == "spills 449 bytes"
    assert aot.row(one, fine).split()[-2:] == [str(one.estimate), "0.0"]


def test_every_capability_is_a_target_and_all_that_is_offered_is_compiled() -> None:
    assert set(TARGETS) == set(CAPABILITIES)
    for capability in TARGETS:
        major, minor = capability.split(".")
        assert f"{{ major: {major} minor: {minor} " in target_text(capability)
    found = list(aot.programs(aot.arguments(["--only", "9.0", "--dtype", "bfloat16"])))
    calls = {p.call for p in found}
    assert {(c.head_dim, c.value_dim) for c in calls} == {*aot.HEAD_DIMS, *aot.ODD_HEAD_DIMS}
    assert len(calls) == 15
    for call in calls:
        for name in aot.PASSES:
            made = [p.config for p in found if (p.call, p.name) == (call, name)]
            assert made == list(call.offered(name))
            assert len(set(map(str, made))) == len(made)
            assert made or (name == "fused" and call.head_dim > 128)


def test_filters_pick_programs() -> None:
    words = "--only 8.0 --head-dim 96 --dtype float32 --pass key --mask none --config 64,64,4,2"
    (one,) = aot.programs(aot.arguments(words.split()))
    assert (one.call.head_dim, one.name, one.config.rows, one.config.stages) == (96, "key", 64, 2)


class Fragile:
    """A program that ends the compiler's process, as a fault in it does."""

    call = aot.Call("9.0", "bfloat16", 64, 64, "none", 1)

    def function(self) -> Any:
        os._exit(134)


@pytest.mark.slow
def test_a_crash_of_the_compiler_is_one_row() -> None:
    with aot.Worker() as worker:
        for _ in range(2):
            found = worker.measure(Fragile())  # type: ignore[arg-type]
            assert found.error == "the compiler's process ended with code 134"
