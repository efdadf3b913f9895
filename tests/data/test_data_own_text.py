"""Anybody's own text: every tokenizer, every way to split, every way to begin a document."""

import cProfile
import gzip
import hashlib
import io
import json
import pstats
import zipfile
from pathlib import Path

import numpy as np
import pytest
from data_helpers import patient
from hypothesis import given
from hypothesis import strategies as st

from transformer_xl.data.corpora import own_text, unpacking
from transformer_xl.data.corpora.own_text import OwnText, prepare_given_splits, prepare_own_text
from transformer_xl.data.corpora.selection import Inputs
from transformer_xl.data.corpora.sources import Source
from transformer_xl.data.store import open_store
from transformer_xl.errors import DataError, TransformerXLError
from transformer_xl.running import prepare

STORY = "".join(f"Line {n} of the story, é and 日本 {n * n}.\n" + ("\n" if n % 7 == 6 else "") for n in range(200))
WHOLE = OwnText(shares=(1.0,))


@pytest.fixture
def story(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text(STORY, encoding="utf-8")
    return path


def texts(store):
    return [store.tokenizer.decode(store.split(name).tokens) for name in store.splits]


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_the_text_comes_back_exactly(kind, story, tmp_path):
    size = 400 if kind == "bpe" else None
    settings = OwnText(tokenizer=kind, vocabulary_size=size)
    store = prepare_own_text([story], out=tmp_path / "store", settings=settings)
    assert store.splits == ("train", "valid", "test")
    assert "".join(texts(store)) == STORY
    assert sum(split.bytes for split in store.manifest.splits) == len(STORY.encode())
    assert sum(split.characters for split in store.manifest.splits) == len(STORY)
    shares = [split.bytes / len(STORY.encode()) for split in store.manifest.splits]
    assert shares == pytest.approx([0.9, 0.05, 0.05], abs=0.02)
    assert all(text.endswith("\n") for text in texts(store))  # a split ends with a line


@patient
@given(data=st.binary(min_size=3, max_size=300), cut=st.floats(0.2, 0.8))
def test_any_bytes_come_back(tmp_path_factory, data, cut):
    folder = tmp_path_factory.mktemp("any")
    (folder / "data.bin").write_bytes(b"x" + data)
    settings = OwnText(shares=(cut, 1 - cut), inputs=Inputs(binary="keep"))
    store = prepare_own_text([folder / "data.bin"], out=folder / "store", settings=settings)
    assert b"".join(store.tokenizer.decode_bytes(store.split(name).tokens) for name in store.splits) == b"x" + data


@patient
@given(text=st.text(min_size=1, max_size=200), kind=st.sampled_from(["char", "bpe"]))
def test_any_unicode_comes_back(tmp_path_factory, text, kind):
    folder = tmp_path_factory.mktemp("unicode")
    (folder / "text.txt").write_bytes(b"x" + text.encode())
    size = 300 if kind == "bpe" else None
    settings = OwnText(tokenizer=kind, shares=(1.0,), vocabulary_size=size, inputs=Inputs(binary="keep"))
    store = prepare_own_text([folder / "text.txt"], out=folder / "store", settings=settings)
    assert store.tokenizer.decode(store.split("train").tokens) == "x" + text


def test_words(story, tmp_path):
    settings = OwnText(tokenizer="word", lower=True, min_count=2)
    store = prepare_own_text([story], out=tmp_path / "store", settings=settings)
    words = store.tokenizer.words
    assert words[:2] == ["<eos>", "<unk>"]
    assert words[2:6] == ["line", "of", "the", "story,"]
    assert "0." not in words
    train = store.split("train")
    lines = STORY.encode()[: train.bytes].decode().count("\n")
    assert int((train.tokens == store.tokenizer.mark).sum()) == lines
    assert train.words == len(train) - lines
    assert store.manifest.unit == "perplexity_per_word"
    limited = OwnText(tokenizer="word", vocabulary_size=5)
    assert prepare_own_text([story], out=tmp_path / "five", settings=limited).tokenizer.size == 5


def test_the_last_line_ends_even_without_a_newline(tmp_path):
    (tmp_path / "a.txt").write_text("one two")
    (tmp_path / "b.txt").write_text("three\n")
    settings = OwnText(tokenizer="word", shares=(1.0,))
    store = prepare_own_text([tmp_path / "a.txt", tmp_path / "b.txt"], out=tmp_path / "store", settings=settings)
    assert texts(store) == ["one two\nthree\n"]
    assert store.split("train").document_starts.tolist() == [0, 3]


def test_a_file_larger_than_a_share_is_trained_on(tmp_path):
    """Whatever its name: held out, it would be most of what there is."""
    for number in range(30):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} is small\n" * 20)
    for name in "abcdefgh":
        path = tmp_path / "texts" / f"{name}.txt"
        path.write_text("large\n" * 2000)
        store = prepare_own_text([tmp_path / "texts"], out=tmp_path / name, settings=OwnText(split_by="file"))
        for split in ("valid", "test"):
            assert b"large" not in store.tokenizer.decode_bytes(store.split(split).tokens)
        path.unlink()


@patient
@given(
    lines=st.lists(st.integers(0, 3000), min_size=1, max_size=30),
    shares=st.sampled_from([(0.9, 0.05, 0.05), (0.9, 0.1), (0.5, 0.3, 0.2)]),
)
def test_every_split_has_about_its_share_wherever_lines_end(tmp_path_factory, lines, shares):
    """A header before one line of a hundred thousand bytes was all of train once."""
    text = "".join("x" * length + "\n" for length in lines) + "y" * 200
    folder = tmp_path_factory.mktemp("shares")
    (folder / "a.txt").write_text(text)
    store = prepare_own_text([folder / "a.txt"], out=folder / "store", settings=OwnText(shares=shares))
    assert "".join(texts(store)) == text
    for split, share in zip(store.manifest.splits, shares, strict=True):
        assert split.bytes >= share * len(text) / 2 - 2


def test_a_line_end_within_reach_is_where_splits_end(tmp_path):
    (tmp_path / "a.txt").write_text("# log\n" + "x y " * 3000 + "\n" + "line of text here\n" * 60)
    train, valid, test = texts(prepare_own_text([tmp_path / "a.txt"], out=tmp_path / "store", settings=OwnText()))
    assert train.endswith("x y \n")
    assert all(text.endswith("here\n") for text in (valid, test))


def test_files_stay_whole_when_split_by_file(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    names = [f"{n:02}.txt" for n in range(20)]
    for name in names:
        (folder / name).write_text(f"{name}\n")
    (folder / ".hidden").write_text("not this")
    settings = OwnText(split_by="file", shares=(0.8, 0.1, 0.1))
    store = prepare_own_text([folder], out=tmp_path / "store", settings=settings)
    found = [text.split("\n")[:-1] for text in texts(store)]
    assert sorted(file for files in found for file in files) == names
    assert [len(files) for files in found] == [16, 2, 2]
    assert all(files == sorted(files) for files in found)
    assert [split.documents for split in store.manifest.splits] == [16, 2, 2]


def test_splits_given(tmp_path):
    for name in ("train", "valid", "test"):
        (tmp_path / name).write_text(f"{name} text\n")
    given_paths = {name: [tmp_path / name] for name in ("train", "valid", "test")}
    settings = OwnText(tokenizer="word")
    store = prepare_given_splits(given_paths, out=tmp_path / "store", settings=settings)
    assert texts(store) == ["train text\n", "<unk> text\n", "<unk> text\n"]
    with pytest.raises(DataError, match="need a `train=`"):
        prepare_given_splits({"valid": [tmp_path / "valid"]}, out=tmp_path / "other", settings=settings)


def test_documents_by_blank_line_and_by_separator(tmp_path):
    path = tmp_path / "text"
    path.write_text("a\n\nb\nc\n\n\nd\n")
    blank = OwnText(documents="blank-line", shares=(1.0,))
    store = prepare_own_text([path], out=tmp_path / "blank", settings=blank)
    assert store.split("train").document_starts.tolist() == [0, 3, 9]
    path.write_text("a\n---\nb\n---\nc\n")
    apart = OwnText(documents="separator", separator="---", shares=(1.0,))
    store = prepare_own_text([path], out=tmp_path / "apart", settings=apart)
    assert texts(store) == ["a\nb\nc\n"]
    assert store.split("train").document_starts.tolist() == [0, 2, 4]


def test_standard_input(tmp_path):
    stdin = io.BytesIO(STORY.encode())
    store = prepare_own_text(["-"], out=tmp_path / "store", settings=WHOLE, standard_input=stdin)
    assert texts(store) == [STORY]
    assert store.manifest.name == "standard input"


def test_compressed_text_is_text(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"first\n"))
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("x/b.txt", "second\n")
    store = prepare_own_text([tmp_path / "a.gz", tmp_path / "b.zip"], out=tmp_path / "store", settings=WHOLE)
    assert texts(store) == ["first\nsecond\n"]


def test_a_large_text_uses_more_cores_and_gives_the_same(tmp_path, monkeypatch, story):
    settings = OwnText(tokenizer="word", shares=(1.0,))
    alone = prepare_own_text([story], out=tmp_path / "alone", settings=settings)
    monkeypatch.setattr("transformer_xl.data.corpora.dealing.WORTH_MORE_CORES_BYTES", 1)
    monkeypatch.setattr("transformer_xl.data.corpora.pieces.PIECE_BYTES", 500)
    monkeypatch.setattr("transformer_xl.data.corpora.dealing.cores", lambda: 2)
    many = prepare_own_text([story], out=tmp_path / "many", settings=settings)
    assert many.manifest == alone.manifest
    assert np.array_equal(many.split("train").tokens, alone.split("train").tokens)


def test_the_command_takes_all_of_it(txl, story, tmp_path):
    options = (
        "--tokenizer",
        "bpe",
        "--vocab-size",
        "300",
        "--lower",
        "--split",
        "0.8,0.2",
        "--documents",
        "blank-line",
    )
    code, out, err = txl("prepare", story, *options, "--out", tmp_path / "store", "--json")
    assert code == 0, err
    assert json.loads(out)["vocabulary_size"] == 300
    store = open_store(tmp_path / "store")
    assert store.splits == ("train", "valid")
    assert "".join(texts(store)) == STORY.lower()
    code, out, err = txl("prepare", "--train", story, "--valid", story, "--out", tmp_path / "given")
    assert code == 0, err
    assert "valid" in out
    code, _, err = txl("prepare", story, "--separator", "%%", "--split", "1", "--out", tmp_path / "apart")
    assert code == 0, err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tokenizer": "words"}, "did you mean word"),
        ({"tokenizer": 5}, "no `tokenizer=5`; known: bpe, byte"),
        ({"split_by": "files"}, "no `split_by=files`; did you mean file"),
        ({"documents": "x"}, "no `documents=x`; known: blank-line, file, separator"),
        ({"documents": "blank line"}, "did you mean blank-line"),
        ({"tokenizer": "char", "lower": "no"}, "`lower=` 'no' must be True or False"),
        ({"vocabulary_size": 10}, "`vocabulary_size=`"),
        ({"tokenizer": "bpe", "vocabulary_size": 0}, "`vocabulary_size=0` is too small for bpe"),
        ({"tokenizer": "bpe", "vocabulary_size": 1_000_001}, "1000001 must be a whole number, and at most 1,000,000"),
        ({"tokenizer": "word", "vocabulary_size": 10**90}, "a whole number of 299 bits must be a whole number"),
        ({"tokenizer": "bpe", "vocabulary_size": 300.5}, "`vocabulary_size=` 300.5 must be a whole number"),
        ({"tokenizer": "bpe", "vocabulary_size": True}, "`vocabulary_size=` True must be a whole number"),
        ({"tokenizer": "word", "min_count": 1.5}, "`min_count=1.5` is for `tokenizer=word`, a whole number"),
        ({"shares": "a"}, "`shares=` 'a' must be numbers, such as 0.9,0.05,0.05"),
        ({"shares": 0.9}, "`shares=` 0.9 must be numbers"),
        ({"shares": ("0.9", 0.1)}, "must be numbers"),
        ({"documents": "separator", "separator": 5}, "`separator=` 5 must be one line"),
        ({"tokenizer": "bpe", "vocabulary_size": 10}, "too small for bpe"),
        ({"tokenizer": "word", "vocabulary_size": 2}, "`vocabulary_size=2`"),
        ({"min_count": 2}, "`min_count=2`"),
        ({"tokenizer": "word", "min_count": 0}, "`min_count=0`"),
        ({"lower": True}, "`lower=`"),
        ({"shares": (0.5, 0.4)}, "`shares=0.5,0.4`"),
        ({"shares": (1.5, -0.5)}, "`shares="),
        ({"documents": "separator"}, "`separator="),
        ({"documents": "file", "separator": "x"}, "`separator="),
        ({"documents": "separator", "separator": " "}, "not blank"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, named):
    with pytest.raises(DataError, match=named):
        OwnText(**options)


def test_a_vocabulary_too_large_to_learn_is_one_sentence(txl, story, tmp_path):
    for size in ("999999999", "99999999999999999999999"):
        words = ("--tokenizer", "bpe", "--vocab-size", size, "--out", tmp_path / "store")
        code, out, err = txl("prepare", story, *words)
        assert (code, out) == (2, "")
        assert err == f"txl: --vocab-size {size} must be a whole number, and at most 1,000,000\n"
        assert not (tmp_path / "store").exists()


def test_a_choice_that_is_none_is_refused_from_python(story, tmp_path):
    with pytest.raises(TransformerXLError, match="did you mean file"):
        prepare(story, out=tmp_path / "store", documents="files")
    with pytest.raises(DataError, match="go together"):
        prepare(story, out=tmp_path / "store", documents="blank-line", separator="%")
    assert not (tmp_path / "store").exists()


def slow_by_file(sizes: list[int], order: list[int], shares: tuple[float, ...]) -> list[list[int]]:
    """By its words: each split in turn, the last first, takes the first that is no larger than its share, or else the first, until it has its share."""
    waiting, chosen = list(order), [list[int]() for _ in shares]
    for index in reversed(range(len(shares))):
        most = shares[index] * sum(sizes)
        while len(waiting) > index and (index == 0 or not chosen[index] or sum(sizes[n] for n in chosen[index]) < most):
            fitting = [n for n in waiting if index == 0 or sizes[n] <= most]
            chosen[index].append((fitting or waiting)[0])
            waiting.remove(chosen[index][-1])
    return [sorted(numbers) for numbers in chosen]


@patient
@given(
    sizes=st.lists(st.integers(1, 400), min_size=3, max_size=40),
    shares=st.sampled_from([(0.9, 0.05, 0.05), (0.5, 0.3, 0.2), (0.6, 0.4), (1.0,)]),
)
def test_files_are_dealt_out_as_the_rule_says(tmp_path_factory, sizes, shares):
    folder = tmp_path_factory.mktemp("dealt")
    sources = [Source(path=folder / f"{n}.txt") for n in range(len(sizes))]
    for source, size in zip(sources, sizes, strict=True):
        source.path.write_bytes(b"x" * size)
    dealt = own_text._by_file(sources, OwnText(split_by="file", shares=shares))
    order = sorted(range(len(sizes)), key=lambda n: hashlib.sha256(f"{n}.txt".encode()).hexdigest())
    found = [[sources.index(part.source) for part in parts] for parts in dealt.values()]
    assert found == slow_by_file(sizes, order, shares)


def test_many_small_files_cost_no_more_each(tmp_path, monkeypatch):
    looked: list[Path] = []
    kind_of = unpacking.kind_of
    monkeypatch.setattr(unpacking, "kind_of", lambda path: looked.append(path) or kind_of(path))

    def calls_of_each(count: int) -> float:
        folder = tmp_path / str(count)
        folder.mkdir()
        for number in range(count):
            (folder / f"{number}.txt").write_text(f"text number {number} of some\n")
        profile = cProfile.Profile()
        looked.clear()
        profile.runcall(prepare_own_text, [folder], out=tmp_path / "store", settings=OwnText(split_by="file"))
        assert len(looked) <= 2 * count
        return pstats.Stats(profile).total_calls / count

    assert calls_of_each(400) < 1.1 * calls_of_each(100)
