"""Products in bfloat16 or float16 where that is asked for, and nothing else: positions, norms, softmax sums and losses stay float32."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import transformer_xl as txl
from card import CARD, inserted
from small_run import SMALL
from transformer_xl import devices
from transformer_xl.cli import main
from transformer_xl.config import ModelConfig
from transformer_xl.devices import choose_device, computing_on, half_of
from transformer_xl.errors import ConfigError
from transformer_xl.model import products
from transformer_xl.training.session import Session
from transformer_xl.training.step import take_step

TEXT = "def f(x):\n    return x\n" * 8
CLOSE = 0.02
"""Of a loss in nats: bfloat16 keeps eight bits of each factor, and a loss here is 4 to 6."""
RUNS = ("trained_run", "recurrent_run")


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_losses_on_a_card(run, precision, request):
    run = request.getfixturevalue(run)
    expected = txl.load(run, device="cpu").score(TEXT).nats[1:]
    with inserted(bfloat16=True):
        loaded = txl.load(run, device="cuda", precision=precision)
        found = loaded.score(TEXT).nats[1:]
        figure = loaded.evaluate(tokens=200)
        assert len(loaded.generate("def ", tokens=8)) > 0
    np.testing.assert_allclose(found, expected, atol=CLOSE)
    assert 0 < np.abs(found - expected).max(), "nothing was rounded"
    assert figure.rule.precision == precision
    assert f"products in {precision}" in figure.rule.sentence()


@pytest.mark.parametrize("run", RUNS)
def test_losses_on_a_processor(run, request):
    run = request.getfixturevalue(run)
    exact, rounded = txl.load(run, device="cpu"), txl.load(run, device="cpu", precision="bfloat16")
    for data in ({"memory": None}, {"rule": "paper"}):
        one, other = (loaded.evaluate(tokens=300, **data).loss_nats for loaded in (exact, rounded))
        assert abs(one - other) < CLOSE
    long = TEXT * 8
    found, expected = rounded.score(long).nats[1:], exact.score(long).nats[1:]
    np.testing.assert_allclose(found, expected, atol=CLOSE)
    if run.name != "lstm":  # whose products are torch's own
        assert 0 < np.abs(found - expected).max(), "nothing was rounded"


def test_only_products_are_rounded(trained_run, monkeypatch):
    """Everything that adds many numbers up is given float32, and what is kept for a card is kept in half precision."""
    seen = {}

    def noting(name):
        original = getattr(F if name != "softmax" else torch, name)

        def noted(values, *args, **kwargs):
            seen.setdefault(name, set()).add(values.dtype)
            return original(values, *args, **kwargs)

        return noted

    with inserted(bfloat16=True):
        loaded = txl.load(trained_run, device="cuda", precision="bfloat16")
        for name in ("layer_norm", "cross_entropy", "log_softmax"):
            monkeypatch.setattr(F, name, noting(name))
        monkeypatch.setattr(torch, "softmax", noting("softmax"))
        engine = loaded.engine()
        tokens_BT = torch.tensor([list(TEXT.encode())], device=CARD)
        engine.score(tokens_BT)
        assert engine.feed(tokens_BT[:, :1]).dtype == torch.float32
        assert engine.last_hidden_BD.dtype == torch.float32
        assert engine.kept.keys[0].dtype == torch.bfloat16
        with products.computing_in(torch.bfloat16, CARD):
            tables = loaded.model.encoding.distances(64)
        assert {table.relative_key_HSK.dtype for table in tables} == {torch.float32}
        with products.computing_in(None, CARD):
            exact = loaded.model.encoding.distances(64)
        for one, other in zip(tables, exact, strict=True):
            assert torch.equal(one.relative_key_HSK, other.relative_key_HSK), "positions were rounded"
    assert seen.pop("log_softmax") == seen.pop("cross_entropy") == {torch.float32}
    assert seen == {"layer_norm": {torch.float32}, "softmax": {torch.float32}}


def test_an_engine_saved_in_half_precision_goes_on_in_another(trained_run, tmp_path):
    tokens = list(TEXT.encode())
    with inserted(bfloat16=True):
        engine = txl.load(trained_run, device="cuda", precision="bfloat16").engine()
        engine.read(engine.tokens([tokens]))
        engine.save(tmp_path / "state")
        again = txl.load(trained_run, device="cuda", precision="bfloat16").engine(state=tmp_path / "state")
        expected = engine.score(engine.tokens([tokens])).cpu()
        assert torch.equal(again.score(again.tokens([tokens])).cpu(), expected)
    whole = txl.load(trained_run, device="cpu").engine(state=tmp_path / "state")
    torch.testing.assert_close(whole.score(whole.tokens([tokens])), expected, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("model", [{}, {"vocabulary": 20_000, "cutoffs": (40, 100)}], ids=["plain", "one table"])
def test_a_training_step_on_a_card(model, byte_store):
    """Where a large table has one gradient, under autocast too."""
    model = ModelConfig(**{**vars(SMALL.model), **model})

    def losses(device, precision):
        config = replace(SMALL, model=model, training=replace(SMALL.training, precision=precision))
        session = Session.fresh(config, store=byte_store, device=torch.device(device))
        found = [(update := take_step(session, session.lanes.next())).nats / update.tokens for _ in range(3)]
        assert session.model.vocabulary.tables[0].grad.dtype == torch.float32
        return found

    expected = losses("cpu", "float32")
    with inserted(bfloat16=True):
        found = losses("cuda", "bfloat16")
    assert found != expected
    np.testing.assert_allclose(found, expected, atol=2 * CLOSE)


def test_validation_is_in_the_precision_of_training(byte_store):
    for precision, half in (("float32", None), ("bfloat16", torch.bfloat16), ("float16", None)):
        config = replace(SMALL, training=replace(SMALL.training, precision=precision))
        session = Session.fresh(config, store=byte_store, device=torch.device("cpu"))
        with session.model_to_use() as model:
            assert model.reads_in == half
        assert session.model.reads_in is None


def test_the_command_says_what_it_computes_in(trained_run, capsys):
    assert main(["evaluate", str(trained_run), "--tokens", "300", "--precision", "bfloat16", "--json"]) == 0
    told = capsys.readouterr()
    assert "in bfloat16" in told.err
    assert json.loads(told.out)["rule"]["precision"] == "bfloat16"
    assert main(["generate", str(trained_run), "--tokens", "3", "--precision", "float16", "--device", "cpu"]) == 2
    assert "float16 is for GPUs" in capsys.readouterr().err


@pytest.fixture
def ampere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    yield
    torch.set_float32_matmul_precision("highest")


def test_tf32_is_allowed_and_said(ampere, monkeypatch):
    assert torch.get_float32_matmul_precision() == "highest"
    monkeypatch.setenv(devices.TF32_SWITCH, "0")
    assert computing_on(choose_device("cuda")) == "computing on cuda (Some GPU)"
    monkeypatch.delenv(devices.TF32_SWITCH)
    assert computing_on(choose_device("cuda")).endswith("float32 products in TF32 (NVIDIA_TF32_OVERRIDE=0: exact)")
    assert torch.get_float32_matmul_precision() == "high"


def test_what_a_word_means(ampere):
    card, processor = torch.device("cuda"), torch.device("cpu")
    assert half_of("auto", card) == torch.bfloat16
    assert half_of("float16", card) == torch.float16
    assert half_of("auto", processor) is half_of("float32", card) is None
    with pytest.raises(ConfigError, match="give auto, float32, bfloat16, float16"):
        half_of("half", card)
