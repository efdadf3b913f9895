"""What each of several ranks does, for test_rank_work: tokens it scores in a validation, and what it exchanges with the others in a step. Started by torchrun."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from small_run import SMALL
from transformer_xl.data.store import open_store
from transformer_xl.training import validating
from transformer_xl.training.ranks import joined
from transformer_xl.training.session import Session
from transformer_xl.training.step import take_step

STEPS = 4


def main(data: str, parallel: str, out: str) -> None:
    store = open_store(data)
    config = replace(SMALL, training=replace(SMALL.training, accumulation=1, validation_tokens=0, average="ema"))
    with joined(parallel=parallel, device="cpu") as ranks:
        session = Session.fresh(config, store=store, device=torch.device("cpu"), ranks=ranks)
        take_step(session, session.lanes.next())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            for _ in range(STEPS):
                assert take_step(session, session.lanes.next()).taken
        exchanged = [event for event in profile.events() if event.name.startswith("gloo:")]
        sizes = [4 * max(1, torch.Size(shape).numel()) for event in exchanged for shape in event.input_shapes[:1]]
        scored = []
        counted = validating.summed
        validating.summed = lambda losses: scored.append(counted(losses)[1]) or counted(losses)
        with session.model_to_use() as model:
            figures = validating.evaluate_together(session, model, store.split("valid"))
        told = {
            "rank": ranks.rank,
            "exchanges": len(exchanged) / STEPS,
            "kinds": sorted({event.name for event in exchanged}),
            "bytes": sum(sizes) / STEPS,
            "parameters": sum(weight.numel() for weight in session.model.parameters()),
            "scored": sum(scored),
            "tokens": figures.tokens,
            "lanes": figures.rule.lanes,
            "loss": figures.loss_nats,
        }
        Path(out, f"{ranks.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
