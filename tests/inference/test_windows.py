"""Reading without memory: a window is the model's own forward, and what no window shows is refused."""

import pytest
import torch

from small_models import build, random_tokens
from transformer_xl.errors import InputError
from transformer_xl.inference import WindowReader, make_reader


def test_a_segment_is_the_models_own_forward_and_a_longer_text_its_last_window():
    model = build(memory=0)
    tokens_BT = random_tokens(model, lanes=2, length=9)
    reader = make_reader(model, lanes=2, window=9)
    assert isinstance(reader, WindowReader)
    torch.testing.assert_close(reader.read(tokens_BT), model(tokens_BT).hidden_BTD)
    more_BT = random_tokens(model, lanes=2, length=3, seed=5)
    last_BT = torch.cat([tokens_BT, more_BT], dim=1)[:, -9:]
    torch.testing.assert_close(reader.read(more_BT), model(last_BT).hidden_BTD[:, -3:])
    reader.reset([0, 1])
    torch.testing.assert_close(reader.read(more_BT), model(more_BT).hidden_BTD)


def test_lanes_come_and_go():
    model = build(memory=0)
    tokens_BT = random_tokens(model, lanes=3, length=5)
    reader = make_reader(model, lanes=3)
    reader.read(tokens_BT)
    fewer, order = reader.select([2, 0, 1]).without([1])
    assert order == [0, 2]
    next_BT = torch.tensor([[1], [2]])
    whole_BT = torch.cat([tokens_BT[[2, 1]], next_BT], dim=1)
    torch.testing.assert_close(fewer.read(next_BT)[:, 0], model(whole_BT).hidden_BTD[:, -1])


def test_a_text_beyond_the_window_has_no_scores_and_a_window_no_file(tmp_path):
    model = build(memory=0)
    reader = make_reader(model, window=6)
    assert reader.score(random_tokens(model, lanes=1, length=6)).shape == (1, 6)
    with pytest.raises(InputError, match="7 tokens is longer than the window of 6"):
        reader.score(random_tokens(model, lanes=1, length=1))
    with pytest.raises(InputError, match="keeps nothing but its text"):
        reader.save(tmp_path / "saved")
