"""From a workload to its rows: one model drawn at random, written once, opened by everybody, outputs compared, then rounds against the clock."""

import json
import math
import platform
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from transformer_xl.benchmarks.children import (
    BenchmarkError,
    Child,
    Rounds,
    cores,
    ready_children,
    spread,
    take_turns,
    timed,
)
from transformer_xl.benchmarks.entrants import Entrant, entrants_of
from transformer_xl.benchmarks.environment import huggingface_python
from transformer_xl.benchmarks.training import check_training
from transformer_xl.benchmarks.workloads import FORMULAS, Kind, Scale, Workload, workloads_of
from transformer_xl.console import progress, say
from transformer_xl.interop.formats.huggingface import config_to_huggingface, weights_to_huggingface
from transformer_xl.model import TransformerXL

TOLERANCE = 2e-5
"""How far log-probabilities and losses may be from those of the implementation they are checked against, in float32."""
CHECKED_TOKENS = 4
CHECKED_WINDOWS = 1
CHECKED_SEGMENTS = 2
SECONDS_OF_A_TURN = {"full": 2.0, "tiny": 0.02}
PEAK_SIZES = {"full": {"size": 2048, "megabytes": 1000}, "tiny": {"size": 256, "megabytes": 16}}


@dataclass(frozen=True, kw_only=True)
class Machine:
    processor: str
    cores: int
    python: str
    torch: str
    flops_per_second: float
    """Best of several large matrix products."""
    bytes_per_second: float
    """Best of several readings of a large buffer."""


@dataclass(frozen=True, kw_only=True)
class Row:
    workload: str
    implementation: str
    tokens_per_second: float
    spread: tuple[float, float]
    ratio_to_huggingface: float | None
    ratio_to_huggingface_spread: tuple[float, float] | None
    ratio_to_one_lane: float | None
    ratio_to_one_lane_spread: tuple[float, float] | None
    ratio_to_sliding: float | None
    ratio_to_sliding_spread: tuple[float, float] | None
    paper_ratio_to_sliding: int | None
    peak_memory_mb: float
    share_of_limit: float
    max_difference: float | None
    checked_against: str | None
    disturbed_rounds: int


@dataclass(frozen=True, kw_only=True)
class Result:
    kind: Kind
    scale: Scale
    rounds: int
    machine: Machine
    rows: list[Row]

    def as_json(self) -> dict[str, object]:
        told = asdict(self)
        rows = told.pop("rows")
        return {**told, "tolerance": TOLERANCE, "limits": list(FORMULAS), "rows": rows}


def measure(kind: Kind, *, scale: Scale, rounds: int, against_huggingface: bool, preset: str | None = None) -> Result:
    pythons = {"huggingface": huggingface_python()} if against_huggingface else {}
    chosen = workloads_of(kind, scale=scale, preset=preset)
    taking_part = [entrants_of(workload, against_huggingface=against_huggingface) for workload in chosen]
    # One process for each, kept from workload to workload; those that only check are among them.
    names = {key: entrant.implementation for table in taking_part for key, entrant in table.items()}
    names |= {
        entrant.checked_against: entrant.checked_against
        for table in taking_part
        for entrant in table.values()
        if entrant.checked_against
    }
    measured: list[tuple[Workload, dict[str, Entrant], Rounds, dict[str, float | None]]] = []
    with (
        ready_children(pythons, names=names) as processes,
        progress(f"bench {kind}", total=len(chosen) * rounds, unit="rounds") as advance,
    ):
        peaks = [processes["exact"].ask("peaks", **PEAK_SIZES[scale])]
        for workload, table in zip(chosen, taking_part, strict=True):
            advance(0, note=workload.name)
            with model_folder(workload) as folder:
                check = check_training if kind == "training" else open_and_check
                differences = check(workload, table, processes, folder=folder)
            turns = {
                key: partial(
                    timed,
                    processes[key],
                    mode=entrant.mode,
                    steps=steps_of_a_turn(processes[key], entrant.mode, seconds=SECONDS_OF_A_TURN[scale]),
                )
                for key, entrant in table.items()
            }
            found = take_turns(turns, rounds=rounds, advance=advance)
            if found.disturbed:
                say(
                    f"{workload.name}: other processes were busy in {found.disturbed} of {rounds} rounds; run it again on a quiet machine"
                )
            measured.append((workload, table, found, differences))
        peaks.append(processes["exact"].ask("peaks", **PEAK_SIZES[scale]))
    machine = examined(peaks)
    rows = [row(key, work, table, found, machine, said) for work, table, found, said in measured for key in table]
    return Result(kind=kind, scale=scale, rounds=rounds, machine=machine, rows=rows)


@contextmanager
def model_folder(workload: Workload) -> Iterator[Path]:
    """A model drawn at random, in Hugging Face's layout: the one file that everybody opens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TransformerXL(workload.config)
    state = model.state_dict()
    if workload.tail_bias is not None:
        state["vocabulary.tail_bias_C"].fill_(workload.tail_bias)
    with tempfile.TemporaryDirectory(prefix="txl-bench-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config_to_huggingface(workload.config)), encoding="utf-8")
        save_file(weights_to_huggingface(state, workload.config), folder / "model.safetensors", {"format": "pt"})
        yield folder


def open_and_check(
    workload: Workload, table: dict[str, Entrant], processes: dict[str, Child], *, folder: Path
) -> dict[str, float | None]:
    """Everybody opens the model, fills its memory with one text, reads on, and must say what the reference says."""
    draw, config = random.Random(0), workload.config
    text = draw.choices(range(config.vocabulary), k=config.memory)
    request = {
        "folder": str(folder),
        "top_k": workload.top_k,
        "segment": workload.segment,
        "vocabulary": config.vocabulary,
        "text": text,
    }
    tokens = {
        "generation": draw.choices(
            range(config.vocabulary), k=CHECKED_WINDOWS if workload.kind == "sliding" else CHECKED_TOKENS
        ),
        "evaluation": draw.choices(range(config.vocabulary), k=CHECKED_SEGMENTS * workload.segment),
    }
    answers: dict[str, dict[str, Tensor]] = {}

    def answer_of(key: str, *, lanes: int, mode: str) -> dict[str, Tensor]:
        if key not in answers:
            file = folder / f"{key}.safetensors"
            processes[key].ask("open", lanes=lanes, **request)
            processes[key].ask("check", mode=mode, tokens=tokens[mode], file=str(file))
            answers[key] = load_file(file)
        return answers[key]

    differences: dict[str, float | None] = {}
    for key, entrant in table.items():
        answer = answer_of(key, lanes=entrant.lanes, mode=entrant.mode)
        differences[key] = None
        if entrant.checked_against:
            reference = answer_of(entrant.checked_against, lanes=1, mode=entrant.mode)
            differences[key] = agree(key, entrant, answer, reference, workload=workload.name)
    for key in answers.keys() - table.keys():
        processes[key].ask("close")
    return differences


def agree(
    key: str, entrant: Entrant, answer: dict[str, Tensor], reference: dict[str, Tensor], *, workload: str
) -> float:
    difference = largest_difference(answer, reference)
    if entrant.must_agree and not difference <= TOLERANCE:
        raise BenchmarkError(
            f"{workload}: {key} differs from {entrant.checked_against} by {difference:.2g}, where at most {TOLERANCE:.0e} is rounding; a race between"
            " different answers would mean nothing"
        )
    return difference


def largest_difference(answer: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Between the values in order, and between what the two say of the same word; of a word that the reference did not name, it says at most its last value."""
    ours, theirs = answer["values"].double(), reference["values"].double()
    if ours.shape != theirs.shape:
        return math.inf
    difference = float((ours - theirs).abs().max())
    for row in range(len(ours) if "ids" in answer else 0):
        said = dict(zip(reference["ids"][row].tolist(), theirs[row].tolist(), strict=True))
        last = theirs[row, -1].item()
        for token, value in zip(answer["ids"][row].tolist(), ours[row].tolist(), strict=True):
            difference = max(difference, abs(value - said.get(token, last)))
    return difference if math.isfinite(difference) else math.inf


def examined(peaks: list[dict[str, float]]) -> Machine:
    """The best of what was measured before all workloads and after them."""
    return Machine(
        processor=processor_name(),
        cores=cores(),
        python=platform.python_version(),
        torch=torch.__version__,
        flops_per_second=max(found["flops_per_second"] for found in peaks),
        bytes_per_second=max(found["bytes_per_second"] for found in peaks),
    )


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def steps_of_a_turn(child: Child, mode: str, *, seconds: float) -> int:
    """So many that a turn takes about `seconds`, found by two short ones of which the first only warms up, unless one step is long enough."""
    if timed(child, mode=mode, steps=1).seconds > 2 * seconds:
        return 1
    return max(1, math.ceil(seconds * 2 / timed(child, mode=mode, steps=2).seconds))


def row(
    key: str,
    workload: Workload,
    table: dict[str, Entrant],
    found: Rounds,
    machine: Machine,
    differences: dict[str, float | None],
) -> Row:
    entrant = table[key]
    speed, slowest, fastest = spread(found.speeds(key))
    limit = max(entrant.work.flops / machine.flops_per_second, entrant.work.bytes / machine.bytes_per_second)
    tokens_of_a_step = entrant.lanes * (1 if entrant.mode == "generation" else workload.segment)
    to = {
        "huggingface": "huggingface" in table and key in ("exact", "int8", "huggingface"),
        "one_lane": key == "many lanes",
        "sliding": key == "exact" and "window" in table,
    }
    others = {"huggingface": "huggingface", "one_lane": "exact", "sliding": "window"}
    ratios: dict[str, object] = {}
    for name, asked in to.items():
        middle, low, high = spread(found.ratios(key, others[name])) if asked else (None, None, None)
        ratios |= {f"ratio_to_{name}": middle, f"ratio_to_{name}_spread": (low, high) if asked else None}
    return Row(
        workload=f"{workload.name}, {entrant.lanes} lanes" if key == "many lanes" else workload.name,
        implementation=entrant.implementation,
        tokens_per_second=speed,
        spread=(slowest, fastest),
        paper_ratio_to_sliding=workload.paper_ratio if to["sliding"] else None,
        peak_memory_mb=found.peak_memory_mb(key),
        share_of_limit=speed * limit / tokens_of_a_step,
        max_difference=differences[key],
        checked_against=entrant.checked_against or None,
        disturbed_rounds=found.disturbed,
        **ratios,  # type: ignore[arg-type]
    )
