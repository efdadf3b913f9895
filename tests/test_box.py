"""The model in the box: packed from a run, found where no run is named, and in the wheel. A small run plays it here, packed as the real one is."""

import json
import random
import re
import runpy
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

import transformer_xl as txl
from transformer_xl import native
from transformer_xl.checkpoint import RunFolder, load_checkpoint
from transformer_xl.checkpoint.box import box_folder, folder_of
from transformer_xl.checkpoint.eight_bits import EIGHT_BITS
from transformer_xl.cli import main
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.fitting import beginning, prepared

ROOT = Path(__file__).parents[1]
FILES = {EIGHT_BITS, "README.md", "about.json", "checksums.json", "config.json", "tokenizer/tokenizer.json"}
TEXT = "def decode(self, text):\n    return text\n" * 8
SAID = "no run is named: reading with the model in the box"


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def packed(trained_run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("package") / "box"
    size = runpy.run_path(str(ROOT / "recipes" / "box.py"))["pack"](trained_run, folder)
    assert size == sum((folder / name).stat().st_size for name in files_in(folder))
    return folder


@pytest.fixture
def here(packed, tmp_path, monkeypatch) -> Path:
    """A folder to work in, with a text, and with a model in the box."""
    monkeypatch.setattr("transformer_xl.checkpoint.box.box_folder", lambda: packed)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


@pytest.fixture
def no_box(here, monkeypatch) -> Path:
    monkeypatch.setattr("transformer_xl.checkpoint.box.box_folder", lambda: here / "nowhere")
    return here


def test_help_says_what_may_be_left_out(capsys):
    for command, usage in (("score", "[RUN] FILE"), ("generate", "[RUN]"), ("serve", "[RUN ...]")):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        shown = " ".join(capsys.readouterr().out.split())
        assert usage in shown
        assert "None, or the word box: the model in the box, which comes with the package" in shown


def test_what_is_packed_names_no_place_of_this_machine(packed, trained_run):
    assert files_in(packed) == FILES
    told = load_checkpoint(trained_run).about
    for name in FILES:
        data = (packed / name).read_bytes()
        for place in (trained_run, told.data, trained_run.parents[1]):
            assert str(place).encode() not in data, name
    assert json.loads((packed / "about.json").read_text())["data"] == ""
    card = (packed / "README.md").read_text()
    assert f"to step {told.step}" in card
    assert "python recipes/box.py pack --run runs/box --out src/transformer_xl/box" in card


def test_a_run_that_has_no_room_in_the_box_is_refused(trained_run, tmp_path):
    recipe = runpy.run_path(str(ROOT / "recipes" / "box.py"))
    recipe["pack"].__globals__["LARGEST_BOX"] = 1000
    with pytest.raises(SystemExit, match="where the box has room for 1,000"):
        recipe["pack"](trained_run, tmp_path / "box")
    assert not (tmp_path / "box").exists()


def test_none_and_the_word_are_the_box_and_a_folder_here_comes_first(here, packed, trained_run):
    assert folder_of(None) == folder_of("box") == folder_of(Path("box")) == packed
    assert folder_of("./runs/box") == Path("runs/box")
    assert txl.load().checkpoint.folder == txl.load("box").checkpoint.folder == packed
    assert txl.load().checkpoint.run is None
    shutil.copytree(RunFolder(trained_run).chosen_checkpoint(), here / "box")
    assert txl.load("box").checkpoint.folder == Path("box")
    assert txl.load().checkpoint.folder == packed


def test_text_is_written_and_scored_without_a_run(here, packed, capsys):
    ways: list[list[str]] = []
    for run in ([], ["box"], [str(packed)]):
        assert main(["generate", *run, "--prompt", "def ", "--tokens", "20", "--device", "cpu"]) == 0
        shown = capsys.readouterr()
        assert shown.err == ("" if run else f"{SAID}\n")
        assert main(["score", *run, "text.txt", "--device", "cpu"]) == 0
        ways.append([shown.out, capsys.readouterr().out])
    assert ways[0] == ways[1] == ways[2]


@pytest.mark.parametrize(
    "words",
    [
        ["text.txt", "--by", "line"],
        ["--by", "line", "text.txt"],
        ["box", "text.txt", "--by", "line"],
        ["box", "--by", "line", "text.txt"],
        ["--by", "line", "box", "text.txt"],
    ],
)
def test_of_two_words_the_first_is_the_run_wherever_options_stand(words, here, capsys):
    assert main(["score", *words]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == TEXT.count("\n")
    assert shown.err.count(SAID) == ("box" not in words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["score"], "the following arguments are required: FILE; see: txl score --help"),
        (["score", "box"], "box does not exist; name a file, or - for standard input (one word is the text, two are"),
        (
            ["score", "runs"],
            "runs is a folder; name a file, or - for standard input (one word is the text, two are RUN",
        ),
        (["score", "box", "runs"], "runs is a folder; name a file, or - for standard input\n"),
        (["score", "a", "b", "c"], "c is one word too many"),
        (["evaluate"], "this model came from elsewhere, and no data came with it; give some made with its tokenizer"),
        (
            ["attention", "--text", "text.txt"],
            "the model in the box is in no run's folder; say where to write with --out",
        ),
    ],
)
def test_what_is_left_open_is_one_sentence(words, told, here, capsys):
    (here / "runs").mkdir()
    assert main(words) == 2
    assert f"txl: {told}" in capsys.readouterr().err


def test_data_in_its_tokens_are_evaluated(here, capsys):
    assert main(["prepare", "text.txt", "--out", "store", "--tokenizer-of", "box"]) == 0
    assert main(["evaluate", "--data", "store", "--split", "train"]) == 0
    shown = capsys.readouterr()
    assert "bits per byte: " in shown.out
    assert SAID in shown.err


def test_attention_is_drawn_where_it_is_asked_for(here, monkeypatch):
    monkeypatch.setattr("transformer_xl.pictures.can_draw", lambda: False)
    assert main(["attention", "--text", "text.txt", "--out", "looks"]) == 0
    assert "Attention of box" in (here / "looks" / "report.html").read_text()


def test_a_server_without_a_run(here):
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    from transformer_xl.cli.serve import load_models
    from transformer_xl.serving.limits import Limits

    models, _ = load_models([None, "box"], memory=None, limits=Limits(admitted=1), device="cpu", precision="float32")
    assert [one.name for one in models] == ["box", "box-2"]


@pytest.mark.skipif(native.library() is None, reason="no C++ compiler here")
def test_a_file_is_compressed_and_comes_back(here, capsys):
    assert main(["compress", "text.txt"]) == 0
    assert main(["decompress", "text.txt.txl", "--model", "box", "-o", "again.txt"]) == 0
    assert (here / "again.txt").read_text() == TEXT
    assert capsys.readouterr().err == f"{SAID}\n"
    assert main(["export", "box", "--to", "safetensors", "--out", "kept"]) == 0
    assert (here / "kept" / "model.safetensors").is_file()
    assert txl.decompress(txl.compress(TEXT.encode()), model="kept") == TEXT.encode()


def test_training_begins_with_it(here, capsys, without_pictures):
    assert main(["prepare", "text.txt", "--out", "store", "--tokenizer-of", "box"]) == 0
    words = ["--from", "box", "--data", "store", "--training.steps", "2", "--training.lanes", "1"]
    assert main(["train", *words, "--training.validate_every", "2", "--device", "cpu", "--run", "runs/mine"]) == 0
    before, after = txl.load(), txl.load("runs/mine")
    assert after.tokenizer.size == before.tokenizer.size
    assert "came without its text: what was lost on that is not known" in capsys.readouterr().err


def test_a_text_is_fitted_from_it(here):
    (here / "text.txt").write_text(TEXT * 40)
    _, plan, store = prepared("text.txt", minutes=0.02, device="cpu", from_="box")
    assert plan.origin == "box"
    assert store.manifest.tokenizer_kind == "byte"
    assert plan.base == load_checkpoint(None).config


def test_fit_begins_with_it_where_it_knows_the_text_and_nobody_said_otherwise(here, monkeypatch):
    """The small run that plays it here knows next to nothing, so a compressor plays one that knows less."""
    (here / "text.txt").write_text(TEXT * 40)
    draw = random.Random(1)
    (here / "other.txt").write_text("".join(draw.choices("ABCDEFGHIJ#", k=30_000)))
    how = {"minutes": 0.02, "device": "cpu"}
    unknown = prepared("other.txt", **how, run="runs/other.txt")[1]
    monkeypatch.setattr(beginning, "bits_of_a_compressor", lambda pieces: 9.0)
    known = prepared("text.txt", **how, run="runs/text.txt")[1]
    assert (known.wish, known.origin, known.tokenizer) == (None, "box", None)
    assert re.search(r"those of the model in the box: .* needs [\d.]+ bits per byte and xz 9.00", known.reasons[0])
    assert (unknown.wish, unknown.origin, unknown.tokenizer) == (None, None, "byte")
    assert "drawn by chance: of a sample, the model in the box needs" in unknown.reasons[0]
    # The same call goes on; asked for by name it is another one.
    assert prepared("text.txt", **how, run="runs/text.txt")[1] == known
    with pytest.raises(ConfigError, match="was begun with"):
        prepared("text.txt", **how, run="runs/text.txt", from_="box")
    asked = prepared("text.txt", **how, run="runs/chance", from_="nothing")[1]
    assert (asked.wish, asked.origin, asked.reasons[0]) == ("nothing", None, "weights: drawn by chance, as asked for")


def test_a_text_is_fitted_without_one(no_box):
    (no_box / "text.txt").write_text(TEXT * 40)
    assert prepared("text.txt", minutes=0.02, device="cpu")[1].origin is None


@pytest.mark.parametrize(
    "words",
    [
        ["generate"],
        ["generate", "box"],
        ["score", "text.txt"],
        ["evaluate", "--data", "store"],
        ["attention", "--text", "text.txt"],
        ["compress", "text.txt"],
        ["fit", "text.txt", "--from", "box", "--run", "mine"],
        ["prepare", "text.txt", "--tokenizer-of", "box", "--out", "store"],
    ],
)
def test_a_build_without_one_says_so(words, no_box, capsys):
    (no_box / "text.txt").write_text(TEXT * 40)
    assert main(words) == 2
    told = "txl: there is no model in the box of this build; name a run's folder, such as runs/first\n"
    assert capsys.readouterr().err == told
    assert files_in(no_box) == {"text.txt"}


def test_a_program_hears_the_same(no_box):
    for call in (txl.load, lambda: txl.compress(b"some text")):
        with pytest.raises(CheckpointError, match="there is no model in the box of this build; name a run's folder"):
            call()


def test_the_wheel_and_the_source_package_bring_it(packed, tmp_path):
    from hatchling.builders.sdist import SdistBuilder
    from hatchling.builders.wheel import WheelBuilder

    for name in ("pyproject.toml", "README.md", "LICENSE", "hatch_build.py", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(packed, tmp_path / "src" / "transformer_xl" / "box")
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    (tmp_path / "src" / "transformer_xl" / "__init__.py").touch()

    (wheel,) = WheelBuilder(str(tmp_path)).build(directory=str(tmp_path / "dist"))
    with zipfile.ZipFile(wheel) as archive:
        assert {f"transformer_xl/box/{name}" for name in FILES} <= set(archive.namelist())
    (sources,) = SdistBuilder(str(tmp_path)).build(directory=str(tmp_path / "dist"))
    with tarfile.open(sources) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/transformer_xl/box/{name}" for name in FILES} | {"recipes/box.py"} <= names


@pytest.mark.skipif(not (box_folder() / "config.json").is_file(), reason="this checkout has no model in the box")
def test_the_real_one():
    folder = box_folder()
    assert sum((folder / name).stat().st_size for name in files_in(folder)) <= 10_000_000
    for name in files_in(folder) - {EIGHT_BITS}:
        assert not any(place in (folder / name).read_text() for place in ("/root/", "/home/", "/tmp/")), name
    loaded = txl.load(folder)
    assert loaded.tokenizer.kind == "bpe"
    text = "The history of the city is the history of its people.\n"
    assert loaded.score(text).total_bits < 3 * len(text)
