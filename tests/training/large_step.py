"""One real training step of a preset, for test_large_presets: prints the loss, the time and the largest resident memory of this process."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from transformer_xl.data.store import open_store
from transformer_xl.presets import find_preset
from transformer_xl.training.ranks import ALONE, joined
from transformer_xl.training.session import Session
from transformer_xl.training.step import take_step


def main(name: str, data: str, lanes: int, parallel: str) -> None:
    run = find_preset(name).run
    run = replace(run, training=replace(run.training, lanes=lanes, checkpoint_activations=True))
    store = open_store(data)
    if parallel == "alone":
        print(told(run, store, ALONE), flush=True)
        return
    with joined(parallel=parallel, device="cpu") as ranks:  # type: ignore[arg-type]
        line = told(run, store, ranks)
        if ranks.first:
            print(line, flush=True)


def told(run, store, ranks) -> str:
    session = Session.fresh(run, store=store, device=ranks.device("cpu"), ranks=ranks)
    started_at = time.perf_counter()
    update = take_step(session, session.lanes.next())
    seconds = time.perf_counter() - started_at
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    return json.dumps({"loss": update.nats / update.tokens, "taken": update.taken, "seconds": seconds, "peak": peak})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
