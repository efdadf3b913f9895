"""The paper's attention-length study: the same weights, evaluated with more and less memory than they were trained with."""

from collections.abc import Sequence
from pathlib import Path

from transformer_xl.evaluation.scoring import UNIT_NAMES, Figures
from transformer_xl.pictures import can_draw, picture


def sweep_table(results: Sequence[Figures], *, unit: str, trained: int) -> str:
    """Aligned for people: memory, figure, and the difference to the memory of training."""
    base = next((result for result in results if result.rule.memory == trained), results[0])
    title = UNIT_NAMES[unit]
    lines = [f"{'memory':>8}  {title:>20}  {'difference':>10}  {'tokens/s':>9}"]
    for result in results:
        value, memory, speed = result.value(unit), result.rule.memory, result.tokens / result.seconds
        mark = "  (trained with)" if memory == trained else ""
        lines.append(f"{memory:>8}  {value:>20.4f}  {value - base.value(unit):>+10.4f}  {speed:>9,.0f}{mark}")
    return "\n".join(lines)


def draw_sweep(results: Sequence[Figures], path: Path, *, unit: str, trained: int, title: str) -> bool:
    """False where matplotlib is not installed."""
    if not can_draw():
        return False
    with picture(path, title=title) as axes:
        # Evenly spaced: lengths grow by doubling, and 0 has no place on a logarithmic axis.
        places = range(len(results))
        axes.plot(places, [result.value(unit) for result in results], marker="o")
        axes.set_xticks(list(places), [str(result.rule.memory) for result in results])
        for place, result in enumerate(results):
            if result.rule.memory == trained:
                axes.axvline(place, color="grey", linestyle="--", linewidth=1, label=f"trained with {trained}")
                axes.legend()
        axes.set_xlabel("memory in evaluation")
        axes.set_ylabel(UNIT_NAMES[unit])
    return True
