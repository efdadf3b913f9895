"""Each study end to end at a minimal scale: what it trains, what it reuses, and that its page says what its figures are."""

import json
import shlex
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_scale import BYTES, MINIMAL

from transformer_xl.checkpoint import load_checkpoint
from transformer_xl.cli import main
from transformer_xl.config.sources import resolve
from transformer_xl.data.corpora.recipes import RECIPES
from transformer_xl.errors import CheckpointError
from transformer_xl.model import parameter_count
from transformer_xl.presets import find_preset
from transformer_xl.studies import ablation, generation, runs, scales, speed
from transformer_xl.studies.catalogue import run_study
from transformer_xl.studies.scales import find_scale
from transformer_xl.studies.tables import ENCODING
from transformer_xl.training import loop


def names_trained(monkeypatch) -> list[str]:
    """Fills up with the run of every training from here on."""
    train, names = runs.train, []

    def listening(config, *, folder, **others):
        names.append(folder.name)
        return train(config, folder=folder, **others)

    monkeypatch.setattr(runs, "train", listening)
    return names


def table_of(page: str) -> list[dict[str, str]]:
    """The first table of a page, a dictionary for each row."""
    lines = next(part for part in page.split("\n\n") if part.startswith("| ")).splitlines()
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(header, row, strict=True)) for row in rows]


# --- Table 6


def test_the_page_shows_what_the_figures_say(finished):
    page = (finished / "ablation-encoding-minimal.md").read_text()
    value = json.loads((finished / "ablation-encoding-minimal.json").read_text())
    shown = table_of(page)
    *rows, standard = value["rows"]
    assert len(rows) == 12
    assert len(shown) == 15
    for cells, row, defined in zip(shown, rows, ENCODING.rows, strict=False):
        for column, figures in (
            ("valid bits per byte, as trained", [seed["init"] for seed in row["seeds"]]),
            ("valid, best", [seed["best"] for seed in row["seeds"]]),
            ("test bits per byte, as trained", [seed["test"]["init"] for seed in row["seeds"]]),
            ("test, at that length", [seed["test"]["best"] for seed in row["seeds"]]),
        ):
            values = [figure["value"] for figure in figures]
            mean, spread = cells[column].split(" ± ")
            assert float(mean) == pytest.approx(sum(values) / 2, abs=5.1e-4)
            assert float(spread) == pytest.approx(abs(values[0] - values[1]) / 2, abs=5.1e-4)
        assert cells["paper: best"] == ("" if defined.paper_best is None else f"{defined.paper_best:.2f}")
        assert cells["recurrence"] == ("yes" if row["recurrence"] else "no")
        assert bool(cells["a window for each token (as trained)"]) == (not row["recurrence"])
    for cells, (share, (paper, length)) in zip(
        shown[12:], sorted(ENCODING.lengthened.paper.items())[::-1], strict=True
    ):
        figures = [seed["test"][f"at {share:.4g}"]["value"] for seed in standard["seeds"]]
        assert float(cells["test, at that length"].split(" ± ")[0]) == pytest.approx(sum(figures) / 2, abs=5.1e-4)
        assert (float(cells["paper: best"]), int(cells["paper: attention length"])) == (paper, length)
    for claim in value["claims"]:
        assert claim["here"] == "cannot tell"  # of two seeds
        assert f"| {claim['claim']} | {claim['effect']['value']:.3f} [" in page
    assert MINIMAL.caveat in page
    assert (finished / "ablation-encoding-minimal.png").stat().st_size > 1000


def test_lengths_are_chosen_on_valid_and_test_is_read_at_those_alone(finished):
    value = json.loads((finished / "ablation-encoding-minimal.json").read_text())
    for row in value["rows"][:-1]:
        for seed in row["seeds"]:
            points = [seed["init"], *seed["sweep"]]
            lowest = min(point["value"] for point in points)
            assert seed["best"] in points
            assert seed["best"]["value"] < lowest + 0.001
            chosen, test = seed["best"], seed["test"]
            assert (test["best"]["attention"], test["best"]["clamp"]) == (chosen["attention"], chosen["clamp"])
            assert {point["tokens"] for point in test.values()} == {149}
            trained = test["level"]["attention"]
            clamped = [point["attention"] for point in seed["sweep"] if point["clamp"]]
            longer = [point["attention"] for point in seed["sweep"] if point["attention"] > trained]
            assert clamped == (sorted(set(longer)) if row["encoding"] == "relative" else [])
            if longer:
                assert test["longer"]["attention"] in longer
            for point in (*points, *test.values(), *seed["windows"].values()):
                assert point["loss_nats"] == pytest.approx(sum(point["blocks"]) / len(point["blocks"]), rel=0.05)


def test_a_window_for_each_token_is_read_beside(finished, byte_store):
    """Of a model without memory: by hand, each token at the end of its own window."""
    value = json.loads((finished / "ablation-encoding-minimal.json").read_text())
    (row,) = [row for row in value["rows"] if row["model"] == "absolute-half"]
    seed = row["seeds"][0]
    model = load_checkpoint(finished / "runs" / seed["run"].split("/")[-1]).model.eval()
    tokens = torch.from_numpy(np.asarray(byte_store.split("test").tokens[:40], dtype=np.int64))
    with torch.inference_mode():
        losses = model(tokens[None, :8], targets_BT=tokens[None, 1:9]).loss_BT[0].tolist()  # of the first window all
        for end in range(9, 40):
            losses.append(float(model(tokens[None, end - 8 : end], targets_BT=tokens[None, end : end + 1]).loss_BT))
    assert seed["windows"]["sliding"]["loss_nats"] == pytest.approx(sum(losses) / 39, rel=1e-5)
    assert seed["windows"]["level"]["tokens"] == 39


def test_the_rows_are_the_papers(finished):
    value = json.loads((finished / "ablation-encoding-minimal.json").read_text())
    found = [(row["recurrence"], row["encoding"], row["loss"], row["fed_at_once"]) for row in value["rows"][:-1]]
    assert found == [
        (True, "relative", "full", 8),
        (True, "shaw", "full", 8),
        (True, "relative", "half", 8),
        (False, "relative", "full", 8),
        (False, "relative", "half", 8),
        (False, "shaw", "full", 8),
        (False, "shaw", "half", 8),
        (False, "absolute", "half", 8),
        (False, "per_layer", "half", 8),
        (True, "relative", "half", 8),
        (False, "relative", "half", 8),
        (False, "shaw", "half", 8),
    ]
    steps = {row["model"]: row["seeds"][0]["tokens_scored"] for row in value["rows"]}
    assert steps["transformer-xl-half-twice"] == steps["transformer-xl"] == 2 * steps["transformer-xl-half"]


def test_a_rows_commands_make_its_figure(finished, capsys):
    """The words of the page, typed again: the same configuration, and from txl evaluate the same figure."""
    page = (finished / "ablation-encoding-minimal.md").read_text()
    value = json.loads((finished / "ablation-encoding-minimal.json").read_text())
    for title, row in (("Shaw, recurrence, full", 1), ("Ours, no recurrence, full", 3)):
        block = page.split(f"{title} loss:\n\n```bash\n")[1].split("\n```")[0].splitlines()
        seed = value["rows"][row]["seeds"][0]
        assert main([*shlex.split(block[0])[1:], "--print_config"]) == 0
        config = json.loads(capsys.readouterr().out)
        made = json.loads((finished / "runs" / seed["run"].split("/")[-1] / "config.json").read_text())
        assert config["training"].pop("precision") == "auto"
        assert made["training"].pop("precision") == "float32"  # what this machine computes in
        assert config == made
        assert main([*shlex.split(block[1])[1:], "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["loss_nats"] == pytest.approx(seed["init"]["loss_nats"], rel=1e-6)


def test_a_finished_study_is_neither_trained_nor_evaluated_again(finished, byte_store, monkeypatch):
    names = names_trained(monkeypatch)
    monkeypatch.setattr(ablation.attention, "at_attention", lambda *_, **__: pytest.fail("evaluated again"))
    before = json.loads((finished / "ablation-encoding-minimal.json").read_text())
    _, value = run_study("ablation-encoding", scale=MINIMAL, data=byte_store.folder, out=finished)
    assert names == []
    assert value == before


def test_studies_share_their_models(finished, byte_store, monkeypatch):
    names = names_trained(monkeypatch)
    _, value = run_study("memory-matched", scale=MINIMAL, data=byte_store.folder, out=finished)
    assert [name.removeprefix("minimal-text.txt-") for name in names] == [
        "no-recurrence-176-seed-1",
        "no-recurrence-half-172-seed-1",
    ]
    assert [row["fed_at_once"] for row in value["rows"]] == [8, 8, 11, 11]
    page = (finished / "memory-matched-minimal.md").read_text()
    assert [float(cells["paper: best"]) for cells in table_of(page)] == [26.77, 28.33, 27.98, 28.83]


def test_a_killed_study_trains_only_what_is_missing(byte_store, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(scales.SCALES, "tiny", MINIMAL)
    words = ["study", "memory-matched", "--data", str(byte_store.folder), "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        take_step, taken = loop.take_step, 0

        def stopping(session, segment):
            nonlocal taken
            taken += 1
            if taken == 5:  # the second step of the second model
                signal.raise_signal(signal.SIGTERM)
            return take_step(session, segment)

        patch.setattr(loop, "take_step", stopping)
        assert main(words) == 128 + signal.SIGTERM
    assert "transformer-xl-half-seed-1 stopped at step 2 and saved; the same command goes on" in capsys.readouterr().err
    names = names_trained(monkeypatch)
    assert main([*words, "--json"]) == 0
    printed = capsys.readouterr()
    assert "going on from step 2" in printed.err
    assert [name.removeprefix("minimal-text.txt-") for name in names] == [
        "transformer-xl-half-seed-1",
        "no-recurrence-176-seed-1",
        "no-recurrence-half-172-seed-1",
    ]
    assert json.loads(printed.out) == json.loads((tmp_path / "out" / "memory-matched-minimal.json").read_text())


def test_a_run_of_another_configuration_is_refused(finished, byte_store):
    wider = replace(BYTES, words={**BYTES.words, "training.learning_rate": "0.1"})
    with pytest.raises(
        CheckpointError, match=r"another configuration \(training.learning_rate 0.0025 -> 0.1\); choose"
    ):
        run_study("ablation-encoding", scale=replace(MINIMAL, ablation=wider), data=byte_store.folder, out=finished)


def test_a_run_on_other_data_is_refused(finished, tmp_path):
    (tmp_path / "text.txt").write_text("another text altogether\n" * 400)
    assert main(["prepare", str(tmp_path / "text.txt"), "--tokenizer", "char", "--out", str(tmp_path / "store")]) == 0
    with pytest.raises(CheckpointError, match=r"another configuration \(model.vocabulary|other data"):
        run_study("ablation-encoding", scale=MINIMAL, data=tmp_path / "store", out=finished)


# --- Table 7


def test_fragmentation_shuffles_lines_once(word_store, tmp_path):
    scale = replace(MINIMAL, test_tokens=None)
    page, value = run_study("ablation-fragmentation", scale=scale, data=word_store.folder, out=tmp_path / "out")
    assert [row["paper"]["best"] for row in value["rows"]] == [25.2, 25.7, 27.1]
    assert "lines shuffled" in value["corpus"]
    assert value["unit"] == "perplexity_per_word"
    assert {claim["here"] for claim in value["claims"]} == {"cannot tell"}  # of one seed
    assert page.read_text().count("One Billion Word") >= 1


# --- Table 8


def test_recl_measures_both_groups_and_trains_only_the_recurrent_ones(finished, byte_store, monkeypatch):
    names = names_trained(monkeypatch)
    page, value = run_study("recl", scale=MINIMAL, data=byte_store.folder, out=finished)
    assert [name.removeprefix("minimal-text.txt-") for name in names] == ["qrnn-seed-1", "lstm-seed-1"]
    rows = value["rows"]
    assert [(row["group"], row["model"], row["paper"]["0.1"]) for row in rows] == [
        ("recurrent", "transformer-xl", 900),
        ("recurrent", "qrnn", 500),
        ("recurrent", "lstm", 400),
        ("ablation", "transformer-xl", 700),
        ("ablation", "shaw", 400),
        ("ablation", "no-recurrence", 300),
        ("ablation", "per-layer-half", 128),
    ]
    shown = table_of(page.read_text())
    for cells, row in zip(shown, rows, strict=True):
        for ratio in ("0.1", "0.5", "1.0"):
            found = row["recl"][ratio][0]
            length, interval = cells[f"r = {ratio}"].split(" [")
            assert length == f"{'>=' if found['at_least'] else ''}{found['length']}"
            low, high = map(int, interval.rstrip("]").split(", "))
            assert 4 <= low <= high <= 16
            assert found["length"] in (4, 8, 12, 16)
        assert list(row["perplexity_by_context"][0]) == ["4", "8", "12", "16"]
    # Its windows end at the 8 tokens that it was trained on: more context is the same context.
    perplexity = rows[6]["perplexity_by_context"][0]
    assert perplexity["8"] == perplexity["12"] == perplexity["16"] != perplexity["4"]
    assert len(value["claims"]) == 15
    for group in ("recurrent", "ablation"):
        assert (finished / f"recl-minimal-{group}.png").stat().st_size > 1000
        assert (finished / f"recl-minimal-{group}-gain.png").stat().st_size > 1000
    # A member of both groups has the same losses in both, and may have another length: its baseline is another.
    assert rows[0]["perplexity_by_context"] == rows[3]["perplexity_by_context"]


def test_members_of_a_group_have_the_same_budget():
    for name in ("tiny", "small", "paper"):
        scale = find_scale(name)
        vocabulary = RECIPES[scale.standard.corpus].counts.vocabulary
        standard = resolve(
            find_preset(scale.standard.preset).run, vocabulary=vocabulary, files=[], words=scale.standard.words
        )
        for base in (scale.lstm, scale.qrnn):
            other = resolve(find_preset(base.preset).run, vocabulary=vocabulary, files=[], words=base.words)
            assert parameter_count(other.model) == pytest.approx(parameter_count(standard.model), rel=0.025)
            fed = (other.training.segment * other.training.lanes, other.training.steps)
            assert fed == pytest.approx(
                (standard.training.segment * standard.training.lanes, standard.training.steps), rel=0.1
            )


# --- Table 9


def test_speed_stands_beside_the_papers(tmp_path, monkeypatch):
    """What is measured is the benchmark's affair and tested there: here are its rows as four lengths might give them."""
    monkeypatch.setattr(speed, "measure", lambda kind, **_: fake_bench(kind))
    page, value = run_study("speed", scale=replace(MINIMAL, bench="full"), data=None, out=tmp_path)
    assert [(row["attention"], row["ratio"], row["paper"]) for row in value["rows"]] == [
        (800, 80.0, 363),
        (1800, 180.0, 773),
        (2800, 280.0, 1409),
        (3800, 380.0, 1874),
    ]
    cells = table_of(page.read_text())
    assert cells[3]["window slower by"] == "380x"
    assert cells[3]["paper: window slower by"] == "1,874x"
    assert [claim["here"] for claim in value["claims"]] == ["appears", "appears"]


@pytest.mark.slow
def test_speed_runs_the_benchmark(tmp_path):
    page, value = run_study("speed", scale=MINIMAL, data=None, out=tmp_path)
    assert [row["attention"] for row in value["rows"]] == [18, 38]
    assert "say that the command works, and nothing about speed" in page.read_text()


def fake_bench(kind):
    from transformer_xl.benchmarks.measuring import Machine, Result, Row
    from transformer_xl.benchmarks.workloads import workloads_of

    others = ("ratio_to_huggingface", "ratio_to_one_lane")
    nothing = dict.fromkeys([*others, *(f"{name}_spread" for name in others), "max_difference", "checked_against"])
    rows = []
    for workload in workloads_of(kind, scale="full"):
        ratio = workload.config.memory / 10
        for name, times in (("exact", ratio), ("window", 1.0)):
            rows.append(
                Row(
                    workload=workload.name,
                    implementation=name,
                    tokens_per_second=times,
                    spread=(times, times),
                    ratio_to_sliding=ratio if name == "exact" else None,
                    ratio_to_sliding_spread=(ratio, ratio) if name == "exact" else None,
                    paper_ratio_to_sliding=workload.paper_ratio,
                    peak_memory_mb=1.0,
                    share_of_limit=0.5,
                    disturbed_rounds=0,
                    **nothing,
                )
            )
    machine = Machine(processor="x", cores=2, python="3", torch="2", flops_per_second=1.0, bytes_per_second=1.0)
    return Result(kind=kind, scale="full", rounds=3, machine=machine, rows=rows)


# --- Appendix E


def test_generation_continues_the_test_split(finished, byte_store, monkeypatch):
    names = names_trained(monkeypatch)
    page, value = run_study("generation", scale=MINIMAL, data=byte_store.folder, out=finished)
    assert names == []
    text = byte_store.tokenizer.decode(byte_store.split("test").tokens.tolist())
    assert len(value["examples"]) == 3
    for example, written in zip(value["examples"], MINIMAL.written_tokens, strict=True):
        assert example["context"] + example["reference"] in text
        assert len(example["reference"]) == written
        assert example["generated"] != example["reference"]
    assert len({example["context"] for example in value["examples"]}) == 3
    again = run_study("generation", scale=MINIMAL, data=byte_store.folder, out=finished)[1]
    assert again["examples"] == value["examples"]
    assert "## Example 3" in page.read_text()


def test_a_text_cannot_break_its_page():
    cell = generation.example_text(1, {"context": "a\n\n<b>", "generated": "</td> & x", "reference": "|"})
    assert "a<br><br>&lt;b&gt;" in cell
    assert "&lt;/td&gt; &amp; x" in cell


# --- what cannot be done


def test_bad_input_is_one_sentence(byte_store, tmp_path, capsys):
    data = ["--data", str(byte_store.folder)]
    out = ["--out", str(tmp_path / "out")]
    (tmp_path / "one.txt").write_text("a line of words\n" * 50)
    part = tmp_path / "part"
    assert main(["prepare", str(tmp_path / "one.txt"), "--tokenizer", "byte", "--out", str(part)]) == 0
    manifest = json.loads((part / "manifest.json").read_text())
    manifest["splits"] = [split for split in manifest["splits"] if split["name"] != "test"]
    (part / "manifest.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    for words, expected in (
        (["ablation-encodings", *data], "no study ablation-encodings; did you mean ablation-encoding?"),
        (["recl", "--scale", "tinny", *data], "no scale tinny; did you mean tiny?"),
        (["ablation-encoding"], "is trained on enwik8; make it with: txl prepare enwik8"),
        (["ablation-fragmentation", "--scale", "paper"], "is trained on lm1b"),
        (["recl", "--data", str(tmp_path / "nothing")], "there is no folder"),
        (["recl", "--data", str(tmp_path)], "holds no data store"),
        (["memory-matched", "--data", str(part)], "has no test split, which memory-matched needs"),
        (["ablation-encoding", "--seeds", "0", *data], "--seeds: 0 is too few"),
        (["generation", "--seeds", "3", *data], "is no mean over models"),
        (["ablation-fragmentation", *data], "byte tokens without sentences"),
    ):
        assert main(["study", *words, *out]) == 2
        said = capsys.readouterr().err
        assert expected in said
        assert said.count("\n") == 1
