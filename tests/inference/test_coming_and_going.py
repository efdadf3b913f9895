"""Lanes that join a batch and leave it in place read what they would read alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from small_models import build
from transformer_xl.config import RecurrentConfig
from transformer_xl.errors import InputError
from transformer_xl.inference import Engine, Reader, make_reader
from transformer_xl.model import Recurrent

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def lstm() -> Recurrent:
    torch.manual_seed(0)
    return Recurrent(RecurrentConfig(vocabulary=13, cell="lstm", n_layer=2, d_model=8, d_hidden=10)).double().eval()


@given(seed=st.integers(0, 1000), kind=st.sampled_from(["empty", "zeros", "lstm"]))
@settings(max_examples=40, deadline=None)
def test_each_lane_of_a_changing_batch_is_what_it_would_be_alone(seed, kind):
    model = lstm() if kind == "lstm" else build(memory=6, initial_memory=kind)
    generator = torch.Generator().manual_seed(seed)

    def number(most: int) -> int:
        return int(torch.randint(1, most + 1, (1,), generator=generator))

    def newcomer() -> Reader:
        fresh = make_reader(model)
        fresh.read(torch.randint(13, (1, number(20)), generator=generator))
        return fresh

    alone = [newcomer()]
    together = alone[0].fork()
    moves = 0
    for _ in range(12):
        if number(2) == 1:
            coming = [newcomer() for _ in range(number(3))]
            together = together.grown(coming)
            alone += [one.fork() for one in coming]
        elif len(alone) > 1:
            leaving = {number(len(alone)) - 1 for _ in range(number(len(alone) - 1))}
            together, order = together.without(leaving)
            assert sorted(order) == [lane for lane in range(len(alone)) if lane not in leaving]
            moves += order != sorted(order)
            alone = [alone[lane] for lane in order]
        tokens = torch.randint(13, (len(alone), 1), generator=generator)
        read = together.read(tokens)
        assert together.lanes == len(alone)
        for lane, own in enumerate(alone):
            torch.testing.assert_close(read[lane], own.read(tokens[lane : lane + 1])[0], **CLOSE)
            assert together.read_B[lane] == own.read_B[0]


def test_the_lanes_of_others_are_not_used_up():
    model = build(memory=6)
    first, second = Engine(model), Engine(model)
    second.read(torch.tensor([[1, 2, 3]]))
    kept = second.fork()
    first.read(torch.tensor([[4]]))
    batch = first.grown([second])
    batch.read(torch.tensor([[5], [6]]))
    torch.testing.assert_close(second.read(torch.tensor([[7]])), kept.read(torch.tensor([[7]])), **CLOSE)


def test_engines_of_several_memories_do_not_join():
    model = build(memory=6)
    with pytest.raises(InputError, match="several models or memories"):
        Engine(model).grown([Engine(model, memory=3)])
