"""Files made to do harm: refused in one sentence, or imported, and nothing in them is ever run. NEVER open them with pickle or torch.load."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from transformer_xl.cli import main
from transformer_xl.errors import ImportRefused
from transformer_xl.interop.extraction import extract
from transformer_xl.interop.foreign import Lengths
from transformer_xl.interop.importing import import_run
from transformer_xl.interop.tensor_bundle import read_bundle
from transformer_xl.interop.torch_files import read_torch_file
from transformer_xl.interop.vocabularies import read_vocabulary_file

FIXTURES = Path(__file__).parents[3] / "shared" / "fixtures"
pytestmark = pytest.mark.skipif(not FIXTURES.exists(), reason="../shared/fixtures is not here")
MANIFEST = json.loads((FIXTURES / "hostile" / "manifest.json").read_text()) if FIXTURES.exists() else {"cases": []}
CASES = [(case["case"], case["load"], case["expect"]) for case in MANIFEST["cases"]]
GOOD_TORCH = [
    *sorted(FIXTURES.glob("original/*/*/*.pt")),
    *sorted(FIXTURES.glob("nvidia/**/*.pt")),
    *sorted(FIXTURES.glob("hf/**/*.bin")),
    *sorted(FIXTURES.glob("hf/**/vocab.pkl")),
]


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


def mutated(data: bytes, chance: random.Random) -> bytes:
    """One of: bytes changed, a stretch cut out, a stretch repeated, the end cut off, a number made huge."""
    changed = bytearray(data)
    place = chance.randrange(len(changed))
    match chance.randrange(6):
        case 0 | 1:
            for _ in range(chance.choice((1, 1, 3, 20))):
                changed[chance.randrange(len(changed))] = chance.randrange(256)
        case 2:
            del changed[place : place + chance.choice((1, 4, 100))]
        case 3:
            changed[place:place] = changed[place : place + chance.choice((1, 8, 200))]
        case 4:
            del changed[place:]
        case 5:
            changed[place : place + 4] = chance.choice((b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\0"))
    return bytes(changed)


def read_mutated(count: int, seed: int, folder: Path) -> None:
    """In this process: whatever is not an ImportRefused fails the test, or kills it."""
    chance = random.Random(seed)
    bundles = sorted(FIXTURES.glob("tensorflow/*/model.ckpt.index"))
    for number in range(count):
        if number % 8 == 7:
            index = chance.choice(bundles)
            shutil.copy(index.with_suffix(".data-00000-of-00001"), folder / "m.data-00000-of-00001")
            (folder / "m.index").write_bytes(mutated(index.read_bytes(), chance))
            read, path = read_bundle, folder / "m.index"
        else:
            path = folder / "mutated"
            path.write_bytes(mutated(chance.choice(GOOD_TORCH).read_bytes(), chance))
            read = lambda path: extract(read_torch_file(path).value)  # noqa: E731
        try:
            read(path)
        except ImportRefused as error:
            if "\n" in str(error):
                raise


LIMITED = """
import resource, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
import test_hostile_files
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
test_hostile_files.read_mutated(int(sys.argv[1]), 7, Path(sys.argv[2]))
"""


def run_mutations(count: int, folder: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(count), str(folder), str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment["TXL_FIXTURE_MARKER"] = str(folder / "marker")
    answer = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert not (folder / "marker").exists()
    assert not (folder / "PWNED").exists()


def test_mutated_files_are_read_or_refused(tmp_path):
    run_mutations(400, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_mutated_files_are_read_or_refused(tmp_path):
    run_mutations(10_000, tmp_path)


def test_mutated_files_are_imported_or_refused(tmp_path):
    """The whole way, child process and all."""
    chance = random.Random(3)
    sources = [FIXTURES / "original" / "a-plain" / "zip", FIXTURES / "hf" / "div1-tied-r" / "safetensors"]
    for number in range(12):
        folder, source = tmp_path / f"mutated-{number}", sources[number % 2]
        shutil.copytree(source, folder)
        names = ["model.pt", "optimizer.pt"] if number % 2 == 0 else ["model.safetensors", "config.json", "vocab.pkl"]
        path = folder / chance.choice(names)
        path.write_bytes(mutated(path.read_bytes(), chance))
        out = tmp_path / f"run-{number}"
        try:
            import_run(folder, out, lengths=Lengths())
        except ImportRefused as error:
            refused = str(error)
        else:
            continue
        assert "\n" not in refused
        assert not out.exists()


def test_a_vocabulary_that_contradicts_itself_is_refused(tmp_path):
    with pytest.raises(ImportRefused, match=r"vocabulary|symbol"):
        read_vocabulary_file(FIXTURES / "hostile" / "s15-vocab-bad-indices" / "vocab.pkl", scratch=tmp_path / "scratch")


def test_no_hostile_file_makes_a_child_large(tmp_path):
    """All in one process of their own, whose children are only these."""
    files = [str(FIXTURES / "hostile" / case / load) for case, load, _ in CASES]
    script = (
        "import resource, sys\n"
        "from transformer_xl.cli import main\n"
        "for number, path in enumerate(sys.argv[2:]):\n"
        "    main(['import', path, '--out', f'{sys.argv[1]}/run-{number}'])\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), *files], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    largest = int(done.stdout.splitlines()[-1])
    assert 10_000 < largest < 1_000_000, f"a child took {largest:,} kB"
