"""txl compress and txl decompress: files and pipes; what cannot be done is one sentence, and nothing is written."""

import io
import json
import sys
from pathlib import Path

import pytest
from damage import Head, joined, parts

import transformer_xl as txl
from transformer_xl.cli import main

TEXT = Path(json.__file__).read_bytes()


def test_the_commands_write_a_file_and_read_it_again(trained_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_bytes(TEXT[:3000])
    model = ["--model", str(trained_run)]
    assert main(["compress", "notes.txt", *model]) == 0
    said = capsys.readouterr().out
    written = Path("notes.txt.txl").stat().st_size
    assert said == f"notes.txt.txl: {written:,} bytes for 3,000, {8 * written / 3000:.3f} bits per byte\n"
    assert main(["decompress", "notes.txt.txl", *model]) == 2
    assert capsys.readouterr().err.endswith("txl: notes.txt exists; name the file to write with --out\n")
    assert main(["decompress", "notes.txt.txl", "-o", "again.txt", *model]) == 0
    assert capsys.readouterr().out == "again.txt: 3,000 bytes\n"
    assert Path("again.txt").read_bytes() == TEXT[:3000]
    assert main(["compress", "notes.txt", "-o", "best.txl", "--level", "best", *model]) == 0
    assert txl.decompress(Path("best.txl").read_bytes(), model=trained_run) == TEXT[:3000]


def test_pipes(trained_run, capfdbinary, monkeypatch):
    model = ["--model", str(trained_run)]

    def through(command, data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert main([command, "-", *model]) == 0
        return capfdbinary.readouterr().out

    assert through("decompress", through("compress", TEXT[:2000])) == TEXT[:2000]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["compress", "nothing.txt"], "nothing.txt does not exist; name a file, or - for standard input"),
        (["compress", "."], ". is a folder"),
        (["compress", "notes.txt", "-o", "notes.txt"], "notes.txt is the file that is read"),
        (["compress", "notes.txt", "-o", "/dev/null"], "/dev/null is no plain file; name one to write, or - for"),
        (["decompress", "notes.txt"], "notes.txt does not end in .txl; name the file to write with --out"),
        (["decompress", "notes.txt", "-o", "out"], "notes.txt is no file that txl compress wrote"),
        (["decompress", "cut.txl"], "cut.txl ends too early: it was cut off"),
        (["decompress", "long.txl"], "long.txl goes on behind its end"),
        (["decompress", "other.txl"], "other.txl was compressed with another model"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_writes_nothing(
    loaded, trained_run, words, told, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    archive = txl.compress(TEXT[:100], model=loaded)
    _, blocks = parts(archive)
    Path("notes.txt").write_bytes(TEXT[:100])
    Path("cut.txl").write_bytes(archive[:-1])
    Path("long.txl").write_bytes(archive + b"\n")
    Path("other.txl").write_bytes(joined(Head(fingerprint=bytes(8), lanes=1), blocks))
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main([*words, "--model", str(trained_run)]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"txl: {told}")
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == before
