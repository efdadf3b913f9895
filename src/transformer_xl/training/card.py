"""What a run's folder shows to people: README.md, with its figures and the exact command that made it, and the curve of its losses."""

import math
from pathlib import Path
from typing import Any

from transformer_xl.checkpoint import RunFolder
from transformer_xl.data.store import Store
from transformer_xl.evaluation import UNIT_NAMES
from transformer_xl.files import write_text
from transformer_xl.pictures import can_draw, picture
from transformer_xl.training.recording import peak_memory_mb, read_metrics
from transformer_xl.training.session import Session


def write_card(run: RunFolder, *, session: Session, store: Store, command: str) -> None:
    model, training, manifest = session.config.model, session.config.training, store.manifest
    end = f"in {training.minutes:g} minutes" if training.minutes else f"of {training.steps:,}"
    learned = sum(parameter.numel() for parameter in session.model.parameters() if parameter.requires_grad)
    still = sum(parameter.numel() for parameter in session.model.parameters() if not parameter.requires_grad)
    parameters = f"{still:,}, which stand still, and an adapter's {learned:,}" if still else f"{learned:,}"
    facts = [
        ("data", f"{manifest.name} ({manifest.rule})"),
        ("tokenizer", f"{manifest.tokenizer_kind}, {manifest.vocabulary_size:,} tokens"),
        ("parameters", parameters),
        ("shape", model.in_words.shape),
        ("memory / segment", f"{model.in_words.memory} / {training.segment}"),
        ("steps", f"{session.step:,} {end}, {session.tokens:,} tokens scored"),
        (
            "time in steps",
            f"{session.seconds / 60:.1f} minutes, {session.tokens / max(session.seconds, 1e-9):,.0f} tokens/s",
        ),
        ("peak memory", f"{peak_memory_mb(session.device):,.0f} MB"),
        ("updates skipped", f"{session.skipped}"),
    ]
    validations = [line for line in read_metrics(run.metrics) if line["kind"] == "validation"]
    if validations:
        last = validations[-1]
        value = value_of(last, unit=manifest.unit)
        facts.append(
            (
                f"valid {UNIT_NAMES[manifest.unit]}",
                f"{value:.4f} at step {last['step']:,} (exact rule, lengths of training)",
            )
        )
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts)
    write_text(
        run.card,
        f"# {run.path.name}\n\nA {model.in_words.kind} language model.\n\n| | |\n|---|---|\n{rows}\n\nMade by:\n\n```bash\n{command}\n```\n\n"
        f"![loss](figures/loss.png)\n\nUse it:\n\n```bash\ntxl evaluate {run.path}\ntxl generate {run.path} --tokens 500\n```\n",
    )


def value_of(line: dict[str, Any], *, unit: str) -> float:
    """A line about training or a validation in the corpus's own unit."""
    if unit == "perplexity_per_word":
        return math.exp(line["loss_nats"])
    bits = line["loss_nats"] / math.log(2)
    return float(line.get("bits_per_byte", bits) if unit == "bits_per_byte" else bits)


STYLES: dict[str, dict[str, object]] = {
    "train": {"linewidth": 1.0, "alpha": 0.8},
    "validation": {"marker": "o", "markersize": 4},
}


def draw_curve(run: RunFolder, *, unit: str) -> None:
    """figures/loss.png; nothing where matplotlib is not installed, or nothing was measured yet."""
    if run.metrics.is_file() and run.metrics.stat().st_size and can_draw():
        plot_curve(run, run.made("figures") / "loss.png", unit=unit)


def plot_curve(run: RunFolder, path: Path | None, *, unit: str) -> Any:
    """Losses by step, in the corpus's unit."""
    lines = list(read_metrics(run.metrics))
    with picture(path, title=run.path.name) as axes:
        for kind, style in STYLES.items():
            chosen = [line for line in lines if line["kind"] == kind and math.isfinite(line["loss_nats"])]
            values = [value_of(line, unit=unit) for line in chosen]
            if values:
                axes.plot(
                    [line["step"] for line in chosen], values, label=f"{kind} ({values[-1]:.3g} at the end)", **style
                )
        axes.set_xlabel("step")
        axes.set_ylabel(UNIT_NAMES[unit])
        if unit == "perplexity_per_word":
            axes.set_yscale("log")
        axes.legend()
    return axes.figure
