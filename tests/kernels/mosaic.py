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
    Interpreter._interpret_inline_mgpu_p = assembly
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


def assembly(self: Any, eqn: Any, token: Any, invals: Any) -> Any:
    """What kernels do in assembly, most of it to global memory, by its function's name."""
    if eqn.params["mgpu_fn"].__name__ == "zero":
        return token, [np.int32(0)]
    count = eqn.params["pytree_args"].num_leaves
    (place, *values), leaves = (given := invals())[:count], given[count:]
    own, found = eqn.params["pytree_ref_transforms"].unflatten(leaves)[0], eqn.invars[0]
    operand = jaxpr_interpret.resolve_ref(found.aval, place, own)
    name, *first = eqn.params["mgpu_fn"].__name__.split()
    if not first:
        fn = {"await_turn": _awaited, "pass_turn": _passed}[name]
        return _call(self, eqn, token, fn, operand=operand, value=values[0]), []
    index, *values = values
    more = {"operand": operand, "index": index, "first": np.int32(first[0])}
    if name == "load_tile":
        out = eqn.outvars[0].aval
        token, tile = _call(self, eqn, token, _loaded_tile, like=out, shape=out.shape, **more)
        return token, [tile]
    more["adds"] = np.bool_({"add_tile": True, "store_tile": False}[name])
    return _call(self, eqn, token, _written_tile, value=values[0], **more), []


def _call(
    interpreter: Any, eqn: Any, token: Any, fn: Any, like: Any = None, **operands: Any
) -> Any:
    """The token after `fn` has run, in its turn, for the equation's thread; with what is `like`."""
    only = gpu_callbacks.TOKEN_SHAPE_DTYPE
    return callback.io_callback(
        functools.partial(fn, eqn.source_info),
        only if like is None else (only, like),
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
    with np.errstate(invalid="ignore", over="ignore"):  # infinities that are hidden later
        where.store(key, place, before + np.matmul(left, right, dtype=before.dtype))
    return token


@gpu_callbacks.fail_on_exception
def _awaited(source: Any, *, token: Any, mesh: Any, thread: Any, operand: Any, value: Any) -> Any:
    """Programs run one after the other, so that it is their turn when they ask."""
    _, _, done = Where(mesh, thread, source).read(operand)
    assert value in (-1, done), f"{done} additions are done, and the turn is {value}"
    return token


@gpu_callbacks.fail_on_exception
def _passed(source: Any, *, token: Any, mesh: Any, thread: Any, operand: Any, value: Any) -> Any:
    where = Where(mesh, thread, source)
    key, place, done = where.read(operand)
    where.store(key, place, done + np.asarray(value))
    return token


def _in_pieces(tile: Any) -> Any:
    """A tile of 64 rows as it lies in global memory: by threads, not by rows."""
    # Warps, halves of their rows, rows; pieces, halves of their dims, threads, pairs.
    apart = np.asarray(tile).reshape(4, 2, 8, -1, 2, 4, 2)
    return apart.transpose(3, 1, 0, 2, 5, 4, 6).reshape(-1, 1024)


def _in_rows(pieces: Any) -> Any:
    """The other way round."""
    apart = pieces.reshape(-1, 2, 4, 8, 4, 2, 2).transpose(2, 1, 3, 0, 5, 4, 6)
    return apart.reshape(64, -1)


def _pieces(content: Any, index: Any, first: Any, dims: int) -> Any:
    """Where they lie in the content of the sums' memory."""
    begin = int(first) // 16
    return content.reshape(-1, *content.shape[-2:])[int(index), begin : begin + dims // 16]


@gpu_callbacks.fail_on_exception
def _written_tile(
    source: Any, *, token: Any, mesh: Any, thread: Any, operand: Any, index: Any, first: Any,
    value: Any, adds: Any,
) -> Any:  # fmt: skip
    """Stored, or added to what is there."""
    where = Where(mesh, thread, source)
    with _one_adds:
        key, place, content = where.read(operand)
        there, own = _pieces(content, index, first, value.shape[1]), _in_pieces(value)
        there[...] = there + own if adds else own
        where.store(key, place, content)
    return token


@gpu_callbacks.fail_on_exception
def _loaded_tile(
    source: Any, *, token: Any, mesh: Any, thread: Any, operand: Any, index: Any, first: Any,
    shape: Any,
) -> Any:  # fmt: skip
    content = Where(mesh, thread, source).read(operand)[2]
    return token, _in_rows(_pieces(content, index, first, int(shape[1])))


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
