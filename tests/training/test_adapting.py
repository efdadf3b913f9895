"""A run that begins with another's weights: what it takes over and what not, what it gains and loses, and that an adapter's training is exact."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from test_minutes import Machine, by_clock, state_of
from test_resuming import stop_after

import transformer_xl as txl
from small_run import SMALL, prepare
from transformer_xl.checkpoint import RunFolder, load_checkpoint, read_training_state, write_checkpoint
from transformer_xl.checkpoint.run_folder import ADAPTER_FILE
from transformer_xl.cli import main
from transformer_xl.config import RunConfig
from transformer_xl.data.store import open_store
from transformer_xl.errors import CheckpointError, ConfigError, DataError
from transformer_xl.evaluation import evaluate, make_rule
from transformer_xl.model.adapters import factors, merged
from transformer_xl.training import gains, train
from transformer_xl.training.origin import open_origin
from transformer_xl.training.recording import read_metrics
from transformer_xl.training.session import Session
from transformer_xl.training.step import take_step

pytestmark = pytest.mark.usefixtures("without_pictures")
CPU = torch.device("cpu")
STEPS = 12
NEW = replace(SMALL.training, steps=STEPS, validate_every=6, save_every=6)


@pytest.fixture(scope="module")
def new_store(tmp_path_factory):
    """Another text in the same tokens: letters of a kind of its own, so that a run gains on it and loses on the old."""
    folder = tmp_path_factory.mktemp("new")
    (folder / "novel.txt").write_text("IT WAS A BRIGHT COLD DAY IN APRIL.\n" * 300)
    return prepare(folder / "novel.txt", folder / "store", "byte")


def begun(config: RunConfig, **training: object) -> RunConfig:
    return replace(config, training=replace(NEW, **training))  # type: ignore[arg-type]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(run).model.state_dict()


# --- what is taken over


@pytest.mark.parametrize("rank", [None, 3])
def test_it_begins_with_the_weights_and_nothing_else(rank, trained_run, new_store):
    origin = open_origin(trained_run, store=new_store, rank=rank)
    session = Session.fresh(begun(SMALL), store=new_store, device=CPU, origin=origin)
    own = session.model.state_dict()
    assert all(torch.equal(own[name], weight) for name, weight in weights_of(trained_run).items())
    assert (session.step, session.tokens, session.best_nats, session.memories) == (0, 0, None, [None])
    assert not any(session.optimiser.state.values())
    assert session.lanes.at_start


@pytest.mark.parametrize(
    "training", [{}, {"optimiser": "muon", "average": "ema", "weight_decay": 0.1, "precision": "bfloat16"}]
)
@pytest.mark.parametrize("model", [{}, {"cutoffs": (50, 120)}, {"ngrams": (2, 3), "ngram_rows": 20, "d_ngram": 4}])
def test_an_adapter_learns_and_what_it_stands_beside_does_not(model, training, byte_store, new_store, tmp_path):
    config = replace(SMALL, model=replace(SMALL.model, **model), training=replace(SMALL.training, steps=2))
    train(config, store=byte_store, folder=tmp_path / "base")
    origin = open_origin(tmp_path / "base", store=new_store, rank=3)
    session = Session.fresh(begun(config, **training), store=new_store, device=CPU, origin=origin)
    before = {name: value.clone() for name, value in session.model.state_dict().items()}
    for _ in range(5):
        take_step(session, session.lanes.next())
        session.step += 1
        session.average.update(session.model, step=session.step)
    after = session.model.state_dict()
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert moved == set(factors(after))
    with session.model_to_use() as readers:
        assert readers.state_dict().keys() == origin.weights.keys()
    assert all(torch.equal(value, after[name]) for name, value in session.model.state_dict().items())


# --- what it gains and loses


@pytest.mark.parametrize("adapter", [[], ["--adapter", "rank=4"]])
def test_the_command_tells_what_was_gained_and_lost(adapter, trained_run, new_store, byte_store, tmp_path, capsys):
    words = ["train", "--from", str(trained_run), *adapter, "--data", str(new_store.folder), "--run"]
    words += [str(tmp_path / "run"), "--training.steps", "25", "--training.learning_rate", "0.02"]
    assert main(words) == 0
    new, old, rule, done = capsys.readouterr().out.splitlines()[-4:]
    assert new.startswith("novel.txt valid: gained ")
    assert old.startswith("text.txt valid: lost ")
    assert rule.startswith("rule exact: every token after the first scored once")
    assert done.endswith(f"next: txl evaluate {tmp_path / 'run'}")
    told = json.loads((tmp_path / "run" / "evaluations" / "gained-and-lost.json").read_text())
    for gain, store, line in zip(told, (new_store, byte_store), (new, old), strict=True):
        split = store.split("valid").first(SMALL.training.validation_tokens)
        for run, when in ((trained_run, "before"), (tmp_path / "run", "after")):
            model = load_checkpoint(run).model
            figures = evaluate(model, split, rule=make_rule(model, SMALL.evaluation, tokens=len(split)))
            assert gain[when]["loss_nats"] == figures.loss_nats
            assert gain[when]["rule"] == vars(figures.rule)
        assert f"({gain['before']['bits_per_byte']:.4f} -> {gain['after']['bits_per_byte']:.4f})" in line


def test_a_stop_while_they_are_compared_is_a_stop(trained_run, new_store, tmp_path, monkeypatch):
    def stopped(*given, **told):
        signal.raise_signal(signal.SIGTERM)
        return make_rule(*given, **told)

    how = {"store": new_store, "folder": tmp_path / "run", "origin": open_origin(trained_run, store=new_store)}
    with monkeypatch.context() as patch:
        patch.setattr(gains, "make_rule", stopped)
        outcome = train(begun(SMALL, steps=2), **how)
    assert (outcome.step, outcome.stopped_by, outcome.gains) == (2, signal.SIGTERM, ())
    assert not (tmp_path / "run" / "evaluations" / "gained-and-lost.json").exists()
    outcome = train(begun(SMALL, steps=2), **how)
    assert (outcome.stopped_by, len(outcome.gains)) == (None, 2)


def test_what_is_not_known_of_the_old_text_is_said(trained_run, new_store, byte_store, tmp_path, capsys):
    words = ["--data", str(new_store.folder), "--training.steps", "2", "--run"]
    assert main(["export", str(trained_run), "--to", "safetensors", "--out", str(tmp_path / "given")]) == 0
    assert main(["train", "--from", str(tmp_path / "given"), *words, str(tmp_path / "one")]) == 0
    captured = capsys.readouterr()
    assert "came without its text: what was lost on that is not known" in captured.err
    assert captured.out.count("valid:") == 1
    moved = shutil.copytree(byte_store.folder, tmp_path / "store")
    train(replace(SMALL, training=replace(NEW, steps=2)), store=open_store(moved), folder=tmp_path / "base")
    shutil.rmtree(moved)
    assert main(["train", "--from", str(tmp_path / "base"), *words, str(tmp_path / "two")]) == 0
    assert f"is no longer at {moved}: what was lost on it is not known" in capsys.readouterr().err
    shutil.copytree(new_store.folder, moved)  # the very text that is trained on
    assert main(["train", "--from", str(tmp_path / "base"), *words, str(tmp_path / "three")]) == 0
    assert capsys.readouterr().out.count("valid:") == 1
    tokenizer = json.loads((moved / "tokenizer.json").read_text())
    (moved / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main(["train", "--from", str(tmp_path / "base"), *words, str(tmp_path / "four")]) == 0
    assert f"{moved} now holds text in other tokens" in capsys.readouterr().err


def test_recurrent_runs_go_on_too(recurrent_run, new_store, tmp_path, capsys):
    words = ["train", "--from", str(recurrent_run), "--data", str(new_store.folder), "--training.steps", "4", "--run"]
    assert main([*words, str(tmp_path / "run")]) == 0
    assert "novel.txt valid: gained" in capsys.readouterr().out
    assert main([*words, str(tmp_path / "adapter"), "--adapter", "rank=2"]) == 2
    assert "--adapter is for the layers of a Transformer-XL, and this is an lstm" in capsys.readouterr().err


# --- an adapter's run is a run


@pytest.fixture(scope="module")
def adapter_run(trained_run, new_store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted") / "run"
    train(begun(SMALL), store=new_store, folder=folder, origin=open_origin(trained_run, store=new_store, rank=3))
    return folder


def test_its_weights_are_the_sum_everywhere(adapter_run, trained_run, new_store, tmp_path, capsys):
    file = adapter_run / ADAPTER_FILE
    assert file.read_bytes() == (RunFolder(adapter_run).chosen_checkpoint() / ADAPTER_FILE).read_bytes()
    sum_ = merged({**weights_of(trained_run), **load_file(file)})
    beside = txl.load(trained_run, adapter=file)
    for found in (weights_of(adapter_run), beside.model.state_dict()):
        assert found.keys() == sum_.keys()
        assert all(torch.equal(found[name], weight) for name, weight in sum_.items())
    out = tmp_path / "merged"
    assert main(["export", str(trained_run), "--adapter", str(file), "--to", "safetensors", "--out", str(out)]) == 0
    made = RunFolder(adapter_run).chosen_checkpoint() / "model.safetensors"
    assert (out / "model.safetensors").read_bytes() == made.read_bytes()
    text = "IT WAS A COLD DAY."
    assert (beside.score(text).nats[1:] == txl.load(adapter_run).score(text).nats[1:]).all()
    capsys.readouterr()
    read = ["score", str(new_store.folder / "manifest.json")]
    for words in (["generate", "--tokens", "9"], read, [*read, "--by", "line"]):
        assert main([words[0], str(trained_run), *words[1:], "--adapter", str(file)]) == 0
        with_file = capsys.readouterr().out
        assert main([words[0], str(adapter_run), *words[1:]]) == 0
        assert capsys.readouterr().out == with_file


def test_figures_with_an_adapter_stand_beside_the_runs_own(adapter_run, trained_run, new_store, tmp_path, capsys):
    run = Path(shutil.copytree(trained_run, tmp_path / "base"))
    words = ["evaluate", str(run), "--data", str(new_store.folder), "--split", "valid", "--json"]
    assert main(words) == 0
    own = json.loads(capsys.readouterr().out)
    assert main([*words, "--adapter", str(adapter_run / ADAPTER_FILE)]) == 0
    adapted = json.loads(capsys.readouterr().out)
    assert adapted["adapter"] == str(adapter_run / ADAPTER_FILE)
    assert adapted["loss_nats"] < own["loss_nats"]
    assert main(["evaluate", str(adapter_run), "--split", "valid", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss_nats"] == adapted["loss_nats"]
    kept = sorted(path.name for path in (run / "evaluations").iterdir())
    assert [name.split("-adapter-")[0].removesuffix(".json") for name in kept] == [
        "valid-exact-memory-12-segment-12"
    ] * 2
    assert len(set(kept)) == 2


def test_validation_reads_the_sum(adapter_run, new_store):
    last = [line for line in read_metrics(RunFolder(adapter_run).metrics) if line["kind"] == "validation"][-1]
    model = load_checkpoint(RunFolder(adapter_run).checkpoint_at(STEPS)).model
    split = new_store.split("valid").first(SMALL.training.validation_tokens)
    found = evaluate(model, split, rule=make_rule(model, SMALL.evaluation, tokens=len(split)))
    assert found.loss_nats == last["loss_nats"]


def test_it_can_be_begun_from_in_turn(adapter_run, byte_store, tmp_path, capsys):
    words = ["train", "--from", str(adapter_run), "--data", str(byte_store.folder), "--training.steps", "2"]
    assert main([*words, "--run", str(tmp_path / "run")]) == 0
    assert "novel.txt valid:" in capsys.readouterr().out  # its own text is the old one now


# --- stopped and resumed

VARIANTS = {
    "adam": begun(SMALL),
    "averaged, dropout, two micro-batches": replace(
        begun(SMALL, average="ema", accumulation=2, warm_up=3), model=replace(SMALL.model, dropout=0.2)
    ),
    "muon, recomputed": begun(SMALL, optimiser="muon", average="uniform", average_from=5, checkpoint_activations=True),
    "sgd": begun(SMALL, optimiser="sgd", momentum=0.9, schedule="plateau"),
}


def final_state(folder: Path) -> dict[str, object]:
    checkpoint = RunFolder(folder).checkpoint_at(STEPS)
    state: dict[str, object] = {
        name: (checkpoint / name).read_bytes() for name in ("model.safetensors", "training.safetensors")
    }
    if (checkpoint / ADAPTER_FILE).is_file():
        # safetensors puts what a header tells in any order; its checksum is over all of it, and over every number.
        with safe_open(checkpoint / ADAPTER_FILE, framework="pt") as file:
            state[ADAPTER_FILE] = file.metadata()
    return state


@pytest.mark.parametrize("rank", [3, None])
@pytest.mark.parametrize("variant", VARIANTS)
def test_stopped_and_resumed_is_bit_identical(variant, rank, trained_run, new_store, tmp_path, monkeypatch):
    how = {"store": new_store, "origin": open_origin(trained_run, store=new_store, rank=rank)}
    train(VARIANTS[variant], folder=tmp_path / "whole", **how)
    for stop_at in (1, 8):
        with monkeypatch.context() as patch:
            stop_after(patch, stop_at)
            outcome = train(VARIANTS[variant], folder=tmp_path / str(stop_at), **how)
        assert outcome.stopped_by is not None
        assert outcome.gains == ()
        outcome = train(VARIANTS[variant], folder=tmp_path / str(stop_at), **how)
        assert [gain.corpus for gain in outcome.gains] == ["novel.txt valid", "text.txt valid"]
        assert final_state(tmp_path / str(stop_at)) == final_state(tmp_path / "whole")
    assert len(final_state(tmp_path / "whole")) == (2 if rank is None else 3)


@pytest.mark.parametrize("rank", [3, None])
def test_by_the_clock_it_ends_on_time_and_goes_on_to_the_bit(rank, trained_run, new_store, tmp_path, monkeypatch):
    config = by_clock(0.3, save_every=9)
    how = {"store": new_store, "origin": open_origin(trained_run, store=new_store, rank=rank)}

    def trained(name: str, *, stop_at: int | None = None) -> float:
        with monkeypatch.context() as patch:
            watch = Machine(patch, lambda step: 0.25 if step < 30 else 0.5)
            if stop_at is not None:
                stop_after(patch, stop_at)
            train(config, folder=tmp_path / name, **how)
            return watch.time

    assert trained("whole") == pytest.approx(18, rel=0.05)
    trained("run", stop_at=20)
    trained("run")
    assert state_of(tmp_path / "run") == state_of(tmp_path / "whole")
    told = json.loads((tmp_path / "run" / "evaluations" / "gained-and-lost.json").read_text())
    run = RunFolder(tmp_path / "run")
    table = read_training_state(run.checkpoint_at(run.steps()[-1])).counters.timetable
    assert table is not None
    assert [gain["before"]["tokens"] for gain in told] == [max(2, table.validation_tokens // 4) - 1] * 2


def test_minutes_and_epochs_end_it_by_command(trained_run, new_store, tmp_path, capsys):
    words = ["train", "--from", str(trained_run), "--data", str(new_store.folder), "--run"]
    assert main([*words, str(tmp_path / "minutes"), "--minutes", "0.03"]) == 0
    shown = capsys.readouterr()
    assert "steps fit into 0.03 minutes" in shown.err
    assert "novel.txt valid: gained" in shown.out
    assert main([*words, str(tmp_path / "epochs"), "--epochs", "0.5", "--adapter", "rank=2"]) == 0
    assert "novel.txt valid: gained" in capsys.readouterr().out
    # The next run takes over the end too, unless it is told another.
    words[2] = str(tmp_path / "minutes")
    assert main([*words, str(tmp_path / "steps"), "--training.steps", "3"]) == 0
    assert txl.Run(tmp_path / "steps").step == 3


def test_momenta_are_kept_of_an_adapter_alone(adapter_run):
    """What is saved for resuming is as small as the adapter is."""
    state = read_training_state(RunFolder(adapter_run).checkpoint_at(STEPS))
    kept = [name for name in state.tensors if name.startswith("optimiser.exp_avg.")]
    assert len(kept) == 2 * 5 * SMALL.model.n_layer
    assert all(".adapter." in name for name in kept)


# --- what cannot be


def refused(*words: str, run: Path, capsys) -> str:
    capsys.readouterr()
    assert main(["train", *map(str, words), "--run", str(run)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return said


def test_words_that_do_not_go_together(trained_run, new_store, tmp_path, capsys):
    data, run = ("--data", str(new_store.folder)), tmp_path / "run"
    begin = ("--from", str(trained_run), *data)
    assert "there is no model to train; give a preset" in refused(*data, run=run, capsys=capsys)
    assert "tiny-byte describes a model" in refused("tiny-byte", *begin, run=run, capsys=capsys)
    assert "name its run with --from" in refused("tiny-byte", *data, "--adapter", "rank=8", run=run, capsys=capsys)
    for word in ("8", "rank", "rank=", "rank=x", "rank=-1", "rank=2.5", "alpha=8", "rank=" + "9" * 20, "rank=٣"):
        assert "where rank=N is expected" in refused(*begin, "--adapter", word, run=run, capsys=capsys), word
    for word in ("rank=0", "rank=17"):
        assert "take 1 to 16" in refused(*begin, "--adapter", word, run=run, capsys=capsys)
    said = refused(*begin, "--model.n_layer", "3", run=run, capsys=capsys)
    assert "model.n_layer: 3 where" in said
    assert "has 2; leave it out" in said
    assert "there is no run" in refused("--from", str(tmp_path / "no"), *data, run=run, capsys=capsys)
    assert not run.exists()


def test_lengths_and_dropout_may_be_others(trained_run, new_store, tmp_path):
    words = ["train", "--from", str(trained_run), "--data", str(new_store.folder), "--training.steps", "2", "--run"]
    assert main([*words, str(tmp_path / "run"), "--model.memory", "20", "--model.dropout", "0.1"]) == 0
    assert load_checkpoint(tmp_path / "run").config.model.memory == 20


def test_text_in_other_tokens_is_refused_with_the_way_out(trained_run, word_store, tmp_path, capsys):
    with pytest.raises(DataError, match="another tokenizer"):
        open_origin(trained_run, store=word_store)
    said = refused("--from", str(trained_run), "--data", str(word_store.folder), run=tmp_path / "run", capsys=capsys)
    assert f"than {trained_run} knows (256 byte tokens); make it again from its text with: txl prepare TEXT" in said
    assert f"--tokenizer-of {trained_run}" in said


def test_weights_of_another_type_are_refused(trained_run, new_store, tmp_path):
    given = load_checkpoint(trained_run)
    weights = {name: value.half() for name, value in given.model.state_dict().items()}
    about = {"config": given.config, "about": given.about, "tokenizer": given.tokenizer}
    write_checkpoint(tmp_path / "halves", weights=weights, **about)
    with pytest.raises(CheckpointError, match="holds float16, and weights are trained in float32"):
        open_origin(tmp_path / "halves", store=new_store)


def test_a_run_goes_on_only_from_what_it_began_with(trained_run, adapter_run, new_store, tmp_path):
    here = {"store": new_store, "folder": Path(shutil.copytree(adapter_run, tmp_path / "run"))}
    config = begun(SMALL, steps=14)
    with pytest.raises(CheckpointError, match="is an adapter in training, beside another run's weights"):
        train(config, **here)
    with pytest.raises(CheckpointError, match="is an adapter in training"):
        train(config, origin=open_origin(trained_run, store=new_store), **here)
    with pytest.raises(CheckpointError, match="rank 3 where 4 is asked for; give `adapter=rank=3`"):
        train(config, origin=open_origin(trained_run, store=new_store, rank=4), **here)
    with pytest.raises(CheckpointError, match="did not begin with the weights of"):
        train(config, origin=open_origin(adapter_run, store=new_store, rank=3), **here)
    assert train(config, origin=open_origin(trained_run, store=new_store, rank=3), **here).step == 14
    whole = {"store": new_store, "folder": tmp_path / "whole"}
    train(begun(SMALL), origin=open_origin(trained_run, store=new_store), **whole)
    with pytest.raises(CheckpointError, match="trains all weights and no adapter"):
        train(config, origin=open_origin(trained_run, store=new_store, rank=3), **whole)
    assert train(config, **whole).step == 14  # all it needs is its own
    state = read_training_state(RunFolder(tmp_path / "whole").checkpoint_at(14))
    assert state.counters.origin == open_origin(trained_run, store=new_store).fingerprint


def test_a_run_that_began_by_itself_is_not_begun_from_another(trained_run, byte_store, new_store, tmp_path):
    train(begun(SMALL, steps=2), store=new_store, folder=tmp_path / "run")
    with pytest.raises(CheckpointError, match="choose another `run=`"):
        train(begun(SMALL), store=new_store, folder=tmp_path / "run", origin=open_origin(trained_run, store=new_store))


def test_another_model_is_refused_by_its_field(trained_run, new_store, tmp_path):
    config = replace(SMALL, model=replace(SMALL.model, norm="pre"))
    with pytest.raises(ConfigError, match=r"model.norm: pre where .* has post; leave it out"):
        train(config, store=new_store, folder=tmp_path, origin=open_origin(trained_run, store=new_store))
