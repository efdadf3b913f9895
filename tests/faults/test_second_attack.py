"""What a second attacker tried: files that are no files, counts without a limit, manifests that lie. Each is one sentence, and nothing is harmed."""

import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from small_models import build
from small_run import SMALL
from transformer_xl.checkpoint import RunFolder
from transformer_xl.checkpoint.folder import load_model, save_tensors
from transformer_xl.cli import main
from transformer_xl.config.sources import resolve
from transformer_xl.decoding import beam_search
from transformer_xl.errors import CheckpointError, ConfigError, InputError
from transformer_xl.files import atomic_file
from transformer_xl.inference import Engine
from transformer_xl.inference.cache import kept_bytes
from transformer_xl.library import load

pytestmark = [pytest.mark.usefixtures("without_pictures"), pytest.mark.timeout(60)]


@pytest.fixture
def run(trained_run, tmp_path) -> Path:
    return Path(shutil.copytree(trained_run, tmp_path / "run"))


@pytest.fixture
def data(byte_store, tmp_path) -> Path:
    return Path(shutil.copytree(byte_store.folder, tmp_path / "data"))


def refused(capsys, words: list[object], *parts: str) -> None:
    """Exit 2 with one line on standard error that holds these parts, after the one that says what computes."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    said = capsys.readouterr().err.removeprefix("computing on cpu, 1 thread\n").strip()
    assert said.startswith("txl: "), said
    assert "\n" not in said, said
    for part in parts:
        assert part in said, said


@pytest.mark.parametrize("kind", ["pipe", "link", "dangling link", "folder"])
def test_only_plain_files_are_replaced(kind, tmp_path) -> None:
    place = tmp_path / "out.npy"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to(tmp_path / "elsewhere")
        if kind == "link":
            (tmp_path / "elsewhere").write_bytes(b"dear")
    before = place.lstat()
    with pytest.raises(OSError, match="plain file") as caught, atomic_file(place) as file:
        file.write(b"new")
    assert caught.value.filename == str(place)
    assert os.path.samestat(before, place.lstat())
    assert not list(tmp_path.glob(".txl*"))


def test_per_token_into_a_pipe_is_one_sentence(run, tmp_path, capsys) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(capsys, ["evaluate", run, "--tokens", 30, "--per-token", tmp_path / "pipe"], "pipe", "plain file")
    assert not (tmp_path / "pipe").is_file()


# --- folders that are no runs


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def train_words(tmp_path: Path, data: Path, folder: Path) -> list[object]:
    config = tmp_path / "small.json"
    config.write_text(json.dumps(asdict(SMALL)), encoding="utf-8")
    return ["train", config, "--data", data, "--run", folder, "--training.steps", 1]


@pytest.mark.parametrize(
    "files",
    [
        {"README.md": "mine"},
        {"config.json": '{"model_type": "gpt2"}'},
        {"lock": "mine"},
        {"checkpoints/step-00000010/weights.bin": "mine", "README.md": "mine"},
    ],
)
def test_a_strangers_folder_is_not_trained_into(files, byte_store, tmp_path, capsys) -> None:
    folder = tmp_path / "theirs"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    before = contents(folder)
    refused(capsys, train_words(tmp_path, byte_store.folder, folder), "theirs", "no run")
    assert contents(folder) == before


def test_a_log_beside_the_run_is_nobodys_harm(byte_store, tmp_path) -> None:
    """As `txl train ... | tee run/train.log` leaves it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "train.log").write_text("mine", encoding="utf-8")
    assert main([str(word) for word in train_words(tmp_path, byte_store.folder, tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "train.log").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("left", [(), ("lock",), ("lock", "config.json"), ("config.json", ".txl-partial-1.json")])
def test_a_run_killed_before_its_first_checkpoint_begins_again(left, byte_store, tmp_path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    written = {"lock": "4711", "config.json": json.dumps(asdict(SMALL)), ".txl-partial-1.json": "{"}
    for name in left:
        (folder / name).write_text(written[name], encoding="utf-8")
    assert main([str(word) for word in train_words(tmp_path, byte_store.folder, folder)]) == 0
    assert RunFolder(folder).steps() == [1]


# --- names and numbers of checkpoints


def test_a_step_has_one_name(run) -> None:
    here = RunFolder(run)
    assert here.steps() == [10, 20]
    (here.checkpoints / "step-000000000030").mkdir()
    (here.checkpoints / f"step-{'9' * 200}").mkdir()
    (here.checkpoints / "step-0000004\u0661").mkdir()
    assert here.steps() == [10, 20]
    (here.checkpoints / "best.json").write_text('{"step": 20.0}', encoding="utf-8")
    assert here.best_step() is None
    (here.checkpoints / "best.json").write_text('{"step": 20}', encoding="utf-8")
    assert here.best_step() == 20


# --- counts without a limit


@pytest.mark.parametrize("tokens", [-1, 0, 1, -(10**30)])
def test_too_few_tokens_are_no_figure(tokens, trained_run, capsys) -> None:
    refused(capsys, ["evaluate", trained_run, "--tokens", tokens], "--tokens", "at least 2")
    with pytest.raises(InputError, match="at least 2"):
        load(trained_run).evaluate(tokens=tokens)


@pytest.mark.parametrize("lanes", [0, -1, 10**7, 10**12, 10**30])
@pytest.mark.parametrize("which", ["trained_run", "recurrent_run"])
def test_lanes_are_bounded_by_the_tokens(lanes, which, request, capsys) -> None:
    run = request.getfixturevalue(which)
    refused(capsys, ["evaluate", run, "--lanes", lanes, "--tokens", 100], "lanes", "100 tokens")


@pytest.mark.parametrize("which", ["trained_run", "recurrent_run"])
@pytest.mark.parametrize("lanes", [10**9, 10**30])
def test_an_engine_of_too_many_lanes_is_refused_before_it_is_made(which, lanes, request) -> None:
    with pytest.raises(InputError, match="GB"):
        load(request.getfixturevalue(which)).engine(lanes=lanes * 100)


def test_a_segment_longer_than_the_text_reads_the_text(trained_run) -> None:
    loaded = load(trained_run)
    giant = loaded.evaluate(tokens=300, segment=2**31 - 1)
    assert giant.loss_nats == loaded.evaluate(tokens=300, segment=300).loss_nats


def test_the_tables_of_distances_are_counted() -> None:
    model = build(d_model=2048, n_head=1, d_head=1, n_layer=1, memory=6)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = machine // (2048 * 8)  # sines alone fill the machine, keys and values a hundredth of it
    assert kept_bytes(replace(model.config, memory=memory), lanes=1) < machine
    with pytest.raises(InputError, match="GB"):
        Engine(model, memory=memory)


@pytest.mark.parametrize("sight", ["last", "segment"])
@pytest.mark.parametrize("clamp_len", [1, 3, 7, 20, 2**31 - 1])
def test_a_clamp_takes_no_more_than_what_is_read(clamp_len, sight) -> None:
    """Smaller than the memory of 6, within what a segment adds to it, and far beyond: the numbers of torch, one token at a time and many."""
    model = build(clamp_len=clamp_len).eval()
    fast, plain = Engine(model, lanes=2, sight=sight), Engine(model, lanes=2, sight=sight)
    plain.compiled = plain.linear.compiled = False
    generator = torch.Generator().manual_seed(0)
    for length in (1, 5, 1, 1, 30, 1, 2):
        tokens = torch.randint(13, (2, length), generator=generator)
        torch.testing.assert_close(fast.read(tokens), plain.read(tokens), rtol=0, atol=1e-10)
    if fast._panels is not None:  # there is a compiler
        assert fast._panels.distances <= min(clamp_len + 1, 6 + 30)


def test_beams_and_samples_have_a_limit(trained_run, capsys) -> None:
    refused(capsys, ["generate", trained_run, "--beams", 10**30], "beams", "at most 1,024")
    refused(capsys, ["generate", trained_run, "--samples", 10**9], "--samples", "at most 4,096")
    with pytest.raises(InputError, match="at most"):
        beam_search(build().eval(), [1], tokens=1, beams=10**5000)


def test_a_model_larger_than_the_machine_is_not_begun(byte_store, tmp_path, capsys) -> None:
    words = [*train_words(tmp_path, byte_store.folder, tmp_path / "run"), "--model.d_inner", 2_000_000_000]
    refused(capsys, words, "weights", "GB", "d_inner")


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to")]
)
def test_no_memory_left_is_one_sentence(error, monkeypatch, capsys) -> None:
    def fail(words: object) -> int:
        raise error

    monkeypatch.setattr("transformer_xl.cli.dispatch", fail)
    refused(capsys, ["train"], "not enough memory")


def test_other_errors_of_torch_are_not_hidden(monkeypatch) -> None:
    def fail(words: object) -> int:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr("transformer_xl.cli.dispatch", fail)
    with pytest.raises(RuntimeError, match="shapes"):
        main(["train"])


def test_layers_that_are_only_named_are_not_built(tmp_path, monkeypatch) -> None:
    config = replace(SMALL, model=replace(SMALL.model, n_layer=4096))
    tensors = {f"layers.{layer}.x": torch.zeros(0) for layer in range(4096)}
    save_tensors(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr("transformer_xl.checkpoint.folder.build_shapes", lambda config: pytest.fail("built"))
    with pytest.raises(CheckpointError, match="n_layer 4,096"):
        load_model(tmp_path / "model.safetensors", config=config)


# --- pipes and endless files


def test_a_pipe_is_no_configuration_prompt_or_state(trained_run, byte_store, tmp_path, capsys) -> None:
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    link = tmp_path / "link.toml"
    link.symlink_to(pipe)
    for place in (pipe, link):
        refused(capsys, ["train", place, "--data", byte_store.folder, "--run", tmp_path / "run"], "no plain file")
        refused(capsys, ["generate", trained_run, "--prompt-file", place], "no plain file")
        with pytest.raises(CheckpointError, match="no plain file"):
            load(trained_run).engine(state=place)
    assert not (tmp_path / "run").exists()


def test_a_prompt_file_has_a_limit(trained_run, tmp_path, capsys) -> None:
    with (tmp_path / "long.txt").open("wb") as file:
        file.truncate(1 << 40)  # a hole: it takes no room
    refused(capsys, ["generate", trained_run, "--prompt-file", tmp_path / "long.txt"], "64 MB")


# --- numbers too long to be shown


@pytest.mark.parametrize(
    "line",
    [
        "model.memory = {}",
        "model.cutoffs = [{}]",
        "model.cutoffs = [20, {}]",
        "model.encoding = {}",
        "model.encoding = [{}]",
        "model.norm_eps = {}",
        "model.tie_embeddings = {}",
        "training.seed = {}",
        "training.lanes = {}",
        "evaluation = {}",
    ],
)
def test_a_number_of_thousands_of_digits_is_one_sentence(line, tmp_path) -> None:
    place = tmp_path / "config.toml"
    place.write_text(line.format("0x" + "f" * 5000) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        resolve(SMALL, vocabulary=256, files=[place], words={})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("section", ["model", "training", "evaluation"])
def test_nor_is_one_below_zero(section) -> None:
    for name, value in asdict(getattr(SMALL, section)).items():
        if type(value) is int:
            with pytest.raises(ConfigError):
                replace(getattr(SMALL, section), **{name: -(16**5000)})


# --- manifests that lie


def changed(data: Path, **changes: object) -> Path:
    """Fields of the manifest, or of its first split where they begin with `split_`."""
    place = data / "manifest.json"
    value = json.loads(place.read_text(encoding="utf-8"))
    for name, new in changes.items():
        (value["splits"][0] if name.startswith("split_") else value)[name.removeprefix("split_")] = new
    place.write_text(json.dumps(value), encoding="utf-8")
    return data


@pytest.mark.parametrize(
    "changes",
    [
        {"vocabulary_size": "256"},
        {"vocabulary_size": -1},
        {"vocabulary_size": 0},
        {"vocabulary_size": 256.0},
        {"vocabulary_size": 2**40},
        {"vocabulary_size": None},
        {"dtype": "O"},
        {"dtype": "float64"},
        {"dtype": "uint16"},
        {"dtype": 7},
        {"unit": "furlongs"},
        {"unit": []},
        {"name": 5},
        {"origin": ["a"]},
        {"origin": {"a": 1}},
        {"sentence_mark": 256},
        {"sentence_mark": True},
        {"sentence_mark": 3},
        {"splits": []},
        {"splits": {}},
        {"splits": [5]},
        {"version": [1]},
        {"surprise": 1},
        {"split_tokens": 5},
        {"split_tokens": -1},
        {"split_tokens": "many"},
        {"split_documents": 10**6},
        {"split_documents": -1},
        {"split_bytes": 0},
        {"split_characters": -5},
        {"split_words": 1.5},
        {"split_name": "valid"},
        {"split_files": []},
        {"split_files": [{"name": "train.tokens.bin", "bytes": "1", "sha256": ""}]},
    ],
)
def test_a_manifest_that_lies_is_one_sentence(changes, data, capsys) -> None:
    refused(capsys, ["data", changed(data, **changes)], "manifest.json", "prepare the store again")


def test_positions_outside_of_a_split_are_one_sentence(data, capsys) -> None:
    place = data / "train.documents.bin"
    for positions in ([-1], [10**9], [2**63 - 1]):
        place.write_bytes(np.array(positions, dtype="<i8").tobytes())
        refused(capsys, ["data", data], "train.documents.bin", "prepare the store again")


@pytest.mark.parametrize("place", [0, -1, 50])
def test_tokens_outside_of_the_vocabulary_are_one_sentence(place, word_store, word_config, tmp_path, capsys) -> None:
    data = Path(shutil.copytree(word_store.folder, tmp_path / "words"))
    run, config = tmp_path / "run", tmp_path / "words.json"
    config.write_text(json.dumps(asdict(word_config)), encoding="utf-8")
    words = ["train", config, "--data", data, "--training.validate_every", 0, "--training.steps", 1, "--run"]
    assert main([str(word) for word in [*words, run]]) == 0
    for split in ("train", "valid", "test"):
        file = data / f"{split}.tokens.bin"
        tokens = np.fromfile(file, dtype=word_store.manifest.dtype)
        tokens[place] = np.iinfo(tokens.dtype).max
        tokens.tofile(file)
    refused(capsys, ["data", data], "vocabulary", "prepare the store again")
    refused(capsys, ["evaluate", run, "--data", data, "--split", "test"], str(np.iinfo(tokens.dtype).max))


def test_a_store_with_another_tokenizer_is_one_sentence(data, capsys) -> None:
    refused(capsys, ["data", changed(data, vocabulary_size=255)], "256", "255", "prepare the store again")
