"""What the documentation says and shows: pictures are of today's masks, tutorials and code run."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from flashjax import masks

ROOT = Path(__file__).resolve().parent.parent


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


@pytest.fixture(scope="module")
def drawn() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {p.title: (gallery.cells(p), gallery.verdicts(p)) for p in gallery.PANELS}


def test_the_picture_of_masks_is_drawn_from_todays_masks(drawn):
    committed = gallery.drawn_from(gallery.PICTURES / "masks.png")
    assert committed == gallery.digest(list(drawn.values())), "run: python docs/gallery.py"


def test_each_panel_shows_the_pattern_that_it_names(drawn):
    assert drawn.keys() == PROMISED.keys()
    wrong = [name for name, (seen, _) in drawn.items() if not np.array_equal(seen, PROMISED[name])]
    assert not wrong


def test_the_tiles_shown_are_sound_and_no_empty_one_is_visited(drawn):
    for name, (seen, tiles) in drawn.items():
        size = gallery.TILE
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
