"""Lines of a stream: their bits are those of the text, in whatever pieces it came and however often it was stopped; nothing grows; files are checked."""

import gzip
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import transformer_xl as txl
from mutations import mutated, mutated_table
from transformer_xl.cli import main
from transformer_xl.data.text.tokenizers import ByteTokenizer
from transformer_xl.errors import CheckpointError, DataError, InputError
from transformer_xl.evaluation import lines as lines_module
from transformer_xl.evaluation.lines import METADATA, LineScorer, Recent
from transformer_xl.tensor_files import reading, write_tensors

LOG = b"".join(b"10:%02d service %d answered in %d ms\n" % (n % 60, n % 3, n * 7 % 50) for n in range(60))
PLANTED = b"10:30 service 1 KERNEL PANIC: zyx!? at 0xdeadbeef\n"


@pytest.fixture(scope="module")
def loaded(trained_run):
    return txl.load(trained_run)


def in_pieces(scorer: LineScorer, data: bytes, cuts: list[int]) -> list:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    found = [line for begin, end in pairwise(edges) for line in scorer.feed(data[begin:end])]
    return [*found, *scorer.finish()]


def test_the_bits_of_lines_are_those_of_the_text(loaded):
    found = in_pieces(loaded.line_scorer(), LOG, [])
    whole = loaded.score(LOG)
    assert sum(line.bits for line in found) == pytest.approx(whole.total_bits, rel=1e-5)
    starts = np.array([line.offset for line in found])
    bits = np.add.reduceat(np.nan_to_num(whole.bits), starts)
    np.testing.assert_allclose([line.bits for line in found], bits, atol=1e-3)
    assert [line.text.encode() + b"\n" for line in found] == LOG.splitlines(keepends=True)
    assert [line.number for line in found] == list(range(1, 61))
    assert found[3].bits_per_byte == found[3].bits / len(LOG.splitlines(keepends=True)[3])


@settings(deadline=None, max_examples=25)
@given(data=st.lists(st.binary(max_size=20)).map(b"\n".join), cuts=st.lists(st.integers(0, 1000), max_size=4))
def test_pieces_change_nothing(loaded, data, cuts):
    for by in ("line", "document"):
        expected = in_pieces(loaded.line_scorer(by=by), data, [])
        assert in_pieces(loaded.line_scorer(by=by), data, cuts) == expected
        if by == "line":
            assert sum(line.bytes for line in expected) == len(data)
            assert [line.offset for line in expected] == [0, *np.cumsum([line.bytes for line in expected])][:-1]


@settings(deadline=None, max_examples=8)
@given(
    stops=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    by=st.sampled_from(["line", "document"]),
    piece=st.integers(100, 900),
)
def test_a_restart_changes_nothing(loaded, tmp_path_factory, stops, by, piece):
    """Stopped after any line, with more waiting in the piece that it came in, and in the middle of a line."""
    data, path = LOG[:900] + b"\n" + LOG[900:1800] + b"unfinished", tmp_path_factory.mktemp("state") / "state"
    scorer = loaded.line_scorer(by=by, last=20)
    found = []
    stops = list(stops)
    for start in range(0, len(data), piece):
        left = data[start : start + piece]
        while True:
            stopped = False
            for line in scorer.feed(left):
                found.append(line)
                if stops and len(found) >= stops[0]:
                    stopped = bool(stops.pop(0) + 1)
                    break
            scorer.save(path)
            scorer, left = loaded.line_scorer(by=by, last=20, state=path), b""
            if not stopped:
                break
    found += scorer.finish()
    assert found == in_pieces(loaded.line_scorer(by=by, last=20), data, [])


@pytest.mark.parametrize("run", ["word_run", "recurrent_run"])
def test_other_models_restart_too(run, request, tmp_path):
    loaded = txl.load(request.getfixturevalue(run))
    text = b"def load ( fp ) :\n\nthe object of is\n" * 5
    scorer = loaded.line_scorer()
    found = list(scorer.feed(text[:70]))
    scorer.save(tmp_path / "state")
    scorer = loaded.line_scorer(state=tmp_path / "state")
    found += [*scorer.feed(text[70:]), *scorer.finish()]
    assert found == in_pieces(loaded.line_scorer(), text, [])
    assert len(found) == 15


@pytest.fixture(scope="module")
def word_run(word_store, word_config, tmp_path_factory):
    from transformer_xl.training import train

    folder = tmp_path_factory.mktemp("word-run") / "small"
    train(word_config, store=word_store, folder=folder, command="txl train small")
    return folder


def test_what_is_no_utf8_is_named_by_its_line(word_run):
    scorer = txl.load(word_run).line_scorer(name="a.log")
    with pytest.raises(DataError, match=r"a\.log, line 2 is not UTF-8 at byte 7"):
        list(scorer.feed(b"fine\ndef caf\xe9 x\n"))


def test_documents_end_with_a_blank_line(loaded):
    text = b"\none\ntwo\n\n \nthree\n\nfour"
    found = in_pieces(loaded.line_scorer(by="document"), text, [])
    assert [(one.offset, one.lines, one.bytes) for one in found] == [(0, 4, 10), (10, 3, 9), (19, 1, 4)]
    lines = in_pieces(loaded.line_scorer(), text, [])
    assert found[0].bits == pytest.approx(sum(line.bits for line in lines[:4]))
    assert found[0].text is None
    assert found[2].part.text == "four"


@settings(deadline=None, max_examples=100)
@given(values=st.lists(st.integers(0, 9), max_size=40), size=st.integers(1, 12))
def test_the_rank_is_the_share_of_the_last_that_are_less(values, size):
    recent = Recent(size)
    for place, value in enumerate(values):
        last = values[max(0, place - size) : place]
        assert recent.rank(value) == (sum(one < value for one in last) / len(last) if last else None)
        recent.add(value)


class Told:
    """A reader that finds every byte as surprising as it is told, for what is made of it afterwards."""

    model = SimpleNamespace(
        vocabulary=SimpleNamespace(bias_V=torch.zeros(1)), config=SimpleNamespace(recurrent=False, memory=12)
    )

    def score(self, tokens_BT):
        return torch.where(tokens_BT == ord("Z"), 8.0, 0.1)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (b"all is well ZZZ and so on\n", "ZZZ"),
        (b"all is well ZZZ ZZ and so on\n", "ZZZ ZZ"),
        (b"Z at first\r\n", "Z"),
        (b"and in the endZ", "endZ"),
        ("日本 Z日\n".encode(), "Z日"),
        (b"\xff\xffZ plain\n", "\\xff\\xffZ"),
        (b"one\n", "one"),
    ],
)
def test_the_part_is_the_words_that_surprised_most(line, part):
    scorer = LineScorer(ByteTokenizer(), Told(), model="x")
    list(scorer.feed(b"before\n"))
    (found,) = [*scorer.feed(line), *scorer.finish()]
    assert found.part.text == part
    place = line.index(part.encode("latin-1", "ignore")) if part.isascii() and "\\" not in part else None
    assert place is None or found.part.offset == len(b"before\n") + place
    assert found.part.bits <= found.bits + 1e-9
    assert next(scorer.feed(b" \t\n")).part is None


def test_a_long_line_is_scored_in_pieces_between_characters(loaded, monkeypatch):
    monkeypatch.setattr(lines_module, "MOST_LINE_BYTES", 50)
    text = "音".encode() * 60 + b"\n"
    found = in_pieces(loaded.line_scorer(), text, [7, 40, 90])
    assert [line.bytes for line in found] == [48, 48, 48, 37]
    assert "".join(line.text for line in found) == "音" * 60
    for size, pieces in ((50, [51]), (51, [50, 2]), (100, [50, 51])):
        for cuts in ([], [size], [50], [51]):
            found = in_pieces(loaded.line_scorer(), b"x" * size + b"\n", cuts)
            assert [line.bytes for line in found] == pieces


# --- the command


def lines_of(text):
    return [json.loads(line) for line in text.splitlines()]


def test_the_command_prints_what_stands_out(trained_run, tmp_path, capsys):
    (tmp_path / "a.log").write_bytes(LOG + PLANTED + LOG)
    words = ["score", str(trained_run), str(tmp_path / "a.log"), "--device", "cpu", "--by", "line"]
    assert main([*words, "--summary"]) == 0
    shown = capsys.readouterr()
    found = lines_of(shown.out)
    assert len(found) == 121
    assert set(found[0]) == {"line", "offset", "bytes", "bits", "bits_per_byte", "rank", "among", "part", "text"}
    assert found[0]["rank"] is None
    assert found[60]["text"].encode() + b"\n" == PLANTED
    assert found[60]["rank"] == 1.0
    assert found[60]["among"] == 60
    assert shown.err.startswith(f"121 lines, {len(LOG) * 2 + len(PLANTED):,} bytes: ")

    assert main([*words, "--above", "98%"]) == 0
    above = lines_of(capsys.readouterr().out)
    assert [line["line"] for line in above] == [
        line["line"] for line in found if line["among"] >= 50 and line["rank"] >= 0.98
    ]
    assert 61 in [line["line"] for line in above]
    assert main([*words, "--above", str(found[60]["bits"] - 1), "--last", "10"]) == 0
    assert lines_of(capsys.readouterr().out)[0]["among"] == 10

    assert main([*words[:-1], "token", "--above", "9"]) == 0
    assert all(line["bits"] >= 9 for line in lines_of(capsys.readouterr().out))
    assert main([*words[:-1], "document"]) == 0
    (document,) = lines_of(capsys.readouterr().out)
    assert (document["document"], document["lines"], document["bytes"]) == (1, 121, len(LOG) * 2 + len(PLANTED))


def test_the_state_goes_on_where_it_was(trained_run, tmp_path, capsys, monkeypatch):
    words = ["score", str(trained_run), "-", "--by", "line", "--device", "cpu"]

    def scored(data, *more):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert main([*words, *more]) == 0
        return capsys.readouterr().out

    whole = scored(LOG)
    state = ("--state", str(tmp_path / "state"))
    assert scored(LOG[:1000] + b"\n", *state) + scored(LOG[1000:], *state) != whole  # a line cut in two is two lines
    (tmp_path / "state").unlink()
    cut = LOG.index(b"\n", 1000) + 1
    assert scored(LOG[:cut], *state) + scored(LOG[cut:], *state) == whole


@pytest.mark.processes
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_pipe_is_scored_line_by_line_and_kept_when_stopped(how, trained_run, tmp_path):
    command = [
        sys.executable,
        "-m",
        "transformer_xl",
        "score",
        str(trained_run),
        "-",
        "--by",
        "line",
        "--device",
        "cpu",
        "--state",
        str(tmp_path / "s"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    default = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        preexec_fn=default,
    ) as process:
        for number, line in enumerate(LOG.splitlines(keepends=True)[:3], 1):
            process.stdin.write(line)
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["line"] == number  # while the pipe stays open
        process.stdin.write(b"the beginning of")
        process.stdin.flush()
        time.sleep(0.3)
        process.send_signal(how)
        assert process.wait(timeout=60) == 130
        assert process.stderr.read() == b"txl: stopped\n"
    scorer = txl.load(trained_run).line_scorer(state=tmp_path / "s")
    assert scorer.progress.units == 3
    (rest,) = scorer.feed(b" a line\n")
    assert rest.text == "the beginning of a line"


SIZES = """
import io, resource, sys
from transformer_xl.cli import main
class Text(io.RawIOBase):
    lines, early = 0, 0
    def read1(self, size):
        if self.lines == int(sys.argv[2]) // 5 // 100 * 100:
            Text.early = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if self.lines >= int(sys.argv[2]):
            return b""
        part = b"".join(b"%07d got %d ok\\n" % (n, n * n % 977) for n in range(self.lines, self.lines + 100))
        Text.lines = self.lines = self.lines + 100
        return part
class Input:
    buffer = Text()
sys.stdin = Input()
sys.stdout = open("/dev/null", "w")
assert main(["score", sys.argv[1], "-", "--device", "cpu", "--by", "line", "--above", "99%", "--last", "500", "--state", sys.argv[3]]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - Text.early, file=sys.stderr)
"""


@pytest.mark.processes
@pytest.mark.parametrize("count", [3000, pytest.param(200_000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_memory_does_not_grow_with_the_lines(trained_run, tmp_path, count):
    """In kilobytes, from the first fifth of the lines on."""
    command = [sys.executable, "-c", SIZES, str(trained_run), str(count), str(tmp_path / "state")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert int(answer.stderr) < 3000


# --- states that anybody may have written


@pytest.fixture(scope="module")
def state(loaded, tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "state"
    scorer = loaded.line_scorer(by="document")
    list(scorer.feed(LOG[:500] + b"\n" + LOG[:500]))
    scorer.save(path)
    return path


def test_a_damaged_state_is_refused(loaded, state, tmp_path):
    chance, path = random.Random(21), tmp_path / "state"
    sound = state.read_bytes()
    for _ in range(150):
        path.write_bytes(mutated(sound, chance))
        if path.read_bytes() != sound:
            with pytest.raises(CheckpointError, match=str(path)):
                loaded.line_scorer(state=path)


def test_a_forged_state_is_read_or_refused(loaded, state, tmp_path):
    """With its checksum made right again."""
    chance, path = random.Random(21), tmp_path / "state"
    with reading(state, what="a state") as file:
        tensors, progress = (
            {name: tensor.clone() for name, tensor in file.tensors().items()},
            json.loads(file.metadata[METADATA]),
        )
    met = set()
    for _ in range(200):
        changed = dict(tensors)
        name = chance.choice(["engine", "recent", "rest", None, None, None])
        if name is not None:
            data = bytearray(changed[name].numpy().tobytes())
            if data:
                changed[name] = torch.frombuffer(
                    bytearray(mutated(bytes(data), chance)) or bytearray(1), dtype=torch.uint8
                )
            told = progress
        else:
            _, told = mutated_table(progress, chance)
        write_tensors(path, changed, metadata={METADATA: json.dumps(told)})
        try:
            scorer = loaded.line_scorer(state=path)
            assert all(line.bits >= 0 for line in scorer.feed(b"one\n\ntwo\n\n"))
            met.add("read")
        except CheckpointError:
            met.add("refused")
    assert "refused" in met


def test_a_state_is_of_one_model_and_one_question(loaded, state, recurrent_run, tmp_path, capsys, trained_run):
    with pytest.raises(CheckpointError, match="is of another model"):
        txl.load(recurrent_run).line_scorer(state=state)
    with pytest.raises(CheckpointError, match="`by=document`"):
        loaded.line_scorer(by="line", state=state)
    with pytest.raises(CheckpointError, match="`last=10000`"):
        loaded.line_scorer(last=5, state=state)
    with pytest.raises(CheckpointError, match="was made with `memory=12`"):
        txl.load(trained_run, memory=5).line_scorer(state=state)
    with pytest.raises(InputError, match="`last=0`"):
        loaded.line_scorer(last=0)


def test_what_cannot_be_asked_is_one_sentence(trained_run, state, tmp_path, capsys):
    (tmp_path / "a.log").write_bytes(LOG)
    (tmp_path / "empty").touch()

    def error(*words, file="a.log"):
        assert main(["score", str(trained_run), str(tmp_path / file), "--device", "cpu", *map(str, words)]) == 2
        shown = capsys.readouterr()
        assert shown.err.count("\n") == 1
        return shown.err

    assert "'120%' is neither bits" in error("--by", "line", "--above", "120%")
    assert "'much' is neither bits" in error("--by", "line", "--above", "much")
    assert "--state is for --by line" in error("--state", "x")
    assert "--last is for --by line" in error("--last", "5")
    assert "--above P% compares lines" in error("--above", "99%")
    assert "--last 0 must be 1 to 1,000,000 lines" in error("--by", "line", "--last", "0")
    assert "was made with --by document" in error("--by", "line", "--state", state)
    assert "there is no folder" in error("--by", "line", "--state", tmp_path / "gone" / "state")
    assert "empty is empty, so there is nothing to score" in error("--by", "line", file="empty")
    assert "a model with memory 0" in error("--by", "line", "--memory", "0")


# --- one type, and the array that it was


def test_scores_still_behave_as_the_array_they_were(loaded):
    text = "def f(x):\n"
    scores = loaded.score(text)
    assert scores.tokens.tolist() == list(text.encode())
    assert scores.offsets.tolist() == list(range(len(text)))
    assert np.isnan(scores.nats[0])
    np.testing.assert_allclose(scores.bits[1:], scores.nats[1:] / np.log(2), rtol=1e-6)
    old = scores.nats[1:]
    with pytest.warns(DeprecationWarning, match=r"scores\.nats\[1:\]"):
        assert len(scores) == len(old)
    for use in (
        lambda it: it / np.log(2),
        lambda it: -it,
        lambda it: it.mean(),
        lambda it: it[3:].sum(),
        lambda it: it.astype(np.float64),
        lambda it: np.exp(it),
        lambda it: np.asarray(it),
        lambda it: np.array(list(it)),
        lambda it: it.shape,
        lambda it: np.concatenate([it, it]),
    ):
        with pytest.warns(DeprecationWarning, match="no array of nats any more"):
            np.testing.assert_array_equal(use(scores), use(old))
    with pytest.raises(AttributeError, match="Scores has no entropy"):
        scores.entropy  # noqa: B018
    (piece,) = loaded.score_stream([text.encode()])
    with pytest.warns(DeprecationWarning, match="loss_P is now called nats"):
        np.testing.assert_array_equal(piece.loss_P, scores.nats)


def test_progress_is_written_as_it_is_read(loaded, state):
    scorer = loaded.line_scorer(state=state)
    assert replace(scorer.progress) == scorer.progress
    assert asdict(scorer.progress)["part_text"] in LOG.decode()


# --- what outsiders met


def scored(capsys, *words):
    assert main(["score", *map(str, words)]) == 0
    told = capsys.readouterr()
    return [json.loads(line) for line in told.out.splitlines()], told.err


def test_one_state_has_one_user(trained_run, tmp_path, capsys):
    command = [sys.executable, "-m", "transformer_xl", "score", str(trained_run), "-", "--by", "line"]
    with subprocess.Popen([*command, "--state", str(tmp_path / "st")], stdin=-1, stdout=-1, text=True) as first:
        first.stdin.write("one\n")
        first.stdin.flush()
        assert first.stdout.readline()
        (tmp_path / "a.log").write_bytes(LOG)
        words = ["score", str(trained_run), str(tmp_path / "a.log"), "--by", "line", "--state", str(tmp_path / "st")]
        assert main(words) == 2
        assert f"is in use by process {first.pid}; wait for it, stop it, or give another --state" in (
            capsys.readouterr().err
        )
        first.stdin.close()
        first.stdout.read()
    assert main(words) == 0


def test_a_compressed_file_is_scored_by_what_it_holds(trained_run, tmp_path, capsys):
    (tmp_path / "a.log").write_bytes(LOG)
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(LOG))
    for by in ("line", "token"):
        found = [scored(capsys, trained_run, tmp_path / name, "--by", by)[0] for name in ("a.log", "a.log.gz")]
        assert found[0] == found[1]
    (tmp_path / "b.log.gz").write_bytes(gzip.compress(LOG)[:-20])
    assert main(["score", str(trained_run), str(tmp_path / "b.log.gz")]) == 2
    assert "is damaged or cut short" in capsys.readouterr().err


def test_a_state_is_read_as_it_was_written(trained_run, tmp_path, capsys):
    (tmp_path / "a.log").write_bytes(LOG)
    words = ["score", str(trained_run), str(tmp_path / "a.log"), "--by", "line", "--state", str(tmp_path / "st")]
    assert main(words) == 0
    capsys.readouterr()
    assert main([*words, "--weights", "int8"]) == 2
    assert "was made with --weights exact; ask for that, or give another --state" in capsys.readouterr().err
    assert main([*words, "--memory", "4"]) == 2
    assert "was made with --memory 12" in capsys.readouterr().err


def test_a_share_of_too_few_lines_is_said(trained_run, tmp_path, capsys):
    (tmp_path / "a.log").write_bytes(LOG)
    found, said = scored(capsys, trained_run, tmp_path / "a.log", "--by", "line", "--above", "99%")
    assert found == []
    assert "--above 99% needs 100 lines to compare with, and there were 60: nothing could stand out" in said
    assert "needs" not in scored(capsys, trained_run, tmp_path / "a.log", "--by", "line", "--above", "90%")[1]


@pytest.mark.parametrize("state", ["", ".", "no/such/st"])
def test_a_state_that_cannot_be_a_file(state, trained_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.log").write_bytes(LOG)
    assert main(["score", str(trained_run), "a.log", "--by", "line", "--state", state]) == 2
    assert "name a file" in capsys.readouterr().err


@pytest.mark.parametrize(("above", "last", "needs"), [("99.995%", None, "20,000"), ("99%", "10", "100")])
def test_a_share_that_the_last_lines_cannot_have_is_refused(above, last, needs, trained_run, tmp_path, capsys):
    """An alarm that can never ring."""
    (tmp_path / "a.log").write_bytes(LOG)
    words = ["score", str(trained_run), str(tmp_path / "a.log"), "--by", "line", "--above", above]
    assert main([*words, *(["--last", last] if last else [])]) == 2
    assert f"--above {above} needs {needs} lines to compare with, and these are compared with the last" in (
        capsys.readouterr().err
    )


def test_a_line_that_is_refused_has_its_number(word_run, tmp_path):
    scorer = txl.load(word_run).line_scorer(name="a.log")
    with pytest.raises(DataError, match=r"a\.log, line 2 is not UTF-8"):
        list(scorer.feed(b"ok line\nb\xff\nthird\n"))
    scorer.save(tmp_path / "state")
    (third,) = txl.load(word_run).line_scorer(state=tmp_path / "state").feed(b"")
    assert (third.offset, third.text) == (11, "third")
    with pytest.raises(DataError, match=r"line 4 is not UTF-8"):
        list(scorer.feed(b"\xff\n"))


def test_a_file_that_is_read_once_more_is_said(trained_run, tmp_path, capsys):
    (tmp_path / "a.log").write_bytes(LOG)
    words = (trained_run, tmp_path / "a.log", "--by", "line", "--state", tmp_path / "st")
    assert "were read before" not in scored(capsys, *words)[1]
    assert f"{len(LOG):,} bytes were read before" in scored(capsys, *words)[1]


def test_nothing_leaves_no_state(trained_run, tmp_path, capsys):
    (tmp_path / "a.log").write_bytes(b"")
    words = ["score", str(trained_run), str(tmp_path / "a.log"), "--by", "line", "--state", str(tmp_path / "st")]
    assert main(words) == 2
    assert "is empty" in capsys.readouterr().err
    assert not (tmp_path / "st").exists()
