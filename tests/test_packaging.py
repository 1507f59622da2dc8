"""What is shipped, kernels/ as flashjax.kernels in it, and when make uses a Python as it is."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def shipped(folder: Path) -> set[str]:
    """The code and data files under a folder, by their path from it."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(folder).as_posix() for path in files}


def test_kernels_is_a_relative_link():
    link = ROOT / "flashjax" / "kernels"
    assert os.readlink(link) == "../kernels"
    assert link.resolve() == ROOT / "kernels"
    assert (link / "__init__.py").is_file()


def test_the_wheel_is_the_flashjax_package():
    assert PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["flashjax"]
    assert (ROOT / "flashjax" / "py.typed").is_file()


def test_every_extra_of_the_design_exists():
    wanted = {"cuda13", "cuda12", "flax", "examples", "bench", "docs", "test", "dev", "aot"}
    assert set(PYPROJECT["project"]["optional-dependencies"]) == wanted


@pytest.mark.parametrize("extra", ["cuda13", "cuda12"])
def test_a_cuda_extra_takes_the_jax_that_the_package_takes(extra):
    (plain,) = (text for text in PYPROJECT["project"]["dependencies"] if text.startswith("jax>"))
    (cuda,) = PYPROJECT["project"]["optional-dependencies"][extra]
    assert cuda == plain.replace("jax", f"jax[{extra}]")


@pytest.mark.slow
def test_wheel_holds_kernels_and_package(tmp_path):
    pytest.importorskip("hatchling")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {f"flashjax/{name}" for name in shipped(ROOT / "flashjax")}
    kernels = {f"flashjax/kernels/{name}" for name in shipped(ROOT / "kernels")}
    assert kernels
    assert {name for name in names if ".dist-info/" not in name} == package | kernels


def prepared(*arguments: str) -> tuple[int, str]:
    """Exit status and words of scripts/prepared.py, asked about the Python that runs the tests."""
    ran = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "prepared.py"), *arguments],
        capture_output=True,
        text=True,
    )
    return ran.returncode, ran.stdout + ran.stderr


def test_a_python_that_imports_all_is_prepared():
    assert prepared("test") == (0, "")


def test_a_python_with_another_jax_is_not_prepared():
    status, words = prepared("flax", "0.0.1")
    assert status == 1
    assert "wanted jax==0.0.1" in words
