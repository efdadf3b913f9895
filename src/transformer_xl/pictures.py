"""Pictures, as files or as figures that a notebook shows. matplotlib is an extra, and is imported only when something is drawn."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from transformer_xl.errors import InputError
from transformer_xl.files import atomic_file, readable

ENDINGS = (".png", ".svg", ".pdf")


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


@contextmanager
def figure(path: Path | None, *, size: tuple[float, float], dpi: int = 140) -> Iterator[Any]:
    """A figure of so many inches to put axes on; the file appears when the block ends without an error. Without a path, the figure is all there is."""
    if path is not None and path.suffix not in ENDINGS:
        raise InputError(f"{path} must end in {', '.join(ENDINGS)}")
    if path is not None and not path.parent.is_dir():
        raise InputError(f"{path} cannot be written, because there is no folder {path.parent}; make it first")
    if not can_draw():
        raise InputError("pictures need matplotlib; install it with: pip install 'transformer-xl[viz]'")
    from matplotlib.text import Text

    drawn = _figure_class()(figsize=size, layout="constrained")
    yield drawn
    for text in drawn.findobj(Text):
        text.set_text(readable(text.get_text()))
    if path is not None:
        with atomic_file(path) as file:
            drawn.savefig(file, dpi=dpi, format=path.suffix[1:])


@cache
def _figure_class() -> Any:
    from matplotlib.figure import Figure  # not pyplot: no state that outlives the picture, no screen asked for

    class Picture(Figure):
        """A matplotlib Figure that a notebook shows without being told how."""

        def _repr_png_(self) -> bytes:
            shown = BytesIO()
            self.savefig(shown, format="png")
            return shown.getvalue()

    return Picture


@contextmanager
def picture(path: Path | None, *, title: str) -> Iterator[Any]:
    """One pair of axes to draw on."""
    with figure(path, size=(7, 4.2)) as drawn:
        axes = drawn.subplots()
        yield axes
        axes.set_title(title)
        axes.grid(True, which="major", alpha=0.3)


def draw_lines(
    path: Path,
    lines: Mapping[str, tuple[Any, Any, str]],
    *,
    title: str,
    x: str,
    y: str,
    logarithmic: bool = False,
    zero: bool = False,
    highest: float | None = None,
) -> list[Path]:
    """A line for each label, of its places, values and style; what lies above `highest` is not shown. Where it was drawn: nowhere without matplotlib."""
    if not can_draw():
        return []
    with picture(path, title=title) as axes:
        for label, (places, values, style) in lines.items():
            axes.plot(places, values, style, markersize=3, linewidth=1.2, label=label)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.set_yscale("log" if logarithmic else "linear")
        if highest is not None:
            axes.set_ylim(top=min(highest, axes.get_ylim()[1]))
        if zero:
            axes.axhline(0, color="black", linewidth=0.8)
        axes.legend(fontsize=8)
    return [path]


@contextmanager
def panels(path: Path, *, title: str, count: int, columns: int = 3) -> Iterator[list[Any]]:
    """Several axes of one size, side by side and then below each other."""
    columns = min(columns, count)
    rows = -(-count // columns)
    with figure(path, size=(1.2 + 4.2 * columns, 0.6 + 3.8 * rows)) as drawn:
        every = drawn.subplots(rows, columns, squeeze=False).flatten().tolist()
        for axes in every[count:]:
            axes.set_visible(False)
        yield every[:count]
        drawn.suptitle(title)
