"""Cutting: however small the pieces, the tokens and documents are those of the whole text."""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from data_helpers import patient
from hypothesis import example, given
from hypothesis import strategies as st

from transformer_xl.data.corpora import pieces
from transformer_xl.data.corpora.dealing import ordered_map, processes
from transformer_xl.data.corpora.encoding import encode_piece
from transformer_xl.data.corpora.pieces import (
    BY_ARTICLE,
    BY_BLANK_LINE,
    BY_FILE,
    NO_DOCUMENTS,
    Part,
    by_separator,
    cut,
)
from transformer_xl.data.corpora.sources import Source
from transformer_xl.data.store import SplitWriter, smallest_dtype
from transformer_xl.data.text.tokenizers import ByteTokenizer, WordTokenizer
from transformer_xl.errors import DataError

LINES = st.lists(st.sampled_from(["", " ", "a", "b c", "é日", "%%", " = T = ", "%% x", "\t", "long " * 9]), max_size=40)
RULES = [NO_DOCUMENTS, BY_FILE, BY_BLANK_LINE, BY_ARTICLE, by_separator("%%")]


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pieces") / "text"


def encoded(file, tokenizer, rule, fallback):
    """As a store has it."""
    with SplitWriter(folder=file.parent, name="train", vocabulary=tokenizer.size) as writer:
        for piece in cut([Part(source=Source(path=file))], fallback=fallback):
            writer.append(encode_piece((tokenizer, rule), piece))
    dtype = smallest_dtype(tokenizer.size)
    tokens = np.fromfile(file.parent / "train.tokens.bin", dtype).tolist()
    return tokens, np.fromfile(file.parent / "train.documents.bin", "<i8").tolist()


@patient
@example(lines=[" = T = "], rule=BY_FILE, ended=False, size=1)  # pieces that have no token
@given(lines=LINES, rule=st.sampled_from(RULES), ended=st.booleans(), size=st.integers(1, 40))
def test_small_pieces_give_what_the_whole_gives(file, lines, rule, ended, size):
    file.write_text("\n".join(lines) + ("\n" if ended else ""), encoding="utf-8")
    words = WordTokenizer(["<eos>", "<unk>", "a", "b", "%%"])
    for tokenizer, fallback in ((ByteTokenizer(), "character"), (words, "word")):
        whole = encoded(file, tokenizer, rule, fallback)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pieces, "PIECE_BYTES", size)
            patch.setattr(pieces, "MARGIN_BYTES", 64)
            assert encoded(file, tokenizer, rule, fallback) == whole


@patient
@given(lines=LINES)
def test_documents_begin_where_the_rule_says(file, lines):
    text = "".join(f"{line}\n" for line in lines)
    file.write_text(text, encoding="utf-8")
    data = text.encode()

    tokens, starts = encoded(file, ByteTokenizer(), BY_FILE, "character")
    assert bytes(tokens) == data
    assert starts == ([0] if data else [])

    _, starts = encoded(file, ByteTokenizer(), BY_BLANK_LINE, "character")
    blank, expected, here = False, {0} if data else set(), 0
    for line in data.split(b"\n")[:-1]:
        if blank and line.strip():
            expected.add(here)
        blank, here = not line.strip(), here + len(line) + 1
    assert starts == sorted(expected)

    tokens, starts = encoded(file, ByteTokenizer(), by_separator("%%"), "character")
    documents = re.split(rb"(?m)^%%[ \t\r]*\n", data)
    assert bytes(tokens) == b"".join(documents)
    begins = np.cumsum([0, *map(len, documents)])[:-1]
    assert starts == sorted({int(begin) for begin in begins if begin < len(tokens)})


def test_a_range_of_a_source_is_read_alone(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(bytes(range(100)))
    (piece,) = cut([Part(source=Source(path=file), start=10, stop=20)], fallback="character")
    assert (piece.data, piece.offset, piece.first, piece.last) == (bytes(range(10, 20)), 10, True, True)


def by_two(work, items, *, shared):
    with processes(work, shared, workers=2) as pool:
        return list(ordered_map(pool, items))


def test_several_workers_keep_the_order():
    assert by_two(divmod, range(1, 40), shared=1000) == [divmod(1000, n) for n in range(1, 40)]


def kill_own_process(shared: object, item: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of another kind")
def test_a_killed_worker_is_said_in_one_sentence():
    with pytest.raises(DataError, match="worker process was killed"):
        by_two(kill_own_process, range(9), shared=None)


PARENT = """
import os, sys
from transformer_xl.data.corpora.dealing import ordered_map, processes
def show(shared, item):
    return os.getpid()
if __name__ == "__main__":
    with processes(show, None, workers=2) as pool:
        for pid in ordered_map(pool, iter(int, 1)):
            print(pid, flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are looked up in /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_go_when_their_parent_does(tmp_path, how):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    # A shell makes what it runs in the background deaf to SIGINT; where that is the suite, the parent must hear it all the same.
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hears
    ) as parent:
        workers = {int(parent.stdout.readline()) for _ in range(200)}
        parent.send_signal(how)
        parent.communicate()
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        time.sleep(0.02)  # the suite's time limit ends this if they stay
    assert parent.returncode != 0


def test_a_worker_that_fails_says_so():
    with pytest.raises(ZeroDivisionError):
        by_two(divmod, [1, 0, *[5] * 30], shared=1)
