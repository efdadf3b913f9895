"""Text out: what memory holds is what was fed, sampling follows its rules, and characters come whole."""

import pytest
import torch

import transformer_xl as txl
from transformer_xl.cli import main
from transformer_xl.config import ModelConfig
from transformer_xl.data.tokenizers import ByteTokenizer
from transformer_xl.errors import InputError
from transformer_xl.generation import Sampling, generate, pick, text_pieces
from transformer_xl.model import TransformerXL


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = ModelConfig(vocabulary=50, n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=32, memory=600, init_std=0.3)
    return TransformerXL(config).double()


def test_greedy_is_the_likeliest_continuation_of_everything_before(model):
    prompt = torch.randint(50, (300,)).tolist()
    drawn = list(generate(model, prompt, tokens=8, sampling=Sampling(temperature=0.0)))
    sequence = list(prompt)
    model.eval()
    for token in drawn:
        with torch.no_grad():
            assert int(model.log_probabilities(model(torch.tensor([sequence])).hidden_BTD[0, -1]).argmax()) == token
        sequence.append(token)


def test_without_memory_the_window_is_read_again(model):
    model.set_lengths(memory=0)
    prompt = [1, 2, 3]
    drawn = list(generate(model, prompt, tokens=5, sampling=Sampling(temperature=0.0)))
    model.eval()
    for place in range(5):
        with torch.no_grad():
            hidden = model(torch.tensor([prompt + drawn[:place]])).hidden_BTD[0, -1]
        assert int(model.log_probabilities(hidden).argmax()) == drawn[place]


def test_seeds_decide(model):
    def draw(seed):
        return list(generate(model, [1], tokens=30, sampling=Sampling(seed=seed)))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        (Sampling(top_k=2), {3, 1}),
        (Sampling(top_k=0, top_p=0.6), {3, 1}),
        (Sampling(top_k=0, top_p=0.3), {3}),
        (Sampling(top_k=0), {0, 1, 2, 3}),
    ],
)
def test_only_the_likeliest_are_drawn(sampling, possible):
    log_probability = torch.tensor([0.1, 0.3, 0.15, 0.45]).log()
    generator = torch.Generator().manual_seed(0)
    assert {pick(log_probability, sampling=sampling, generator=generator) for _ in range(300)} == possible


def test_temperature_sharpens():
    log_probability = torch.tensor([0.3, 0.7]).log()
    generator = torch.Generator().manual_seed(0)
    drawn = [pick(log_probability, sampling=Sampling(temperature=0.5), generator=generator) for _ in range(4000)]
    assert sum(drawn) / 4000 == pytest.approx(0.49 / (0.49 + 0.09), abs=0.02)


def test_characters_come_whole():
    tokenizer = ByteTokenizer()
    text = "naïve 🎼 – ok"
    pieces = list(text_pieces(tokenizer, iter(tokenizer.encode(text).tolist())))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_bad_sampling_is_named(model):
    with pytest.raises(InputError, match=r"sampling.top_p: 0.0 is no share"):
        Sampling(top_p=0.0)
    with pytest.raises(txl.TransformerXLError, match=r"sampling.temperature: -1.0 is negative"):
        Sampling(temperature=-1.0)
    with pytest.raises(InputError, match="the prompt holds no tokens"):
        list(generate(model, [], tokens=1, sampling=Sampling()))


def test_command_streams_prompts_and_the_papers_protocol(trained_run, tmp_path, capsys):
    assert main(["generate", str(trained_run), "--prompt", "def ", "--tokens", "30", "--seed", "5"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("def ")
    (tmp_path / "prompt.txt").write_text("def ")
    assert (
        main(
            [
                "generate",
                str(trained_run),
                "--prompt-file",
                str(tmp_path / "prompt.txt"),
                "--tokens",
                "30",
                "--seed",
                "5",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out == first
    assert main(["generate", str(trained_run), "--paper", "--tokens", "50", "--seed", "2"]) == 0
    shown = capsys.readouterr().out
    assert all(
        title in shown for title in ("context: 512 tokens", "generated: 50 tokens", "reference: what really came")
    )
    assert (trained_run / "samples" / "paper-seed-2.md").exists()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert main(["generate", str(trained_run), "--prompt-file", str(tmp_path / "latin.txt")]) == 2
    assert "not UTF-8 at byte 3" in capsys.readouterr().err
