"""The pictures of masks and scores: ``python docs/gallery.py`` draws them again.

Whatever is drawn comes from the library itself. Each panel's title is the code that is evaluated.
Its cells are found by attention: where all scores are 0 and the values are one-hot, a row's output
is above 0 in just those columns that it sees. Its tiles are those that the schedule visits. Each
picture carries what it was drawn from in its metadata, so that a test can tell when it is stale.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flashjax
from flashjax import masks, scores
from flashjax.masks.schedule import at
from flashjax.structure import Dims

PICTURES = Path(__file__).resolve().parent / "pictures"
# The key of the metadata (a PNG text chunk).
KEY = "flashjax"
# Positions a tile. The library's own tiles are larger; small ones show the same schedule.
TILE = 8

Array = np.ndarray[Any, Any]
Colour = tuple[float, float, float]

# What a panel's code may use beside the terms of flashjax.masks.
BLOCK_ROW, BLOCK_COLUMN = np.indices((6, 6))
NAMES = {name: getattr(masks, name) for name in masks.__all__} | {
    "arange": np.arange,
    "repeat": np.repeat,
    "i": BLOCK_ROW,
    "j": BLOCK_COLUMN,
}


@dataclasses.dataclass(frozen=True)
class Panel:
    """A pattern: its name, the code that makes its mask, and the length of its rows and columns."""

    title: str
    code: str
    rows: int = 48
    columns: int = 48

    def mask(self) -> masks.Mask:
        made = eval(self.code, dict(NAMES))
        assert isinstance(made, masks.Mask)
        return made


PANELS = (
    Panel("causal", "Causal()"),
    Panel("causal, bottom right", 'Causal(align="bottom_right")', rows=24),
    Panel("sliding window", "Window(left=11, right=0)"),
    Panel("sink tokens and window", "Causal() & (\n  Prefix(4) | Window(11, 0))"),
    Panel("prefix LM", "Prefix(14) | Causal()"),
    Panel("chunked", "Causal() & Chunked(size=12)"),
    Panel(
        "packed documents, padding",
        "Causal() & Segments(repeat(\n  [0, 1, 2, -1], [14, 20, 8, 6]))",
    ),
    Panel(
        "a question, three answers",
        "Causal() & Intervals(\n"
        "  begin=repeat([0, 12, 24, 36], 12),\n"
        "  end=repeat([48, 24, 36, 48], 12))",
    ),
    Panel("padding as an array", "Dense(arange(48) < 37)"),
    Panel("blocks", "BlockSparse(\n  (i == j) | (j == 0)\n  | (i == j + 3), 8, 8)"),
    Panel(
        "a function of your own",
        "Window(23, 0) & Predicate(\n  lambda row, column:\n    (row - column) % 3 == 0)",
    ),
    Panel("not", "~Window(7, 7)"),
)


def cells() -> list[Array]:
    """Which columns each row of each panel sees, bool (T, S), as attention itself shows it."""

    def seen(panel: Panel, mask: masks.Mask) -> jax.Array:
        out = flashjax.dot_product_attention(
            jnp.zeros((panel.rows, 1, 1)),
            jnp.zeros((panel.columns, 1, 1)),
            jnp.eye(panel.columns)[:, None],
            mask=mask,
            implementation="xla",
        )
        return out[:, 0] > 0

    # One program for all: it compiles in half the time of twelve.
    made = [panel.mask() for panel in PANELS]
    found = jax.jit(lambda made: list(map(seen, PANELS, made)))(made)
    return [np.asarray(seen_by_row) for seen_by_row in found]


def verdicts() -> list[Array]:
    """EMPTY (never visited), PARTIAL or FULL (visited unmasked) per tile of the forward's walk."""
    axes = [(masks.Blocks(p.rows, TILE), masks.Blocks(p.columns, TILE)) for p in PANELS]
    made = [p.mask().aligned(Dims((), 1, p.rows, p.columns)) for p in PANELS]

    def walks(made: list[masks.Mask]) -> list[masks.Schedule]:
        return [masks.schedule(m, *pair, "rows") for m, pair in zip(made, axes, strict=True)]

    return [_walked(walk, *pair) for walk, pair in zip(jax.jit(walks)(made), axes, strict=True)]


def _walked(walk: masks.Schedule, rows: masks.Blocks, columns: masks.Blocks) -> Array:
    walk = jax.tree.map(np.asarray, walk)
    found = np.full((rows.count, columns.count), masks.EMPTY, np.int8)
    for block in range(rows.count):
        part = at(walk, block)
        for index in range(int(part.count[0, 0])):
            tile, full = part.step(index)
            found[block, int(tile[0, 0])] = masks.FULL if full[0, 0] else masks.PARTIAL
    return found


def digest(drawn: list[tuple[Array, Array]]) -> str:
    """Of the panels' code, cells and verdicts: the same exactly where the picture is."""
    state = hashlib.sha256()
    for panel, (seen, tiles) in zip(PANELS, drawn, strict=True):
        state.update(repr((panel.title, panel.code, seen.shape, TILE)).encode())
        state.update(np.packbits(seen).tobytes() + tiles.tobytes())
    return state.hexdigest()


# Blue and orange stay apart for colour-blind readers, and in grey. The background is part of the
# picture: text on a transparent one vanishes in GitHub's dark mode.
SEEN_FULL: Colour = (0.10, 0.29, 0.53)
SEEN: Colour = (0.36, 0.60, 0.84)
VISITED: Colour = (0.98, 0.86, 0.70)
PALE: Colour = (0.72, 0.84, 0.95)
SKIPPED: Colour = (1.0, 1.0, 1.0)
LINE = "#c4c8ce"
BACKGROUND = "#f6f8fa"
TEXT = "#1f2328"
# In points, at 11 inches of width; GitHub shows a picture at about half of that.
CODE, HEADING = 8.5, 11.0
COLOURS = 64


def image(seen: Array, tiles: Array) -> Array:
    """The cells of a panel in colour, (T, S, 3)."""
    per_cell = np.kron(tiles, np.ones((TILE, TILE), np.int8))[: seen.shape[0], : seen.shape[1]]
    picture = np.empty((*seen.shape, 3))
    picture[...] = SKIPPED
    picture[per_cell != masks.EMPTY] = VISITED
    picture[seen & (per_cell == masks.PARTIAL)] = SEEN
    picture[seen & (per_cell == masks.FULL)] = SEEN_FULL
    # A cell that is seen in a tile that is skipped would be a fault of the library.
    picture[seen & (per_cell == masks.EMPTY)] = (1.0, 0.0, 0.0)
    return picture


def _draw_panel(axes: Any, panel: Panel, seen: Array, tiles: Array) -> None:
    rows, columns = seen.shape
    axes.imshow(image(seen, tiles), interpolation="nearest", extent=(0, columns, rows, 0))
    axes.set_xticks(range(0, columns + 1, TILE), labels=[])
    axes.set_yticks(range(0, rows + 1, TILE), labels=[])
    axes.grid(color=LINE, linewidth=0.6)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_color(LINE)
    axes.set_anchor("N")
    style = {"transform": axes.transAxes, "color": TEXT, "verticalalignment": "bottom"}
    # In units of a square panel's height, so that a flat one's text stands as close.
    unit, lines = columns / rows, panel.code.count("\n") + 1
    axes.text(0, 1 + 0.03 * unit, panel.code, family="monospace", fontsize=CODE, **style)
    above = 1 + (0.045 + 0.064 * lines) * unit
    axes.text(0, above, panel.title, fontsize=HEADING, fontweight="bold", **style)
    visited, full = int((tiles != masks.EMPTY).sum()), int((tiles == masks.FULL).sum())
    text = f"visits {visited} of {tiles.size} tiles, {full} unmasked"
    style["verticalalignment"] = "top"
    axes.text(0, -0.03 * unit, text, fontsize=CODE, **style)


def draw_masks(path: Path) -> None:
    """The gallery of masks as a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    drawn = list(zip(cells(), verdicts(), strict=True))
    figure = Figure(figsize=(11, 11.4), facecolor=BACKGROUND)
    grid = figure.subplots(3, 4)
    for axes, panel, (seen, tiles) in zip(grid.flat, PANELS, drawn, strict=True):
        _draw_panel(axes, panel, seen, tiles)
    figure.subplots_adjust(left=0.02, right=0.98, top=0.92, bottom=0.07, hspace=0.46, wspace=0.12)
    labels = {
        "seen, in a tile that needs no element mask": SEEN_FULL,
        "seen, in a tile that is masked": SEEN,
        "hidden, in a visited tile": VISITED,
        "skipped, forward and backward": SKIPPED,
    }
    figure.legend(
        handles=[Patch(facecolor=c, edgecolor=LINE, label=label) for label, c in labels.items()],
        loc="lower center",
        ncols=4,
        fontsize=9,
        frameon=False,
        labelcolor=TEXT,
    )
    _save(figure, path, digest(drawn))


CAPS = (5.0, 15.0, 30.0)
HEADS = 8
DISTANCES = 64


def score_curves() -> dict[str, Array]:
    """What the modifiers do to scores. With one column, a row's LSE is its score."""
    return {name: np.asarray(values) for name, values in jax.jit(_score_curves)().items()}


def _score_curves() -> dict[str, jax.Array]:
    x = jnp.linspace(-60, 60, 81)
    one = jnp.ones((1, 1, 1))

    def lse(query: jax.Array, **arguments: Any) -> jax.Array:
        return flashjax.dot_product_attention(
            query, one, one, scale=1.0, return_residual=True, **arguments
        )[1]

    capped = [lse(x[:, None, None], logits_soft_cap=cap)[:, 0] for cap in CAPS]
    biases = lse(jnp.zeros((DISTANCES, HEADS, 1)), score_mod=scores.Alibi())
    weights = flashjax.dot_product_attention(
        jnp.zeros((DISTANCES, HEADS, 1)),
        jnp.zeros((DISTANCES, 1, 1)),
        jnp.eye(DISTANCES)[:, None],
        score_mod=scores.Alibi(),
        is_causal=True,
    )
    return {"x": x, "capped": jnp.stack(capped), "alibi": biases.T, "weights": weights[-1]}


def draw_scores(path: Path) -> None:
    """The picture of score modifiers as a PNG; its metadata are the curves."""
    from matplotlib.figure import Figure

    curves = score_curves()
    figure = Figure(figsize=(11, 3.4), facecolor=BACKGROUND)
    cap, alibi, weights = figure.subplots(1, 3)
    blues = np.linspace(SEEN_FULL, PALE, HEADS)
    for value, line, colour in zip(CAPS, curves["capped"], blues[::3], strict=True):
        cap.plot(curves["x"], line, color=colour)
        cap.annotate(
            f"cap {value:g}",
            (60, line[-1]),
            xytext=(-2, 3),
            ha="right",
            textcoords="offset points",
            fontsize=CODE,
            color=TEXT,
        )
    cap.plot(curves["x"], curves["x"], color=LINE, linewidth=1, zorder=0)
    cap.set_ylim(-35, 38)
    _describe(cap, "soft cap", "logits_soft_cap=cap", "score", "score after")
    for head in range(HEADS):
        alibi.plot(curves["alibi"][head], color=blues[head])
        weights.plot(curves["weights"][head][::-1], color=blues[head])
    _describe(alibi, "ALiBi, a line a head", "scores.Alibi()", "distance", "added to the score")
    weights.set_ylim(0, 0.4)
    _describe(
        weights,
        "what equal scores become",
        "scores.Alibi(), is_causal=True",
        "distance",
        "weight in the last row",
    )
    figure.tight_layout()
    _save(figure, path, json.dumps({k: np.round(v, 4).tolist() for k, v in curves.items()}))


def _describe(axes: Any, title: str, code: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=HEADING, fontweight="bold", color=TEXT, pad=20)
    axes.text(
        0, 1.03, code, transform=axes.transAxes, family="monospace", fontsize=CODE, color=TEXT
    )
    axes.set_xlabel(x, fontsize=CODE, color=TEXT)
    axes.set_ylabel(y, fontsize=CODE, color=TEXT)
    axes.tick_params(labelsize=8, colors=TEXT)
    axes.grid(color=LINE, linewidth=0.4)
    for spine in axes.spines.values():
        spine.set_color(LINE)


def _save(figure: Any, path: Path, state: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    figure.set_dpi(150)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    # A palette holds these few colours and their soft edges in a third of the bytes.
    pixels = np.asarray(canvas.buffer_rgba())[..., :3]
    picture = Image.fromarray(pixels).quantize(COLOURS, dither=Image.Dither.NONE)
    info = PngInfo()
    info.add_text(KEY, state, zip=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, optimize=True, pnginfo=info)


def drawn_from(path: Path) -> str:
    """What a picture's metadata say that it was drawn from."""
    from PIL import Image

    with Image.open(path) as picture:
        return str(picture.info[KEY])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PICTURES, metavar="DIR")
    out = parser.parse_args().out
    for name, draw in (("masks.png", draw_masks), ("scores.png", draw_scores)):
        draw(out / name)
        print(out / name)


if __name__ == "__main__":
    main()
