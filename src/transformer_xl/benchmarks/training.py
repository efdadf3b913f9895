"""Before training steps are timed: everybody's losses and gradients must be the same."""

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from transformer_xl.benchmarks.children import BenchmarkError, Child
from transformer_xl.benchmarks.entrants import Entrant
from transformer_xl.benchmarks.workloads import CLUSTER_SHARES, Workload

LOSS_TOLERANCE = 2e-5
GRADIENT_TOLERANCE = {"formula": 1e-9, "huggingface": 1e-2}
"""Of each gradient as a whole, over its norm. Against the formula it is computed in float64. Hugging Face has float32 only, where of ten million ReLUs
one or two are 0 up to rounding: either side of it is right, and all layers below feel it."""


def check_training(
    workload: Workload, table: dict[str, Entrant], processes: dict[str, Child], *, folder: Path
) -> dict[str, float | None]:
    """Losses and gradients of one segment must be the reference's before anybody is timed."""
    config, answers = workload.config, {}
    references = {entrant.checked_against for entrant in table.values()} - {"", *table}
    for key in (*table, *references):
        file = folder / f"{key}.safetensors"
        processes[key].ask(
            "open_training",
            folder=str(folder),
            lanes=workload.batch,
            segment=workload.segment,
            dropout=config.dropout,
            edges=list(config.cluster_edges),
            shares=list(CLUSTER_SHARES[: config.clusters]),
        )
        processes[key].ask("check_training", file=str(file), seed=0, precise="huggingface" not in table)
        answers[key] = load_file(file)
        file.unlink()
    differences: dict[str, float | None] = dict.fromkeys(table)
    for key, entrant in table.items():
        if entrant.checked_against:
            differences[key] = largest_difference(
                answers[key], answers[entrant.checked_against], workload=workload.name, name=entrant.checked_against
            )
    for key in references:
        processes[key].ask("close")
    return differences


def largest_difference(answer: dict[str, Tensor], reference: dict[str, Tensor], *, workload: str, name: str) -> float:
    """Of a loss; gradients are compared by their norms."""
    for key, theirs in reference.items():
        if key not in answer:
            raise BenchmarkError(f"{workload}: {name} has a gradient of {key}, and we have none")
        apart = answer[key].double() - theirs.double()
        if key == "losses":
            difference, limit = float(apart.abs().max()), LOSS_TOLERANCE
        else:
            difference, limit = float(apart.norm() / theirs.double().norm()), GRADIENT_TOLERANCE[name]
        if not difference <= limit:
            raise BenchmarkError(
                f"{workload}: {key} differs from that of {name} by {difference:.2g}, where at most {limit:.1e} is rounding; a race between different"
                " answers would mean nothing"
            )
    return float((answer["losses"] - reference["losses"]).abs().max())
