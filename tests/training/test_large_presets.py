"""The paper's largest models take a real step on a machine of 24 GB."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "large_step.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


@pytest.mark.parametrize("name", ["enwik8-24l", "wikitext-103-large"])
def test_a_step_of_one_lane_with_recomputing(name, byte_store):
    told = subprocess.run(
        [sys.executable, SCRIPT, name, str(byte_store.folder), "1", "alone"], capture_output=True, text=True, check=True
    )
    check(told.stdout, below=8e9)


def test_a_step_of_the_largest_sharded_over_two_ranks(byte_store):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    told = subprocess.run(
        [*launcher, SCRIPT, "lm1b-large", str(byte_store.folder), "2", "fsdp"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    check(told.stdout, below=10e9)


def check(line: str, *, below: float) -> None:
    print(line)
    told = json.loads(line)
    assert told["taken"]
    assert 4 < told["loss"] < 20
    assert told["peak"] < below
