"""Counts of the real files, against what is known of them. Skipped where the files are not at hand."""

import hashlib
import json

import numpy as np
import pytest

from transformer_xl.data.corpora.recipes import SPLITS_MD5
from transformer_xl.data.feeding.evaluation_stream import EvaluationStream
from transformer_xl.data.store import open_store


def prepared(txl, tmp_path, *words):
    code, out, err = txl("prepare", *words, "--out", tmp_path / "store", "--json")
    assert code == 0, err
    assert json.loads(out)["splits"]
    return open_store(tmp_path / "store", verify=True)


def tokens(store):
    return tuple(split.tokens for split in store.manifest.splits)


def test_enwik8(txl, tmp_path, corpora):
    store = prepared(txl, tmp_path, "enwik8", "--source", corpora / "enwik8" / "enwik8.gz")
    assert tokens(store) == (90_000_000, 5_000_000, 5_000_000)
    assert store.manifest.vocabulary_size == store.tokenizer.size == 205
    assert store.manifest.unit == "bits_per_character"
    for name, values in (("train", 205), ("valid", 203), ("test", 198)):
        split = store.split(name)
        assert split.tokens.dtype == np.uint8
        text = store.tokenizer.decode_bytes(split.tokens)
        assert hashlib.md5(text).hexdigest() == SPLITS_MD5["enwik8"][name]
        assert len(np.unique(split.tokens)) == values
        assert all(text[start : start + 8] == b"  <page>" for start in split.document_starts)
    shares = np.bincount(split.tokens) / len(split)
    entropy = -sum(share * np.log2(share) for share in shares if share)
    assert round(entropy, 4) == 5.0997


def test_enwik8_as_the_paper_read_it(txl, tmp_path, corpora):
    store = prepared(txl, tmp_path, "enwik8", "--newlines", "drop", "--source", corpora / "enwik8")
    assert tokens(store) == (88_982_818, 4_945_742, 4_943_417)
    assert store.tokenizer.size == 204
    assert "newlines dropped" in store.manifest.rule
    assert store.split("test").bytes == 5_000_000
    split = store.split("valid")
    starts = split.document_starts
    assert len(starts) == 574
    assert all(store.tokenizer.decode(split.tokens[start : start + 8]) == "  <page>" for start in starts)


def test_text8(txl, tmp_path, corpora):
    store = prepared(txl, tmp_path, "text8", "--source", corpora / "text8")
    assert tokens(store) == (90_000_000, 5_000_000, 5_000_000)
    assert store.tokenizer.characters == " abcdefghijklmnopqrstuvwxyz"
    for name in store.splits:
        text = store.tokenizer.decode_bytes(store.split(name).tokens) if name != "train" else None
        assert text is None or hashlib.md5(text).hexdigest() == SPLITS_MD5["text8"][name]


def test_penn_treebank(txl, tmp_path, corpora):
    store = prepared(txl, tmp_path, "ptb", "--source", corpora / "ptb")
    assert tokens(store) == (929_589, 73_760, 82_430)
    assert store.tokenizer.size == 10_000
    assert "<unk>" in store.tokenizer.words
    assert store.tokenizer.words[:3] == ["aer", "banknote", "berlitz"]  # first appearance
    assert store.tokenizer.token(int(store.split("train").tokens[-1])) == "<eos>"


def test_wikitext_2(txl, tmp_path, corpora):
    store = prepared(txl, tmp_path, "wikitext-2", "--source", corpora / "wikitext-2")
    assert tokens(store) == (2_088_628, 217_646, 245_569)
    assert store.tokenizer.size == 33_278
    assert [split.documents for split in store.manifest.splits] == [600, 60, 60]
    assert store.tokenizer.words[:4] == ["<eos>", "the", ",", "."]
    text = (corpora / "wikitext-2" / "wiki.valid.tokens").read_text(encoding="utf-8")
    words = "\n".join(" ".join(line.split()) for line in text.split("\n"))
    assert store.tokenizer.decode(store.split("valid").tokens) == words
    counts = np.bincount(store.split("train").tokens, minlength=store.tokenizer.size) + 1
    surprise = -np.log(counts / counts.sum())[store.split("test").tokens].mean()
    assert np.exp(surprise) == pytest.approx(914.4, abs=0.1)


def test_wikitext_103_against_its_vocabulary(txl, tmp_path, corpora):
    source = corpora / "wikitext-103"
    store = prepared(txl, tmp_path, "wikitext-103", "--splits", "valid,test", "--source", source)
    assert tokens(store) == (217_646, 245_569)
    assert store.tokenizer.size == 267_735
    assert store.tokenizer.words[:4] == ["<eos>", "the", ",", "."]
    assert store.split("test").tokens.dtype == np.uint32
    text = (source / "wiki.test.tokens").read_text(encoding="utf-8")
    assert store.tokenizer.decode(store.split("test").tokens).split() == text.split()  # every word is in the vocabulary


def test_wikitext_103_without_its_training_text_says_what_is_missing(txl, tmp_path, corpora):
    code, _, err = txl("prepare", "wikitext-103", "--source", corpora / "wikitext-103", "--out", tmp_path / "store")
    assert code == 2
    assert "wiki.train.tokens" in err
    assert "--splits valid,test" in err


def test_one_billion_word_heldout(txl, tmp_path, corpora):
    source = corpora / "lm1b"
    shards = sorted(source.glob("news.en.heldout-0001*"))
    store = prepared(txl, tmp_path, "lm1b", "--source", source, "--train", *shards)
    valid = store.split("valid")
    assert valid.words == 153_583
    assert len(valid.sentence_starts) == 6_075
    assert len(valid) == 153_583 + 2 * 6_075
    assert tokens(store)[1] == tokens(store)[2]
    scored = sum(int((s.targets >= 0).sum()) for s in EvaluationStream(valid, lanes=3, segment=64, warm_up=64))
    assert scored == 159_658  # the words and one end mark a sentence
    stream = EvaluationStream(valid, lanes=3, segment=64, warm_up=64, score_boundaries=True)
    assert sum(int((s.targets >= 0).sum()) for s in stream) == len(valid) - 1


def test_one_billion_word_against_a_vocabulary_file(txl, tmp_path, corpora):
    vocabulary = tmp_path / "1b_word_vocab.txt"
    vocabulary.write_text("<S>\n</S>\n<UNK>\nthe\n,\n.\n", encoding="utf-8")
    words = ("lm1b", "--splits", "valid", "--source", corpora / "lm1b", "--vocab", vocabulary)
    store = prepared(txl, tmp_path, *words)
    assert store.tokenizer.words == ["<S>", "</S>", "<UNK>", "the", ",", "."]
    assert store.manifest.sentence_mark == 0
    assert int((store.split("valid").tokens == 0).sum()) == 2 * 6_075


def test_one_billion_word_without_a_vocabulary_says_so(txl, tmp_path, corpora):
    code, _, err = txl(
        "prepare", "lm1b", "--splits", "valid", "--source", corpora / "lm1b", "--out", tmp_path / "store"
    )
    assert code == 2
    assert "--vocab" in err
    assert not list(tmp_path.iterdir())
