"""The figures of Appendix C: what more context gains, and perplexity against context length."""

from itertools import cycle
from pathlib import Path

import numpy as np

from transformer_xl.analysis.recl import Array, Group, perplexity_gains
from transformer_xl.pictures import can_draw, draw_lines, panels

MOST_MAPS, MOST_CELLS = 6, 40
"""Models and lengths that a picture of heat maps can show and still be read."""
MARKERS = "osD^vP*X"


def draw_recl(group: Group, folder: Path, *, ratio: str) -> list[Path]:
    """The pictures made, in `folder`; none where matplotlib is not installed."""
    if not can_draw():
        return []
    gain_ICC = perplexity_gains(group, ratio=float(ratio))
    paths = [folder / "gain.png", folder / "perplexity.png"]
    draw_gain(group, paths[0], ratio=ratio)
    lines = _lines(group, group.perplexities(), group.lengths)
    draw_lines(paths[1], lines, title="Perplexity against context length", x="context length", y="perplexity")
    if len(group.names) <= MOST_MAPS and len(group.lengths) <= MOST_CELLS:
        paths.append(folder / "gain-pairs.png")
        _draw_pairs(group, gain_ICC, paths[-1], title=f"Perplexity gained by a longer context (r = {ratio})")
    return paths


def draw_gain(group: Group, path: Path, *, ratio: str) -> list[Path]:
    """What one step more of context gains: the paper's figure."""
    gain_ICC = perplexity_gains(group, ratio=float(ratio))
    places, gained = np.arange(len(group.lengths) - 1), f"exp f(c, c) - exp f(c, c+{group.step})"
    gains = _lines(group, gain_ICC[:, places, places + 1], group.lengths[:-1])
    title = f"What {group.step} more tokens of context gain (r = {ratio})"
    return draw_lines(path, gains, title=title, x="context length c", y=gained, zero=True)


def _lines(group: Group, value_IC: Array, lengths: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], Array, str]]:
    rows = zip(group.names, value_IC, cycle(MARKERS), strict=False)
    return {name: (lengths, value_C, f"{marker}-") for name, value_C, marker in rows}


def _draw_pairs(group: Group, gain_ICC: Array, path: Path, *, title: str) -> None:
    from matplotlib.colors import PowerNorm

    highest = float(np.nanmax(gain_ICC)) or 1.0  # one colour for one gain in all maps
    first, last, half = group.lengths[0], group.lengths[-1], group.step / 2
    # The first steps gain most by far: on a scale of square roots the later ones are seen too.
    colours = PowerNorm(0.5, vmin=0, vmax=highest)
    edges = (first - half, last + half, first - half, last + half)
    with panels(path, title=title, count=len(group.names)) as every:
        for axes, name, gain_CC in zip(every, group.names, gain_ICC, strict=True):
            image = axes.imshow(gain_CC, origin="lower", extent=edges, norm=colours, cmap="viridis")
            axes.set_title(name)
            axes.set_xlabel("long context c'")
            axes.set_ylabel("short context c")
        every[0].figure.colorbar(image, ax=every, label="perplexity gained from c to c'")
