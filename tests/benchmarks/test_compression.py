"""Compressors side by side: all of them give back what they were given, and the whole command on toys."""

import json
import shutil
import sys
from functools import partial

import pytest

from transformer_xl.benchmarks import codec_worker, environment
from transformer_xl.benchmarks.children import Child, all_ready
from transformer_xl.benchmarks.compression import FROM_PACKAGES, WORKER, Comparison, Row, _pieces
from transformer_xl.cli import main
from transformer_xl.cli.bench_compression import NAMES
from transformer_xl.data.corpora.own_text import OwnText, prepare_own_text

LINE = "It was a bright cold day in April, and the clocks were striking {}.\n"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compression")
    (folder / "text.txt").write_text("".join(LINE.format(number * number) for number in range(1000)))
    prepare_own_text([folder / "text.txt"], out=folder / "clocks", settings=OwnText(shares=(0.8, 0.1, 0.1)))
    return str(folder / "clocks")


def test_the_command_compares_on_toys(trained_run, corpus, tmp_path, capsys):
    words = ["bench", "compression", "--scale", "tiny", "--model", str(trained_run), "--corpus", corpus]
    assert main([*words, "--against", "xz,zstd-dictionary", "--json", "--plot", str(tmp_path / "ratio.png")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (tmp_path / "ratio.png").stat().st_size > 1000
    found = {(row["codec"], row["primed"], row["size"]): row for row in told["rows"]}
    assert len(found) == len(told["rows"]) == 2 * (2 + 2 + 1)
    assert found["xz -9e", True, 1000]["bits_per_byte"] < found["xz -9e", False, 1000]["bits_per_byte"]
    assert found["txl fast", False, 1000]["compress_kb_per_second"] > 0
    assert told["train_bytes"] == {"clocks": 20_000}
    assert told["skipped"] == {}
    assert main([*words, "--against", "none", "--sizes", "200"]) == 0
    assert "at no size" in capsys.readouterr().out


@pytest.mark.parametrize("codec", codec_worker.CODECS)
def test_what_a_codec_makes_is_measured_as_it_is(codec, tmp_path):
    """Those from packages are here where the benchmark was run once."""
    if codec in FROM_PACKAGES and not environment.codecs_environment().exists():
        pytest.skip("nobody has compared with the packages here yet")
    python = environment.codecs_python() if codec in FROM_PACKAGES else sys.executable
    if codec == "zpaq -m5" and shutil.which("zpaq") is None:
        assert "Debian" in codec_worker.missing(codec)["missing"]
        return
    train = "".join(LINE.format(number) for number in range(2000)).encode()
    (tmp_path / "train").write_bytes(train)
    (tmp_path / "text").write_bytes(train[:3000])
    asked = {"train": str(tmp_path / "train"), "texts": [str(tmp_path / "text")]}
    with all_ready({codec: lambda: Child(codec, python=python, worker=WORKER)}) as children:
        ask = partial(children[codec].ask, codec=codec)
        assert ask("missing") == {"missing": None}
        (alone,), (primed,) = (ask("measure", primed=both, **asked)["texts"] for both in (False, True))
    assert 0 < alone["bytes"] < 3000
    assert primed["bytes"] < alone["bytes"]
    assert set(alone) == {"bytes", "compress_seconds", "decompress_seconds"}


def test_pieces_are_spread_over_the_text():
    text = bytes(range(256)) * 400
    assert [len(piece) for piece in _pieces(text, 1000)] == [1000] * 8
    assert _pieces(text, 1000)[-1] == text[-1000:]
    assert len(_pieces(text, 50_000)) == 1
    assert _pieces(text, len(text)) == [text]


def test_a_model_is_counted_once():
    def row(codec, bits, size=1000):
        return Row(corpus="c", codec=codec, primed=False, size=size, pieces=1, bits_per_byte=bits)

    told = {"model": "m", "model_bytes": 1000, "train_bytes": {"c": 1}, "skipped": {}}
    rows = (row("txl fast", 3.0), row("txl best", 2.0), row("xz", 4.0), row("zstd", 3.0), row("zstd", 9.0, 10))
    assert Comparison(rows=rows, **told).wins_from() == {"c": 8000}
    assert Comparison(rows=(*rows, row("ppmd", 1.0)), **told).wins_from() == {"c": None}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model", "x"], "--corpus is missing"),
        (["--model", "x", "--corpus", "y", "--sizes", "a"], "--sizes: a must be whole numbers"),
        (["--model", "x", "--corpus", "y", "--sizes", "0"], "--sizes: 0 must not be below 1"),
        (["--model", "x", "--corpus", "y", "--against", "zip"], "--against: no compressor zip; did you mean"),
        (["--model", "x", "--corpus", "y", "--minutes", "3"], "--minutes is for txl bench learning"),
        (["--model", "x", "--corpus", "y", "--prime-bytes", "3"], "--prime-bytes: 3 is too few"),
        (["--model", "x", "--corpus", "y", "--plot", "x.gif"], "--plot: x.gif must end in"),
        (["--model", "x", "--corpus", "y", "--preset", "bytes"], "--preset: compression has none"),
    ],
)
def test_words_that_do_not_fit_are_one_sentence(words, told, capsys):
    assert main(["bench", "compression", *words]) == 2
    assert capsys.readouterr().err.startswith(f"txl: {told}")
    assert main(["bench", "generation", "--model", "x"]) == 2
    assert capsys.readouterr().err == "txl: --model is for txl bench compression; leave it out\n"
    assert set(NAMES.values()) == set(codec_worker.CODECS)
