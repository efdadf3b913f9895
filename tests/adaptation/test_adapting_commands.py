"""Learning while reading from Python and from the command line: tuned on valid, told on test, and a stream that goes on after a restart."""

import io
import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import transformer_xl as txl
from transformer_xl.adaptation import AdaptiveReader
from transformer_xl.adaptation.statistics import gather
from transformer_xl.adaptation.tuned import read_tuned
from transformer_xl.checkpoint.adapter_file import fingerprint
from transformer_xl.checkpoint.run_folder import RunFolder
from transformer_xl.cli import main
from transformer_xl.config import AdaptationConfig
from transformer_xl.errors import CheckpointError, ConfigError, InputError

TEXT = b"def first(x):\n    return x\n\ndef second(x):\n    return first(x)\n" * 3
BY_HAND = ["--adaptation.rate", "0.05", "--adaptation.cache_lambda", "0.1", "--adaptation.segment", "8"]


@pytest.fixture(scope="module")
def tuned_run(trained_run, tmp_path_factory):
    """One that was tuned, by the command."""
    folder = tmp_path_factory.mktemp("tuned") / "small"
    shutil.copytree(trained_run, folder)
    words = ["tune-adaptation", str(folder), "--tokens", "300", "--segments", "8", "--device", "cpu"]
    assert main([*words, "--adaptation.rank", "2", "--adaptation.cache_size", "100"]) == 0
    return folder


@pytest.fixture(scope="module")
def loaded(tuned_run):
    return txl.load(tuned_run, device="cpu")


def test_what_was_tuned_is_in_the_run(tuned_run, loaded):
    tuned = read_tuned(RunFolder(tuned_run), base=fingerprint(loaded.model.state_dict()))
    assert tuned.both.nats <= tuned.gradient.nats <= tuned.static.nats
    assert tuned.cache.nats <= tuned.static.nats
    assert tuned.gradient.how.moves
    assert (tuned.gradient.how.rule, tuned.gradient.how.segment) == ("rms", 24)
    assert tuned.tokens == 300
    assert loaded.adaptation("both") == tuned.both.how


@pytest.mark.parametrize("way", ["gradient", "cache", "both"])
def test_figures_of_valid_are_those_that_tuning_found(tuned_run, loaded, way):
    """The last pass of tuning mixes nothing in: what it promised is what reading gives."""
    tuned = read_tuned(RunFolder(tuned_run), base=fingerprint(loaded.model.state_dict()))
    found = loaded.evaluate(split="valid", tokens=300, adapt=way)
    assert found.loss_nats == pytest.approx(getattr(tuned, way).nats, abs=1e-5)
    assert found.rule.lanes == 1
    assert "scored before it was learned from" in found.rule.sentence()
    assert found.loss_nats < loaded.evaluate(split="valid", tokens=300).loss_nats


def test_where_nothing_learns_the_static_figure_to_the_bit(loaded):
    static = loaded.evaluate(tokens=400)
    nothing = loaded.evaluate(tokens=400, adapt=AdaptationConfig(rate=0.0, cache_lambda=0.0))
    assert nothing.loss_nats == static.loss_nats
    assert nothing.rule == static.rule


def test_the_rule_tells_the_segments_that_were_read(loaded):
    """Weights that hardly move read as those that stand still, in segments as long as a lesson."""
    hardly = loaded.evaluate(tokens=400, adapt=AdaptationConfig(rate=1e-30))
    assert hardly.rule.segment == 2 * loaded.config.evaluation.segment
    assert f"segments of {hardly.rule.segment} with memory" in hardly.rule.sentence()
    still = loaded.evaluate(tokens=400, segment=hardly.rule.segment)
    assert hardly.loss_nats == pytest.approx(still.loss_nats, abs=1e-5)
    assert hardly.loss_nats != pytest.approx(loaded.evaluate(tokens=400).loss_nats, abs=1e-5)


def test_tuning_finds_nothing_where_learning_only_hurts(loaded, monkeypatch):
    """Beside weights that stand still in segments as long: a longer segment alone may help."""
    from transformer_xl.adaptation.tuning import Tuning
    from transformer_xl.evaluation import make_rule

    valid = loaded.store().split("valid").first(200)
    rule = make_rule(loaded.model, loaded.config.evaluation, tokens=200, lanes=1)
    statistics = gather(loaded.model, loaded.store().split("train"), segment=24, segments=4, rank=2)
    tuning = Tuning(loaded.model, valid, rule=rule, statistics=statistics)
    really = tuning._tried
    monkeypatch.setattr(tuning, "_tried", lambda how: replace(really(how), nats=level + 1e-9))
    level = tuning._still(AdaptationConfig(segment=24)).nats
    tuned = tuning.tune(AdaptationConfig(rule="rms", rank=2), corpus="")
    assert not tuned.gradient.how.moves
    assert tuned.gradient.nats == level


def test_the_command_tells_and_keeps_the_figure(tuned_run, tmp_path, capsys):
    words = ["evaluate", str(tuned_run), "--tokens", "300", "--device", "cpu", "--adapt"]
    assert main([*words, "both", "--per-token", str(tmp_path / "losses.npy")]) == 0
    assert "moved by rms after every 24 tokens" in capsys.readouterr().out
    assert len(np.load(tmp_path / "losses.npy")) == 299
    (kept,) = (tuned_run / "evaluations").glob("*-adapt-both.json")
    assert json.loads(kept.read_text())["rule"]["lanes"] == 1
    assert main([*words, "gradient", "--adaptation.rate", "0", "--json"]) == 0
    still = json.loads(capsys.readouterr().out)
    assert main([*words[:-1], "--json"]) == 0
    assert still["loss_nats"] == json.loads(capsys.readouterr().out)["loss_nats"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--adapt", "both", "--lanes", "2"], "take 1"),
        (["--adapt", "both", "--rule", "paper"], "the rule paper"),
        (["--adapt", "both", "--weights", "int8"], "not rounded to int8"),
        (["--adapt", "both", "--sweep", "0,4"], "nor --adapt"),
        (["--adapt", "gradient", "--precision", "bfloat16"], "read in float32, not in bfloat16"),
        (["--adapt", "cache", "--adaptation.cache_lambda", "1"], "below 1"),
        (["--adapt", "cache", "--adaptation.theta", "1"], "no option --adaptation.theta"),
        (["--adaptation.rate", "1"], "say with --adapt"),
        (["--adapt", "gradient", "--adaptation.learns", "adapters", "--adaptation.rank", "3"], "of its shape"),
    ],
)
def test_what_cannot_go_together(tuned_run, capsys, words, message):
    assert main(["evaluate", str(tuned_run), "--tokens", "50", "--device", "cpu", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_run_that_was_not_tuned(trained_run, capsys):
    words = ["evaluate", str(trained_run), "--tokens", "60", "--device", "cpu", "--adapt"]
    assert main([*words, "gradient"]) == 2
    assert "txl tune-adaptation" in capsys.readouterr().err
    assert main([*words, "gradient", "--adaptation.rate", "0.1", "--adaptation.rule", "rms"]) == 2
    assert "which this run does not have" in capsys.readouterr().err
    assert main([*words, "gradient", "--adaptation.rate", "0.1"]) == 0
    assert "moved by sgd after every 24 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["{", "[]", '{"base": 1}', '{"version": 9}', '{"no": 1}', "[" * 9999])
def test_damaged_settings_are_refused(tuned_run, tmp_path, damage):
    run = tmp_path / "run"
    shutil.copytree(tuned_run, run)
    (run / "adaptation.json").write_text(damage)
    with pytest.raises(CheckpointError, match="is damaged"):
        txl.load(run, device="cpu").adaptation("cache")
    settings = json.loads((tuned_run / "adaptation.json").read_text())
    (run / "adaptation.json").write_text(json.dumps({**settings, "base": "0"}))
    with pytest.raises(CheckpointError, match="other weights"):
        txl.load(run, device="cpu").adaptation("cache")


def test_rms_learns_adapters_too(loaded):
    how = AdaptationConfig(rate=1e-3, rule="rms", learns="adapters", rank=2)
    assert loaded.evaluate(split="valid", tokens=300, adapt=how).loss_nats != pytest.approx(
        loaded.evaluate(split="valid", tokens=300).loss_nats, abs=1e-6
    )


def test_sizes_of_gradients_are_their_root_mean_square(loaded):
    """By hand, of one stretch: the text read on from its beginning."""
    split, model = loaded.store().split("train"), loaded.model.eval()
    found = gather(model, split, segment=12, segments=3, rank=2)
    row, memory, squares = torch.from_numpy(np.asarray(split.tokens[:37], dtype=np.int64))[None], None, 0.0
    weight = model.layers[1].inner.weight
    for start in (0, 12, 24):
        output = model(row[:, start : start + 12], targets_BT=row[:, start + 1 : start + 13], memory=memory)
        memory = output.memory
        (gradient,) = torch.autograd.grad(output.loss_BT.mean(), [weight])
        squares = squares + gradient.double() ** 2
    torch.testing.assert_close(
        found.sizes["layers.1.inner.weight"].double(), (squares / 3).sqrt(), rtol=1e-4, atol=1e-9
    )
    assert found.tokens == 36


def test_a_text_in_pieces_is_the_text(loaded):
    whole = loaded.score(TEXT, adapt="both")
    pieces = [TEXT[start : start + 11] for start in range(0, len(TEXT), 11)]
    streamed = list(loaded.score_stream(pieces, adapt="both"))
    nats = np.concatenate([piece.nats for piece in streamed])
    np.testing.assert_allclose(nats, whole.nats, rtol=0, atol=2e-5)
    assert whole.total_bits < loaded.score(TEXT).total_bits
    with pytest.raises(InputError, match="not rounded"):
        loaded.score(TEXT, adapt="both", weights="int8")


@pytest.mark.parametrize("way", ["gradient", "cache", "both"])
def test_a_stream_goes_on_after_a_restart_to_the_bit(tuned_run, tmp_path, monkeypatch, capsys, way):
    def lines(data, state):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        words = ["score", str(tuned_run), "-", "--by", "line", "--device", "cpu", "--adapt", way, "--state", str(state)]
        assert main(words) == 0
        return [json.loads(line)["bits"] for line in capsys.readouterr().out.splitlines()]

    whole = lines(TEXT, tmp_path / "whole")
    first = lines(TEXT[:60], tmp_path / "state")  # in the middle of a line, which then is one of its own
    assert len(first) == 5
    cut = TEXT.index(b"\n", 60) + 1
    head = lines(TEXT[:cut], tmp_path / "parts")
    assert head + lines(TEXT[cut:], tmp_path / "parts") == whole
    other = ["score", str(tuned_run), str(tuned_run / "config.json"), "--by", "line", "--device", "cpu"]
    assert main([*other, "--state", str(tmp_path / "whole")]) == 2
    assert "was made with --adapt" in capsys.readouterr().err


def test_its_state_has_an_end(loaded, tmp_path):
    """Bounded, however long the stream."""
    sizes = []
    scorer = loaded.line_scorer(adapt="both")
    for _ in range(3):
        list(scorer.feed(TEXT * 2))
        scorer.save(tmp_path / "state")
        sizes.append((tmp_path / "state").stat().st_size)
    assert max(sizes) - min(sizes) < 13 * 8 + 12000  # bits of lines, and tokens of a segment
    how = loaded.adaptation("both")
    cache = scorer._reader.lane(0).cache
    assert len(cache) == how.cache_size
    assert len(cache.next_N) < 3 * how.cache_size + 600


def test_generating_learns_from_the_prompt(tuned_run, loaded, capsys):
    prompt = TEXT.decode()
    words = ["generate", str(tuned_run), "--prompt", prompt, "--tokens", "20", "--device", "cpu"]
    for how in (["--adapt", "both"], ["--adapt", "gradient"], ["--adapt", "cache"], ["--adapt", "both", *BY_HAND]):
        assert main([*words, *how]) == 0
        assert capsys.readouterr().out.startswith(prompt)
    options = {"tokens": 30, "temperature": 0.5, "seed": 3}
    still = AdaptationConfig(rate=0.0)
    assert loaded.generate(prompt, adapt=still, **options) == loaded.generate(prompt, **options)
    learned = AdaptationConfig(rate=0.5, segment=8)
    assert loaded.generate(prompt, adapt=learned, **options) != loaded.generate(prompt, **options)
    assert main([*words, "--adapt", "both", "--samples", "2"]) == 2
    assert "drop --samples" in capsys.readouterr().err


@pytest.mark.parametrize("size", [100, 0])
def test_what_is_drawn_from_is_what_would_be_scored(loaded, size):
    """The mixture of a writer and the scores of every next token, in float64."""
    how = AdaptationConfig(rate=0.05, segment=8, cache_lambda=0.2, cache_theta=0.3, cache_size=size, cache_context=2)
    model = txl.load(loaded.checkpoint.run.path, device="cpu").model.double().eval()
    model.set_lengths(memory=64)  # all that was read is seen, by either rule of sight
    tokens = torch.tensor([list(TEXT[:30])])
    reader = AdaptiveReader(model, how)
    reader.score(tokens)
    writer = reader.lane(0).writer()
    log_1V = writer.head_logits(writer.last_hidden_BD)
    for token in (10, 32, 100, 101, 250):
        loss = reader.fork().score(torch.tensor([[token]]))
        torch.testing.assert_close(-log_1V[0, token], loss[0, 0], rtol=0, atol=1e-10)
    assert float(log_1V.exp().sum()) == pytest.approx(1.0, abs=1e-12)


def test_sentences_without_order_are_refused(loaded):
    split = loaded.store().split("test").first(50)
    split.sentence_mark = 3
    from transformer_xl.adaptation.evaluating import adaptive_rule, score_adapting
    from transformer_xl.errors import DataError
    from transformer_xl.evaluation import make_rule

    rule = make_rule(loaded.model, loaded.config.evaluation, tokens=50)
    rule, how = adaptive_rule(rule, AdaptationConfig(cache_lambda=0.1))
    with pytest.raises(DataError, match="nothing to adapt to"):
        score_adapting(loaded.model, split, how, rule=rule)
    with pytest.raises(ConfigError, match="the rule sliding"):
        adaptive_rule(replace(rule, name="sliding"), how)
