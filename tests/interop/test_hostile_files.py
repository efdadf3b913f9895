"""Files made to do harm: refused in one sentence, or imported, and nothing in them is ever run. NEVER open them with pickle or torch.load."""

import json
import os
import subprocess
import sys

import pytest

from foreign import FIXTURES, MANY, needs_many
from transformer_xl.cli import main
from transformer_xl.errors import ImportRefused
from transformer_xl.interop.importing import read_vocabulary_file
from transformer_xl.interop.quarantine.extraction import extract
from transformer_xl.interop.quarantine.torch_files import read_torch_file

pytestmark = needs_many
MANIFEST = json.loads((FIXTURES / "hostile" / "manifest.json").read_text()) if FIXTURES is MANY else {"cases": []}
CASES = [(case["case"], case["load"], case["expect"]) for case in MANIFEST["cases"]]


@pytest.mark.parametrize(("case", "load", "expect"), CASES, ids=[case for case, _, _ in CASES])
def test_hostile_files_do_nothing(case, load, expect, tmp_path, monkeypatch, capsys):
    """Through every door that would read the file: as the source, as its folder, as a vocabulary."""
    marker = tmp_path / "marker"
    monkeypatch.setenv("TXL_FIXTURE_MARKER", str(marker))
    monkeypatch.chdir(tmp_path)
    path = FIXTURES / "hostile" / case / load
    doors = [[str(path)], [str(path.parent)]]
    good = FIXTURES / "hf" / "div1-tied-r" / "safetensors"
    if path.suffix in (".pkl", ".pt", ".bin"):
        doors.append([str(good), "--vocabulary", str(path)])
    for number, words in enumerate(doors):
        code = main(["import", *words, "--out", str(tmp_path / f"run-{number}")])
        shown = capsys.readouterr()
        assert not marker.exists()
        assert not (tmp_path / "PWNED").exists()
        if "import weights" in expect:
            assert code == 0
            continue
        assert code == 2
        sentences = [line for line in shown.err.splitlines() if not line.startswith("reading ")]  # on a slow machine
        assert len(sentences) == 1
        assert sentences[0].startswith("txl: ")
        assert case in sentences[0]
        assert not (tmp_path / f"run-{number}").exists()
    if case.startswith("x") and path.suffix in (".pkl", ".pt", ".bin"):
        with pytest.raises(ImportRefused, match=r"asks for|instruction"):
            extract(read_torch_file(path).value)


def test_a_vocabulary_that_contradicts_itself_is_refused(tmp_path):
    with pytest.raises(ImportRefused, match=r"vocabulary|symbol"):
        read_vocabulary_file(FIXTURES / "hostile" / "s15-vocab-bad-indices" / "vocab.pkl", scratch=tmp_path / "scratch")


EACH_APART = """
import contextlib, io, json, os, sys, time
from transformer_xl.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    assert main(["import", sys.argv[2], "--out", f"{sys.argv[1]}/good"]) == 0
for number, path in enumerate(sys.argv[3:]):
    begun = time.monotonic()
    child = os.fork()
    if not child:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            code = main(["import", path, "--out", f"{sys.argv[1]}/run-{number}"])
        print(json.dumps({"code": code, "said": said.getvalue()}), flush=True)
        os._exit(0)
    _, status, used = os.wait4(child, 0)
    seconds = time.monotonic() - begun
    cpu = used.ru_utime + used.ru_stime
    print(json.dumps({"status": status, "seconds": seconds, "cpu": cpu, "kilobytes": used.ru_maxrss}), flush=True)
"""


def test_no_hostile_file_takes_a_gigabyte_or_five_seconds(tmp_path):
    """The whole import of each in a process of its own, which counts with its children, after a good one has loaded what has nothing to do with the file.

    Seconds are the processor's: others may be using it, too.
    """
    files = [str(FIXTURES / "hostile" / case / load) for case, load, _ in CASES]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TXL_FIXTURE_MARKER": str(tmp_path / "marker")}
    good = str(FIXTURES / "hf" / "div1-tied-r" / "bin")
    command = [sys.executable, "-c", EACH_APART, str(tmp_path), good, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 2 * len(files)
    for (case, _, expect), told, used in zip(CASES, lines[::2], lines[1::2], strict=True):
        assert used["status"] == 0, case
        assert told["code"] == (0 if "import weights" in expect else 2), case
        assert used["cpu"] < 5 and used["seconds"] < 60, (case, used)  # noqa: PT018
        assert 10_000 < used["kilobytes"] < 1_000_000, (case, used)
    assert not (tmp_path / "marker").exists()
    print(
        f"most: {max(used['cpu'] for used in lines[1::2]):.2f} s, {max(used['kilobytes'] for used in lines[1::2]):,} kB"
    )
