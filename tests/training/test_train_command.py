"""`txl train` as people type it: presets, files and fields, and signals to a real process."""

import json
import signal
import subprocess
import sys
import time

import pytest

from transformer_xl.checkpoint import RunFolder
from transformer_xl.cli import main
from transformer_xl.config.sources import options

FAST = [
    *(
        "--model.n_layer",
        "2",
        "--model.d_model",
        "16",
        "--model.n_head",
        "2",
        "--model.d_head",
        "8",
        "--model.d_inner",
        "32",
    ),
    *("--model.memory", "12", "--training.segment", "12", "--training.lanes", "4", "--training.warm_up", "2"),
]


def printed(capsys, *words):
    assert main(["train", *words, "--print_config"]) == 0
    return json.loads(capsys.readouterr().out)


def test_preset_then_files_then_fields_the_later_ones_win(byte_store, tmp_path, capsys):
    (tmp_path / "a.toml").write_text("[model]\nmemory = 7\nn_layer = 3\n[training]\nlanes = 2\n")
    (tmp_path / "b.json").write_text('{"model": {"memory": 9}}')
    data = ["--data", str(byte_store.folder)]
    plain = printed(capsys, "demo", *data)
    assert plain["model"]["memory"] == 128
    assert plain["model"]["vocabulary"] == byte_store.manifest.vocabulary_size
    changed = printed(
        capsys,
        "demo",
        *data,
        "--config",
        str(tmp_path / "a.toml"),
        "--config",
        str(tmp_path / "b.json"),
        "--training.lanes=6",
    )
    assert (changed["model"]["memory"], changed["model"]["n_layer"], changed["training"]["lanes"]) == (9, 3, 6)
    assert changed["model"]["d_model"] == plain["model"]["d_model"]
    alone = printed(capsys, str(tmp_path / "a.toml"), *data)
    assert (alone["model"]["memory"], alone["training"]["lanes"]) == (7, 2)


def test_a_printed_configuration_reads_back(byte_store, tmp_path, capsys):
    data = ["--data", str(byte_store.folder)]
    first = printed(capsys, "tiny-byte", *data, "--model.dropout", "0.25", "--model.locked_dropout", "embedding,output")
    (tmp_path / "printed.json").write_text(json.dumps(first))
    assert printed(capsys, str(tmp_path / "printed.json"), *data) == first


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["tiny-bite"], "no preset tiny-bite; did you mean tiny-byte?"),
        (["demo", "--model.memroy", "3"], "no option --model.memroy; did you mean --model.memory?"),
        (["demo", "--model.memory", "many"], "model.memory: expected a whole number, found 'many'"),
        (["demo", "--model.encoding", "absolut"], "model.encoding: 'absolut' is unknown; did you mean absolute?"),
        (["demo", "--model.vocabulary", "300"], "model.vocabulary: 300 where"),
        (["wikitext-103-standard"], "model.cutoffs: 200000 is past the vocabulary (256)"),
        (["nothing.toml"], "there is no file nothing.toml"),
        (["demo"], "--run is missing"),
    ],
)
def test_what_cannot_be_is_one_sentence(words, sentence, byte_store, capsys):
    assert main(["train", *words, "--data", str(byte_store.folder)]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_files_that_cannot_be_read_are_named(byte_store, tmp_path, capsys):
    for name, text, sentence in (
        ("bad.json", "{", "is not JSON"),
        ("bad.toml", "model = [", "is not TOML"),
        ("list.json", "[1]", "holds no table of fields"),
        ("deep.json", "[" * 100_000, "is not JSON"),
    ):
        (tmp_path / name).write_text(text)
        assert main(["train", str(tmp_path / name), "--data", str(byte_store.folder)]) == 2
        assert sentence in capsys.readouterr().err


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = "".join(
        capsys.readouterr().out.split()
    )  # lines are broken at spaces and hyphens, wherever the terminal ends
    for name, _, explanation in options():
        assert f"--{name}" in shown
        assert "".join(explanation.split()) in shown


@pytest.mark.processes
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_same_command_goes_on(number, code, byte_store, tmp_path):
    command = [
        sys.executable,
        "-m",
        "transformer_xl",
        "train",
        "demo",
        "--data",
        str(byte_store.folder),
        "--run",
        str(tmp_path / "run"),
    ]
    command += [*FAST, "--training.steps", "100000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        while not (tmp_path / "run" / "metrics.jsonl").exists() or not (tmp_path / "run" / "metrics.jsonl").read_text():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(timeout=30) == code
        assert "stopped at step" in process.stderr.read()
    stopped_at = RunFolder(tmp_path / "run").steps()[-1]
    assert stopped_at > 0
    command[command.index("100000")] = str(stopped_at + 3)
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert f"going on from step {stopped_at}" in answer.stderr


def test_a_store_without_a_valid_split_still_trains(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("all of it is for training\n" * 100)
    assert main(["prepare", str(tmp_path / "text.txt"), "--split", "1", "--out", str(tmp_path / "store")]) == 0
    words = [
        "train",
        "demo",
        "--data",
        str(tmp_path / "store"),
        "--run",
        str(tmp_path / "run"),
        *FAST,
        "--training.steps",
        "5",
    ]
    assert main(words) == 0
    assert "has no valid split" in capsys.readouterr().err
    assert RunFolder(tmp_path / "run").steps() == [5]
