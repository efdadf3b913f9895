"""`txl score`: each token's surprise as the text comes, equal to scoring it whole, in memory that does not grow."""

import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest

import transformer_xl as txl
from transformer_xl.cli import main
from transformer_xl.errors import InputError
from transformer_xl.training import train

TEXT = "def naïve(x):\n    return x  # 音\n" * 40


@pytest.fixture(scope="module")
def word_run(word_store, word_config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("word-run") / "small"
    train(word_config, store=word_store, folder=folder, command="txl train small")
    return folder


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_lines_are_the_librarys_losses(trained_run, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    assert main(["score", str(trained_run), str(tmp_path / "text.txt"), "--summary"]) == 0
    shown = capsys.readouterr()
    found = lines(shown.out)
    bits = txl.load(trained_run).score(TEXT).bits[1:]
    assert found[0]["bits"] is None
    np.testing.assert_allclose([line["bits"] for line in found[1:]], bits, atol=1e-4)
    assert [line["offset"] for line in found] == list(range(len(TEXT.encode())))
    assert bytes(line["id"] for line in found) == TEXT.encode()
    assert [line["token"] for line in found[4:8]] == ["n", "a", "\\xc3", "\\xaf"]
    mean = bits.mean(dtype=np.float64)
    assert shown.err == (
        "computing on cpu, 1 thread\n"
        f"{len(bits):,} tokens after the first: {mean:.4f} bits per token, {mean:.4f} bits per byte, perplexity {2**mean:,.2f}\n"
    )


def test_words_are_shown_where_they_stand(word_run, tmp_path, capsys):
    text = "def load ( fp ) :\n\nNeverHeardOf the object\n"
    (tmp_path / "text.txt").write_text(text)
    assert main(["score", str(word_run), str(tmp_path / "text.txt"), "--summary"]) == 0
    shown = capsys.readouterr()
    found = lines(shown.out)
    bits = txl.load(word_run).score(text).bits[1:]
    np.testing.assert_allclose([line["bits"] for line in found[1:]], bits, atol=1e-4)
    assert [line["token"] for line in found[-5:]] == ["<eos>", "<unk>", "the", "object", "<eos>"]
    assert text[found[-3]["offset"] :].startswith("the object")
    per_byte = bits.sum(dtype=np.float64) / (len(text) - found[1]["offset"])
    assert f"{per_byte:.4f} bits per byte" in shown.err


@pytest.mark.processes
def test_a_pipe_is_scored_as_it_comes(trained_run):
    """The first lines come while the pipe is still open; a reader that leaves ends it quietly."""
    command = [sys.executable, "-m", "transformer_xl", "score", str(trained_run), "-"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        process.stdin.write(b"hello")
        process.stdin.flush()
        assert [json.loads(process.stdout.readline())["token"] for _ in range(5)] == list("hello")
        process.stdout.close()
        process.stdin.write(b" world")
        process.stdin.close()
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == b"computing on cpu, 1 thread\n"


SIZES = """
import io, resource, sys
from transformer_xl.cli import main
class Text(io.RawIOBase):
    left, early = int(sys.argv[2]), None
    def read1(self, size):
        if self.early is None and self.left < int(sys.argv[2]) - 60_000:
            Text.early = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        part = b"some text, over and over.\\n"[: self.left] * 64
        self.left -= len(part)
        return part if self.left > 0 else b""
class Input:
    buffer = Text()
sys.stdin = Input()
sys.stdout = open("/dev/null", "w")
assert main(["score", sys.argv[1], "-"]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - Text.early, file=sys.stderr)
"""


@pytest.mark.processes
def test_memory_does_not_grow_with_the_text(trained_run):
    """In kilobytes, from the 60,000th byte to the 300,000th."""
    command = [sys.executable, "-c", SIZES, str(trained_run), "300000"]
    answer = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert int(answer.stderr.split()[-1]) < 3000


def test_bytes_that_are_no_text_are_scored_by_a_byte_model(trained_run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\xff")))
    assert main(["score", str(trained_run), "-"]) == 0
    assert [line["token"] for line in lines(capsys.readouterr().out)] == ["c", "a", "f", "\\xe9", "\\xff"]


def test_what_cannot_be_scored_is_one_sentence(trained_run, word_run, tmp_path, capsys):
    def error(*words):
        assert main(["score", *map(str, words)]) == 2
        return capsys.readouterr().err

    (tmp_path / "latin.txt").write_bytes(b"def caf\xe9 x")
    (tmp_path / "empty.txt").write_text("")
    assert "latin.txt is not UTF-8 at byte 7 (0xe9)" in error(word_run, tmp_path / "latin.txt")
    assert "empty.txt holds no tokens, so there is nothing to score" in error(trained_run, tmp_path / "empty.txt")
    assert "gone.txt does not exist; name a file, or - for standard input" in error(trained_run, tmp_path / "gone.txt")
    (tmp_path / "text.txt").write_text("abc")
    assert "a model with memory 0 sees no text" in error(trained_run, tmp_path / "text.txt", "--memory", "0")
    with pytest.raises(InputError, match="has nothing to predict"):
        txl.load(trained_run).score("a")


def test_memory_is_as_asked(trained_run, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    assert main(["score", str(trained_run), str(tmp_path / "text.txt"), "--memory", "3"]) == 0
    found = [line["bits"] for line in lines(capsys.readouterr().out)[1:]]
    np.testing.assert_allclose(found, txl.load(trained_run, memory=3).score(TEXT).bits[1:], atol=1e-4)


def test_one_token_has_nothing_before_it(trained_run, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("a")
    assert main(["score", str(trained_run), str(tmp_path / "text.txt"), "--summary"]) == 0
    shown = capsys.readouterr()
    assert lines(shown.out) == [{"token": "a", "id": 97, "bits": None, "offset": 0}]
    assert "nothing could be predicted" in shown.err
