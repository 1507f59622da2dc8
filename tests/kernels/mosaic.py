"""What JAX's interpreter of Mosaic GPU kernels lacks of Hopper, for tests alone (0.11.2, 0.12.0.1).

It has no stores to accumulators in registers, no product with a left side in registers, no sums in
global memory by TMA, and does not look for races in what products read. All of it is private to
JAX: where one of these names is gone, `install` fails and says which.
"""

import functools
import threading
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory
from jax._src.state.types import AbstractRef
from jax.experimental.pallas import mosaic_gpu as plgpu

Interpreter = jaxpr_interpret.JaxprInterpreter
KEY = gpu_callbacks.HostAllocationKey.from_array
LOAD, STORE = primitives.wgmma_accumulator_deref_p, primitives.wgmma_accumulator_store_p

_interpret = Interpreter.interpret
_load = Interpreter._interpret_wgmma_accumulator_deref_p
_copy = gpu_callbacks.copy_smem_to_gmem
_one_adds = threading.Lock()


def params() -> Any:
    """What `interpret` of a kernel takes: races are errors."""
    return plgpu.InterpretGPUParams(detect_races=True)


def install() -> None:
    """Teaches the interpreter; may be called again."""
    Interpreter.interpret = interpret
    Interpreter._interpret_wgmma_accumulator_deref_p = load_or_store
    Interpreter._interpret_wgmma_ref_p = product
    Interpreter._interpret_inline_mgpu_p = counter
    gpu_callbacks.copy_smem_to_gmem = copy_or_add


def races_found() -> bool:
    """Whether the last call saw a race: JAX 0.12 raises, 0.11 only prints."""
    return bool(gpu_callbacks.get_races().races_found)


def reset() -> None:
    """Forgets what a call that failed left behind."""
    gpu_callbacks.reset_gpu_interpret_mode_state()


def interpret(self: Any, jaxpr: Any, token: Any, *args: Any) -> Any:
    """Sends stores to accumulators where loads of them are handled: it knows no others."""

    def known(eqn: Any) -> Any:
        if eqn.primitive is not STORE:
            return eqn
        return eqn.replace(primitive=LOAD, params={"wait_n": None})

    if any(eqn.primitive is STORE for eqn in jaxpr.eqns):
        jaxpr = jaxpr.replace(eqns=[known(eqn) for eqn in jaxpr.eqns])
    return _interpret(self, jaxpr, token, *args)


def load_or_store(self: Any, eqn: Any, token: Any, invals: Any) -> Any:
    """A store has two operands, a load one."""
    if len(eqn.invars) == 1:
        return _load(self, eqn, token, invals)
    accumulator, value = invals()
    return _call(self, eqn, token, _stored, accumulator=accumulator, value=value), value


def product(self: Any, eqn: Any, token: Any, invals: Any) -> Any:
    """``acc += a @ b``, with `a` in shared memory or in registers."""
    acc, a, b, *leaves = invals()
    names = ("acc_transforms_tree", "a_transforms_tree", "b_transforms_tree")
    trees = [eqn.params[name] or jax.tree.structure([]) for name in names]
    transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(tuple(trees)), leaves)
    operands: list[Any] = []
    for var, value, own in zip(eqn.invars, (acc, a, b), transforms, strict=False):
        in_registers = not isinstance(var.aval, AbstractRef)
        operands.append(
            (value, None) if in_registers else jaxpr_interpret.resolve_ref(var.aval, value, own)
        )
    pairs = tuple((value, None if own is None else tuple(own)) for value, own in operands)
    return _call(self, eqn, token, _multiplied, operands=pairs), []


def counter(self: Any, eqn: Any, token: Any, invals: Any) -> Any:
    """Waiting for a turn and passing it on, of all that is written in assembly."""
    place, number, *leaves = invals()
    (transforms, _), found = eqn.params["pytree_ref_transforms"].unflatten(leaves), eqn.invars[0]
    operand = jaxpr_interpret.resolve_ref(found.aval, place, transforms)
    fn = {"await_turn": _awaited, "pass_turn": _passed}[eqn.params["mgpu_fn"].__name__]
    return _call(self, eqn, token, fn, operand=operand, number=number), []


def _call(interpreter: Any, eqn: Any, token: Any, fn: Any, **operands: Any) -> Any:
    """The token after `fn` has run, in its turn, for the equation's thread."""
    return callback.io_callback(
        functools.partial(fn, eqn.source_info),
        gpu_callbacks.TOKEN_SHAPE_DTYPE,
        token=token,
        mesh=interpreter.mesh_location,
        thread=interpreter.thread,
        **operands,
    )


class Where(NamedTuple):
    """The thread and line that an equation runs in, and what it does to memory."""

    mesh: Any
    thread: Any
    source: Any

    @property
    def logged(self) -> Any:
        return shared_memory.GPULoggingInfo(self.mesh, self.thread, self.source)

    def read(self, operand: Any, clock: Any = None) -> Any:
        """Key, place and content of an operand in memory; with a clock, races are looked for."""
        key, memory = KEY(operand[0]), gpu_callbacks._get_shared_memory()
        own = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(operand[1]))
        place = memory.access(key, own)
        if clock is not None:
            gpu_callbacks.get_races().check_read(
                self.thread, clock.copy(), key, place, source_info=self.source
            )
        content, *_ = memory.get_buffer_content(key, place, self.thread, logging_info=self.logged)
        return key, place, content

    def store(self, key: Any, place: Any, value: Any) -> None:
        memory = gpu_callbacks._get_shared_memory()
        memory.store_buffer_content(key, place, value, self.thread, logging_info=self.logged)

    def clock(self) -> Any:
        """The time at which a product of this thread reads shared memory; None if none is kept."""
        memory = gpu_callbacks._get_shared_memory()
        if not memory.detect_races:
            return None
        with memory.lock:
            clock = memory.clocks[self.thread]
            clock.inc(memory.thread_to_vc_position(self.thread))
            return clock.async_smem_clock.copy()


@gpu_callbacks.fail_on_exception
def _stored(
    source: Any, *, token: Any, mesh: Any, thread: Any, accumulator: Any, value: Any
) -> Any:
    # Registers are a thread's own: no race to look for.
    where, key = Where(mesh, thread, source), KEY(accumulator)
    where.store(key, gpu_callbacks._get_shared_memory().access(key, ()), np.asarray(value))
    return token


@gpu_callbacks.fail_on_exception
def _multiplied(source: Any, *, token: Any, mesh: Any, thread: Any, operands: Any) -> Any:
    where, (acc, a, b) = Where(mesh, thread, source), operands
    clock = where.clock()
    left = np.asarray(a[0]) if a[1] is None else where.read(a, clock)[2]
    right = where.read(b, clock)[2]
    key, place, before = where.read(acc)
    with np.errstate(invalid="ignore"):  # infinities that are hidden later
        where.store(key, place, before + np.matmul(left, right, dtype=before.dtype))
    return token


@gpu_callbacks.fail_on_exception
def _awaited(source: Any, *, token: Any, mesh: Any, thread: Any, operand: Any, number: Any) -> Any:
    """Programs run one after the other, so that it is their turn when they ask."""
    _, _, done = Where(mesh, thread, source).read(operand)
    assert number in (-1, done), f"{done} additions are done, and the turn is {number}"
    return token


@gpu_callbacks.fail_on_exception
def _passed(source: Any, *, token: Any, mesh: Any, thread: Any, operand: Any, number: Any) -> Any:
    where = Where(mesh, thread, source)
    key, place, done = where.read(operand)
    where.store(key, place, done + np.asarray(number))
    return token


class Add(gpu_callbacks.AsyncCopySmemToGmemTask):  # type: ignore[misc]
    """What TMA adds: its read may race, its sum may not."""

    def __call__(self, tma_thread_id: int) -> None:
        memory = gpu_callbacks._get_shared_memory()
        here = self.src_allocation_key, self.src_access
        there = self.dst_allocation_key, self.dst_access
        logged = {"logging_info": self.logging_info}
        with _one_adds:
            self.pre_read(tma_thread_id, memory)
            own, before = (
                memory.get_buffer_content(*place, self.thread, **logged)[0]
                for place in (here, there)
            )
            memory.store_buffer_content(*there, before + own, self.thread, **logged)
            if memory.detect_races:
                self.clock.inc(tma_thread_id)
                self.write_clock = self.clock.copy()
            self.post_write(tma_thread_id, memory)


@gpu_callbacks.fail_on_exception
def copy_or_add(*, reduction_op: Any, **operands: Any) -> Any:
    """From shared to global memory."""
    if reduction_op is None:
        return _copy(reduction_op=None, **operands)
    assert reduction_op == "add"
    assert operands["predicate"] is None
    memory, thread = gpu_callbacks._get_shared_memory(), operands["thread"]
    ends = []
    for end in ("src", "dst"):
        key = KEY(operands[f"{end}_allocation_key_as_array"])
        own = gpu_callbacks._remove_noop_transforms(operands[f"{end}_transforms"])
        ends += [key, memory.access(key, jax.tree.map(int, own))]
    clock = memory.incr_clock(thread) if memory.detect_races else None
    task = Add(operands["mesh_location"], thread, *ends, operands["source_info"], clock=clock)
    memory.execute_async_task(task)
    return operands["token"]
