"""A device is not waited for: what its steps found is read one step late, and it is the same. On a processor, which is asked to behave like one."""

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from small_run import SMALL
from transformer_xl.checkpoint import RunFolder
from transformer_xl.config import EvaluationConfig, RecurrentConfig
from transformer_xl.training import loop, step, train
from transformer_xl.training.optimisation import kept_on
from transformer_xl.training.recording import read_metrics
from transformer_xl.training.reporting import TrainingStopped
from transformer_xl.training.session import Session
from transformer_xl.training.step import take_step

pytestmark = pytest.mark.usefixtures("without_pictures")
OPTIMISERS = ("adam", "adamw", "sgd", "muon")
WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::_unique2", "aten::masked_select")
"""What asks a device for a number, or for a size that depends on its numbers."""


@pytest.fixture
def late(monkeypatch):
    """Sessions behave as on a device."""
    start = loop.start_or_resume

    def started(*arguments, **options):
        session = start(*arguments, **options)
        session.late = True
        return session

    monkeypatch.setattr(loop, "start_or_resume", started)


def configured(optimiser="adam", **training):
    momentum = {"momentum": 0.9} if optimiser == "sgd" else {}
    return replace(SMALL, training=replace(SMALL.training, optimiser=optimiser, **momentum, **training))


def written(folder):
    """All that was recorded except times, and the bytes of what was saved."""
    lines = [
        {name: value for name, value in line.items() if name not in ("seconds", "tokens_per_second", "peak_memory_mb")}
        for line in read_metrics(folder / "metrics.jsonl")
    ]
    last = RunFolder(folder).checkpoint_at(RunFolder(folder).steps()[-1])
    return lines, [(last / name).read_bytes() for name in ("model.safetensors", "training.safetensors")]


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_read_late_or_at_once_a_run_is_the_same(optimiser, byte_store, tmp_path, request):
    config = configured(optimiser, log_every=3, average="uniform", accumulation=2)
    train(config, store=byte_store, folder=tmp_path / "at once")
    request.getfixturevalue("late")
    told = []
    train(config, store=byte_store, folder=tmp_path / "late", on_step=lambda step: told.append(step.step))
    assert told == list(range(1, 21))
    assert written(tmp_path / "late") == written(tmp_path / "at once")
    assert [line["step"] for line in read_metrics(tmp_path / "late" / "metrics.jsonl") if line["kind"] == "train"] == [
        *range(3, 20, 3),
        20,
    ]


def test_a_step_is_told_of_when_the_next_is_queued(late, byte_store, tmp_path, monkeypatch):
    order = []

    def watched(session, segment):
        order.append(("queued", session.step + 1))
        return take_step(session, segment)

    monkeypatch.setattr(loop, "take_step", watched)
    config = configured(steps=5, validate_every=0, save_every=3)
    train(config, store=byte_store, folder=tmp_path / "run", on_step=lambda step: order.append(("told", step.step)))
    queued = [("queued", 1), ("queued", 2), ("told", 1), ("queued", 3), ("told", 2), ("told", 3)]  # which is saved
    assert order == [*queued, ("queued", 4), ("queued", 5), ("told", 4), ("told", 5)]


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("what", [math.nan, math.inf])
def test_what_is_not_finite_moves_nothing(what, where, optimiser, byte_store):
    session = Session.fresh(
        configured(optimiser, accumulation=2, weight_decay=0.1), store=byte_store, device=torch.device("cpu")
    )
    session.late = True

    def whole():
        state = [value for each in session.optimiser.state.values() for key, value in each.items() if key != "step"]
        return [value.clone() for value in (*session.model.parameters(), *state)]

    for _ in range(3):
        assert take_step(session, session.lanes.next()).taken
    before = whole()
    forward, segment = session.model.vocabulary.loss, session.lanes.next()
    hook = None
    if where == "loss":
        session.model.vocabulary.loss = lambda *a, **more: forward(*a, **more) * what
    else:
        hook = session.model.layers[0].query.weight.register_hook(lambda gradient: gradient * what)
    update = take_step(session, segment)
    if hook is not None:
        hook.remove()
    session.model.vocabulary.loss = forward
    assert not update.taken
    assert math.isfinite(update.nats) == (where == "gradient")
    for mine, theirs in zip(whole(), before, strict=True):
        assert torch.equal(mine, theirs)
    assert all(layer.isfinite().all() for memory in session.memories for layer in memory.layers)
    assert take_step(session, session.lanes.next()).taken
    assert not torch.equal(whole()[0], before[0])


@pytest.mark.parametrize("rule", ["stop", "skip"])
def test_the_report_comes_a_step_late_and_names_the_step(rule, late, byte_store, tmp_path, monkeypatch):
    taken = []

    def poisoned(session, segment):
        taken.append(session.step + 1)
        hook = session.model.vocabulary.bias_V.register_hook(lambda gradient: gradient * math.nan)
        try:
            if session.step + 1 != 4:
                hook.remove()
            return take_step(session, segment)
        finally:
            hook.remove()

    monkeypatch.setattr(loop, "take_step", poisoned)
    config = configured(non_finite=rule, log_every=1)
    if rule == "stop":
        with pytest.raises(TrainingStopped, match="a gradient of step 4 is not finite"):
            train(config, store=byte_store, folder=tmp_path / "run")
        assert taken == [1, 2, 3, 4, 5]
        return
    train(config, store=byte_store, folder=tmp_path / "run")
    checkpoint = RunFolder(tmp_path / "run").checkpoint_at(20)
    assert json.loads((checkpoint / "training.json").read_text())["skipped"] == 1
    steps = [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert steps == [1, 2, 3, *range(5, 21)]


class Waits(TorchDispatchMode):
    """Counts what would wait for a device."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, called, types, arguments=(), options=None):
        name = called._schema.name
        self.found[name] += name in WAITS
        return called(*arguments, **(options or {}))


@pytest.mark.parametrize("kind", ["bytes", "words", "tails of their own", "runs of tokens", "lstm"])
@pytest.mark.parametrize("optimiser", ["adam", "muon"])
def test_a_step_asks_a_device_for_nothing(kind, optimiser, byte_store, word_store, word_config, monkeypatch):
    """No number, and no size that depends on numbers; the counters are on the host, after a resume too."""
    config, store = configured(optimiser, accumulation=2), byte_store
    if kind in ("words", "tails of their own"):
        own = {"div_val": 2, "tie_embeddings": False} if kind == "tails of their own" else {}
        config, store = replace(config, model=replace(word_config.model, **own)), word_store
    if kind == "runs of tokens":
        config = replace(config, model=replace(config.model, ngrams=(2, 3), ngram_rows=64, d_ngram=4))
    if kind == "lstm":
        shape = RecurrentConfig(vocabulary=256, cell="lstm", n_layer=1, d_model=8, d_hidden=8)
        config = replace(config, model=shape, evaluation=EvaluationConfig(segment=12))
    session = Session.fresh(config, store=store, device=torch.device("cpu"))
    session.late = True
    if kind == "runs of tokens":
        session.model.ngrams.sparse_gradient = False  # as on a device
    take_step(session, session.lanes.next())
    session.restore(session.state(), weights=session.weights_to_use(), folder=store.folder)
    # On a processor alone tokens are looked at; and a matrix's turn is counted there.
    monkeypatch.setattr("transformer_xl.model.transformer.check_segment", lambda tokens, *a, **more: tokens.shape)
    monkeypatch.setattr("transformer_xl.model.recurrent.check_segment", lambda tokens, *a, **more: tokens.shape)
    monkeypatch.setattr("transformer_xl.model.transformer.check_tokens", lambda *a, **more: None)
    monkeypatch.setattr("transformer_xl.model.memory.Memory.check", lambda memory: None)
    monkeypatch.setattr("transformer_xl.model.memory.Memory.ragged", False)
    segment = session.lanes.next()
    with Waits() as waits:
        update = take_step(session, segment)
    matrices = sum("momentum" in state for state in session.optimiser.state.values())
    assert waits.found["aten::_local_scalar_dense"] == (matrices if optimiser == "muon" else 0)
    assert sum(waits.found[name] for name in WAITS[1:]) == 0
    assert update.taken


def test_what_waits_is_found(word_config, word_store):
    """The counter above sees a step that asks: the same with the places left out."""
    session = Session.fresh(word_config, store=word_store, device=torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch, Waits() as waits:
        patch.setattr(step, "places", lambda *a, **more: None)
        take_step(session, session.lanes.next())
    assert waits.found["aten::nonzero"] == 2


def test_places_found_on_the_host_are_those_of_the_model(word_config, word_store):
    config = replace(word_config.model, div_val=2, tie_embeddings=False)
    session = Session.fresh(replace(word_config, model=config), store=word_store, device=torch.device("cpu"))
    session.model.double()
    segment = session.lanes.next()
    tokens, targets = torch.from_numpy(segment.tokens), torch.from_numpy(segment.targets)
    found = step.places(session.model, segment.tokens, segment.targets, device=session.device)
    assert len(found.tokens) == 3
    assert len(found.targets) == 2
    told, asked = (session.model(tokens, targets_BT=targets, places=places).loss_BT for places in (found, None))
    assert torch.equal(told, asked)
    gradients = [
        torch.autograd.grad(loss.sum(), list(session.model.parameters()), allow_unused=True) for loss in (told, asked)
    ]
    for mine, theirs in zip(*gradients, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


def test_muons_counts_stay_on_the_host_on_any_device(byte_store):
    session = Session.fresh(configured("muon"), store=byte_store, device=torch.device("cpu"))
    take_step(session, session.lanes.next())
    matrices = [state for state in session.optimiser.state.values() if "momentum" in state]
    assert matrices
    assert {str(kept_on("step", state, device=torch.device("meta"))) for state in matrices} == {"cpu"}
