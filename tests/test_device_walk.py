"""Every public path on a device that is not the processor (`card.py`): no tensor lies elsewhere, the numbers are those of the processor, and the host waits
for the device only where `allowed_waits.py` says why."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import transformer_xl as txl
from allowed_waits import ALLOWED, PER_TRAINING_STEP
from card import CARD, inserted
from device_walk import used, walked
from small_run import SMALL
from transformer_xl.cli import main
from transformer_xl.config import EvaluationConfig, ModelConfig, RecurrentConfig, RunConfig
from transformer_xl.training import train
from transformer_xl.training.origin import open_origin
from transformer_xl.training.session import Session
from transformer_xl.training.step import take_step

pytestmark = pytest.mark.usefixtures("without_pictures")
TEXT = "def f(x):\n    return x\n" * 4


# --- the runs


def small(byte_store, folder, *, steps=2, **model):
    training = replace(SMALL.training, steps=steps, validate_every=2, save_every=2)
    config = RunConfig(
        model=ModelConfig(**{**vars(SMALL.model), **model}),
        training=training,
        evaluation=replace(SMALL.evaluation, memory=model.get("memory", 12)),
    )
    train(config, store=byte_store, folder=folder, command="txl train small")
    return folder


@pytest.fixture(scope="module")
def word_run(word_store, word_config, tmp_path_factory):
    """With tails, and with rows of several widths."""
    folder = tmp_path_factory.mktemp("runs") / "words"
    model = replace(word_config.model, div_val=2)
    training = replace(SMALL.training, steps=2, validate_every=2, save_every=2)
    train(replace(word_config, model=model, training=training), store=word_store, folder=folder, command="txl train")
    return folder


@pytest.fixture(scope="module")
def modern_run(byte_store, tmp_path_factory):
    """With runs of tokens and neighbours."""
    folder = tmp_path_factory.mktemp("runs") / "modern"
    return small(byte_store, folder, ngrams=(2, 3), ngram_rows=64, d_ngram=4, neighbours=3, norm="pre", final_norm=True)


@pytest.fixture(scope="module")
def vanilla_run(byte_store, tmp_path_factory):
    return small(byte_store, tmp_path_factory.mktemp("runs") / "vanilla", memory=0, encoding="absolute")


@pytest.fixture(scope="module")
def qrnn_run(byte_store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "qrnn"
    model = RecurrentConfig(vocabulary=256, cell="qrnn", n_layer=2, d_model=16, d_hidden=20, window=2)
    training = replace(SMALL.training, steps=2, validate_every=2, save_every=2)
    config = RunConfig(model=model, training=training, evaluation=EvaluationConfig(segment=12))
    train(config, store=byte_store, folder=folder, command="txl train qrnn")
    return folder


RUNS = ("trained_run", "word_run", "modern_run", "vanilla_run", "recurrent_run", "qrnn_run")
REMEMBERING = tuple(run for run in RUNS if run != "vanilla_run")


@pytest.fixture
def run(request):
    return request.getfixturevalue(request.param)


# --- training

STEPS = {
    "plain": {},
    "muon": {"optimiser": "muon"},
    "sgd": {"optimiser": "sgd", "momentum": 0.9},
    "accumulated": {"accumulation": 2, "average": "ema"},
    "documents": {"reset_memory_at_documents": True},
    "recomputed": {"checkpoint_activations": True},
    "regularised": {"activation_regularisation": 1.0, "temporal_regularisation": 1.0},
}
MODERN = {"ngrams": (2, 3), "ngram_rows": 64, "d_ngram": 4, "neighbours": 3, "norm": "pre", "final_norm": True}
MODELS = {
    "relative": {},
    "modern": MODERN,
    "shaw": {"encoding": "shaw_biased", "learned_positions": 9},
    "per_layer": {
        "encoding": "per_layer",
        "learned_positions": 12,
        "memory": 0,
        "auxiliary_layers": True,
        "auxiliary_targets": 1,
    },
    "tails": {"vocabulary": 300, "cutoffs": (40, 100), "div_val": 2},
    "one table": {"vocabulary": 20_000, "cutoffs": (40, 100)},
    "locked": {"locked_dropout": ("attention", "inner"), "attention_dropout": 0.1, "dropout": 0.1},
}


def steps_taken(config, store):
    def path(device):
        session = Session.fresh(config, store=store, device=torch.device(device))
        dropped = config.model.dropout > 0
        return (
            [take_step(session, session.lanes.next()).nats for _ in range(2)]
            if not dropped
            else bool(take_step(session, session.lanes.next()))
        )

    return path


@pytest.mark.parametrize("training", STEPS)
def test_a_training_step(training, byte_store):
    model = replace(SMALL.model, **MODERN) if training == "muon" else SMALL.model
    config = replace(SMALL, model=model, training=replace(SMALL.training, **STEPS[training]))
    walked(steps_taken(config, byte_store))


@pytest.mark.parametrize("model", MODELS)
def test_a_training_step_of_every_model(model, byte_store):
    model = ModelConfig(**{**vars(SMALL.model), **MODELS[model]})
    config = replace(SMALL, model=model, evaluation=replace(SMALL.evaluation, memory=model.memory))
    walked(steps_taken(config, byte_store))


@pytest.mark.parametrize("cell", ["lstm", "qrnn"])
def test_a_training_step_of_a_recurrent_model(cell, byte_store):
    model = RecurrentConfig(
        vocabulary=256, cell=cell, n_layer=2, d_model=16, d_hidden=20, window=2 if cell == "qrnn" else 1
    )
    walked(
        steps_taken(
            RunConfig(model=model, training=SMALL.training, evaluation=EvaluationConfig(segment=12)), byte_store
        )
    )


def test_how_often_a_training_step_waits(byte_store):
    config = replace(SMALL, training=replace(SMALL.training, steps=9))
    with inserted() as card:
        session = Session.fresh(config, store=byte_store, device=torch.device("cuda"))
        for _ in range(3):
            with card.counted() as waits:
                take_step(session, session.lanes.next())
        assert len(waits) <= PER_TRAINING_STEP, "\n".join(map(str, waits))


def test_a_whole_training_and_its_resuming(byte_store, tmp_path, monkeypatch):
    monkeypatch.setattr("transformer_xl.training.validating.SAMPLE_TOKENS", 8)

    def path(device):
        folder, training = tmp_path / device, replace(SMALL.training, steps=2, validate_every=2, save_every=2)
        how = {"store": byte_store, "folder": folder, "device": device, "command": "txl train"}
        train(replace(SMALL, training=training), **how)
        outcome = train(replace(SMALL, training=replace(training, steps=4)), **how)
        return outcome.validation.figures.loss_nats

    walked(path, close=1e-4)


def test_an_adapter(trained_run, byte_store, tmp_path, monkeypatch):
    monkeypatch.setattr("transformer_xl.training.validating.SAMPLE_TOKENS", 8)

    def path(device):
        folder, training = tmp_path / device, replace(SMALL.training, steps=2, validate_every=2, save_every=2)
        origin = open_origin(trained_run, store=byte_store, rank=2)
        train(replace(SMALL, training=training), store=byte_store, folder=folder, device=device, origin=origin)
        loaded = txl.load(trained_run, device=device, adapter=folder / "adapter.safetensors")
        return loaded.score(TEXT).nats[1:]

    walked(path, close=1e-3)


# --- reading and writing


@pytest.mark.parametrize("run", RUNS, indirect=True)
def test_evaluating(run):
    walked(lambda device: txl.load(run, device=device).evaluate(tokens=120).loss_nats)


@pytest.mark.parametrize("rule", ["paper", "sliding"])
def test_evaluating_by_other_rules(rule, trained_run, vanilla_run):
    run = vanilla_run if rule == "sliding" else trained_run
    walked(lambda device: txl.load(run, device=device).evaluate(tokens=120, rule=rule).loss_nats)


def test_evaluating_with_bytes_for_weights(trained_run):
    walked(
        lambda device: txl.load(trained_run, device=device).evaluate(tokens=120, weights="int8").loss_nats, close=1e-3
    )


@pytest.mark.parametrize("run", RUNS, indirect=True)
def test_generating(run):
    def path(device):
        loaded = txl.load(run, device=device)
        drawn = loaded.generate("def ", tokens=20, top_k=0, top_p=0.9, repetition_penalty=1.2)
        many = loaded.generate_many(["def ", "class ", "x"], tokens=20, stop=["q"])
        return drawn, [one.text for one in many], [one.text for one in loaded.likeliest("def ", tokens=4, beams=3)]

    walked(path)


def test_generating_from_bytes_for_weights(trained_run):
    walked(lambda device: txl.load(trained_run, device=device).generate("def ", tokens=20, weights="int8"))


@pytest.mark.parametrize("run", REMEMBERING, indirect=True)
def test_scoring(run):
    def path(device):
        loaded = txl.load(run, device=device)
        streamed = np.concatenate([piece.nats for piece in loaded.score_stream([TEXT.encode()])])
        return loaded.score(TEXT).nats[1:], streamed[1:]

    walked(path)


def test_scoring_lines_and_going_on(trained_run, tmp_path):
    def path(device):
        loaded, state = txl.load(trained_run, device=device), tmp_path / f"{device}.state"
        scorer = loaded.line_scorer(by="line", last=10)
        first = [line.bits for line in scorer.feed(b"one\ntwo\nthr")]
        scorer.save(state)
        return first + [line.bits for line in loaded.line_scorer(state=state).feed(b"ee\nfour\n")]

    walked(path)


@pytest.mark.parametrize("run", REMEMBERING, indirect=True)
def test_an_engine_saved_and_restored(run, tmp_path):
    def path(device):
        loaded = txl.load(run, device=device)
        ids = np.asarray(loaded.tokenizer.encode(TEXT), dtype=np.int64)[:20]
        tokens_BT = torch.from_numpy(np.stack([ids, ids[::-1].copy()])).to(device)
        engine = loaded.engine(lanes=2)
        engine.read(tokens_BT)
        engine.save(tmp_path / device)
        restored = loaded.engine(state=tmp_path / device)
        restored, _ = type(restored).joined([restored.select([1, 0]), restored.fork()]).without([1])
        restored.reset([1])
        losses = restored.score(tokens_BT[:1].expand(3, -1).contiguous())
        return losses[:, 1:].cpu().numpy(), restored.feed(tokens_BT[:1, :1].expand(3, 1)).cpu().numpy()

    walked(path)


def test_an_engine_goes_from_one_device_to_another(trained_run, tmp_path):
    tokens_BT = torch.tensor([list(b"def f(x):")])
    here = txl.load(trained_run, device="cpu")
    engine = here.engine()
    engine.read(tokens_BT)
    engine.save(tmp_path / "here")
    expected = engine.score(tokens_BT)
    with inserted():
        restored = txl.load(trained_run, device="cuda").engine(state=tmp_path / "here")
        found = restored.score(tokens_BT.to(CARD)).cpu()
        restored.save(tmp_path / "there")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        here.engine(state=tmp_path / "there").score(tokens_BT), engine.score(tokens_BT), rtol=1e-5, atol=1e-5
    )


# --- looking into it, and giving it away


def test_attention(trained_run):
    def path(device):
        view = txl.load(trained_run, device=device).attention(TEXT)
        return [list(row.values()) for row in view.heads]

    walked(path, close=1e-4)


@pytest.mark.parametrize("run", ["trained_run", "vanilla_run", "recurrent_run"], indirect=True)
def test_contexts(run, byte_store):
    from transformer_xl.analysis.contexts import context_losses, make_stretch

    def path(device):
        loaded, split = txl.load(run, device=device), byte_store.split("test")
        stretch = make_stretch(split, lengths=[1, 4, 9], tokens=40, most=40)
        settings = {"evaluation": loaded.config.evaluation, "training": loaded.config.training}
        return context_losses(loaded.model, split, stretch=stretch, **settings).losses

    walked(path)


@pytest.mark.parametrize("to", ["huggingface", "original", "safetensors", pytest.param("onnx", marks=pytest.mark.slow)])
def test_exporting(to, trained_run, byte_store, tmp_path):
    from transformer_xl.interop.exporting import export

    run = small(byte_store, tmp_path / "run", initial_memory="zeros") if to == "huggingface" else trained_run

    def path(device):
        return export(txl.load(run, device=device).checkpoint, tmp_path / device, to=to).files

    walked(path)
    for file in (tmp_path / "cpu").rglob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "cuda" / file.relative_to(tmp_path / "cpu")).read_bytes()


# --- the same by commands


def test_commands(trained_run, vanilla_run, tmp_path, capsys):
    (tmp_path / "text").write_text(TEXT)
    first, second, text = str(trained_run), str(vanilla_run), str(tmp_path / "text")

    def path(device):
        out = tmp_path / device

        def told(*words):
            capsys.readouterr()
            assert main([*words, "--device", device]) == 0
            return capsys.readouterr().out

        def told_as_json(*words):
            return json.loads(told(*words, "--json"))

        looked = told_as_json("attention", first, "--text", text, "--out", str(out / "attention"))
        reach = ("--longest", "8", "--step", "4", "--tokens", "20", "--out", str(out / "recl"))
        compared = told_as_json("compare", first, second, "--tokens", "100", "--plot", str(out / "compared.png"))
        return [
            told_as_json("evaluate", first, "--tokens", "100")["loss_nats"],
            told("generate", first, "--prompt", "def ", "--tokens", "9"),
            [json.loads(line)["bits"] or 0.0 for line in told("score", first, text).splitlines()],
            [row["mean_distance"] for row in looked["ranking"]],
            told_as_json("recl", first, *reach)["recl"],
            [row["loss_nats"] for row in compared["runs"]],
            told("export", first, "--to", "safetensors", "--out", str(out / "export")).replace(device, ""),
        ]

    walked(path, close=1e-4)


def test_every_allowed_wait_is_needed(request):
    """Where all walks above have passed in this process; what only a server needs is walked there."""
    walks = [item for item in request.session.items if item.path == request.path and item is not request.node]
    if len(walks) < 50 or request.session.testsfailed:
        pytest.skip("not all were walked")
    idle = set(ALLOWED) - used
    assert {place for place in idle if not place.startswith(("serving/", "batching/", "interop/formats/"))} == set()
