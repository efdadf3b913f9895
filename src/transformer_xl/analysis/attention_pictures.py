"""Appendix D's figures as pictures: every head's average, the same by term, and chosen heads over the words they look at. Knows no model."""

import math
import unicodedata
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transformer_xl.analysis.attention import Averages, Head, Map, name_of
from transformer_xl.analysis.terms import TERMS, TOTAL
from transformer_xl.data.text.display import visible
from transformer_xl.pictures import figure

COLUMNS = 80
"""At most so many keys side by side in a picture of single positions; more go into further lines, as text does."""
MOST_COLUMNS = 8 * COLUMNS
"""Keys drawn there at all: of a longer memory only the nearest, for a picture of thousands of words cannot be read."""
LONGEST_NAME = 12
TALLEST_PIXELS = 30_000
"""Many heads and positions make one picture smaller, not one that nothing can open."""


def draw_averages(averages: Averages, path: Path | None, *, title: str, chosen: Sequence[Head] = ()) -> Any:
    """A row for each head, a column for each distance, the nearest at the right, where text ends; beside it how far the head looks."""
    N, H = averages.entropy_bits_NH.shape
    with figure(path, size=(11, _height(N * H))) as drawn:
        axes, beside = drawn.subplots(1, 2, width_ratios=(6, 1), sharey=True)
        image = _heat(axes, averages, TOTAL, chosen=chosen)
        axes.set_title(title, fontsize=11, parse_math=False)
        mean_distance = averages.mean_distance.ravel()
        beside.barh(np.arange(N * H), mean_distance, color="#31688e", height=0.8)
        beside.set_title("mean distance")
        beside.set_xlabel("tokens")
        beside.tick_params(labelleft=False, left=False)
        _separate(beside, N, H)
        for layer, head in chosen:
            row = layer * H + head
            label = f" {name_of((layer, head))}: {mean_distance[row]:.0f}"
            beside.annotate(label, (mean_distance[row], row), va="center", fontsize=7)
        beside.margins(x=0.6)
        _colour_bar(drawn, image, axes, averages)
    return drawn


def draw_terms(averages: Averages, path: Path, *, title: str) -> None:
    """One panel for each term that the encoding has: where its softmax alone would look."""
    terms = [term for term in averages.average if term != TOTAL]
    N, H = averages.entropy_bits_NH.shape
    across = min(2, len(terms))
    down = math.ceil(len(terms) / across)
    with figure(path, size=(5 + 5 * across, 0.6 + down * _height(N * H))) as drawn:
        panels = drawn.subplots(down, across, squeeze=False, sharex=True, sharey=True)
        for axes, term in zip(panels.flat, terms, strict=False):
            image = _heat(axes, averages, term)
            axes.set_title(f"({term}) {TERMS[term]}", fontsize=10)
        for axes in panels.flat[len(terms) :]:
            axes.set_axis_off()
        drawn.suptitle(title, fontsize=11, parse_math=False)
        _colour_bar(drawn, image, panels, averages)


def draw_heads(maps: Sequence[Map], names: dict[int, str], path: Path | None, *, title: str) -> Any:
    """Each row a query, each column a token it may look at; what is among a row's top fifth is red, the rest grey.

    `names` are the tokens by position. Words under the columns are red where the last row, the position asked for, looks most.
    """
    panels = [(one, columns) for one in maps for columns in _lines_of_columns(one)]
    longest = max(len(_short(name)) for name in names.values())
    heights = [0.16 * len(one.rows) + 0.5 + 0.065 * longest for one, _ in panels]
    height = sum(heights) + 0.8
    with figure(path, size=(14, height), dpi=min(120, int(TALLEST_PIXELS / height))) as drawn:
        all_axes = drawn.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (one, columns) in zip(all_axes, panels, strict=True):
            lines = _lines_of_columns(one)
            _positions(axes, one, columns, names, width=len(lines[-1]))
            if columns == lines[0]:
                span = max(len(row.probability[TOTAL]) for row in one.rows)
                cut = f", the nearest {MOST_COLUMNS} of {span} keys" if span > MOST_COLUMNS else ""
                name = f"layer {one.head[0] + 1}, head {one.head[1] + 1}, at token {one.position + 1:,}{cut}"
                axes.set_title(name, loc="left", fontsize=10)
        drawn.suptitle(
            f"{title}\nEach row is a position (the last, bold, was asked for), each column a token it may look at; darker is more, by the row's own maximum."
            "\nRed: the fifth of the tokens that the row looks at most; red words: that of the last row.",
            fontsize=11,
            parse_math=False,
        )
    return drawn


def _lines_of_columns(one: Map) -> list[range]:
    """The positions of the keys, cut into lines of one length; only the first may be shorter, so that the nearest stand together."""
    end = one.position + 1
    start = max(min(row.first_key for row in one.rows), end - MOST_COLUMNS)
    lines = math.ceil((end - start) / COLUMNS)
    width = math.ceil((end - start) / lines)
    return [range(max(start, end - (line + 1) * width), end - line * width) for line in reversed(range(lines))]


def _positions(axes: Any, one: Map, columns: range, names: dict[int, str], *, width: int) -> None:
    rows = len(one.rows)
    grey_TS, red_TS = np.full((2, rows, width), np.nan)  # what a row does not see stays white
    offset = width - len(columns)
    for line, row in enumerate(one.rows):
        probability, top = row.probability[TOTAL], set(row.top())
        for column, position in enumerate(columns, start=offset):
            key = position - row.first_key
            if 0 <= key < len(probability):
                (red_TS if key in top else grey_TS)[line, column] = probability[key] / probability.max()
    edges = np.arange(width + 1) - 0.5, np.arange(rows + 1) - 0.5
    lines = {"edgecolors": "white", "linewidth": 0.6, "vmax": 1.0}
    axes.pcolormesh(*edges, np.ma.masked_invalid(grey_TS), cmap="Greys", vmin=-0.04, **lines)
    axes.pcolormesh(*edges, np.ma.masked_invalid(red_TS), cmap="Reds", vmin=-0.2, **lines)  # the palest is still red
    axes.invert_yaxis()
    axes.set_yticks(range(rows), [_short(names[row.position]) for row in one.rows], fontsize=7, parse_math=False)
    axes.get_yticklabels()[-1].set_fontweight("bold")
    labels = [_short(names[position]) for position in columns]
    axes.set_xticks(range(offset, width), labels, fontsize=7, parse_math=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    asked = one.rows[-1]
    top = {asked.first_key + key for key in asked.top()}
    for label, position in zip(axes.get_xticklabels(), columns, strict=True):
        label.set_color("#c4161c" if position in top else "#555555")
        label.set_rotation(90 if len(label.get_text()) > 2 else 0)


def _short(name: str) -> str:
    shown = "".join(character if _has_glyph(character) else "▯" for character in visible(name))
    return shown if len(shown) <= LONGEST_NAME else shown[: LONGEST_NAME - 1] + "…"


@cache
def _has_glyph(character: str) -> bool:
    from matplotlib.font_manager import findfont, get_font

    # A combining mark has nothing to stand on here, and a missing glyph would be a warning for each picture.
    font = get_font(findfont("DejaVu Sans"))
    return unicodedata.combining(character) == 0 and font.get_char_index(ord(character)) != 0


def _heat(axes: Any, averages: Averages, term: str, *, chosen: Sequence[Head] = ()) -> Any:
    from matplotlib.colors import LogNorm

    values_NHR = averages.average[term]
    N, H, R = values_NHR.shape
    # One scale for all pictures of one analysis, from a hundredth of what looking everywhere alike would give.
    high = max(float(values.max()) for values in averages.average.values())
    low = min(0.01 / averages.span, high / 10)
    rows: NDArray[np.float64] = values_NHR.reshape(N * H, R)[:, ::-1]
    extent = (R - 0.5, -0.5, N * H - 0.5, -0.5)
    look = {"cmap": "magma_r", "norm": LogNorm(low, high), "aspect": "auto", "interpolation": "nearest"}
    image = axes.imshow(np.maximum(rows, low), extent=extent, **look)
    axes.set_xlabel("distance looked back, in tokens (0: the token itself)")
    if N * H <= 100:
        labels = [f"▸ {n + 1}.{h + 1}" if (n, h) in chosen else f"{n + 1}.{h + 1}" for n in range(N) for h in range(H)]
        axes.set_yticks(range(N * H), labels, fontsize=7)
        axes.set_ylabel("layer.head")
    else:
        axes.set_yticks([n * H + (H - 1) / 2 for n in range(N)], [f"layer {n + 1}" for n in range(N)], fontsize=8)
        axes.set_ylabel(f"{H} heads in each layer, head 1 on top")
    _separate(axes, N, H)
    return image


def _separate(axes: Any, layers: int, heads: int) -> None:
    for layer in range(1, layers):
        axes.axhline(layer * heads - 0.5, color="black", linewidth=0.9)


def _colour_bar(drawn: Any, image: Any, axes: Any, averages: Averages) -> None:
    bar = drawn.colorbar(image, ax=axes, location="bottom", shrink=0.6, aspect=50, pad=0.02)
    bar.set_label("average attention probability, logarithmic; white line: looking everywhere alike")
    bar.ax.axvline(1 / averages.span, color="white", linewidth=2)


def _height(rows: int) -> float:
    """Inches in which so many heads can be told apart."""
    return 1.9 + max(2.0, min(14.0, 0.16 * rows))
