"""The library as programs use it: text to model to answers in a few calls, in the main thread and in others."""

import inspect
import json
import os
import pydoc
import signal
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

import transformer_xl as txl
from small_run import SMALL
from transformer_xl.checkpoint import RunFolder
from transformer_xl.config import EvaluationConfig
from transformer_xl.decoding import Sampling
from transformer_xl.errors import CheckpointError, ConfigError, DataError, InputError, MissingPackage
from transformer_xl.library import Loaded
from transformer_xl.training import train
from transformer_xl.training.clock import steps_in

TINY = {
    "n_layer": 2,
    "d_model": 16,
    "n_head": 2,
    "d_head": 8,
    "d_inner": 32,
    "memory": 12,
    "ngram_rows": 64,
    "d_ngram": 4,
}
FEW = {"segment": 12, "lanes": 4, "log_every": 5, "validate_every": 0, "validation_tokens": 200}


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    for name in ("decoder.py", "encoder.py"):
        (tmp_path / "logs" / name).write_bytes((Path(json.__file__).parent / name).read_bytes())
    return tmp_path


def test_from_a_folder_to_text(texts):
    store = txl.prepare("logs/")
    assert store.folder == Path("data/logs")
    told = []
    run = txl.train(store, steps=12, model=TINY, training=FEW, on_step=told.append)
    assert run.path == Path("runs/logs")
    assert [now.step for now in told] == list(range(1, 13))
    assert told[-1].progress == 1.0
    assert told[-1].loss_nats < told[0].loss_nats
    assert [row["step"] for row in run.metrics if row["kind"] == "train"] == [5, 10, 12]
    assert list(run.metrics.to_pandas()["kind"]) == ["train", "train", "train", "validation"]
    loaded = run.load()
    assert len(loaded.generate("def ", tokens=9, temperature=0.7, top_k=3).encode()) >= 9
    assert "txl.train('data/logs', steps=12, run='runs/logs'" in (run.path / "README.md").read_text()
    again = txl.train(store, steps=15, model=TINY, training=FEW)
    assert again.step == 15
    assert again.config.training.steps == 15


def test_everything_says_what_it_is(texts):
    store = txl.prepare(["logs/decoder.py"], out="store")
    run = txl.train("store", steps=3, run="r", model=TINY, training=FEW)
    assert repr(store) == "<store store: decoder.py, 256 byte tokens; train 11,205, valid 627, test 641>"
    assert repr(run).startswith("<run r: step 3, best valid bits per byte ")
    assert repr(run.metrics).startswith("<2 rows of metrics: kind, step, loss_nats, ")
    loaded = run.load()
    assert repr(loaded).startswith("<r at step 3: Transformer-XL, 2 layers")
    assert repr(loaded).endswith("memory 12, byte tokens, on cpu>")
    assert repr(loaded.attention("def f")) == (
        "<attention of 2 layers with 2 heads each, over 5 tokens; .plot(layer=1, head=1), .plot(), .heads>"
    )
    assert repr(loaded.evaluate(tokens=100)).startswith("Figures(tokens=99, loss_nats=")


def test_a_store_of_words_gets_a_model_of_words(texts):
    store = txl.prepare("logs", tokenizer="word", vocabulary_size=1500)
    run = txl.train(store, steps=2, training={**FEW, "lanes": 2})
    assert run.config.model.vocabulary == store.manifest.vocabulary_size
    assert run.config.model.cutoffs == tuple(edge for edge in (2000, 5000) if edge < store.manifest.vocabulary_size)


def test_minutes_and_epochs(texts):
    store = txl.prepare("logs/decoder.py")
    assert store.folder == Path("data/decoder")
    run = txl.train(store, minutes=0.02, run="timed", model=TINY, training=FEW)
    assert run.config.training.minutes == 0.02
    run = txl.train(store, epochs=0.1, run="counted", model=TINY, training=FEW)
    assert run.step == steps_in(0.1, run.config, store)


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (
            lambda store: txl.train(store, minutes=1, steps=2),
            ConfigError,
            "minutes and steps both say how long to train",
        ),
        (lambda store: txl.train(store, minutes=0), ConfigError, "`minutes=` 0 is no time; give more than 0"),
        (lambda store: txl.train(store, epochs=0), ConfigError, "`epochs=` 0 is no number of times to read a text"),
        (lambda store: txl.train(store, steps=0), ConfigError, "training.steps: 0 is too small"),
        (lambda store: txl.train(store, "byts"), ConfigError, "no preset byts; did you mean bytes?"),
        (
            lambda store: txl.train(store, model={"memroy": 3}),
            ConfigError,
            "no field model.memroy; did you mean model.memory?",
        ),
        (lambda store: txl.train(store, device="gpu"), ConfigError, "`device=` 'gpu' is no device"),
        (lambda store: txl.train("nowhere"), DataError, "nowhere holds no data store"),
        (lambda store: txl.prepare("nowhere"), DataError, "no corpus and no file nowhere"),
        (lambda store: txl.prepare("enwik"), DataError, "no corpus and no file enwik; did you mean enwik8?"),
        (lambda store: txl.prepare([]), DataError, "nothing to prepare"),
        (lambda store: txl.prepare("."), DataError, r"lies in \., whose text goes into it; choose another `out=`"),
        (lambda store: txl.Run("nowhere"), CheckpointError, "nowhere holds no run; train one with"),
    ],
)
def test_what_cannot_be_is_one_sentence(call, error, sentence, byte_store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=sentence):
        call(byte_store)


# --- a model that is loaded


def test_lengths_are_asked_for_by_name(trained_run):
    loaded = txl.load(trained_run)
    longer = loaded.evaluate(memory=30, tokens=300)
    assert longer.rule.memory == 30
    assert longer.loss_nats == txl.load(trained_run, memory=30).evaluate(tokens=300).loss_nats
    assert loaded.config.model.memory == loaded.model.config.memory == 12
    clamped = loaded.evaluate(memory=30, tokens=300, clamp_len=4, same_length=True, segment=20)
    assert (clamped.rule.clamp_len, clamped.rule.same_length, clamped.rule.segment) == (4, True, 20)
    with pytest.warns(DeprecationWarning, match=r"lengths= goes with the next version; give memory="):
        before = loaded.evaluate(tokens=300, lengths=EvaluationConfig(segment=12, memory=30))
    assert before.loss_nats == longer.loss_nats
    losses = loaded.per_token(memory=30)
    assert np.isnan(losses[0])
    with pytest.warns(DeprecationWarning, match="lengths="):
        np.testing.assert_array_equal(loaded.per_token(lengths=EvaluationConfig(segment=12, memory=30)), losses)


def test_a_sweep_is_its_evaluations(trained_run, tmp_path):
    loaded = txl.load(trained_run)
    found = loaded.sweep([0, 12, 40], tokens=300)
    assert [one.loss_nats for one in found] == [loaded.evaluate(memory=m, tokens=300).loss_nats for m in (0, 12, 40)]
    table = found.to_pandas()
    assert list(table["memory"]) == [0, 12, 40]
    assert list(table["loss_nats"]) == [one.loss_nats for one in found]
    assert str(found).count("\n") == 3
    assert "(trained with)" in str(found).splitlines()[2]
    figure = found.plot(tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert figure._repr_png_().startswith(b"\x89PNG")
    line = figure.axes[0].lines[0]
    assert line.get_ydata().tolist() == [one.bits_per_byte for one in found]
    with pytest.raises(InputError, match="a sweep of no memories has nothing to compare"):
        loaded.sweep([])


def test_attention_is_what_the_analysis_finds(trained_run, tmp_path):
    from transformer_xl.analysis.attention import attention_maps, average_attention

    loaded = txl.load(trained_run)
    text = "def decode(self, s):\n    return 1\n"
    looked = loaded.attention(text)
    tokens, lengths = loaded.tokenizer.encode(text), loaded.config.evaluation
    (expected,) = attention_maps(txl.load(trained_run).model, tokens, lengths=lengths, heads=[(1, 0)], positions=[9])
    np.testing.assert_array_equal(
        looked.map(layer=2, head=1, position=10).rows[0].probability["total"], expected.rows[0].probability["total"]
    )
    averages = average_attention(txl.load(trained_run).model, tokens, lengths=lengths)
    assert [(row["layer"] - 1, row["head"] - 1) for row in looked.heads] == averages.widest()
    assert set(looked.heads.to_pandas()) == {"layer", "head", "mean_distance", "entropy_bits", "memory_share"}
    looked.plot(layer=2, head=1, path=tmp_path / "head.png")
    assert (tmp_path / "head.png").read_bytes().startswith(b"\x89PNG")
    assert looked.plot()._repr_png_().startswith(b"\x89PNG")
    for wrong, sentence in {
        "no head 3.1: this model has layers 1 to 2": {"layer": 3, "head": 1},
        "no token 99 in a text of 34 tokens": {"layer": 1, "head": 1, "position": 99},
        "no token 0 in a text": {"layer": 1, "head": 1, "position": 0},
        "a head is one of a layer; give layer and head": {"layer": 1},
    }.items():
        with pytest.raises(InputError, match=wrong):
            looked.plot(**sentence)
    with pytest.raises(InputError, match="a text of 1 tokens has nothing to look back at"):
        loaded.attention("a")
    with pytest.raises(InputError, match="memory=4`, or give a longer text"):
        loaded.attention("def f").plot()


def test_a_recurrent_model_has_no_attention(recurrent_run):
    with pytest.raises(InputError, match="is a recurrent model, which has no attention to look at"):
        txl.load(recurrent_run).attention("def f")


def test_how_text_is_drawn_stands_in_the_signature():
    """With the defaults that `Sampling` has: they are written down three times, for `help`."""
    known = {field.name: field.default for field in fields(Sampling)}
    for method, missing in ((Loaded.generate, set()), (Loaded.stream, set()), (Loaded.generate_many, {"seed"})):
        parameters = inspect.signature(method).parameters
        assert {name: parameters[name].default for name in known if name in parameters} == {
            name: value for name, value in known.items() if name not in missing
        }
        assert not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())


# --- threads


def weights(folder):
    run = RunFolder(folder)
    return (run.checkpoint_at(run.steps()[-1]) / "training.safetensors").read_bytes()


def dropping(seed):
    model = replace(SMALL.model, dropout=0.2, attention_dropout=0.1)
    return replace(SMALL, model=model, training=replace(SMALL.training, seed=seed, steps=40, save_every=7))


@pytest.mark.usefixtures("without_pictures")
def test_trainings_side_by_side_are_what_each_is_alone(byte_store, tmp_path):
    for seed in (1, 2):
        train(dropping(seed), store=byte_store, folder=tmp_path / f"alone-{seed}")
    start = threading.Barrier(2)

    def one(seed):
        start.wait()
        train(dropping(seed), store=byte_store, folder=tmp_path / f"beside-{seed}")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, (1, 2)))
    for seed in (1, 2):
        assert weights(tmp_path / f"beside-{seed}") == weights(tmp_path / f"alone-{seed}")
    assert weights(tmp_path / "alone-1") != weights(tmp_path / "alone-2")


@pytest.mark.usefixtures("without_pictures")
def test_one_model_reads_writes_and_is_judged_while_another_is_trained(byte_store, trained_run, tmp_path):
    loaded = txl.load(trained_run)
    work = {
        "generate": lambda: loaded.generate("def ", tokens=60, seed=3),
        "evaluate": lambda: loaded.evaluate(tokens=300, memory=40).loss_nats,
        "shorter": lambda: loaded.evaluate(tokens=300, memory=3).loss_nats,
        "score": lambda: loaded.score("def f(x):\n    return x\n").nats[1:].tolist(),
        "attention": lambda: loaded.attention("def f(x):\n    return x\n").averages.mean_distance.tolist(),
    }
    alone = {name: do() for name, do in work.items()}
    train(dropping(5), store=byte_store, folder=tmp_path / "alone")
    with ThreadPoolExecutor(6) as pool:
        training = pool.submit(train, dropping(5), store=byte_store, folder=tmp_path / "beside")
        for _ in range(4):
            beside = {name: pool.submit(do) for name, do in work.items()}
            assert {name: found.result() for name, found in beside.items()} == alone
        training.result()
    assert weights(tmp_path / "beside") == weights(tmp_path / "alone")


def test_training_leaves_the_chance_of_others_alone(byte_store, tmp_path):
    import torch

    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    drawn = []
    config = replace(dropping(1), training=replace(dropping(1).training, steps=4))
    train(config, store=byte_store, folder=tmp_path / "run", on_step=lambda now: drawn or drawn.append(torch.rand(2)))
    assert torch.equal(drawn[0], expected)


@pytest.mark.usefixtures("without_pictures")
def test_a_thread_can_be_stopped_and_goes_on(byte_store, tmp_path):
    whole = train(dropping(4), store=byte_store, folder=tmp_path / "whole")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with ThreadPoolExecutor(1) as pool:
        stopping = {"on_step": lambda now: now.step == 11 and now.stop()}
        first = pool.submit(train, dropping(4), store=byte_store, folder=tmp_path / "run", **stopping).result()
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
        assert (first.step, first.stopped_by) == (11, signal.SIGTERM)
        assert pool.submit(train, dropping(4), store=byte_store, folder=tmp_path / "run").result().step == whole.step
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_an_interrupt_stops_the_main_thread_and_saves(byte_store, tmp_path):
    interrupting = {"on_step": lambda now: now.step == 2 and signal.raise_signal(signal.SIGINT)}
    run = txl.train(byte_store, SMALL, run=tmp_path / "run", **interrupting)
    assert run.stopped
    assert run.step == 2
    assert "step 2 (stopped)" in repr(run)


def test_two_trainers_of_one_run_are_refused_in_threads_too(byte_store, tmp_path):
    with ThreadPoolExecutor(1) as pool:

        def second(now):
            with pytest.raises(CheckpointError, match="is being trained by process"):
                pool.submit(train, SMALL, store=byte_store, folder=tmp_path / "run").result()
            now.stop()

        assert train(SMALL, store=byte_store, folder=tmp_path / "run", on_step=second).step == 1


# --- what it shows


def test_the_main_names_are_shown(capsys):
    assert {"prepare", "train", "load", "Run", "Loaded", "open_store"} <= set(dir(txl))
    assert set(dir(txl)) - {"__version__", "__doc__"} == set(txl.__all__)
    for name in txl.__all__:
        assert getattr(txl, name) is not None
        assert pydoc.getdoc(getattr(txl, name)) or name.endswith("Config"), name
    shown = pydoc.plain(pydoc.render_doc(txl))
    for call in ("txl.prepare(", "txl.train(", "loaded.generate(", "loaded.sweep(", "help(txl.train)"):
        assert call in shown


@pytest.mark.processes
def test_importing_does_nothing():
    code = (
        "import sys, threading, transformer_xl as txl; dir(txl); txl.__doc__\n"
        "loaded = {name.split('.')[0] for name in sys.modules} & {'torch', 'numpy', 'matplotlib', 'tqdm', 'IPython', 'pandas'}\n"
        "assert not loaded and threading.active_count() == 1, loaded\n"
        "txl.find_preset; assert 'torch' not in sys.modules"
    )
    answer = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=os.environ)
    assert answer.returncode == 0, answer.stderr


def test_rows_without_pandas_say_how_to_get_it(trained_run, monkeypatch):
    monkeypatch.setattr("transformer_xl.rows.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match="a table of metrics needs pandas; install it with: pip install pandas"):
        txl.Run(trained_run).metrics.to_pandas()


def test_a_call_of_before_warns_and_nothing_else_does(trained_run):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = txl.load(trained_run)
        loaded.evaluate(memory=5, tokens=50)
        loaded.sweep([0, 5], tokens=50)


def test_a_preset_cut_for_more_words_takes_a_store_of_few(tmp_path):
    (tmp_path / "a.txt").write_text("the clocks were striking thirteen in the town\n" * 400)
    store = txl.prepare(tmp_path / "a.txt", out=tmp_path / "store", tokenizer="word")
    run = txl.train(store, "words", steps=2, run=tmp_path / "run")
    assert run.config.model.cutoffs == ()
