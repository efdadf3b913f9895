"""Bad input on the command line: one sentence, exit code 2, nothing left behind."""

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import pytest
from data_helpers import one_sentence

from transformer_xl.data.store import SplitWriter, open_store
from transformer_xl.errors import DataError
from transformer_xl.running import prepare

NOBODY = 65534


@pytest.fixture
def refused(txl, tmp_path):
    """Runs a command that must be refused; whatever was in the folder before, and nothing else, is there afterwards."""

    def run(*words: object) -> str:
        before = sorted(path for path in tmp_path.rglob("*"))
        code, out, err = txl(*words)
        assert code == 2, out
        assert out == ""
        assert one_sentence(err), err
        assert sorted(path for path in tmp_path.rglob("*")) == before
        return err

    return run


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("some text of one's own\n" * 100)
    return path


def test_empty_file(refused, tmp_path):
    (tmp_path / "empty.txt").touch()
    assert "empty.txt is empty" in refused("prepare", tmp_path / "empty.txt", "--out", tmp_path / "out")


def test_empty_standard_input(refused, tmp_path, monkeypatch):
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert "standard input is empty" in refused("prepare", "-", "--out", tmp_path / "out")


@pytest.mark.parametrize(
    "words", [("prepare", ""), ("prepare", "--train", ""), ("prepare", "text.txt", ""), ("fit", "")]
)
def test_an_empty_path_is_not_the_current_folder(refused, text, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    out = ("--out" if words[0] == "prepare" else "--run", tmp_path.parent / f"{tmp_path.name}-out")
    assert refused(*words, *out).startswith("txl: a path is empty, as where a variable was not set; give a file")
    with pytest.raises(DataError, match="a path is empty"):
        prepare("", out=out[1])
    assert not out[1].exists()


@pytest.mark.parametrize("command", ["prepare", "fit"])
def test_what_is_no_plain_file(refused, tmp_path, command):
    os.mkfifo(tmp_path / "pipe")
    out = ("--out" if command == "prepare" else "--run", tmp_path / "out")
    way_out = "give what comes out of it to txl prepare - or write it to a file first"
    assert f"{tmp_path}/pipe is a pipe and no plain file; {way_out}" in refused(command, tmp_path / "pipe", *out)
    assert f"/dev/null is a device and no plain file; {way_out}" in refused(command, os.devnull, *out)


def test_standard_input_is_there_once(refused, tmp_path, text, monkeypatch):
    with text.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert "- is given twice" in refused("prepare", "-", "-", "--out", tmp_path / "out")


def test_folder_without_text(refused, tmp_path):
    (tmp_path / "folder" / "deeper").mkdir(parents=True)
    (tmp_path / "folder" / ".hidden").write_text("x")
    (tmp_path / "folder" / "empty").touch()
    assert "folder holds no text" in refused("prepare", tmp_path / "folder", "--out", tmp_path / "out")


@pytest.mark.parametrize("tokenizer", ["char", "word"])
def test_not_utf8(refused, tmp_path, tokenizer):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"plain line\n" * 500 + "caf\u00e9\n".encode("latin-1"))
    err = refused("prepare", path, "--tokenizer", tokenizer, "--out", tmp_path / "out")
    assert "latin.txt is not UTF-8 at byte 5,503 (0xe9)" in err


@pytest.mark.parametrize("tokenizer", [(), ("--tokenizer", "bpe", "--vocab-size", "300")], ids=["byte", "bpe"])
def test_bytes_and_byte_pairs_need_no_utf8(txl, tmp_path, tokenizer):
    path = tmp_path / "latin.txt"
    path.write_bytes("caf\u00e9 latt\u00e9\n".encode("latin-1") * 100)
    code, _, err = txl("prepare", path, "--out", tmp_path / "out", "--split", "1", *tokenizer)
    assert code == 0, err
    store = open_store(tmp_path / "out")
    assert store.tokenizer.decode_bytes(store.split("train").tokens) == path.read_bytes()


def test_unknown_name(refused, tmp_path):
    err = refused("prepare", "enwik9", "--out", tmp_path / "out")
    assert "enwik9; did you mean enwik8?" in err
    assert "nothing to prepare" in refused("prepare", "--out", tmp_path / "out")


def test_a_file_that_is_there_twice(refused, tmp_path):
    (tmp_path / "a").mkdir()
    for place in (tmp_path / "enwik8", tmp_path / "a" / "enwik8"):
        place.write_text("x")
    err = refused("prepare", "enwik8", "--source", tmp_path, "--out", tmp_path / "out")
    assert "enwik8 is there twice" in err


def test_missing_source(refused, tmp_path):
    err = refused("prepare", "enwik8", "--source", tmp_path / "nowhere", "--out", tmp_path / "out")
    assert "nowhere does not exist" in err


def test_wrong_checksum(refused, tmp_path):
    (tmp_path / "enwik8").write_bytes(b"not enwik8")
    err = refused("prepare", "enwik8", "--source", tmp_path / "enwik8", "--out", tmp_path / "deep" / "out")
    assert f"{tmp_path / 'enwik8'} is not the enwik8 we know" in err
    assert "a1fa5ffddb56f4953e226637dabbb36a" in err
    assert f"its md5 is {hashlib.md5(b'not enwik8').hexdigest()} (10 bytes)" in err


def test_archive_of_something_else(refused, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("readme", "x")
    err = refused("prepare", "enwik8", "--source", tmp_path / "a.zip", "--out", tmp_path / "out")
    assert "holds no enwik8 (100,000,000 bytes, md5 a1fa" in err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("text8", "--newlines", "drop"), "--newlines drop"),
        (("ptb", "--vocab", "x"), "--vocab"),
        (("ptb", "--train", "x"), "--train"),
        (("ptb", "--splits", "trian"), "did you mean train"),
        (("ptb", "--lower"), "--lower"),
        (("ptb", "text8"), "prepared alone"),
        (("python", "--source", "x"), "--source"),
        (("python", "--train", "x"), "--train"),
        (("python", "--split", ""), "--split"),
        (("python", "--vocab-size", "0"), "--vocab-size"),
        (("ptb", "--splits", ""), "no split"),
    ],
)
def test_options_that_do_not_apply_are_refused(refused, tmp_path, words, named):
    assert named in refused("prepare", *words, "--out", tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--source", "x"), "--source"),
        (("--train", "x"), "a path does not go with --train"),
        (("--split", "half"), "--split half"),
        (("--split", ""), "--split '' must be shares such as 0.9,0.05,0.05"),
        (("--separator", ""), "--separator '' must be one line"),
        (("--split", "0.5,0.5,0.5"), "--split 0.5,0.5,0.5"),
        (("--split-by", "file"), "cannot be split into 3 by file"),
        (("--tokenizer", "char", "--vocab-size", "9"), "--vocab-size"),
    ],
)
def test_own_text_with_options_that_cannot_work(refused, text, tmp_path, options, named):
    assert named in refused("prepare", text, *options, "--out", tmp_path / "out")


def test_too_little_for_three_splits(refused, tmp_path):
    (tmp_path / "tiny").write_text("a")
    assert "holds no tokens" in refused("prepare", tmp_path / "tiny", "--out", tmp_path / "out")


def test_a_folder_that_is_no_store_is_never_replaced(refused, text, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    assert "is no data store" in refused("prepare", text, "--out", tmp_path / "home")
    assert "is no data store" in refused("prepare", text, "--out", text)


def test_an_older_store_is_replaced_only_by_a_finished_one(refused, txl, text, tmp_path):
    assert txl("prepare", text, "--out", tmp_path / "out")[0] == 0
    old = open_store(tmp_path / "out").manifest
    (tmp_path / "bad").write_bytes(b"\xff")
    refused("prepare", tmp_path / "bad", "--tokenizer", "char", "--out", tmp_path / "out")
    assert open_store(tmp_path / "out", verify=True).manifest == old
    assert txl("prepare", text, "--tokenizer", "char", "--out", tmp_path / "out")[0] == 0
    assert open_store(tmp_path / "out", verify=True).manifest.tokenizer_kind == "char"


def test_no_space_left(refused, text, tmp_path, monkeypatch):
    def full(self: SplitWriter, encoded: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SplitWriter, "append", full)
    assert "no space left for" in refused("prepare", text, "--out", tmp_path / "out")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can mount a small disk")
def test_no_space_left_on_a_real_small_disk(txl, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True).returncode
    ):
        pytest.skip("mounting is not allowed here")
    try:
        (tmp_path / "text").write_bytes(b"a line of text\n" * 100_000)
        code, _, err = txl("prepare", tmp_path / "text", "--out", disk / "out")
        assert code == 2
        assert one_sentence(err)
        assert f"no space left for {disk / 'out'}" in err
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions of another kind")
def test_read_only_target(txl):
    # Outside tmp_path, which another user may not enter: root may write anywhere, so root becomes somebody else.
    folder = Path(tempfile.mkdtemp())
    am_root = os.geteuid() == 0
    try:
        (folder / "text").write_text("some text\n" * 100)
        (folder / "locked").mkdir()
        (folder / "locked").chmod(0o555)
        folder.chmod(0o755)
        if am_root:
            os.seteuid(NOBODY)
        code, _, err = txl("prepare", folder / "text", "--out", folder / "locked" / "out")
    finally:
        if am_root:
            os.seteuid(0)
        left = list((folder / "locked").iterdir())
        shutil.rmtree(folder)
    assert code == 2
    assert one_sentence(err)
    assert "locked/out cannot be written: Permission denied" in err
    assert left == []


@pytest.mark.skipif(sys.platform == "win32", reason="signals of another kind")
@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_a_killed_prepare_leaves_nothing_that_looks_finished(tmp_path, how, code):
    out = tmp_path / "out"
    prepare = subprocess.Popen(
        [sys.executable, "-m", "transformer_xl", "prepare", "-", "--out", out],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell's background jobs, and all that they start, would not hear SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with prepare:
        prepare.stdin.write(b"the beginning of a long text\n" * 1000)
        prepare.stdin.flush()
        while not list(tmp_path.glob("*/*/standard input")) and not list(tmp_path.glob(".*/*/standard input")):
            assert prepare.poll() is None
            time.sleep(0.02)
        prepare.send_signal(how)
        assert prepare.wait() == code
    assert not out.exists()
    if how == signal.SIGINT:
        assert not list(tmp_path.iterdir())
    for left in tmp_path.iterdir():
        with pytest.raises(DataError, match="holds no data store"):
            open_store(left)


@pytest.mark.parametrize("content", ["", "one two three\n", "a\na\n"])
def test_a_file_that_is_no_vocabulary(refused, tmp_path, content):
    (tmp_path / "wiki.valid.tokens").write_text("a\n")
    (tmp_path / "wiki.test.tokens").write_text("a\n")
    (tmp_path / "vocabulary").write_text(content)
    words = ("wikitext-103", "--splits", "valid,test", "--source", tmp_path, "--vocab", tmp_path / "vocabulary")
    assert "is no vocabulary" in refused("prepare", *words, "--out", tmp_path / "out")


def test_a_sentence_mark_inside_the_text(refused, tmp_path):
    (tmp_path / "shard").write_text("a b\nc <S> d\n")
    (tmp_path / "news.en.heldout-00000-of-00050").write_text("a\n")
    words = ("lm1b", "--source", tmp_path, "--train", tmp_path / "shard")
    assert "holds the word <S>" in refused("prepare", *words, "--out", tmp_path / "out")
