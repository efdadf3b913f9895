"""Who takes part in a workload, and whose answers theirs must be."""

from dataclasses import dataclass
from functools import partial

from transformer_xl.benchmarks import workloads


@dataclass(frozen=True, kw_only=True)
class Entrant:
    implementation: str
    lanes: int
    mode: str
    checked_against: str
    must_agree: bool
    work: workloads.Work


def entrants_of(workload: workloads.Workload, *, against_huggingface: bool) -> dict[str, Entrant]:
    """By the name of their process. Everybody is checked against Hugging Face, or without it against our model's own forward."""
    training = workload.kind == "training"
    # Without Hugging Face, the spelled-out formula says what training is.
    reference = "huggingface" if against_huggingface else "formula" if training else "forward"
    mode = workload.kind if workload.kind in ("generation", "training") else "evaluation"

    def entrant(implementation: str, *, lanes: int = 1, weight_bytes: int = 4) -> Entrant:
        steps = partial(workloads.work_of_step, lanes=lanes, weight_bytes=weight_bytes)
        return Entrant(
            implementation=implementation,
            lanes=workload.batch if training else lanes,
            mode=mode,
            checked_against="" if implementation == reference else reference,
            must_agree=implementation != "int8",
            work=(workloads.work_of_training if training else steps)(workload),
        )

    table = {"exact": entrant("exact")}
    if workload.kind == "generation":
        table["int8"] = entrant("int8", weight_bytes=1)
    if workload.many_lanes:
        table["many lanes"] = entrant("exact", lanes=workloads.MANY_LANES)
    if workload.kind == "sliding":
        table["window"] = Entrant(
            implementation="window",
            lanes=1,
            mode="generation",
            checked_against="plain window",
            must_agree=True,
            work=workloads.work_of_window(workload),
        )
    if against_huggingface:
        table["huggingface"] = entrant("huggingface")
    return table
