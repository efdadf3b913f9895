"""The engine of a recurrent model gives the numbers of its forward, however the text comes."""

import random

import pytest
import torch

from transformer_xl.config import RecurrentConfig
from transformer_xl.errors import CheckpointError, InputError
from transformer_xl.inference import RecurrentEngine, make_reader, reader, restore_reader
from transformer_xl.model import Recurrent

MODELS = [("lstm", 1), ("qrnn", 2)]


@pytest.fixture(params=MODELS, ids=["lstm", "qrnn"])
def model(request, monkeypatch) -> Recurrent:
    monkeypatch.setattr(reader, "CHUNK", 5)
    monkeypatch.setattr(reader, "LEAST_CHUNK", 3)
    torch.manual_seed(0)
    cell, window = request.param
    config = RecurrentConfig(
        vocabulary=13, cell=cell, window=window, n_layer=2, d_model=6, d_hidden=9, init_std=0.5, cutoffs=(4,)
    )
    return Recurrent(config).double().eval()


def test_equals_the_forward_under_random_chunks_resets_and_forks(model):
    for seed in range(20):
        chance = random.Random(seed)
        texts = [[] for _ in range(chance.randint(1, 4))]
        engine = make_reader(model, lanes=len(texts))
        for _ in range(6):
            action = chance.choice(["read", "read", "reset", "select", "join"])
            if action == "read":
                length = chance.randint(1, 9)
                new = [[chance.randrange(13) for _ in range(length)] for _ in texts]
                found = engine.feed(torch.tensor(new))
                texts = [[*text, *more] for text, more in zip(texts, new, strict=True)]
                for lane, text in enumerate(texts):
                    hidden_BTD = model(torch.tensor([text])).hidden_BTD
                    torch.testing.assert_close(
                        found[lane], model.log_probabilities(hidden_BTD)[0, -1], rtol=0, atol=1e-10
                    )
            elif action == "reset":
                lane = chance.randrange(len(texts))
                engine.reset([lane])
                texts[lane] = []
            else:
                lanes = [chance.randrange(len(texts)) for _ in range(chance.randint(1, 4))]
                parts = [engine.select([lane]) for lane in lanes]
                engine = RecurrentEngine.joined(parts) if action == "join" else engine.select(lanes)
                texts = [list(texts[lane]) for lane in lanes]


def test_scores_every_token_given_all_before_it(model):
    tokens_BT = torch.randint(13, (2, 23), generator=torch.Generator().manual_seed(1))
    engine = make_reader(model, lanes=2)
    found_BT = torch.cat([engine.score(tokens_BT[:, :4]), engine.score(tokens_BT[:, 4:])], dim=1)
    expected_BT = model(tokens_BT[:, :-1], targets_BT=tokens_BT[:, 1:]).loss_BT
    assert found_BT[:, 0].isnan().all()
    torch.testing.assert_close(found_BT[:, 1:], expected_BT, rtol=0, atol=1e-10)


def test_goes_on_after_saving_and_restoring(model, tmp_path):
    tokens_BT = torch.randint(13, (2, 9), generator=torch.Generator().manual_seed(1))
    engine = make_reader(model, lanes=2)
    engine.read(tokens_BT)
    engine.save(tmp_path / "state")
    again = restore_reader(model, tmp_path / "state")
    assert torch.equal(again.score(tokens_BT), engine.score(tokens_BT))
    (tmp_path / "state").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="not a saved engine"):
        restore_reader(model, tmp_path / "state")


def test_refuses_what_is_for_attention(model):
    with pytest.raises(InputError, match="memory: 64 is for attention"):
        make_reader(model, memory=64)
    with pytest.raises(InputError, match="'int8' is for Transformer-XL"):
        make_reader(model, weights="int8")
    with pytest.raises(InputError, match="lane 1 does not exist"):
        make_reader(model).reset([1])
