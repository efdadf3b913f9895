"""The benchmark's promises at toy size: rows with their keys, ratios within rounds, turns one at a time, and no race between different answers."""

import json
import math
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from transformer_xl.benchmarks import children, environment, measuring, versions
from transformer_xl.benchmarks.children import BenchmarkError, Child, Run, take_turns
from transformer_xl.benchmarks.entrants import entrants_of
from transformer_xl.benchmarks.training import largest_difference
from transformer_xl.benchmarks.workloads import Workload, work_of_step, work_of_window, workloads_of
from transformer_xl.cli import main

CHECKOUT = Path(__file__).parents[2]
KEYS = {
    "workload",
    "implementation",
    "tokens_per_second",
    "spread",
    "ratio_to_huggingface",
    "ratio_to_one_lane",
    "ratio_to_sliding",
    "peak_memory_mb",
    "share_of_limit",
    "max_difference",
}


@pytest.fixture(autouse=True)
def beside_other_tests(monkeypatch):
    """One thread, and a round that others disturbed is not run again: nothing here depends on a few per cent of speed."""
    monkeypatch.setattr(children, "cores", lambda: 1)
    monkeypatch.setattr(children, "DISTURBED_SHARE", math.inf)


def bench(capsys, *words: str) -> dict:
    assert main(["bench", *words, "--scale", "tiny", "--rounds", "2", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def check_rows(result: dict) -> dict[tuple[str, str], dict]:
    assert result["scale"] == "tiny"
    assert result["machine"]["flops_per_second"] > 0
    assert result["machine"]["bytes_per_second"] > 0
    for row in result["rows"]:
        assert row.keys() >= KEYS
        assert row["spread"][0] <= row["tokens_per_second"] <= row["spread"][1]
        assert row["peak_memory_mb"] > 10
        assert row["share_of_limit"] > 0
        if row["implementation"] not in ("int8", "huggingface"):
            assert 0 <= row["max_difference"] <= result["tolerance"]
    return {(row["workload"], row["implementation"]): row for row in result["rows"]}


def test_generation_has_its_rows(capsys):
    rows = check_rows(bench(capsys, "generation"))
    assert len(rows) == 11
    for (workload, implementation), row in rows.items():
        assert row["ratio_to_huggingface"] is None
        assert (row["ratio_to_one_lane"] is not None) == workload.endswith("16 lanes")
        if implementation == "int8":
            assert 0 < row["max_difference"] < 1  # not exact, and not another model either


def test_sliding_is_compared_with_memory(capsys):
    rows = check_rows(bench(capsys, "sliding"))
    assert len(rows) == 4
    for (_, implementation), row in rows.items():
        assert (row["ratio_to_sliding"] is not None) == (implementation == "exact")


def test_training_is_checked_and_timed(capsys):
    rows = check_rows(bench(capsys, "training"))
    assert len(rows) == 2
    assert all(row["checked_against"] == "formula" for row in rows.values())


def test_other_gradients_are_noticed_before_any_timing():
    mine = {"losses": torch.ones(3), "weight": torch.tensor([1.0, 1e-3])}
    told = {"workload": "w", "name": "formula"}
    assert largest_difference(mine, {**mine, "losses": torch.full((3,), 1 + 1e-5)}, **told) == pytest.approx(1e-5, 0.1)
    with pytest.raises(BenchmarkError, match="weight differs from that of formula by"):
        largest_difference(mine, {**mine, "weight": torch.tensor([1.0, 1e-3 + 1e-6])}, **told)
    with pytest.raises(BenchmarkError, match="formula has a gradient of bias, and we have none"):
        largest_difference(mine, {**mine, "bias": torch.ones(1)}, **told)


@pytest.mark.skipif(
    not environment.huggingface_environment().exists(),
    reason="takes minutes to install; made by: txl bench evaluation --against huggingface --scale tiny",
)
def test_hugging_face_says_the_same_and_is_timed(capsys):
    rows = check_rows(bench(capsys, "generation", "--against", "huggingface"))
    assert len(rows) == 15
    for (workload, implementation), row in rows.items():
        assert (row["ratio_to_huggingface"] is None) == workload.endswith("16 lanes")
        if implementation == "huggingface":
            assert row["ratio_to_huggingface"] == 1.0
            assert row["max_difference"] is None
        else:
            assert row["checked_against"] == "huggingface"


def test_evaluation_prints_a_table_that_says_it_is_tiny(capsys):
    assert main(["bench", "evaluation", "--scale", "tiny", "--rounds", "1"]) == 0
    shown = capsys.readouterr().out
    assert "evaluate tiny characters segment 8 memory 38" in shown
    assert "tiny shapes" in shown


def test_other_weights_are_noticed_before_any_timing(tmp_path):
    """One process is given a model of which a single tensor was changed a little."""
    workload = workloads_of("generation", scale="tiny")[1]
    table = entrants_of(workload, against_huggingface=False)
    exact = {"exact": table["exact"]}
    with (
        children.ready_children({}, names={"exact": "exact", "forward": "forward"}) as processes,
        measuring.model_folder(workload) as folder,
    ):
        found = measuring.open_and_check(workload, exact, processes, folder=folder)
        assert found["exact"] is not None
        assert found["exact"] <= measuring.TOLERANCE
        state = load_file(folder / "model.safetensors")
        state["transformer.layers.1.dec_attn.r_net.weight"] *= 1.05
        shutil.copytree(folder, tmp_path / "other")
        save_file(state, tmp_path / "other" / "model.safetensors", {"format": "pt"})
        misled = {**processes, "forward": Redirected(processes["forward"], folder=str(tmp_path / "other"))}
        with pytest.raises(BenchmarkError, match="exact differs from forward by"):
            measuring.open_and_check(workload, exact, misled, folder=folder)


class Redirected:
    """A child that opens another folder than the one it is told."""

    def __init__(self, child: Child, *, folder: str) -> None:
        self.child, self.folder = child, folder

    def ask(self, do: str, **request: object) -> dict:
        return self.child.ask(do, **{**request, **({"folder": self.folder} if do == "open" else {})})


def test_a_process_that_dies_says_why():
    child = Child("exact")
    try:
        child.answer()
        with pytest.raises(BenchmarkError, match=r"process of exact ended: .*nowhere"):
            child.ask("open", folder="/nowhere", lanes=1, top_k=0, segment=1, vocabulary=4, text=[1])
        with pytest.raises(BenchmarkError, match="process of exact ended"):
            child.ask("close")
    finally:
        child.end()


# --- turns


def run_of(tokens_per_second: float, *, disturbed: bool = False) -> Run:
    return Run(tokens=100, seconds=100 / tokens_per_second, memory_mb=1.0, peak_memory_mb=2.0, disturbed=disturbed)


def test_ratios_are_taken_within_rounds():
    """The machine halves its speed in the second round: every ratio stays 4, whatever the medians say."""
    ours, theirs = iter([40.0, 20.0, 44.0]), iter([10.0, 5.0, 11.0])
    found = take_turns(
        {"ours": lambda: run_of(next(ours)), "theirs": lambda: run_of(next(theirs))}, rounds=3, advance=lambda: None
    )
    assert found.ratios("ours", "theirs") == pytest.approx([4.0, 4.0, 4.0])
    assert found.speeds("ours") == pytest.approx([40.0, 20.0, 44.0])
    assert children.spread(found.speeds("ours")) == pytest.approx((40.0, 20.0, 44.0))


def test_everybody_runs_once_a_round_and_starts_in_turn():
    order: list[str] = []

    def turn(name: str) -> Run:
        order.append(name)
        return run_of(1.0)

    take_turns({name: partial(turn, name) for name in "abc"}, rounds=3, advance=lambda: None)
    assert "".join(order) == "abcbcacab"


def test_disturbed_rounds_are_run_again_but_not_forever():
    disturbed = iter([True, False, False])
    found = take_turns({"a": lambda: run_of(1.0, disturbed=next(disturbed))}, rounds=2, advance=lambda: None)
    assert (found.repeated, found.disturbed) == (1, 0)
    always = take_turns({"a": lambda: run_of(1.0, disturbed=True)}, rounds=2, advance=lambda: None)
    assert (always.repeated, always.disturbed, len(always.runs)) == (2, 2, 2)


# --- what is compared


def test_differences_are_of_values_and_of_words():
    reference = {"values": torch.tensor([[-1.0, -2.0, -3.0]]), "ids": torch.tensor([[7, 8, 9]])}
    assert measuring.largest_difference(reference, reference) == 0.0
    moved = {"values": torch.tensor([[-1.0, -2.0, -3.5]]), "ids": reference["ids"]}
    assert measuring.largest_difference(moved, reference) == 0.5
    swapped = {"values": reference["values"], "ids": torch.tensor([[8, 7, 9]])}
    assert measuring.largest_difference(swapped, reference) == 1.0
    unknown = {"values": reference["values"], "ids": torch.tensor([[5, 8, 9]])}
    assert measuring.largest_difference(unknown, reference) == 2.0
    broken = {"values": torch.tensor([[-1.0, float("nan"), -3.0]]), "ids": reference["ids"]}
    assert measuring.largest_difference(broken, reference) == float("inf")


def test_the_least_work_of_the_papers_shapes():
    """By hand, from the shapes: 37.9M weights that are read, 2100 keys and values and 820 relative keys of width 512 in 12 layers."""
    workload = workloads_of("generation", scale="full")[0]
    weights = 12 * (4 * 512 * 512 + 2 * 512 * 2048) + 512 * 204
    assert work_of_step(workload, lanes=1, weight_bytes=4).bytes == 4 * (weights + 12 * 512 * (2 * 2100 + 820))
    assert work_of_step(workload, lanes=1, weight_bytes=1).bytes == weights + 4 * 12 * 512 * (2 * 2100 + 820)
    one, many = (work_of_step(workload, lanes=lanes, weight_bytes=4) for lanes in (1, 16))
    assert many.flops == 16 * one.flops
    assert many.bytes - one.bytes == 4 * 15 * 12 * 512 * 2 * 2100


def test_the_least_work_of_a_window_counts_pairs_that_see_each_other():
    """Against counting them one by one."""
    workload: Workload = workloads_of("sliding", scale="tiny")[1]
    config, W, width = workload.config, workload.config.memory, 32
    matrices = 4 * 32 * width + 2 * 32 * 64
    lower = sum(matrices + width * (2 * (t + 1) + min(config.clamp_len, t + 1)) for t in range(W))
    last = (W - 1) * 2 * 32 * width + matrices + width * (2 * W + config.clamp_len)
    assert work_of_window(workload).flops == 2 * (lower + last + 32 * 204)


# --- the command's words


def test_the_plot_shows_whether_a_long_text_is_slower(tmp_path, capsys):
    words = [
        "bench",
        "generation",
        "--scale",
        "tiny",
        "--tokens",
        "400",
        "--plot",
        str(tmp_path / "flat.png"),
        "--json",
    ]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["points"][-1]["tokens"] == 400
    assert len(told["points"]) == 200
    assert told["ms_per_token_last"] > 0
    assert (tmp_path / "flat.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["reading"], "invalid choice"),
        (["generation", "--preset", "enwik8-12l"], "--preset: enwik8-12l is for txl bench training"),
        (["training", "--preset", "tiny-lstm"], "preset tiny-lstm is no Transformer-XL"),
        (["generation", "--rounds", "0"], "--rounds: 0 is too few"),
        (["generation", "--tokens", "5"], "give --plot FILE"),
        (["sliding", "--plot", "a.png"], "our own generation alone"),
        (["generation", "--plot", "a.txt"], "must end in"),
        (["generation", "--plot", "nowhere/a.png"], "there is no folder nowhere"),
        (["generation", "--plot", "a.png", "--tokens", "1"], "at least 2"),
    ],
)
def test_wrong_words_are_one_sentence(words, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_an_installation_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(environment, "TRANSFORMERS", "0.0.0")
    with pytest.raises(BenchmarkError, match=r"transformers 0\.0\.0 could not be installed"):
        environment.huggingface_python()
    assert not environment.huggingface_environment().exists()
    assert [path.name for path in (tmp_path / "transformer-xl").iterdir() if path.is_dir()] == []


def test_serving_is_timed_in_rounds(capsys):
    result = bench(capsys, "serving")
    one, many, first = result["rows"]
    assert one["ratio_to_one_stream"] is None
    assert many["implementation"] == "16 streams"
    assert many["spread"][0] <= many["tokens_per_second"] <= many["spread"][1]
    low, high = many["ratio_to_one_stream_spread"]
    assert low <= many["ratio_to_one_stream"] <= high
    assert many["ratio_to_one_stream"] > 1, "sixteen streams were not written together"
    assert 0 < first["first_token_seconds"] < 30
    assert all(row["peak_memory_mb"] > 50 for row in result["rows"])
    assert main(["bench", "serving", "--against", "huggingface"]) == 2


def test_a_version_beside_itself_computes_the_same_and_is_as_fast(capsys, monkeypatch):
    monkeypatch.setattr(versions, "TINY", {"writing": 4, "training": 1})
    assert main(["bench", "versions", "--against", str(CHECKOUT), "--scale", "tiny", "--rounds", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["work"] for row in rows] == ["writing", "training"]
    assert all(row["ratio"] > 0 and row["tokens_per_second"] > 0 for row in rows)


def test_versions_want_another_checkout(capsys, tmp_path):
    assert main(["bench", "versions"]) == 2
    assert main(["bench", "versions", "--against", str(tmp_path)]) == 2
    assert "is no checkout of this software" in capsys.readouterr().err
    assert main(["bench", "training", "--against", "nobody"]) == 2
    assert "--against: nobody is unknown" in capsys.readouterr().err
