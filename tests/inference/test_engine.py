"""The engine against the model's own forward: the same numbers, whatever the chunks, lanes, resets and forks."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from small_models import build, random_tokens
from transformer_xl.errors import CheckpointError, InputError
from transformer_xl.inference import Engine, cache, reader

CLOSE = {"rtol": 0, "atol": 1e-10}


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    """So small that every test moves its memory several times."""
    monkeypatch.setattr(cache, "ROOM", 7)
    monkeypatch.setattr(reader, "CHUNK", 5)
    monkeypatch.setattr(reader, "LEAST_CHUNK", 3)


@st.composite
def models(draw):
    encoding = draw(st.sampled_from(["relative", "shaw", "shaw_biased"]))
    return build(
        encoding=encoding,
        memory=draw(st.integers(1, 6)),
        clamp_len=draw(st.sampled_from([0, 2])),
        norm=draw(st.sampled_from(["post", "pre"])),
        initial_memory=draw(st.sampled_from(["empty", "zeros"])),
        same_length=draw(st.booleans()),
        same_length_keys=draw(st.sampled_from(["memory", "memory+1"])),
        share_biases=encoding != "relative" or draw(st.booleans()),
        neighbours=draw(st.sampled_from([0, 1, 3, 9])),
        **draw(st.sampled_from([{}, {"ngrams": (2, 4), "ngram_rows": 11, "d_ngram": 5}])),
    )


def oracle(model, tokens, cuts, sight):
    """Hidden states of the model's own forward over segments; the rule `last` is its same_length with M+1 keys."""
    if sight == "last" and not model.config.same_length:
        model.config = replace(model.config, same_length=True, same_length_keys="memory+1")
    memory, parts, start = None, [], 0
    for stop in cuts:
        output = model(tokens[:, start:stop], memory=memory)
        memory, start = output.memory, stop
        parts.append(output.hidden_BTD)
    return torch.cat(parts, 1)


@given(
    model=models(),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    sight=st.sampled_from(["last", "segment"]),
)
@settings(max_examples=80, deadline=None)
def test_equals_the_models_forward_under_any_chunking(model, lengths, sight):
    cuts = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    tokens = random_tokens(model, lanes=2, length=cuts[-1])
    reader = Engine(model, lanes=2, sight=sight)
    read = torch.cat(
        [reader.read(tokens[:, stop - length : stop]) for stop, length in zip(cuts, lengths, strict=True)], 1
    )
    with torch.no_grad():
        torch.testing.assert_close(read, oracle(model, tokens, cuts, sight), **CLOSE)


@given(model=models(), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_lanes_resets_and_forks_do_not_disturb_each_other(model, seed):
    """Each lane of a busy engine gives what an engine of its own gives."""
    generator = torch.Generator().manual_seed(seed)
    together = Engine(model, lanes=3)
    alone = [Engine(model) for _ in range(3)]
    for turn in range(6):
        tokens = torch.randint(13, (3, int(torch.randint(1, 8, (1,), generator=generator))), generator=generator)
        read = together.read(tokens)
        for lane, own in enumerate(alone):
            torch.testing.assert_close(read[lane], own.read(tokens[lane : lane + 1])[0], **CLOSE)
        if turn == 1:
            together.reset([1])
            alone[1].reset([0])
        if turn == 3:
            fork = together.fork()
            fork.read(torch.zeros(3, 4, dtype=torch.int64))  # what a fork reads, the others never see
            together = together.select([2, 0, 0])
            alone = [alone[2].fork(), alone[0].fork(), alone[0].fork()]


@torch.no_grad()
def test_scores_are_the_models_losses_and_the_first_has_none():
    model = build(memory=50)
    tokens = random_tokens(model, lanes=2, length=20)
    whole = model(tokens[:, :-1], targets_BT=tokens[:, 1:]).loss_BT
    reader = Engine(model, lanes=2)
    scores = torch.cat([reader.score(tokens[:, :1]), reader.score(tokens[:, 1:8]), reader.score(tokens[:, 8:])], 1)
    assert scores[:, 0].isnan().all()
    torch.testing.assert_close(scores[:, 1:], whole, **CLOSE)
    reader.reset([1])
    again = reader.score(tokens)
    assert again[:, 0].isnan().tolist() == [False, True]
    torch.testing.assert_close(again[1, 1:], whole[1], **CLOSE)


@torch.no_grad()
def test_feed_gives_the_next_tokens_distribution():
    model = build(memory=30, cutoffs=(4, 9), div_val=2)
    tokens = random_tokens(model, lanes=2, length=17)
    expected = model.log_probabilities(model(tokens).hidden_BTD[:, -1])
    torch.testing.assert_close(Engine(model, lanes=2).feed(tokens), expected, **CLOSE)


def test_saved_and_restored_goes_on(tmp_path):
    model = build(memory=6)
    tokens = random_tokens(model, lanes=2, length=30)
    reader = Engine(model, lanes=2)
    reader.read(tokens[:, :11])
    reader.reset([1])
    reader.read(tokens[:, 11:15])
    reader.save(tmp_path / "engine.safetensors")
    other = Engine.restore(model, tmp_path / "engine.safetensors")
    torch.testing.assert_close(other.score(tokens[:, 15:]), reader.score(tokens[:, 15:]), rtol=0, atol=0)
    with pytest.raises(CheckpointError, match=r"lacks the tensor keys.2 that this model asks for"):
        Engine.restore(build(n_layer=3), tmp_path / "engine.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="not a saved engine"):
        Engine.restore(model, tmp_path / "bad.safetensors")


def test_float32_stays_close_over_a_long_text():
    model = build(memory=32).float()
    tokens = random_tokens(model, lanes=1, length=400)
    fast = Engine(model).read(tokens)
    exact = Engine(model.double()).read(tokens)
    assert (fast - exact).abs().max() < 2e-5 * exact.abs().max()


def test_nothing_grows_with_the_text():
    model = build(memory=16)
    reader = Engine(model)
    reader.read(random_tokens(model, lanes=1, length=50))
    size = sum(buffer.numel() for buffer in (*reader.kept.keys, *reader.kept.values))
    for _ in range(40):
        reader.read(random_tokens(model, lanes=1, length=5))
    assert sum(buffer.numel() for buffer in (*reader.kept.keys, *reader.kept.values)) == size


def test_wrong_use_is_named():
    model = build()
    with pytest.raises(InputError, match="lane 2 does not exist"):
        Engine(model, lanes=2).reset([2])
    with pytest.raises(InputError, match="tokens for 1 lanes, where the engine has 2"):
        Engine(model, lanes=2).read(torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(InputError, match="outside the vocabulary"):
        Engine(model).read(torch.tensor([[99]]))
    with pytest.raises(InputError, match=r"call model.eval\(\) before"):
        Engine(build(train=True)).read(torch.tensor([[1]]))
    with pytest.raises(InputError, match="absolute has no memory"):
        Engine(build(encoding="absolute", memory=0))


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.bool, torch.float32, torch.complex64])
def test_tokens_of_other_types_are_refused_by_name(kind):
    with pytest.raises(InputError, match=r"expected whole numbers .* found torch\."):
        Engine(build(memory=3)).read(torch.ones(1, 2).to(kind))
    with pytest.raises(InputError, match="expected a tensor"):
        Engine(build(memory=3)).read([[1, 2]])


def test_short_whole_numbers_are_scored_as_long_ones():
    tokens = torch.tensor([[1, 2, 3]])
    long, short = Engine(build(memory=3)).score(tokens), Engine(build(memory=3)).score(tokens.int())
    torch.testing.assert_close(long, short, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("wrong", [{"weights": "int4"}, {"sight": "far"}, {"memory": 1.5}, {"lanes": 2.0}])
def test_choices_that_are_none_are_refused(wrong):
    with pytest.raises(InputError, match=r"is unknown|must be whole numbers"):
        Engine(build(memory=3), **wrong)
