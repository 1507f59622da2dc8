"""XLA's compiler for CUDA on a machine with no GPU, and what it says of a kernel."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from flashjax.kernels.triton.config import SHARED_MEMORY


class Target(NamedTuple):
    """A device to compile for: its name picks JAX's facts about it."""

    kind: str
    cores: int
    shared_per_core: int  # KiB, CUDA C++ Programming Guide


TARGETS = {
    "8.0": Target("NVIDIA A100", 108, 164),
    "8.6": Target("NVIDIA A10", 72, 100),
    "8.9": Target("NVIDIA L40", 142, 100),
    "9.0": Target("NVIDIA H200", 132, 228),
    "12.0": Target("NVIDIA RTX PRO 6000", 188, 100),
}


@dataclasses.dataclass(frozen=True)
class AbstractGpu(jax.sharding.AbstractDevice):
    """A device that is not there, as kernels are lowered for it."""

    compute_capability: str = ""


def abstract_gpu(capability: str) -> AbstractGpu:
    target = TARGETS[capability]
    return AbstractGpu(target.kind, target.cores, "gpu", capability)


def abstract_mesh(capability: str) -> jax.sharding.AbstractMesh:
    """For `jax.sharding.use_abstract_mesh`: what is traced within is planned for this device."""
    return jax.sharding.AbstractMesh(
        (1,),
        ("x",),
        axis_types=(jax.sharding.AxisType.Auto,),
        abstract_device=abstract_gpu(capability),
    )


def target_text(capability: str) -> str:
    """The device as XLA's compiler wants it described (xla.gpu.GpuTargetConfigProto)."""
    target, (major, minor) = TARGETS[capability], capability.split(".")
    # wgmma is in sm_90a alone.
    extension = "feature_extension: ACCELERATED_FEATURES" if capability == "9.0" else ""
    return f"""
        platform_name: "CUDA"
        device_description_str: "{target.kind}"
        dnn_version_info {{ major: 9 minor: 10 }}
        gpu_device_info {{
          name: "{target.kind}"
          cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
          core_count: {target.cores}
          fpus_per_core: 128
          clock_rate_ghz: 1.8
          device_memory_size: {40 * 2**30}
          memory_bandwidth: 2000000000000
          l2_cache_size: {40 * 2**20}
          threads_per_warp: 32
          threads_per_block_limit: 1024
          threads_per_core_limit: {1536 if target.shared_per_core == 100 else 2048}
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
          shared_memory_per_core: {target.shared_per_core * 1024}
          shared_memory_per_block: {48 * 1024}
          shared_memory_per_block_optin: {SHARED_MEMORY[capability]}
          driver_version: "13.0.0"
          runtime_version: "13.0.0"
          compile_time_toolkit_version: "13.0.0"
          dnn_version: "9.10.0"
        }}"""


class Measured(NamedTuple):
    """What came of a compilation; `error` says why there is nothing else."""

    registers: int = 0
    stack: int = 0
    spilled: int = 0  # bytes a thread, stores
    shared: int = 0
    seconds: float = 0.0
    error: str | None = None


class Kernel(NamedTuple):
    """What ptxas tells of one kernel."""

    registers: int
    stack: int
    spilled: int


def read_ptxas(text: str) -> dict[str, Kernel]:
    """Kernels by name, from what ``ptxas -v`` says."""
    found = {}
    for part in text.split("Compiling entry function '")[1:]:
        name = part.partition("'")[0]
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", part)
        registers = re.search(r"Used (\d+) registers", part)
        if frame and registers:
            found[name] = Kernel(int(registers[1]), int(frame[1]), int(frame[2]))
    return found


# The compiler gave up letting products of a warpgroup run beside other instructions. C7519, one
# more fence before a product, lets them.
SERIALISED = re.compile(r".*\(C75(?!19)\d\d\).*|.*wgmma.*serializ.*")


def read_thunks(text: str) -> dict[str, int]:
    """Bytes of shared memory by kernel, from XLA's dump of its thunks."""
    rows = re.finditer(r"kCustomKernel \[.*?\] (\S+) grid.*?shared_memory: (\d+) bytes", text)
    return {row[1]: int(row[2]) for row in rows}


def read_resources(text: str) -> int:
    """Bytes of shared memory, from Mosaic GPU's dump of a kernel's resources."""
    found = re.search(r"smem_scratch_bytes=(\d+)", text)
    return int(found[1]) if found else 0


def read_mosaic(path: Path, seconds: float) -> Measured:
    """What Mosaic GPU's dump says of one kernel, by what ptxas says of it."""
    kernel = next(iter(read_ptxas(words := path.read_text()).values()))
    # The two dumps of a kernel may have different numbers.
    name = path.stem.rpartition("_")[0]
    taken = max(read_resources(x.read_text()) for x in path.parent.glob(f"{name}_*.resources.txt"))
    slow = SERIALISED.search(words)
    return Measured(*kernel, taken, seconds, f"ptxas: {slow[0]}" if slow else None)


def toolkit() -> Path:
    """The folder of a CUDA toolkit that holds bin/ptxas."""
    named = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [Path(x) for x in named if x] + [Path("/usr/local/cuda")]
    on_path = shutil.which("ptxas")
    candidates += [Path(on_path).resolve().parent.parent] if on_path else []
    # Where the wheel nvidia-cuda-nvcc puts it.
    candidates += [Path(p, "nvidia", "cu13") for p in sys.path]
    for candidate in candidates:
        if (candidate / "bin" / "ptxas").is_file():
            return candidate
    raise FileNotFoundError(
        "no ptxas was found in CUDA_HOME, /usr/local/cuda, PATH or the nvidia wheels. Install a "
        "CUDA toolkit, or pip install 'flashjax[aot]'."
    )


# XLA runs ptxas several times at once, and reports what it says of a failure.
SCRIPT = """#!/bin/sh
"{ptxas}" -v "$@" 2>"{folder}/$$"
status=$?
cat "{folder}/$$" >&2
exit $status
"""


class Compiler:
    """XLA's compiler for CUDA in this process. ptxas runs behind a script that keeps its words."""

    def __init__(self, folder: Path) -> None:
        self._dump, self._log = folder / "dump", folder / "ptxas"
        # Mosaic GPU has a ptxas of its own, and ways of its own to tell.
        self._mosaic = folder / "mosaic"
        os.environ["MOSAIC_GPU_DUMP_TO"] = str(self._mosaic)
        for what in ("PTXAS", "RESOURCES"):
            os.environ[f"MOSAIC_GPU_DUMP_{what}"] = "1"
        cuda, stand_in = toolkit(), folder / "cuda"
        (stand_in / "bin").mkdir(parents=True)
        for name in ("nvvm", "lib", "include"):
            if (cuda / name).exists():
                (stand_in / name).symlink_to(cuda / name)
        script = stand_in / "bin" / "ptxas"
        script.write_text(SCRIPT.format(ptxas=cuda / "bin" / "ptxas", folder=self._log))
        script.chmod(0o755)
        self._options = {
            "xla_gpu_cuda_data_dir": str(stand_in),
            "xla_dump_to": str(self._dump),
            "xla_gpu_autotune_level": 0,  # there is nothing to run candidates on
        }
        self._devices: dict[str, Any] = {}

    def measure(
        self, capability: str, function: Callable[..., Any], shapes: Sequence[Any]
    ) -> Measured:
        """Compiles a function of one kernel, whose name begins with `flashjax_`."""
        for folder in (self._dump, self._log, self._mosaic):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        begin = time.perf_counter()
        try:
            self._compile(capability, function, shapes)
        except Exception as error:  # whatever it is, it belongs into the table
            said = " ".join(str(error).split()) or repr(error)
            return Measured(seconds=time.perf_counter() - begin, error=said)
        seconds = time.perf_counter() - begin
        mosaic = [read_mosaic(path, seconds) for path in self._mosaic.glob("*.ptxas")]
        if mosaic:  # what comes before and after the main kernel takes less
            return max(mosaic, key=lambda found: (found.shared, found.registers))
        kernels: dict[str, Kernel] = {}
        for path in self._log.iterdir():
            kernels |= read_ptxas(path.read_text())
        shared: dict[str, int] = {}
        for path in self._dump.glob("*thunk_sequence.txt"):
            shared |= read_thunks(path.read_text())
        own = [name for name in kernels if name.startswith("flashjax_") and name in shared]
        if len(own) != 1:
            said = f"kernels {sorted(kernels)}, thunks {sorted(shared)}: wanted one of flashjax"
            return Measured(seconds=seconds, error=said)
        return Measured(*kernels[own[0]], shared[own[0]], seconds)

    def _compile(
        self, capability: str, function: Callable[..., Any], shapes: Sequence[Any]
    ) -> None:
        device = self._device(capability)
        mesh = jax.sharding.Mesh(np.array([device]), ("x",))
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), shapes
        )
        with jax.sharding.use_abstract_mesh(abstract_mesh(capability)):
            lowered = jax.jit(function).trace(*placed).lower(lowering_platforms=("cuda",))
        lowered.compile(self._options)

    def _device(self, capability: str) -> Any:
        if capability not in self._devices:
            from jax.experimental import topologies

            topology = topologies.get_topology_desc(
                platform="cuda",
                topology_name="",
                topology="1x1x1",
                target_config=target_text(capability),
            )
            self._devices[capability] = topology.devices[0]
        return self._devices[capability]
