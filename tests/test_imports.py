"""Imports go one way, kernels stay lazy, and `import flashjax` is light and needs no GPU."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# docs/design.md, 'Rooms': a module may import from its own package and from earlier lines, never
# from its neighbours on a line. `flashjax` is the package's own __init__: it re-exports the others,
# so it may import anything, and only what comes after it may import from it.
ORDER = (
    ("structure", "varying"),
    ("elementwise",),
    ("masks", "scores", "dropout", "rotary"),
    ("spec",),
    ("backend",),
    ("bind", "kernels"),
    ("merge", "tiles"),
    ("passes",),
    ("reference", "chunked"),
    ("cases",),
    ("tuning",),
    ("plan",),
    ("batching", "cudnn"),
    ("sharding",),
    ("vjp",),
    ("attention", "explanation"),
    ("decode", "parallel"),
    ("flashjax",),
    ("adapter", "cache"),
    ("layer",),
    ("linen", "nnx", "doctor"),
    ("__main__",),
)
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}

# Interpret mode is a setting of Pallas, and a peer to compare with may be a Pallas kernel.
MAY_USE_PALLAS = ("flashjax.kernels", "tests.kernels", "bench.peers")
FOLDERS = ("flashjax", "kernels", "examples", "bench", "scripts", "tests")


def modules() -> dict[str, Path]:
    """Every module of the repository by its import name; kernels/ once, as flashjax.kernels."""
    found = {}
    for folder in FOLDERS:
        for directory, _, files in os.walk(ROOT / folder, followlinks=False):
            for path in (Path(directory, name) for name in files if name.endswith(".py")):
                parts = path.relative_to(ROOT).with_suffix("").parts
                name = ".".join(part for part in parts if part != "__init__")
                found[f"flashjax.{name}" if folder == "kernels" else name] = path
    return found


MODULES = modules()


def called_import(node: ast.Call) -> str | None:
    """The module that `import_module` or `__import__` is called with, where it is written out."""
    name = getattr(node.func, "attr", getattr(node.func, "id", None))
    if name in ("import_module", "__import__") and node.args:
        argument = node.args[0]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            return argument.value
    return None


def imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, module) of each import in a source text, those inside functions too.

    `package` is what a leading dot stands for. `from a import b` gives a.b where that is a module,
    of this repository or right below jax.experimental, else a.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                is_module = full in MODULES or base == "jax.experimental"
                yield node.lineno, full if is_module else base
        elif isinstance(node, ast.Call) and (name := called_import(node)):
            yield node.lineno, package + name if name.startswith(".") else name


def imports_of(name: str) -> Iterator[tuple[int, str]]:
    """The imports of one module of this repository."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return imports(path.read_text(), package)


def is_within(module: str, packages: tuple[str, ...]) -> bool:
    """Whether a module is one of these packages or inside one."""
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def room(module: str) -> str:
    """What ORDER calls a module of flashjax: flashjax.masks.terms is in the room masks."""
    return module.split(".")[1] if "." in module else module


def fault(importer: str, imported: str) -> str | None:
    """What is wrong with one module of flashjax importing another, in words."""
    here, there = room(importer), room(imported)
    if here in (there, "flashjax") or RANK[there] < RANK[here]:
        return None
    return f"{here} may not import {there}: see ORDER in tests/test_imports.py"


def test_every_module_has_a_place_in_the_order():
    rooms = {room(module) for module in MODULES if is_within(module, ("flashjax",))}
    assert rooms <= set(RANK), "add it to ORDER in this file and to 'Rooms' in docs/design.md"


def test_imports_go_one_way():
    faults = [
        f"{importer}:{line}: {reason}"
        for importer in MODULES
        if is_within(importer, ("flashjax",)) and room(importer) in RANK
        for line, imported in imports_of(importer)
        if is_within(imported, ("flashjax",)) and room(imported) in RANK
        if (reason := fault(importer, imported))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("flashjax.plan", "flashjax.spec"),
        ("flashjax.masks.schedule", "flashjax.masks.terms"),
        ("flashjax", "flashjax.attention"),
        ("flashjax.doctor", "flashjax"),
    ],
)
def test_the_rule_allows(importer, imported):
    assert fault(importer, imported) is None


@pytest.mark.parametrize(
    ("importer", "imported", "reason"),
    [
        ("flashjax.spec", "flashjax.plan", "spec may not import plan"),
        ("flashjax.masks.terms", "flashjax.scores", "masks may not import scores"),
        ("flashjax.bind", "flashjax.kernels.softmax", "bind may not import kernels"),
        ("flashjax.vjp", "flashjax", "vjp may not import flashjax"),
    ],
)
def test_the_rule_refuses(importer, imported, reason):
    assert reason in fault(importer, imported)


@pytest.mark.parametrize(
    ("source", "imported"),
    [
        ("import flashjax.spec", "flashjax.spec"),
        ("from flashjax.spec import Spec", "flashjax.spec"),
        ("from .spec import Spec", "flashjax.spec"),
        ("from . import structure", "flashjax.structure"),
        ("from flashjax import structure", "flashjax.structure"),
        ("from flashjax import __version__", "flashjax"),
        ("def lazy():\n    from .spec import Spec", "flashjax.spec"),
        ("import importlib\nimportlib.import_module('.spec', 'flashjax')", "flashjax.spec"),
        ("from jax.experimental import pallas as pl", "jax.experimental.pallas"),
    ],
)
def test_every_form_of_import_is_seen(source, imported):
    assert imported in [module for _, module in imports(source, "flashjax")]


def test_a_leading_dot_counts_from_the_package():
    assert list(imports("from ..spec import Spec", "flashjax.masks")) == [(1, "flashjax.spec")]


def test_only_kernels_touch_pallas():
    faults = [
        f"{importer}:{line} imports {imported}"
        for importer in MODULES
        if not is_within(importer, MAY_USE_PALLAS)
        for line, imported in imports_of(importer)
        if is_within(imported, ("jax.experimental.pallas", "jax._src.pallas"))
    ]
    assert not faults, "\n".join(faults)


def test_kernels_is_no_top_level_import():
    faults = [
        f"{importer}:{line} imports {imported}; the folder imports as flashjax.kernels"
        for importer in MODULES
        for line, imported in imports_of(importer)
        if imported.split(".")[0] == "kernels"
    ]
    assert not faults, "\n".join(faults)


IMPORT_FLASHJAX = """
import json, sys
import jax
before = set(sys.modules)
import flashjax
loaded = sorted(set(sys.modules) - before)
from jax._src import xla_bridge
print(json.dumps({"loaded": loaded, "started": xla_bridge.backends_are_initialized()}))
"""


@pytest.fixture(scope="module")
def fresh_import(tmp_path_factory):
    """What a fresh process sees at `import flashjax` on a machine whose GPU is hidden."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    path = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_FLASHJAX],
        env=environment | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path},
        cwd=tmp_path_factory.mktemp("elsewhere"),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_import_starts_no_backend(fresh_import):
    assert not fresh_import["started"]


def test_import_loads_no_kernel_language(fresh_import):
    heavy = ("jax.experimental.pallas", "jax._src.pallas", "jax.experimental.mosaic")
    assert [module for module in fresh_import["loaded"] if is_within(module, heavy)] == []


def test_import_loads_no_package_beyond_the_dependencies(fresh_import):
    known = {"flashjax", "jax", "jaxlib", "jaxtyping", "numpy", "wadler_lindig"}
    loaded = {module.split(".")[0] for module in fresh_import["loaded"]}
    assert loaded - known - set(sys.stdlib_module_names) == set()
