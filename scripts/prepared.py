"""Can this Python serve as it is? Exit status 0 says yes; else a line on stdout says what it lacks.

    python3 scripts/prepared.py EXTRA [JAX_VERSION [CUDA_EXTRA]]

Each requirement of the extra in pyproject.toml has to be here in an allowed version, and to import.
"""

import importlib
import importlib.metadata
import importlib.util
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    from packaging.requirements import Requirement
except ImportError:
    print("it has no package packaging")
    sys.exit(1)

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
MODULES = {
    "nvidia-cuda-nvcc": "nvidia.cu13",
    "orbax-checkpoint": "orbax.checkpoint",
    "pytest-xdist": "xdist",
}
"""Import names that differ from the package's own name."""


def requirements(project: dict[str, Any], extra: str) -> Iterator[Requirement]:
    """What an extra names; where it names flashjax's other extras, what those name."""
    for requirement in map(Requirement, project["optional-dependencies"][extra]):
        if requirement.name == project["name"]:
            for inner in requirement.extras:
                yield from requirements(project, inner)
        else:
            yield requirement


def fault(requirement: Requirement) -> str | None:
    """Why a requirement is not met, in words."""
    name = requirement.name
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"it has no package {name}"
    if not requirement.specifier.contains(found, prereleases=True):
        return f"it has {name} {found}, wanted {name}{requirement.specifier}"
    try:
        importlib.import_module(MODULES.get(name, name))
    except Exception as error:  # a broken package may raise anything, and the reason is passed on
        return f"importing {name} fails: {error}"
    return None


def main(extra: str, jax_version: str = "", cuda_extra: str = "") -> str | None:
    """Why this Python cannot serve, in words, or None."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    wanted = [Requirement(text) for text in project["dependencies"]]
    if jax_version:
        wanted.append(Requirement(f"jax=={jax_version}"))
    for requirement in [*wanted, *requirements(project, extra)]:
        if reason := fault(requirement):
            return reason
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    if cuda_extra and not any(map(importlib.util.find_spec, plugins)):
        return "this machine has an NVIDIA GPU, and its JAX has no CUDA plugin"
    return None


if __name__ == "__main__":
    if reason := main(*sys.argv[1:]):
        print(reason)
        sys.exit(1)
