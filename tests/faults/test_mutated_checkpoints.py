"""Thousands of damaged checkpoints of our own through the one door: each is loaded, or refused in one sentence that names the file, in no time.

Checksums find all of it first, so most cases have theirs made anew, as somebody would who edits a file by hand.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from mutations import mutated, mutated_table
from transformer_xl.checkpoint import RunFolder, load_checkpoint
from transformer_xl.checkpoint.folder import CHECKSUMS
from transformer_xl.errors import TransformerXLError
from transformer_xl.files import digest

LONGEST_SECONDS = 2
FILES = {"weights": "model.safetensors", "config": "config.json", "about": "about.json"}
BATCHES = 4
THOUSANDS = {"weights": 20_000, "config": 10_000}
NAMES_A_TENSOR = re.compile(r"tensor \w+(\.\w+)+ that config.json|\w+(\.\w+)+ has shape .* where config.json")
"""A field that is possible, but not that of the weights, shows in the first tensor that is not as it would have it."""


class TooLong(BaseException):
    """Nothing in the library catches this one."""


def load_mutated(what: str, count: int, seed: int, folder: Path) -> dict[str, float]:
    """`what`: one of FILES. Whatever is not a sentence of ours that names the file, and the field where one was changed, ends this process."""
    chance, outcomes, slowest = random.Random(seed), Counter(), 0.0
    path = folder / FILES[what]
    good, checksums = path.read_bytes(), json.loads((folder / CHECKSUMS).read_text())
    for number in range(count):
        key = ""
        if what == "weights":
            damaged = mutated_safetensors(good, chance)
        elif number % 2:
            damaged = mutated(good, chance)
        else:
            key, table = mutated_table(json.loads(good), chance)
            damaged = json.dumps(table).encode()
        path.write_bytes(damaged)
        honest = number % 10 != 9
        if honest:
            told = {**checksums, path.name: digest(path)}
            (folder / CHECKSUMS).write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")
        else:
            (folder / CHECKSUMS).write_text(json.dumps(checksums, indent=2, sort_keys=True) + "\n")
        said, begun = "", time.process_time()
        signal.setitimer(signal.ITIMER_PROF, LONGEST_SECONDS)
        try:
            load_checkpoint(folder)
        except TransformerXLError as error:
            said = str(error)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        slowest = max(slowest, time.process_time() - begun)
        outcomes["refused" if said else "loaded"] += 1
        if said:
            about_the_file = path.name in said and "\n" not in said
            if not about_the_file or (key and honest and key not in said and not NAMES_A_TENSOR.search(said)):
                raise AssertionError(f"{number}: {key}: {said}")
        elif not honest and damaged != good:
            raise AssertionError(f"{number}: damage was not found")
    return {**outcomes, "slowest_seconds": round(slowest, 3)}


def mutated_safetensors(good: bytes, chance: random.Random) -> bytes:
    """Mostly in the header, where everything that can be wrong stands; or anywhere."""
    end = 8 + int.from_bytes(good[:8], "little")
    match chance.randrange(3):
        case 0:
            return mutated(good, chance)
        case 1:
            return mutated(good[:end], chance) + good[end:]
        case _:
            _, table = mutated_table(json.loads(good[8:end]), chance)
            header = json.dumps(table).encode()
            return len(header).to_bytes(8, "little") + header + good[end:]


LIMITED = """
import json, resource, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[4:]
import torch
torch.set_num_threads(1)
import test_mutated_checkpoints as mutations
def stop(*_): raise mutations.TooLong
signal.signal(signal.SIGPROF, stop)
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
counts, seed, folder = json.loads(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
for what, count in counts.items():
    good = (folder / mutations.FILES[what]).read_bytes()
    print(json.dumps({"what": what, **mutations.load_mutated(what, count, seed, folder)}))
    (folder / mutations.FILES[what]).write_bytes(good)
"""


def run_mutations(counts: dict[str, int], seed: int, run: Path, place: Path) -> None:
    """In a process of its own with limits: a crash of the interpreter is seen, and so is a file that asks for too much."""
    folder = Path(shutil.copytree(RunFolder(run).chosen_checkpoint(), place / "checkpoint"))
    here = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    command = [sys.executable, "-c", LIMITED, json.dumps(counts), str(seed), str(folder), *here, *sys.path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    answer = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert answer.returncode == 0, answer.stderr[-3000:]
    results = [json.loads(line) for line in answer.stdout.splitlines()]
    assert [found["what"] for found in results] == list(counts)
    for found in results:
        assert found["loaded"] + found["refused"] == counts[found["what"]]
        assert found["refused"] > counts[found["what"]] // 3
    print(results)


@pytest.mark.parametrize("kind", ["trained_run", "recurrent_run"])
def test_damaged_checkpoints_are_loaded_or_refused_by_name(kind, request, tmp_path):
    run_mutations({"weights": 200, "config": 200, "about": 50}, 1, request.getfixturevalue(kind), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("what", ["weights", "config"])
@pytest.mark.parametrize("batch", range(BATCHES))
def test_thousands_of_damaged_checkpoints_are_loaded_or_refused_by_name(what, batch, trained_run, tmp_path):
    run_mutations({what: THOUSANDS[what] // BATCHES}, 2 + batch, trained_run, tmp_path)
