"""What the documentation says and shows: pictures are of today's masks, tutorials and code run."""

import ast
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flashjax
from flashjax import masks

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))


def load_gallery() -> ModuleType:
    # By its file: another package may be called `docs`.
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "docs" / "gallery.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


gallery = load_gallery()
ROW, COLUMN = np.arange(48)[:, None], np.arange(48)[None, :]
CAUSAL = COLUMN <= ROW
DOCUMENT = np.repeat([0, 1, 2, -1], [14, 20, 8, 6])
BLOCK_ROW, BLOCK_COLUMN = ROW // 8, COLUMN // 8

# What each panel's title promises, stated again without the library.
PROMISED = {
    "causal": CAUSAL,
    "causal, bottom right": COLUMN - ROW[:24] <= 24,
    "sliding window": CAUSAL & (ROW - COLUMN <= 11),
    "sink tokens and window": CAUSAL & ((COLUMN < 4) | (ROW - COLUMN <= 11)),
    "prefix LM": (COLUMN < 14) | CAUSAL,
    "chunked": CAUSAL & (ROW // 12 == COLUMN // 12),
    "packed documents, padding": CAUSAL
    & (DOCUMENT[:, None] == DOCUMENT[None, :])
    & (DOCUMENT >= 0)[:, None],
    "a question, three answers": CAUSAL & ((COLUMN < 12) | (ROW // 12 == COLUMN // 12)),
    "padding as an array": np.broadcast_to(COLUMN < 37, (48, 48)),
    "blocks": (BLOCK_ROW == BLOCK_COLUMN) | (BLOCK_COLUMN == 0) | (BLOCK_ROW == BLOCK_COLUMN + 3),
    "a function of your own": CAUSAL & (ROW - COLUMN <= 23) & ((ROW - COLUMN) % 3 == 0),
    "not": abs(ROW - COLUMN) > 7,
}


def test_the_picture_of_masks_shows_what_todays_masks_do():
    """One test: what it draws takes seconds, and workers share nothing."""
    drawn = list(zip(gallery.cells(), gallery.verdicts(), strict=True))
    committed = gallery.drawn_from(gallery.PICTURES / "masks.png")
    assert committed == gallery.digest(drawn), "run: python docs/gallery.py"

    names = [panel.title for panel in gallery.PANELS]
    assert names == list(PROMISED)
    size = gallery.TILE
    for name, (seen, tiles) in zip(names, drawn, strict=True):
        assert np.array_equal(seen, PROMISED[name]), name
        parts = seen.reshape(tiles.shape[0], size, tiles.shape[1], size)
        some, every = parts.any((1, 3)), parts.all((1, 3))
        assert np.array_equal(tiles != masks.EMPTY, some), name
        assert not (~every & (tiles == masks.FULL)).any(), name


def test_the_picture_of_scores_is_drawn_from_todays_scores():
    committed = json.loads(gallery.drawn_from(gallery.PICTURES / "scores.png"))
    curves = gallery.score_curves()
    assert committed.keys() == curves.keys()
    for name, values in curves.items():
        # Rounded to four places in the picture, and tanh differs between machines.
        np.testing.assert_allclose(committed[name], values, atol=2e-4, err_msg=name)


def test_pictures_are_small_enough_for_a_readme():
    for path in gallery.PICTURES.glob("*.png"):
        assert path.stat().st_size < 200_000, path.name


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs(path, tmp_path):
    # As a reader runs it: in a process of its own, which sees one device, from another directory.
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        # They compile much and run little: 45 % less time to compile than at level 1.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_is_a_notebook(path):
    """Cells of jupytext's percent format, of which the first is Markdown with the title."""
    cells = re.split(r"^# %%(.*)\n", path.read_text(), flags=re.MULTILINE)
    assert cells[0] == ""
    kinds, bodies = cells[1::2], cells[2::2]
    assert set(kinds) == {"", " [markdown]"}
    assert bodies[0].startswith('"""\n# ')
    for kind, body in zip(kinds[1:], bodies[1:], strict=True):
        if kind == " [markdown]":
            assert all(line.startswith("#") for line in body.strip().splitlines()), body


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *TUTORIALS]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_to_files(path):
    links = re.findall(r"\]\(([^)\s]+)\)", path.read_text())
    links += re.findall(r'src="([^"]+)"', path.read_text())
    files = [link.partition("#")[0] for link in links if not re.match(r"\w+:", link)]
    missing = [name for name in files if name and not (path.parent / name).exists()]
    assert not missing


# A block of README that is not to run, or cannot here, has this comment on the line before it.
NOT_RUN = "<!-- not run: "


def readme_blocks() -> list[str]:
    text = (ROOT / "README.md").read_text()
    blocks = re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [b[1] for b in blocks if NOT_RUN not in text[: b.start()].rstrip().rpartition("\n")[2]]


def readme_names() -> dict[str, object]:
    """What README's blocks take for granted: B 2, T = S 256, N 4, H 16."""
    # By numpy, which compiles nothing.
    q, k, v = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 256, 4, 16)), jnp.float32)
    ids = np.repeat([[0, 1, -1]] * 2, [100, 130, 26], axis=1)
    return {
        "flashjax": flashjax,
        "jax": jax,
        "jnp": jnp,
        "np": np,
        "q": q,
        "k": k,
        "v": v,
        "x": jnp.ones((2, 256, 512)),
        "ids": jnp.asarray(ids),
        "document_ids": jnp.asarray(ids),
        "positions": jnp.arange(256),
        "prefix_lengths": jnp.array([10, 20]),
        "begin": jnp.arange(256),
        "end": jnp.arange(256) + 64,
        "blocks": jnp.eye(2, dtype=bool),
        "s": jnp.ones(4),
        "key": jax.random.key(1),
    }


@pytest.mark.usefixtures("quick_compiles")
def test_readme_runs():
    """All blocks in one namespace, and each mask that they name fits a call."""
    names = readme_names()
    blocks = readme_blocks()
    text = (ROOT / "README.md").read_text()
    assert len(blocks) == text.count("```python") - text.count(NOT_RUN) > 0
    for block in blocks:
        for statement in ast.parse(block).body:
            exec(compile(ast.Module([statement], []), "README.md", "exec"), names)
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            if any(isinstance(t, ast.Name) and t.id == "mask" for t in targets):
                q, k, v, mask = (names[name] for name in ("q", "k", "v", "mask"))
                jax.eval_shape(
                    functools.partial(flashjax.dot_product_attention, mask=mask), q, k, v
                )
