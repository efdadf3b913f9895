"""The paper's attention-length study: the same weights, evaluated with more and less memory than they were trained with."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformer_xl.evaluation.scoring import UNIT_NAMES, Figures
from transformer_xl.pictures import picture
from transformer_xl.rows import Rows


class Sweep:
    """Figures, one for each memory, in the order they were asked for."""

    def __init__(self, figures: Sequence[Figures], *, unit: str, trained: int, title: str) -> None:
        """`unit`: the text's own. `trained`: the memory of training."""
        self.figures, self.unit, self.trained, self.title = tuple(figures), unit, trained, title

    def __iter__(self) -> Iterator[Figures]:
        return iter(self.figures)

    def __len__(self) -> int:
        return len(self.figures)

    def __repr__(self) -> str:
        """A table for people: memory, figure, and the difference to the memory of training."""
        base = next((one for one in self.figures if one.rule.memory == self.trained), self.figures[0])
        lines = [f"{'memory':>8}  {UNIT_NAMES[self.unit]:>20}  {'difference':>10}  {'tokens/s':>9}"]
        for one in self.figures:
            value, memory, speed = one.value(self.unit), one.rule.memory, one.tokens / one.seconds
            mark = "  (trained with)" if memory == self.trained else ""
            lines.append(f"{memory:>8}  {value:>20.4f}  {value - base.value(self.unit):>+10.4f}  {speed:>9,.0f}{mark}")
        return "\n".join(lines)

    @property
    def rows(self) -> Rows:
        units = ("loss_nats", "bits_per_token", "bits_per_byte", "perplexity", "tokens", "seconds")
        return Rows(
            ({"memory": one.rule.memory, **{unit: getattr(one, unit) for unit in units}} for one in self.figures),
            name="a sweep",
        )

    def to_pandas(self) -> Any:
        return self.rows.to_pandas()

    def plot(self, path: Path | str | None = None) -> Any:
        """A matplotlib Figure, which a notebook shows; written to `path` (.png, .svg, .pdf) where one is given."""
        with picture(None if path is None else Path(path), title=self.title) as axes:
            # Evenly spaced: lengths grow by doubling, and 0 has no place on a logarithmic axis.
            places = range(len(self))
            axes.plot(places, [one.value(self.unit) for one in self.figures], marker="o")
            axes.set_xticks(list(places), [str(one.rule.memory) for one in self.figures])
            for place, one in enumerate(self.figures):
                if one.rule.memory == self.trained:
                    axes.axvline(place, color="grey", linestyle="--", linewidth=1, label=f"trained with {self.trained}")
                    axes.legend()
            axes.set_xlabel("memory in evaluation")
            axes.set_ylabel(UNIT_NAMES[self.unit])
        return axes.figure
