"""Compiles every configuration that the kernels offer, with no GPU: `make aot`.

For each compute capability, dtype, head dim, mask and pass it prints what ptxas says of registers
and spills and what the compilers say of shared memory, beside the kernels' own estimates.
The exit code is 1 where a configuration does not compile, spills, or takes more shared memory than
was estimated.

    make aot ARGS="--only 9.0 --head-dim 128 --pass forward"
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import jax

from flashjax.backend import Backend, Device
from flashjax.bind import Arguments, bind
from flashjax.kernels.hopper import Hopper, backward_config
from flashjax.kernels.hopper.config import guards, shared_memory
from flashjax.kernels.triton import BACKEND, config
from flashjax.kernels.triton.config import ForwardConfig
from flashjax.spec import Operands, Spec
from flashjax.tuning.table import plain
from scripts.deviceless import TARGETS, Compiler, Measured, toolkit

# Of Triton's kernels, and forward and backward of Hopper's.
Pass = Literal["forward", "query", "key", "mosaic", "fused"]
PASSES: tuple[Pass, ...] = ("forward", "query", "key", "mosaic", "fused")
WANTED: dict[Pass, frozenset[str]] = {
    "forward": frozenset(),
    "query": frozenset({"query"}),
    "key": frozenset({"key", "value"}),
    "mosaic": frozenset(),
    "fused": frozenset({"query", "key", "value"}),
}
NEED = {"forward": config.forward_need, "query": config.query_need, "key": config.key_need}
MASKS = ("causal", "none", "packed")
DTYPES = ("bfloat16", "float16", "float32")
HEAD_DIMS = ((64, 64), (128, 128), (256, 256))
# Head dims that are no power of two, unequal ones, and masks that may hide a column from every row:
# unless asked for, on one capability alone.
ODD_HEAD_DIMS = ((96, 96), (192, 128))
RARE_MASKS = ("packed",)
LENGTH, HEADS = 4096, 8
# Bytes a thread. The fastest configurations measured at H 128 spill up to 236, outside their loops.
# The smallest tile there is, where nothing else fits, may spill more (float32 at H 256).
SPILL_LIMIT = 256
SMALLEST_SPILL_LIMIT = 448
# The second walk of such masks, which only a NaN starts, spills besides (docs/kernel-notes.md).
GUARDED_SPILL_LIMIT = 1024
HOPPER_GUARDED_SPILL_LIMIT = 256
# A mask with arrays, and tiles of 128 rows at H 64, take a few registers too many.
FUSED_SPILL_LIMIT = 192
SECONDS = 120.0

HOPPER = Hopper()


@dataclasses.dataclass(frozen=True)
class Call:
    """What is compiled for: a device and a call of the kernels."""

    capability: str
    dtype: str
    head_dim: int
    value_dim: int
    mask: str
    group: int

    @property
    def spec(self) -> Spec:
        key_heads = HEADS // self.group
        shapes = (HEADS, self.head_dim), (key_heads, self.head_dim), (key_heads, self.value_dim)
        found: list[Spec] = []

        def trace(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> None:
            arguments = Arguments(
                is_causal=self.mask != "none", segment_ids=ids if self.mask == "packed" else None
            )
            found.append(bind(q, k, v, arguments).spec)

        arrays = [jax.ShapeDtypeStruct((1, LENGTH, *s), self.dtype) for s in shapes]
        jax.eval_shape(trace, *arrays, jax.ShapeDtypeStruct((1, LENGTH), "int32"))
        return found[0]

    def offered(self, name: Pass) -> Iterator[Any]:
        """The configurations of one pass, each once: the backward's pairs repeat some."""
        device = Device("cuda", TARGETS[self.capability].kind, self.capability)
        if name in ("mosaic", "fused"):
            backward = name == "fused"
            fits = HOPPER.unsupported(self.spec, device, backward=backward) is None
            yield from HOPPER.configs(self.spec, device, backward=backward) if fits else ()
            return
        seen = set()
        for c in BACKEND.configs(self.spec, device, backward=name != "forward"):
            part: Any = c.query if name == "query" else c  # type: ignore[attr-defined]
            own = tuple(plain(part).items())
            if own not in seen:
                seen.add(own)
                yield part


@dataclasses.dataclass(frozen=True)
class Program:
    """One pass of a call in one configuration."""

    call: Call
    name: Pass
    config: Any

    @property
    def estimate(self) -> int:
        """Bytes of shared memory."""
        if self.name == "mosaic":
            return shared_memory(self.call.spec, self.config)
        if self.name == "fused":
            return backward_config.shared_memory(self.call.spec, self.config)
        sizes = config.Sizes.of(self.call.spec, self.call.capability)
        return int(NEED[self.name](self.config, sizes).shared)

    def function(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What to compile, and the shapes that it takes."""
        spec = dataclasses.replace(self.call.spec, wanted=WANTED[self.name])
        made = self.config
        if self.name in ("forward", "mosaic"):
            backend: Backend = HOPPER if self.name == "mosaic" else BACKEND
            return lambda operands: backend.forward(spec, made, operands), (spec.shapes,)
        if self.name == "query":
            made = config.BackwardConfig(**plain(made), query=made)
        backend = HOPPER if self.name == "fused" else BACKEND

        def backward(operands: Operands, lse: Any, delta: Any, d_out: Any) -> Operands:
            return backend.backward(spec, made, operands, lse, delta, d_out)

        return backward, (spec.shapes, spec.lse, spec.lse, spec.out)


def programs(chosen: argparse.Namespace) -> Iterator[Program]:
    """All that the backend offers within what was chosen, each once."""
    given = [config.ForwardConfig(*sizes) for sizes in chosen.config or ()]
    for capability, dtype, dims, mask, name in itertools.product(
        TARGETS, DTYPES, (*HEAD_DIMS, *ODD_HEAD_DIMS), MASKS, PASSES
    ):
        common = (capability, dtype) == ("9.0", "bfloat16")
        masks = chosen.mask or [x for x in MASKS if common or x not in RARE_MASKS]
        head_dims = chosen.head_dim or [x for x, _ in HEAD_DIMS + ODD_HEAD_DIMS * common]
        if (
            capability in chosen.only
            and dtype in chosen.dtype
            and mask in masks
            and name in chosen.passes
            and dims[0] in head_dims
        ):
            call = Call(capability, dtype, *dims, mask, chosen.group)
            for made in (name in NEED and given) or call.offered(name):
                if name == "key" and given:
                    made = config.BackwardConfig(**plain(made), query=made)
                yield Program(call, name, made)


def _serve(pipe: Any) -> None:
    """A worker process: programs come, measurements go."""
    # Ctrl-C is the parent's to handle; XLA's chatter would stand between the table's rows.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with tempfile.TemporaryDirectory(prefix="flashjax-aot-") as folder:
        compiler = Compiler(Path(folder))
        while (program := pipe.recv()) is not None:
            pipe.send(compiler.measure(program.call.capability, *program.function()))


class Worker:
    """Compiles in a process of its own, so that a crash of the compiler ends only one program."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Any = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            if self._process.is_alive():
                self._pipe.send(None)
            self._process.join(5)
            self._process.kill()

    def measure(self, program: Program) -> Measured:
        if self._process is None or not self._process.is_alive():
            spawn = multiprocessing.get_context("spawn")
            self._pipe, theirs = spawn.Pipe()
            self._process = spawn.Process(target=_serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        begin = time.perf_counter()
        self._pipe.send(program)
        try:
            if self._pipe.poll(SECONDS):
                found: Measured = self._pipe.recv()
                return found
            error = f"the compiler took longer than {SECONDS:.0f} s"
        except (EOFError, ConnectionError):
            self._process.join()
            error = f"the compiler's process ended with code {self._process.exitcode}"
        self._process.kill()
        self._process.join()
        return Measured(seconds=time.perf_counter() - begin, error=error)


HEADER = (
    f"{'cc':>4} {'dtype':8} {'H':>7} {'mask':6} {'pass':7} {'configuration':48} {'regs':>4} "
    f"{'stack':>5} {'spill':>5} {'shared':>6} {'estimate':>8} {'s':>5}  fault"
)


def fault(program: Program, found: Measured) -> str | None:
    """What is wrong with a configuration, in words."""
    if found.error is not None:
        return found.error
    faults = []
    limit = SPILL_LIMIT
    if program.name == "mosaic":
        limit = HOPPER_GUARDED_SPILL_LIMIT if guards(program.call.spec) else 0
    elif program.name == "fused":
        limit = FUSED_SPILL_LIMIT * (program.call.mask != "none")
    elif program.call.mask in RARE_MASKS:
        limit = GUARDED_SPILL_LIMIT
    elif plain(program.config) == plain(ForwardConfig(*config.SMALLEST)):
        limit = SMALLEST_SPILL_LIMIT
    if found.spilled > limit:
        faults.append(f"spills {found.spilled} bytes")
    if found.shared > program.estimate:
        faults.append(f"{found.shared - program.estimate} bytes of shared memory unforeseen")
    return "; ".join(faults) or None


def row(program: Program, found: Measured) -> str:
    call = program.call
    dims = f"{call.head_dim}"
    if call.value_dim != call.head_dim:
        dims += f"/{call.value_dim}"
    sizes = str(program.config).partition(";")[0]
    numbers = f"{found.registers:4} {found.stack:5} {found.spilled:5} {found.shared:6}"
    if found.error is not None:
        numbers = f"{'–':>4} {'–':>5} {'–':>5} {'–':>6}"
    return (
        f"{call.capability:>4} {call.dtype:8} {dims:>7} {call.mask:6} {program.name:7} "
        f"{sizes:48} {numbers} {program.estimate:8} {found.seconds:5.1f}  "
        f"{fault(program, found) or ''}"
    ).rstrip()


def compile_all(wanted: Sequence[Program], jobs: int) -> Iterator[tuple[Program, Measured]]:
    with ExitStack() as stack, ThreadPoolExecutor(jobs) as threads:
        idle = [stack.enter_context(Worker()) for _ in range(jobs)]

        def measure(program: Program) -> Measured:
            worker = idle.pop()
            try:
                return worker.measure(program)
            finally:
                idle.append(worker)

        yield from zip(wanted, threads.map(measure, wanted), strict=True)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make aot", description=__doc__.partition("\n")[0])
    several: dict[str, Any] = {"nargs": "+", "metavar": "X"}
    parser.add_argument("--only", choices=TARGETS, help="capabilities", **several)
    parser.add_argument("--head-dim", type=int, help="query head dims", **several)
    parser.add_argument("--dtype", choices=DTYPES, **several)
    parser.add_argument("--mask", choices=MASKS, **several)
    parser.add_argument("--pass", dest="passes", choices=PASSES, **several)
    parser.add_argument(
        "--config",
        type=lambda text: tuple(map(int, text.split(","))),
        help="rows,columns,warps,stages of Triton's: these, whatever is offered",
        **several,
    )
    parser.add_argument("--group", type=int, default=1, metavar="G", help="N // K (default 1)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default 2)")
    parser.add_argument("--table", type=Path, metavar="PATH", help="write the table there too")
    parser.set_defaults(
        # 8.6 has the limits of 8.9 and, but for its schedule, the same code.
        only=[capability for capability in TARGETS if capability != "8.6"],
        dtype=["bfloat16", "float32"],
        mask=[],
        passes=list(PASSES),
        head_dim=[],
    )
    return parser.parse_args(words)


def main() -> int:
    # The compiler is all that is wanted of the CUDA plugin: arrays, if any, live on the CPU. The
    # processes that compile inherit it.
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    chosen = arguments()
    toolkit()
    begin = time.perf_counter()
    wanted = list(programs(chosen))
    lines = [HEADER]
    print(HEADER, flush=True)
    bad = 0
    for program, found in compile_all(wanted, chosen.jobs):
        bad += fault(program, found) is not None
        lines.append(row(program, found))
        print(lines[-1], flush=True)
    minutes = (time.perf_counter() - begin) / 60
    lines.append(f"\n{len(wanted)} programs in {minutes:.1f} minutes, {bad} of them with a fault")
    print(lines[-1])
    if chosen.table:
        chosen.table.write_text("\n".join(lines) + "\n")
    return 1 if bad or not wanted else 0


if __name__ == "__main__":
    sys.exit(main())
