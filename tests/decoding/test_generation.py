"""Tokens out: memory holds what was fed, lanes do not notice each other, beams find the best, and bad prompts are handled."""

import itertools
import json
import random
import subprocess
import sys

import pytest
import torch

import transformer_xl as txl
from small_models import build
from transformer_xl.cli import main
from transformer_xl.data.text.tokenizers import CharTokenizer
from transformer_xl.decoding import (
    Sampling,
    TextStream,
    beam_search,
    distribution,
    generate,
    start_lanes,
    write_texts,
    writing,
)
from transformer_xl.decoding import lanes as loop
from transformer_xl.errors import InputError
from transformer_xl.inference import Engine

LETTERS = CharTokenizer("abcdefghijklm")


@pytest.fixture(params=["plain", "adaptive", "no memory"])
def model(request):
    changes = {"plain": {}, "adaptive": {"cutoffs": (4, 9)}, "no memory": {"memory": 0}}[request.param]
    return build(**{"memory": 40, **changes})


def after(model, sequence):
    """Log-probabilities after a text, by the model's own forward."""
    model.eval()
    with torch.no_grad():
        return model.log_probabilities(model(torch.tensor([sequence])).hidden_BTD[0, -1])


def test_greedy_is_the_likeliest_continuation_of_everything_before(model):
    prompt = torch.randint(13, (30,)).tolist()
    drawn = list(generate(model, prompt, tokens=8, sampling=Sampling(temperature=0.0)))
    for place, token in enumerate(drawn):
        assert int(after(model, prompt + drawn[:place]).argmax()) == token


def test_draws_are_those_of_the_full_distribution(model):
    """Tail by tail or all at once: the same token for the same share."""
    prompt = [1, 2, 3]
    drawn = list(generate(model, prompt, tokens=20, sampling=Sampling(top_k=0, seed=3)))
    chance = random.Random(3)
    for place, token in enumerate(drawn):
        reached = after(model, prompt + drawn[:place]).exp().cumsum(0)
        share = chance.random()
        assert reached[token] >= share - 1e-9
        assert token == 0 or reached[token - 1] <= share + 1e-9


def test_a_lane_is_the_same_alone_and_among_others(model):
    """Prompts of several lengths, some shared, each lane with its own settings and seed."""
    prompts = [[lane % 13 for lane in range(1 + 3 * (place % 4))] for place in range(64)]
    samplings = [
        Sampling(
            seed=place, top_k=(0, 5)[place % 2], top_p=(1.0, 0.8)[place % 3 == 0], repetition_penalty=1.0 + place % 2
        )
        for place in range(64)
    ]
    model.eval()
    lanes = start_lanes(model, prompts, samplings=samplings)
    steps = [step(lanes) for _ in range(6)]
    for lane in (0, 1, 2, 3, 17, 42, 63):
        alone = list(generate(model, prompts[lane], tokens=6, sampling=samplings[lane]))
        assert [found[lane] for found in steps] == alone


def test_engines_of_two_kinds_are_not_joined():
    model = build()
    with pytest.raises(InputError, match="several models or memories cannot be joined"):
        Engine.joined([Engine(model), Engine(model, memory=3)])


def step(lanes):
    return {author.number: picked.token for author, picked in zip(list(lanes.writers), lanes.next(), strict=True)}


def test_a_lane_that_leaves_is_not_noticed(model):
    model.eval()
    samplings = [Sampling(seed=seed) for seed in range(4)]
    staying = start_lanes(model, [[1, 2]] * 4, samplings=samplings)
    leaving = start_lanes(model, [[1, 2]] * 4, samplings=samplings)
    assert step(staying) == step(leaving)
    leaving.leave([author for author in leaving.writers if author.number in (0, 2)])
    for _ in range(5):
        expected = step(staying)
        assert step(leaving) == {lane: expected[lane] for lane in (1, 3)}


def test_a_prompt_is_read_once_however_many_lanes_share_it(model, monkeypatch):
    read = []
    reader = type(writing.read_prompts(model.eval(), [[1]]))
    original = reader.read
    monkeypatch.setattr(reader, "read", lambda self, tokens: read.append(tokens.shape) or original(self, tokens))
    start_lanes(model, [[1, 2, 3]] * 5, samplings=[Sampling()] * 5).next()
    assert read == [(1, 3)]


def test_texts_stop_each_for_itself(model):
    prompts = [[1], [2, 3], [4]]
    samplings = [Sampling(seed=seed) for seed in range(3)]
    free = write_texts(model, LETTERS, prompts, tokens=30, samplings=samplings)
    stop = free[1].text[4:6]
    held = write_texts(model, LETTERS, prompts, tokens=30, samplings=samplings, stop=[stop])
    for one, other in zip(free, held, strict=True):
        assert other.text == one.text.partition(stop)[0]
    assert held[1].tokens <= 6
    assert free[1].tokens == 30


@pytest.mark.parametrize("cutoffs", [(), (3,)])
def test_wide_beams_find_what_exhaustive_search_finds(cutoffs):
    model = build(vocabulary=6, cutoffs=cutoffs, memory=8).eval()
    prompt, length = [1, 2], 3

    def total(tokens):
        return sum(float(after(model, [*prompt, *tokens[:place]])[token]) for place, token in enumerate(tokens))

    everything = sorted(itertools.product(range(6), repeat=length), key=lambda tokens: -total(tokens))
    found = beam_search(model, prompt, tokens=length, beams=36)
    assert found[0].tokens == list(everything[0])
    for hypothesis, tokens in zip(found, everything, strict=False):
        assert hypothesis.log_probability == pytest.approx(total(tokens), abs=1e-9) or hypothesis.score < found[0].score
    assert [hypothesis.score for hypothesis in found] == sorted(
        (hypothesis.score for hypothesis in found), reverse=True
    )


def test_beams_with_a_stop_are_compared_per_token():
    """Every text that ends in `a` or has three letters, by its mean log-probability."""
    model = build(vocabulary=4, memory=8, seed=5).eval()
    letters = CharTokenizer("abcd")

    def mean(tokens):
        return sum(float(after(model, [1, *tokens[:place]])[token]) for place, token in enumerate(tokens)) / len(tokens)

    texts = [
        tokens
        for length in (1, 2, 3)
        for tokens in itertools.product(range(4), repeat=length)
        if 0 not in tokens[:-1] and (tokens[-1] == 0 or length == 3)
    ]
    found = beam_search(model, [1], tokens=3, beams=40, text=TextStream(letters, stop=["a"]))
    assert len(found) == min(40, len(texts))
    assert found[0].tokens == list(max(texts, key=mean))
    assert found[0].score == pytest.approx(max(map(mean, texts)), abs=1e-9)


def test_one_beam_is_greedy(model):
    greedy = list(generate(model, [1, 2], tokens=10, sampling=Sampling(temperature=0.0)))
    assert beam_search(model, [1, 2], tokens=10, beams=1)[0].tokens == greedy


def test_a_prompt_longer_than_memory_is_read_in_pieces(model, monkeypatch):
    prompt = torch.randint(13, (200,)).tolist()
    whole = list(generate(model, prompt, tokens=5, sampling=Sampling()))
    monkeypatch.setattr(writing, "READ_AT_ONCE", 7)
    assert list(generate(model, prompt, tokens=5, sampling=Sampling())) == whole


def test_bad_prompts_are_named(model):
    with pytest.raises(InputError, match="the prompt holds no tokens"):
        list(generate(model, [], tokens=1, sampling=Sampling()))
    with pytest.raises(InputError, match="99 is outside the vocabulary of 13"):
        list(generate(model, [1, 99], tokens=1, sampling=Sampling()))


def test_bytes_for_weights_are_for_models_with_memory():
    with pytest.raises(InputError, match="'int8' is for models with memory"):
        list(generate(build(memory=0), [1], tokens=1, sampling=Sampling(), weights="int8"))


def test_tails_stay_shut_while_they_cannot_matter(monkeypatch):
    made = []
    monkeypatch.setattr(
        loop, "Distribution", lambda *a, **k: made.append(distribution.Distribution(*a, **k)) or made[-1]
    )
    model = build(cutoffs=(6, 9))
    with torch.no_grad():
        model.vocabulary.tail_bias_C.sub_(50.0)
    list(generate(model, [1], tokens=10, sampling=Sampling(top_k=4)))
    assert len(made) == 10
    assert sum(asked.opened for asked in made) == 0


def test_the_model_is_left_as_it_was(model):
    model.train()
    list(generate(model, [1], tokens=2, sampling=Sampling()))
    assert model.training


GROWTH = """
import os, resource, sys, torch
sys.path.insert(0, sys.argv[1])
from small_models import build
from transformer_xl.data.text.tokenizers import CharTokenizer
from transformer_xl.decoding import Sampling, generate, text_pieces
tokens, early = int(sys.argv[2]), int(sys.argv[3])
model = build(n_layer=1, memory=4).float()
drawn = generate(model, [1], tokens=tokens, sampling=Sampling(repetition_penalty=1.2))
seen = lambda: (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, len(os.listdir("/proc/self/fd")))
written, before = 0, None
for piece in text_pieces(CharTokenizer("abcdefghijklm"), drawn, stop=["abcdefghijklm" * 2]):
    written += len(piece)  # of one character a token
    if written >= early and before is None:
        before = seen()
print(written, *before, *seen())
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("tokens", "early"),
    [(6_000, 2_000), pytest.param(1_000_000, 10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_a_long_text_takes_no_more_memory_than_a_short_one(request, tokens, early):
    """Peak memory in kilobytes, and open files, from the early token to the last."""
    words = [sys.executable, "-c", GROWTH, str(request.config.rootpath / "tests"), str(tokens), str(early)]
    answer = subprocess.run(words, capture_output=True, text=True, check=True)
    written, memory_early, files_early, memory, files = map(int, answer.stdout.split())
    print(f"{written:,} tokens: {memory_early:,} kB at token {early:,}, {memory:,} kB at the end, {files} open files")
    assert written == tokens
    assert memory < 1.01 * memory_early
    assert files == files_early


# --- the library and the command


def test_library_and_command_agree(trained_run, capsys):
    loaded = txl.load(trained_run)
    for words, options in (
        (["--temperature", "0"], {"temperature": 0.0}),
        (["--top-k", "0", "--top-p", "0.8", "--seed", "4"], {"top_k": 0, "top_p": 0.8, "seed": 4}),
        (["--min-p", "0.1", "--repetition-penalty", "1.3"], {"min_p": 0.1, "repetition_penalty": 1.3}),
        (["--stop", "e", "--stop", "t"], {"stop": ["e", "t"]}),
        (["--weights", "int8"], {"weights": "int8"}),
        (["--stop", r"\n", "--seed", "1"], {"stop": ["\n"], "seed": 1}),
    ):
        assert main(["generate", str(trained_run), "--prompt", "def ", "--tokens", "40", *words]) == 0
        assert capsys.readouterr().out == "def " + loaded.generate("def ", tokens=40, **options) + "\n"
    assert "e" not in loaded.generate("def ", tokens=40, stop=["e"])


def test_samples_come_with_their_seeds(trained_run, capsys):
    loaded = txl.load(trained_run)
    words = ["generate", str(trained_run), "--prompt", "def ", "--tokens", "20", "--samples", "3", "--seed", "7"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["seeds"] == [7, 8, 9]
    assert result["tokens"] == [20, 20, 20]
    assert result["tokens_per_second"] > 0
    assert result["settings"]["top_k"] == 40
    for place, seed in enumerate(result["seeds"]):
        assert result["texts"][place] == loaded.generate("def ", tokens=20, seed=seed)
        assert f"--- sample {place + 1} of 3, seed {seed}\ndef {result['texts'][place]}" in shown


def test_beams_through_library_and_command(trained_run, capsys):
    loaded = txl.load(trained_run)
    words = ["generate", str(trained_run), "--prompt", "def ", "--tokens", "12", "--beams", "3"]
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    found = loaded.likeliest("def ", tokens=12, beams=3)
    assert result["texts"] == [text.text for text in found]
    assert result["scores"] == sorted(result["scores"], reverse=True)
    assert result["scores"][0] == pytest.approx(-float(loaded.score("def " + found[0].text).nats[4:].mean()), abs=1e-4)
    assert main(words) == 0
    assert capsys.readouterr().out.startswith(f"--- beam 1 of 3, {result['scores'][0]:.4f} nats per token\ndef ")


def test_many_prompts_at_once(trained_run):
    loaded = txl.load(trained_run)
    prompts = ["", "def ", "import json"]
    together = loaded.generate_many(prompts, tokens=15, seeds=[5, 6, 7])
    for prompt, seed, text in zip(prompts, (5, 6, 7), together, strict=True):
        assert text.text == loaded.generate(prompt, tokens=15, seed=seed)
    with pytest.raises(InputError, match="2 seeds for 3 prompts"):
        loaded.generate_many(prompts, seeds=[1, 2])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--beams", "2", "--temperature", "0.5"], "--temperature goes with drawing, and --beams draws nothing"),
        (["--beams", "2", "--samples", "2"], "--samples goes with drawing"),
        (["--temperature", "0", "--top-k", "3"], "--top-k changes nothing at --temperature 0"),
        (["--temperature", "0", "--seed", "3"], "--seed changes nothing at --temperature 0"),
        (["--paper", "--stop", "x"], "--paper shows one text of full length in its own form; drop --stop"),
        (["--data", "x"], "--data names the test set for --paper"),
        (["--tokens", "0"], "--tokens: 0 tokens are none; ask for at least 1"),
        (["--samples", "0"], "--samples: 0 samples are none"),
        (["--stop", ""], "stop: an empty text stops everything"),
        (["--top-p", "2"], "sampling.top_p: 2.0 is no share"),
        (
            ["--prompt-file", "no-such-file"],
            "no-such-file does not exist; write the prompt into it, or give it with --prompt",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(words, sentence, trained_run, capsys):
    assert main(["generate", str(trained_run), *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.removeprefix("computing on cpu, 1 thread\n").count("\n") == 1


def test_command_takes_every_prompt(trained_run, tmp_path, capsys):
    words = ["generate", str(trained_run), "--tokens", "30", "--seed", "5"]
    assert main([*words, "--prompt", "def "]) == 0
    first = capsys.readouterr().out
    assert first.startswith("def ")
    (tmp_path / "prompt.txt").write_text("def ")
    assert main([*words, "--prompt-file", str(tmp_path / "prompt.txt")]) == 0
    assert capsys.readouterr().out == first
    (tmp_path / "long.txt").write_text("def " * 100)  # far beyond the memory of 12
    assert main([*words, "--prompt-file", str(tmp_path / "long.txt")]) == 0
    assert capsys.readouterr().out.startswith("def " * 100)
    assert main(words) == 0  # an empty prompt starts a line
    assert len(capsys.readouterr().out) > 10
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert main([*words, "--prompt-file", str(tmp_path / "latin.txt")]) == 2
    assert "not UTF-8 at byte 3" in capsys.readouterr().err


def test_the_papers_protocol(trained_run, capsys):
    assert main(["generate", str(trained_run), "--paper", "--tokens", "50", "--seed", "2"]) == 0
    shown = capsys.readouterr().out
    assert all(
        title in shown for title in ("context: 512 tokens", "generated: 50 tokens", "reference: what really came")
    )
    assert (trained_run / "samples" / "paper-seed-2.md").exists()
