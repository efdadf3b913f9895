"""The word corpora whose training text is not at hand, with small texts in place of it: which words are counted, and how."""

import hashlib
from dataclasses import replace

import pytest

from transformer_xl.data.corpora import recipes
from transformer_xl.data.corpora.recipes import LM1B, WIKITEXT_103, Counts, KnownFile
from transformer_xl.data.feeding.sentences import SentenceLanes
from transformer_xl.data.store import open_store

ARTICLES = {
    "train": " \n = One = \n \n b b a <unk> c \n \n = = Part = = \n \n b \n \n = Two = \n \n a \n \n",
    "valid": " \n = Three = \n \n a new b \n \n",
    "test": " \n = Four = \n \n c \n \n",
}


@pytest.fixture
def small_wikitext(monkeypatch, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name, text in ARTICLES.items():
        (folder / f"wiki.{name}.tokens").write_text(text)
    files = tuple(KnownFile(name=f"wiki.{name}.tokens", splits=(name,)) for name in ARTICLES)
    recipe = replace(WIKITEXT_103, files=files, counts=Counts(tokens={}, vocabulary=None))
    monkeypatch.setitem(recipes.RECIPES, "wikitext-103", recipe)
    return folder


def test_wikitext_103_counts_its_training_text_alone(small_wikitext, txl, tmp_path):
    # Beside the training text a list of words is not needed and not used.
    (small_wikitext / "vocab_counts.txt").write_text("wrong 1\n")
    code, _, err = txl("prepare", "wikitext-103", "--source", small_wikitext, "--out", tmp_path / "out")
    assert code == 0, err
    store = open_store(tmp_path / "out")
    assert store.tokenizer.words == ["<eos>", "=", "b", "a", "One", "<unk>", "c", "Part", "Two"]
    assert [split.documents for split in store.manifest.splits] == [2, 1, 1]
    valid = store.tokenizer.decode(store.split("valid").tokens)
    assert valid == "\n= <unk> =\n\na <unk> b\n\n"
    train = store.split("train")
    assert [store.tokenizer.decode(train.tokens[start : start + 3]) for start in train.document_starts] == [
        "= One =",
        "= Two =",
    ]


def test_wikitext_103_gives_unk_the_place_its_count_gives_it(small_wikitext, txl, tmp_path, monkeypatch):
    known = Counts(tokens={"train": 1000, "valid": 11}, vocabulary=4)
    monkeypatch.setitem(
        recipes.RECIPES, "wikitext-103", replace(recipes.RECIPES["wikitext-103"], counts=known, train_lines=100)
    )
    vocabulary = tmp_path / "words.txt"
    vocabulary.write_text("b 700\na 50\nmadeupword0000 0\n")  # leaves 1000 - 100 - 750 for <unk>
    words = ("--splits", "valid", "--vocab", vocabulary, "--source", small_wikitext)
    code, _, err = txl("prepare", "wikitext-103", *words, "--out", tmp_path / "out")
    assert code == 0, err
    assert open_store(tmp_path / "out").tokenizer.words == ["<eos>", "b", "<unk>", "a"]


@pytest.fixture
def small_lm1b(monkeypatch, tmp_path):
    folder = tmp_path / "in" / "training"
    folder.mkdir(parents=True)
    (folder / "news.en-00002-of-00100").write_text("b a\na rare\n")
    (folder / "news.en-00001-of-00100").write_text("a b c\nc b c\n")
    heldout = "a new b\nc\n"
    (folder.parent / "news.en.heldout-00000-of-00050").write_text(heldout)
    (folder.parent / "news.en.heldout-00001-of-00050").write_text("not this\n")
    held = replace(LM1B.files[1], bytes=len(heldout), md5=hashlib.md5(heldout.encode()).hexdigest())
    counts = Counts(tokens={"valid": 8, "test": 8}, vocabulary=None)
    monkeypatch.setitem(recipes.RECIPES, "lm1b", replace(LM1B, files=(LM1B.files[0], held), counts=counts))
    return folder.parent


def test_one_billion_word_counts_its_shards_in_order(small_lm1b, txl, tmp_path):
    code, _, err = txl("prepare", "lm1b", "--source", small_lm1b, "--out", tmp_path / "out")
    assert code == 0, err
    store = open_store(tmp_path / "out")
    assert store.tokenizer.words == ["<S>", "<UNK>", "a", "b", "c"]
    assert "2 training shards of 99" in store.manifest.rule
    assert store.tokenizer.decode(store.split("train").tokens) == "a b c\nc b c\nb a\na <UNK>\n"
    assert store.tokenizer.decode(store.split("test").tokens) == "a <UNK> b\nc\n"
    assert store.split("train").sentence_starts.tolist() == [0, 5, 10, 14]
    segment = SentenceLanes(store.split("valid"), lanes=1, segment=20).next()
    assert sorted(segment.targets[0].tolist()) == sorted([-1, 0, 0, 1, 2, 3, 4])  # <S> -> <S> is the -1


def test_one_billion_word_takes_the_vocabulary_beside_it(small_lm1b, txl, tmp_path):
    (small_lm1b / "1b_word_vocab.txt").write_text("a\n<UNK>\n")
    code, _, err = txl("prepare", "lm1b", "--source", small_lm1b, "--out", tmp_path / "out")
    assert code == 0, err
    store = open_store(tmp_path / "out")
    assert store.tokenizer.words == ["<S>", "a", "<UNK>"]
    assert "read from 1b_word_vocab.txt" in store.manifest.rule
