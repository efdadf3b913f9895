"""Thousands of damaged copies of good checkpoints go the whole way of an import: each becomes a run or is refused in one sentence."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from foreign import HUGGINGFACE, ORIGINAL, found
from mutations import mutated
from transformer_xl.errors import ImportRefused
from transformer_xl.interop import asking
from transformer_xl.interop.formats.foreign_model import Lengths
from transformer_xl.interop.importing import import_run
from transformer_xl.interop.quarantine import child

BATCHES = 10
LONGEST_SECONDS = 5


def good_checkpoints() -> list[Path]:
    """Each in a folder of its own, with what belongs to it."""
    return found(
        *("original/*/zip", "original/*/legacy", "nvidia/*/legacy"), *("hf/*/bin", "hf/*/safetensors", "tensorflow/*")
    )


ENDINGS = (".pt", ".bin", ".pkl", ".safetensors", ".index", ".data-00000-of-00001", "config.json")


class TooLong(BaseException):
    """Nothing in the library catches this one."""


def read_here(folder: Path, *, title: str, total: int, seconds: int) -> int:
    """What the child process does, without the process: starting ten thousand would take hours. The limits are this whole process's."""
    child.read_jobs(json.loads((folder / "request.json").read_text())["jobs"], folder=folder)
    return 0


def import_mutated(count: int, seed: int, folder: Path) -> dict[str, float]:
    """Whatever is not an ImportRefused of one line ends this process."""
    chance, outcomes, slowest = random.Random(seed), Counter(), 0.0
    asking._run = read_here
    os.fsync = lambda descriptor: None  # whether it reaches the disk is not asked here
    kept = {}
    for source in good_checkpoints():
        kept[source] = {path.name: path.read_bytes() for path in source.iterdir() if path.name.endswith(ENDINGS)}
    for number in range(count):
        source = chance.choice(list(kept))
        name = chance.choice(sorted(kept[source]))
        place, out = folder / f"{source.parent.name}-{source.name}", folder / f"run-{number}"
        place.mkdir()
        for file, data in kept[source].items():
            (place / file).write_bytes(mutated(data, chance) if file == name else data)
        begun = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, LONGEST_SECONDS)
        try:
            import_run(place, out, lengths=Lengths())
            outcomes["imported"] += 1
        except ImportRefused as error:
            outcomes["refused"] += 1
            if "\n" in str(error) or not str(error):
                raise
            if out.exists():
                raise AssertionError(f"{out} was left behind") from error
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        slowest = max(slowest, time.process_time() - begun)
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(place)
    left = [path.name for path in folder.iterdir()]
    if left:
        raise AssertionError(f"left behind: {left[:3]}")
    return {**outcomes, "slowest_seconds": round(slowest, 3)}


LIMITED = """
import json, resource, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[4:]
import torch
torch.set_num_threads(1)
import test_mutated_imports
def stop(*_): raise test_mutated_imports.TooLong
signal.signal(signal.SIGPROF, stop)
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
print(json.dumps(test_mutated_imports.import_mutated(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))
"""


def run_mutations(count: int, seed: int, folder: Path) -> None:
    """In a process of its own: a crash of the interpreter is seen, and the limits are its alone."""
    place = folder / "work"
    place.mkdir()
    here = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    command = [sys.executable, "-c", LIMITED, str(count), str(seed), str(place), *here, *sys.path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment["TXL_FIXTURE_MARKER"] = str(folder / "marker")
    answer = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert answer.returncode == 0, answer.stderr[-3000:]
    found = json.loads(answer.stdout)
    assert found["imported"] + found["refused"] == count
    assert found["refused"] > count // 2
    assert not (folder / "marker").exists()
    assert not (folder / "PWNED").exists()
    print(found)


def test_mutated_checkpoints_are_imported_or_refused(tmp_path):
    run_mutations(200, 7, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_ten_thousand_mutated_checkpoints_are_imported_or_refused(batch, tmp_path):
    run_mutations(10_000 // BATCHES, 100 + batch, tmp_path)


def test_mutated_checkpoints_are_imported_or_refused_by_the_limited_child(tmp_path):
    """The same with the child process that reads in earnest."""
    chance = random.Random(3)
    sources = [ORIGINAL / "zip", HUGGINGFACE / "bin"]
    for number in range(8):
        folder, source = tmp_path / f"mutated-{number}", sources[number % 2]
        shutil.copytree(source, folder)
        names = ["model.pt", "optimizer.pt"] if number % 2 == 0 else ["pytorch_model.bin", "vocab.bin"]
        path = folder / chance.choice(names)
        path.write_bytes(mutated(path.read_bytes(), chance))
        out = tmp_path / f"run-{number}"
        said = ""
        try:
            import_run(folder, out, lengths=Lengths())
        except ImportRefused as error:
            said = str(error)
        assert "\n" not in said
        assert out.exists() == (not said)
