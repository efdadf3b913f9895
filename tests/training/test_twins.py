"""Every preset of the paper can learn: its twin, a hundredth of the size, leaves the entropy of single tokens on text that nobody chose it on.

    pytest -m slow -s tests/training/test_twins.py -k enwik8-12l          one twin
    pytest -m slow -s tests/training/test_twins.py                        all 14, one after the other

By arithmetic a step takes a twentieth of a second to a second of one core, so a twin that leaves after a thousand steps takes one to fifteen minutes, all
of them about an hour; three times that at most. Each says what it took.

A twin keeps ratios and rules. What else is scaled, and why:

    width, layers      both by the cube root of a hundred, because a layer grows with the square of its width; as many heads, each narrower
    cutoffs            as shares of the vocabulary
    rate               higher by the root of how much narrower it is. Adam moves each weight by about the rate, whatever the gradient: at the paper's
                       2.5e-4 a few hundred steps move weights by less than a narrow model needs. Not by the whole factor: post-norm models of words
                       stayed at the entropy of single tokens at 1.5e-3 and above (docs/experiments.md), and left it at 5e-4 within 600 steps
    first weights      larger by the same root, so that what a matrix gives is as large as there
    warm-up            the preset's share of all steps, but no fewer than 200 where it has any: it is for Adam's second moment, which remembers a thousand
                       steps in a short training, too. With 100 steps a model of words stayed where it was, with 200 it did not
    segment, lanes     shorter and fewer: they decide how long this takes
    steps              3,000 at most, ended as soon as valid is left behind. 240 were too few for most; 200 were too few for post-norm whatever the rate
"""

import gzip
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from small_run import prepare
from transformer_xl.config import EvaluationConfig, ModelConfig, RunConfig
from transformer_xl.data.store import Store
from transformer_xl.presets import PRESETS, Preset, find_preset
from transformer_xl.training import train
from transformer_xl.training.recording import read_metrics
from transformer_xl.training.stuck import NEAR, Frequencies

PTB = Path(__file__).parents[3] / "shared" / "data" / "ptb"
SMALLER = 100 ** (1 / 3)
STEPS, EVERY, FEWEST_WARM_UP = 3000, 100, 200
TOKENS, SHORTEST, SHORTER = 1024, 32, 8
"""Of a step; of a segment; and how much shorter a segment is."""
VALID = 10_000
TWINS = [preset for preset in PRESETS if preset.table]


def twin_of(preset: Preset, *, vocabulary: int) -> RunConfig:
    was, training = preset.run.model, preset.run.training
    layers, gain = max(1, round(was.n_layer / SMALLER)), SMALLER**0.5
    cutoffs = tuple(round(cutoff / was.vocabulary * vocabulary) for cutoff in was.cutoffs)
    segment = max(SHORTEST, training.segment // SHORTER)
    shared = {"vocabulary": vocabulary, "cutoffs": cutoffs, "n_layer": layers}
    if isinstance(was, ModelConfig):
        d_head = round(was.d_head / SMALLER)
        d_model = was.n_head * d_head
        first = {"init_std": was.init_std * gain, "projection_init_std": was.projection_init_std * gain}
        sizes = {"d_model": d_model, "d_head": d_head, "d_inner": round(was.d_inner * d_model / was.d_model)}
        model = replace(was, memory=segment, **shared, **sizes, **first)
        evaluation = EvaluationConfig(segment=segment, memory=segment)
    else:
        model = replace(was, d_model=round(was.d_model / SMALLER), d_hidden=round(was.d_hidden / SMALLER), **shared)
        evaluation = EvaluationConfig(segment=segment)
    scaled = {name: round(getattr(training, name) / training.steps * STEPS) for name in ("warm_up", "average_from")}
    if scaled["warm_up"]:
        scaled["warm_up"] = max(FEWEST_WARM_UP, scaled["warm_up"])
    return RunConfig(
        model=model,
        evaluation=evaluation,
        training=replace(
            training,
            steps=STEPS,
            learning_rate=training.learning_rate * gain,
            segment=segment,
            context=segment if training.context else 0,
            lanes=min(TOKENS, training.lanes * training.segment) // segment,
            validate_every=EVERY,
            validation_tokens=VALID,
            save_every=0,
            save_minutes=0.0,
            **scaled,
        ),
    )


@pytest.mark.parametrize("preset", TWINS, ids=lambda preset: preset.name)
def test_a_twin_has_the_ratios_of_its_preset(preset):
    was, twin = preset.run.model, twin_of(preset, vocabulary=10_000)
    model = twin.model
    assert model.d_model / was.d_model == pytest.approx(1 / SMALLER, rel=0.1)
    if isinstance(was, ModelConfig):
        assert model.n_head * model.d_head == model.d_model
        assert model.d_inner / model.d_model == pytest.approx(was.d_inner / was.d_model, rel=0.01)
        size = model.n_layer * model.numbers_of_a_layer / (was.n_layer * was.numbers_of_a_layer)
        assert 0.006 < size < 0.014
        assert model.memory / twin.training.segment == was.memory / preset.run.training.segment
    kept = ("schedule", "schedule_rule", "floor", "optimiser", "clip", "average", "variable_segments")
    assert all(getattr(twin.training, name) == getattr(preset.run.training, name) for name in kept)
    assert len(model.cutoffs) == len(was.cutoffs)


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> dict[str, Store]:
    """By corpus: Python's standard library as bytes, its letters as text8 has them, and Penn Treebank as words."""
    folder = tmp_path_factory.mktemp("texts")
    source = "\n".join(path.read_text("utf-8") for path in sorted(Path(json.__file__).parents[1].glob("*.py")))
    (folder / "source.txt").write_text(source, encoding="utf-8")
    (folder / "letters.txt").write_text(re.sub(r"[^a-z]+", " ", source.lower()))
    found = {
        "enwik8": prepare(folder / "source.txt", folder / "bytes", "byte"),
        "text8": prepare(folder / "letters.txt", folder / "letters", "char"),
    }
    if PTB.exists():
        words = prepare(unpacked(folder), folder / "words", "word")
        found |= dict.fromkeys(("wikitext-103", "lm1b", "ptb"), words)
    return found


def unpacked(folder: Path) -> Path:
    text = folder / "words.txt"
    text.write_bytes(gzip.decompress((PTB / "ptb.train.txt.gz").read_bytes()))
    return text


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("name", [preset.name for preset in TWINS])
def test_a_twin_leaves_the_entropy_of_single_tokens(name, stores, tmp_path):
    preset, begun_at = find_preset(name), time.process_time()
    if preset.corpus not in stores:
        pytest.skip("../shared/data/ptb is not here")
    store = stores[preset.corpus]
    config = twin_of(preset, vocabulary=store.manifest.vocabulary_size)
    targets = np.asarray(store.split("valid").first(VALID).tokens[1:], dtype=np.int64)
    entropy = Frequencies(store.split("train"), vocabulary=config.model.vocabulary).nats(targets) / len(targets)

    def losses() -> list[tuple[int, float]]:
        lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
        return [(line["step"], line["loss_nats"]) for line in lines if line["kind"] == "validation"]

    def end_when_left(step) -> None:
        if step.step % EVERY == 1 and step.step > 1 and losses()[-1][1] <= NEAR * entropy:
            step.stop()

    train(config, store=store, folder=tmp_path / "run", command="txl train", on_step=end_when_left)
    step, loss = losses()[-1]
    seconds = time.process_time() - begun_at
    print(f"{name}: {loss:.3f} nats after {step:,} steps, single tokens {entropy:.3f}; {seconds:.0f} s of processor")
    assert loss <= NEAR * entropy, losses()
