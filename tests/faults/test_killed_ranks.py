"""One of two ranks killed with SIGKILL, ten times in all: torchrun starts both anew, and the run ends with the bits of one that nobody killed."""

from pathlib import Path

import pytest

from torchrun import RANDOM, final_bytes, launch, train_with_killed_ranks

RUNS = 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks' processes in /proc")
def test_ten_killed_ranks_cost_no_bit(byte_store, tmp_path):
    answer = launch(RANDOM, byte_store, tmp_path / "whole")
    assert answer.returncode == 0, answer.stderr
    kills, resumes = 0, []
    for number in range(RUNS):
        ranks = [1, 0] if number % 2 else [0, 1]
        steps = train_with_killed_ranks(byte_store, tmp_path / str(number), ranks=ranks)
        assert final_bytes(tmp_path / str(number)) == final_bytes(tmp_path / "whole")
        kills, resumes = kills + len(ranks), [*resumes, *steps]
    print(f"{kills} ranks killed in {RUNS} runs of {RANDOM.training.steps} steps; resumes from steps {resumes}")
    assert len(resumes) == kills == 2 * RUNS
    assert all(0 < step < RANDOM.training.steps for step in resumes)
