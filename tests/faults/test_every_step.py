"""R3 and R7: stopped after each of 50 steps, a run goes on to the same bits; what is not finite never reaches the weights, at any step."""

import math
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from small_run import SMALL
from transformer_xl.checkpoint import RunFolder, load_checkpoint
from transformer_xl.training import loop, train
from transformer_xl.training.reporting import TrainingStopped

STEPS = 50
CONFIG = replace(
    SMALL,
    model=replace(SMALL.model, dropout=0.2, attention_dropout=0.1),
    training=replace(SMALL.training, steps=STEPS, accumulation=2, warm_up=10, validate_every=0, save_every=0),
)
pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("without_pictures")]


@pytest.fixture(scope="module")
def whole(byte_store, tmp_path_factory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("every") / "run"
    train(CONFIG, store=byte_store, folder=folder)
    return final(folder)


def final(folder: Path) -> list[bytes]:
    checkpoint = RunFolder(folder).checkpoint_at(STEPS)
    return [(checkpoint / name).read_bytes() for name in ("model.safetensors", "training.safetensors")]


@pytest.mark.parametrize("each", [range(1, STEPS, 12), pytest.param(range(1, STEPS + 1), marks=pytest.mark.slow)])
def test_stopped_after_a_step_and_resumed_is_bit_identical(each, whole, byte_store, tmp_path, monkeypatch):
    take_step, same = loop.take_step, 0
    for stop_at in each:
        folder, taken = tmp_path / str(stop_at), 0

        def stopping(session, segment, stop_at=stop_at):
            nonlocal taken
            taken += 1
            if taken == stop_at:
                signal.raise_signal(signal.SIGTERM)
            return take_step(session, segment)

        with monkeypatch.context() as patch:
            patch.setattr(loop, "take_step", stopping)
            assert train(CONFIG, store=byte_store, folder=folder).step == stop_at
        train(CONFIG, store=byte_store, folder=folder)
        same += final(folder) == whole
    print(f"{same} of {len(each)} identical")
    assert same == len(each)


@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient", "weight's gradient of one row"])
@pytest.mark.parametrize("steps", [[3], pytest.param(list(range(1, 21)), marks=pytest.mark.slow)])
def test_nothing_that_is_not_finite_is_ever_learned(steps, where, what, byte_store, tmp_path, monkeypatch):
    """Stops by default with the weights as they were; skips on request, counts, and stays finite."""
    take_step = loop.take_step

    def poisoned_at(at):
        def poisoned(session, segment):
            if session.step + 1 != at:
                return take_step(session, segment)
            vocabulary = session.model.vocabulary
            if where == "loss":
                forward = vocabulary.loss
                with monkeypatch.context() as patch:
                    patch.setattr(vocabulary, "loss", lambda *a, **more: forward(*a, **more) + what)
                    return take_step(session, segment)
            target = vocabulary.bias_V if where == "gradient" else session.model.layers[0].query.weight

            def spoil(gradient):
                gradient = gradient.clone()
                gradient[0] = what
                return gradient

            hook = target.register_hook(spoil)
            try:
                return take_step(session, segment)
            finally:
                hook.remove()

        return poisoned

    for at in steps:
        with monkeypatch.context() as patch:
            patch.setattr(loop, "take_step", poisoned_at(at))
            with pytest.raises(TrainingStopped, match=f"of step {at} is not finite"):
                train(SMALL, store=byte_store, folder=tmp_path / f"stop-{at}")
            skipping = replace(SMALL, training=replace(SMALL.training, non_finite="skip"))
            train(skipping, store=byte_store, folder=tmp_path / f"skip-{at}")
        model = load_checkpoint(tmp_path / f"skip-{at}").model
        assert all(bool(torch.isfinite(weight).all()) for weight in model.parameters())
