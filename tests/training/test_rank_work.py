"""Two and four ranks, real torchrun processes on gloo: each scores its share of a validation, and a step is one exchange."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from small_run import SMALL
from torchrun import environment
from transformer_xl.evaluation import make_rule, score_split, scoring
from transformer_xl.training import validating
from transformer_xl.training.ranks import Ranks
from transformer_xl.training.session import Session
from transformer_xl.training.validating import Cost, evaluate_together

pytestmark = pytest.mark.timeout(900)


def told(store, folder: Path, *, ranks: int, parallel: str) -> list[dict]:
    script = Path(__file__).with_name("rank_work.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    words = [*launcher, str(script), str(store.folder), parallel, str(folder)]
    answer = subprocess.run(words, env=environment(), capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "parallel"), [(2, "ddp"), (4, "ddp"), (2, "fsdp")])
def test_ranks_share_a_validation_and_exchange_once(ranks, parallel, byte_store, tmp_path):
    lines = told(byte_store, tmp_path, ranks=ranks, parallel=parallel)
    tokens = len(byte_store.split("valid")) - 1
    scored = [line["scored"] for line in lines]
    print(lines[0])
    assert sum(scored) == tokens  # each once
    assert max(scored) <= 1.1 * tokens / ranks + SMALL.training.segment
    assert {line["tokens"] for line in lines} == {tokens}
    assert len({line["loss"] for line in lines}) == 1
    assert lines[0]["lanes"] % ranks == 0
    if parallel == "ddp":
        # Gradients, and beside them the loss and what each rank asks for.
        numbers = lines[0]["parameters"] + SMALL.training.accumulation + 4
        assert lines[0]["kinds"] == ["gloo:all_reduce"]
        assert (lines[0]["exchanges"], lines[0]["bytes"]) == (1, 4 * numbers)


def test_shares_of_lanes_make_the_figure_of_one_rank(byte_store):
    """In float64: each rank's losses are those that one rank finds there, and nobody's token is anybody else's."""
    session = Session.fresh(SMALL, store=byte_store, device=torch.device("cpu"))
    session.model.double()
    split = byte_store.split("valid")
    whole = score_split(session.model, split, rule=make_rule(session.model, SMALL.evaluation, tokens=len(split)))
    for count in (2, 3, 4, 7):
        rule = make_rule(session.model, SMALL.evaluation, tokens=len(split), ranks=count)
        assert rule.lanes >= count
        times, sum_of_all = np.zeros(len(split), dtype=int), np.zeros(len(split))
        for rank in range(count):
            own = Ranks(rank=rank, count=count).share_of(rule.lanes)
            found = score_split(session.model, split, rule=rule, own=own)
            times += ~np.isnan(found)
            sum_of_all += np.nan_to_num(found)
        assert times[0] == 0
        assert (times[1:] == 1).all()
        np.testing.assert_allclose(sum_of_all[1:], whole[1:], rtol=0, atol=1e-6)  # kept as float32


def test_a_text_too_short_for_all_ranks_leaves_some_without_any(byte_store):
    session = Session.fresh(SMALL, store=byte_store, device=torch.device("cpu"))
    split = byte_store.split("valid").first(20)
    rule = make_rule(session.model, SMALL.evaluation, tokens=len(split), ranks=8)
    assert rule.lanes == 2
    scored = []
    for rank in range(8):
        own = Ranks(rank=rank, count=8).share_of(rule.lanes)
        scored.append(int((score_split(session.model, split, rule=rule, own=own) >= 0).sum()))
    assert sum(scored) == 19
    assert sorted(scored)[:6] == [0] * 6


def test_lanes_are_as_many_as_a_devices_free_memory_allows(monkeypatch):
    device = torch.device("cuda")
    asked = {"tokens": 10**9, "segment": 128}
    for free, expected in ((0, 1), (10**12, scoring.MOST_DEVICE_LANES)):
        monkeypatch.setattr(scoring, "free_bytes", lambda device, free=free: free)
        assert scoring.lanes_for(SMALL.model, **asked, device=device) == expected
        assert scoring.lanes_for(SMALL.model, **asked, device=device, ranks=8) == 8 * expected
    lane = scoring._bytes_of_a_lane(SMALL.model, segment=128)
    monkeypatch.setattr(scoring, "free_bytes", lambda device: 24 * lane + 1)
    assert scoring.lanes_for(SMALL.model, **asked, device=device) == 12
    assert scoring.lanes_for(SMALL.model, **asked) == scoring.MOST_LANES  # on a processor as ever


def test_validating_too_long_is_said_once_with_the_way_out(monkeypatch, capsys):
    monkeypatch.setattr(validating, "WORTH_SAYING_SECONDS", 0.0)
    cost = Cost()
    cost._started_at -= 1000.0
    cost.add(49.0, SMALL.training, tokens=200)
    assert not capsys.readouterr().err
    for _ in range(3):
        cost.add(30.0, SMALL.training, tokens=200)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "validating has taken 8% of the time so far, more than 5%" in said
    assert "raise training.validate_every (it is 10), or lower training.validation_tokens" in said


def test_a_stop_on_any_rank_ends_the_validation_of_all(byte_store):
    class TwoRanks(Ranks):
        def total(self, *values):
            return [*values[:-1], values[-1] + 1]  # the other was asked to stop

    session = Session.fresh(SMALL, store=byte_store, device=torch.device("cpu"))
    session.ranks = TwoRanks()
    assert evaluate_together(session, session.model, byte_store.split("valid")) is None
