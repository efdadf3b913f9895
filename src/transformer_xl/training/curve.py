"""The loss of a run against its steps, as a picture."""

import math

from transformer_xl.checkpoint import RunFolder
from transformer_xl.pictures import can_draw, picture
from transformer_xl.training.recording import read_metrics

STYLES: dict[str, dict[str, object]] = {
    "train": {"linewidth": 1.0, "alpha": 0.8},
    "validation": {"marker": "o", "markersize": 4},
}


def draw_curve(run: RunFolder, *, unit: str) -> None:
    """figures/loss.png, in the corpus's unit; nothing where matplotlib is not installed, or nothing was measured yet."""
    lines = list(read_metrics(run.metrics))
    if not lines or not can_draw():
        return
    words = unit == "perplexity_per_word"
    with picture(run.made("figures") / "loss.png", title=run.path.name) as axes:
        for kind, style in STYLES.items():
            chosen = [line for line in lines if line["kind"] == kind and math.isfinite(line["loss_nats"])]
            values = [math.exp(line["loss_nats"]) if words else line["loss_nats"] / math.log(2) for line in chosen]
            if values:
                axes.plot(
                    [line["step"] for line in chosen], values, label=f"{kind} ({values[-1]:.3g} at the end)", **style
                )
        axes.set_xlabel("step")
        axes.set_ylabel("perplexity per word" if words else "bits per character")
        if words:
            axes.set_yscale("log")
        axes.legend()
