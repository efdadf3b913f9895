"""What the same bits everywhere cost, beside the fastest path of the ordinary engine: run by name, on a machine that does nothing else, with -s for figures."""

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from transformer_xl import native
from transformer_xl.inference import Engine, PortableReader
from transformer_xl.model import TransformerXL
from transformer_xl.presets import find_preset

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.skipif(native.library() is None, reason="no C++ compiler here"),
]
FIRST, TOKENS, TIMES = 200, 400, 5
SLOWER = 1.15


def seconds(work: Callable[[], object]) -> float:
    """Of the processor, all threads together: a thread that waits costs, one that others kept from running does not."""
    started_at = time.process_time()
    work()
    return time.process_time() - started_at


@pytest.mark.parametrize("name", ["bytes", "paper-demo"])
@pytest.mark.parametrize("lanes", [1, 16, 64])
def test_no_slower_than_the_engine(name, lanes):
    """A token of every lane at a time: the engine draws the next one below Python, in as few calls as it can."""
    torch.manual_seed(0)
    model = TransformerXL(find_preset(name).run.model).eval()
    steps = TOKENS // lanes
    tokens_BT = torch.randint(model.config.vocabulary, (lanes, FIRST + steps))
    engine, reader = Engine(model, lanes=lanes), PortableReader(model, lanes=lanes)
    engine.read(tokens_BT[:, :FIRST])
    reader.read_many(tokens_BT[:, :FIRST].numpy())
    chance = native.Choice(temperature=1.0, top_p=1.0, min_p=0.0, share=0.5, top_k=0)
    choices = (native.Choice * (steps * lanes))(*[chance] * (steps * lanes))

    def write() -> None:
        left, last = steps, tokens_BT[:, FIRST].tolist()
        while left:
            now = min(left, engine.most_steps)
            last = engine.write(last, choices, now)[-1]
            left -= now

    def step() -> None:
        for t in range(FIRST, FIRST + steps):
            reader.read(tokens_BT[:, t].numpy())

    many_BT = np.ascontiguousarray(tokens_BT[:, FIRST:].numpy())
    works = {"engine": write, "portable": step, "portable, many": lambda: reader.read_many(many_BT)}
    found = [{name: seconds(work) for name, work in works.items()} for _ in range(TIMES)]
    best = {name: min(each[name] for each in found) / (steps * lanes) for name in works}
    print(
        f"\n{name}, {lanes} lanes: " + ", ".join(f"{key} {value * 1e6:.1f} us a token" for key, value in best.items())
    )
    assert best["portable"] < SLOWER * best["engine"]
    assert best["portable, many"] < SLOWER * best["portable"]
