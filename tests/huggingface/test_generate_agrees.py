"""`generate()` says what the native loop says, token by token, in every mode and under every convention of a model."""

import random
from dataclasses import asdict

import numpy as np
import pytest
import torch

from small_models import build, random_tokens
from transformer_xl.decoding import Sampling, beam_search, generate
from transformer_xl.errors import ConfigError, InputError
from transformer_xl.inference import Engine

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'transformer-xl[hf]'"
)
huggingface = pytest.importorskip("transformer_xl.huggingface")

WITH_MEMORY = {
    "shared u and v": {},
    "u and v per layer": {"share_biases": False},
    "same length": {"same_length": True},
    "same length, itself besides": {"same_length": True, "same_length_keys": "memory+1"},
    "memory of one, same length": {"memory": 1, "same_length": True},
    "clamped": {"clamp_len": 3},
    "pre-norm": {"norm": "pre", "final_norm": True},
    "adaptive softmax": {"cutoffs": (4, 8), "div_val": 2, "tie_projections": (False, True, True)},
    "untied": {"tie_embeddings": False},
    "starts with zeros": {"initial_memory": "zeros"},
    "neighbours": {"neighbours": 3},
    "runs of tokens": {"ngrams": (2, 4), "ngram_rows": 11, "d_ngram": 5},
    "neighbours, from zeros": {"neighbours": 8, "initial_memory": "zeros", "norm": "pre"},
    "starts with zeros, pre-norm, same length": {"initial_memory": "zeros", "norm": "pre", "same_length": True},
    "shaw": {"encoding": "shaw"},
    "shaw with biases, from zeros": {"encoding": "shaw_biased", "initial_memory": "zeros"},
}
WITHOUT_MEMORY = {
    "relative": {"memory": 0},
    "shaw": {"memory": 0, "encoding": "shaw"},
    "absolute": {"memory": 0, "encoding": "absolute", "norm": "pre_keys"},
    "per layer": {"memory": 0, "encoding": "per_layer", "learned_positions": 9},
}
NEW = 20
LIKELIEST = Sampling(temperature=0.0)


def wrapped(model):
    theirs = huggingface.TransformerXLForCausalLM(huggingface.TransformerXLConfig(model=asdict(model.config)))
    theirs.transformer = model
    return theirs.eval()


@pytest.fixture(params=WITH_MEMORY)
def ours(request):
    return build(**WITH_MEMORY[request.param])


def prompt_of(model, length, *, seed=2):
    return random_tokens(model, lanes=1, length=length, seed=seed)


def native(model, prompt, tokens=NEW, sampling=LIKELIEST):
    return list(generate(model, prompt, tokens=tokens, sampling=sampling))


def written(theirs, input_ids, **options):
    """The new tokens of each lane."""
    made = theirs.generate(input_ids, **{"max_new_tokens": NEW, "do_sample": False, **options})
    return made[:, input_ids.shape[1] :].tolist()


def padded(prompts, padding):
    width = max(map(len, prompts))
    ids = [[padding] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def test_every_position_has_the_engines_log_probabilities(ours):
    tokens_BT = random_tokens(ours, lanes=2, length=17)
    engine, theirs = Engine(ours, lanes=2), wrapped(ours)
    expected = torch.stack([engine.feed(tokens_BT[:, t : t + 1]) for t in range(17)], dim=1)
    with torch.no_grad():
        logits = theirs(tokens_BT).logits
    torch.testing.assert_close(logits[..., :-1], expected, rtol=0, atol=1e-10)
    assert torch.isneginf(logits[..., -1]).all()


@pytest.mark.parametrize("length", [1, 5, 14])
def test_greedy_with_and_without_cache_and_in_chunks(ours, length):
    theirs, prompt = wrapped(ours), prompt_of(ours, length)
    expected = [native(ours, prompt[0].tolist())]
    assert written(theirs, prompt) == expected
    assert written(theirs, prompt, use_cache=False) == expected
    for chunk in (1, 4):
        assert written(theirs, prompt, prefill_chunk_size=chunk) == expected
    assert written(theirs, prompt, past_key_values=transformers.DynamicCache()) == expected  # a cache that keeps all


def test_a_smaller_model_may_guess_ahead(ours):
    """Assisted decoding takes tokens back out of the cache."""
    guess = wrapped(build(seed=5))
    prompt = prompt_of(ours, 5)
    assert written(wrapped(ours), prompt, assistant_model=guess) == [native(ours, prompt[0].tolist())]


def test_batches_with_left_padding(ours):
    theirs = wrapped(ours)
    prompts = [prompt_of(ours, length, seed=length)[0].tolist() for length in (2, 11, 1, 6)]
    expected = [native(ours, prompt) for prompt in prompts]
    batch = padded(prompts, ours.config.vocabulary)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    assert written(theirs, ids, attention_mask=mask) == expected
    assert written(theirs, ids, attention_mask=mask, prefill_chunk_size=3) == expected
    assert written(theirs, ids, attention_mask=mask, use_cache=False) == expected
    assert written(theirs, ids) == expected  # the padding itself says where it is
    half = theirs.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    options = {"attention_mask": torch.nn.functional.pad(mask, (0, 8), value=1), "max_new_tokens": NEW - 8}
    rest = written(theirs, half.sequences, past_key_values=half.past_key_values, **options)
    assert rest == [tokens[8:] for tokens in expected]


def test_lanes_of_a_batch_end_where_they_end():
    """Any token can be made the end; what follows it in its lane is padding, and the others go on unmoved."""
    ours = build()
    prompts = [prompt_of(ours, length, seed=length)[0].tolist() for length in (2, 11, 6)]
    whole = [native(ours, prompt) for prompt in prompts]
    end = whole[0][3]
    expected = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in whole]
    assert len({len(tokens) for tokens in expected}) > 1
    batch = padded(prompts, ours.config.vocabulary)
    found = written(wrapped(ours), batch["input_ids"], attention_mask=batch["attention_mask"], eos_token_id=end)
    assert [[token for token in tokens if token != ours.config.vocabulary] for tokens in found] == expected


def test_continued_generation(ours):
    """Twice ten tokens with the cache kept, then more text from outside, as in a conversation."""
    theirs, prompt = wrapped(ours), prompt_of(ours, 5)
    expected = native(ours, prompt[0].tolist())
    half = theirs.generate(prompt, max_new_tokens=10, do_sample=False, return_dict_in_generate=True)
    whole = theirs.generate(half.sequences, max_new_tokens=10, do_sample=False, past_key_values=half.past_key_values)
    assert whole[0, 5:].tolist() == expected
    again = theirs.generate(prompt, max_new_tokens=10, do_sample=False, return_dict_in_generate=True)
    more = torch.cat([again.sequences, prompt_of(ours, 7, seed=8)], dim=1)
    going_on = theirs.generate(more, max_new_tokens=NEW, do_sample=False, past_key_values=again.past_key_values)
    assert going_on[0, more.shape[1] :].tolist() == native(ours, more[0].tolist())


def test_beams(ours):
    theirs, prompt = wrapped(ours), prompt_of(ours, 9)
    expected = beam_search(ours, prompt[0].tolist(), tokens=12, beams=3)
    found = theirs.generate(
        prompt,
        max_new_tokens=12,
        num_beams=3,
        num_return_sequences=3,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert found.sequences[:, 9:].tolist() == [hypothesis.tokens for hypothesis in expected]
    np.testing.assert_allclose(found.sequences_scores, [hypothesis.score for hypothesis in expected], atol=1e-6)


def test_beams_of_a_padded_batch(ours):
    theirs = wrapped(ours)
    prompts = [prompt_of(ours, length, seed=length)[0].tolist() for length in (3, 10)]
    batch = padded(prompts, ours.config.vocabulary)
    found = written(theirs, batch["input_ids"], attention_mask=batch["attention_mask"], num_beams=3)
    assert found == [beam_search(ours, prompt, tokens=NEW, beams=3)[0].tokens for prompt in prompts]


class Collector:
    def __init__(self):
        self.put_values, self.ended = [], False

    def put(self, value):
        self.put_values.append(value.flatten().tolist())

    def end(self):
        self.ended = True


def test_streaming_gives_each_token_as_it_is_drawn(ours):
    theirs, prompt, streamer = wrapped(ours), prompt_of(ours, 5), Collector()
    written(theirs, prompt, streamer=streamer)
    assert streamer.put_values == [prompt[0].tolist(), *([token] for token in native(ours, prompt[0].tolist()))]
    assert streamer.ended


SETTINGS = {
    "plain": {"top_k": 0},
    "top-k": {"top_k": 5, "temperature": 0.7},
    "all of them": {"top_k": 8, "top_p": 0.8, "min_p": 0.05, "temperature": 1.4, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_sampling_draws_the_same_tokens_from_the_same_chance(ours, settings, monkeypatch):
    """torch draws by its own generator and we by ours; given our numbers, theirs must land on our tokens, for the distribution is the same."""
    theirs, prompt, chance = wrapped(ours), prompt_of(ours, 5), random.Random(7)
    seen = []

    def multinomial(probability_BV, num_samples):
        reached_V = probability_BV[0].double().cumsum(dim=0)
        seen.append(probability_BV[0])
        return torch.searchsorted(reached_V, reached_V[-1:] * chance.random(), right=True)[None]

    monkeypatch.setattr(torch, "multinomial", multinomial)
    chosen = SETTINGS[settings]
    drawn = written(theirs, prompt, do_sample=True, **chosen)
    assert drawn == [native(ours, prompt[0].tolist(), sampling=Sampling(**chosen, seed=7))]
    assert len(seen) == NEW


def test_sampled_tokens_come_from_the_engines_log_probabilities(ours):
    theirs, prompt = wrapped(ours), prompt_of(ours, 5)
    torch.manual_seed(3)
    made = theirs.generate(
        prompt, max_new_tokens=NEW, do_sample=True, top_k=0, output_logits=True, return_dict_in_generate=True
    )
    engine = Engine(ours)
    expected = [engine.feed(prompt)] + [engine.feed(token[None, None]) for token in made.sequences[0, 5:-1]]
    torch.testing.assert_close(
        torch.cat(made.logits)[:, :-1].double(),
        torch.cat(expected),
        rtol=0,
        atol=1e-6,  # generate() rounds to float32
    )


IN_ONE_SEGMENT = [
    name for name, how in WITH_MEMORY.items() if "same_length" in how or how.get("initial_memory") != "zeros"
]


@pytest.mark.parametrize("kind", IN_ONE_SEGMENT)
def test_loss_and_gradients_are_the_models_own(kind):
    """For a row no longer than the memory: of a longer one, the model's own forward shows a token more than M, generation and this do not."""
    ours, tokens_BT = build(**WITH_MEMORY[kind]), random_tokens(build(), lanes=3, length=6)
    ours(tokens_BT[:, :-1], targets_BT=tokens_BT[:, 1:]).loss_BT.mean().backward()
    expected = {name: parameter.grad.clone() for name, parameter in ours.named_parameters()}
    ours.zero_grad()
    theirs = wrapped(ours).train()
    output = theirs(tokens_BT, labels=tokens_BT)
    assert output.logits is None
    output.loss.backward()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-10)


def test_dropout_is_on_in_training_alone():
    ours = build(dropout=0.3, attention_dropout=0.3, train=True)
    theirs, tokens_BT = wrapped(ours), random_tokens(ours, lanes=2, length=9)
    assert theirs(tokens_BT, labels=tokens_BT).loss == theirs(tokens_BT, labels=tokens_BT).loss
    theirs.train()
    assert theirs(tokens_BT, labels=tokens_BT).loss != theirs(tokens_BT, labels=tokens_BT).loss
    with pytest.raises(InputError, match="auxiliary losses"):
        wrapped(build(auxiliary_targets=1)).train()(tokens_BT, labels=tokens_BT)


@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_models_without_memory_read_their_window_again(kind):
    ours = build(**WITHOUT_MEMORY[kind])
    theirs = wrapped(ours)
    prompts = [prompt_of(ours, length, seed=length)[0].tolist() for length in (2, 7)]
    batch = padded(prompts, ours.config.vocabulary)
    expected = [native(ours, prompt) for prompt in prompts]
    assert written(theirs, batch["input_ids"], attention_mask=batch["attention_mask"]) == expected
    assert written(theirs, torch.tensor(prompts[1:])) == expected[1:]
    assert written(theirs, torch.tensor(prompts[1:]), num_beams=2, max_new_tokens=6) == [
        beam_search(ours, prompts[1], tokens=6, beams=2)[0].tokens
    ]


def test_repetition_penalty_takes_padding_into_no_account():
    ours = build()
    prompts = [prompt_of(ours, length, seed=length)[0].tolist() for length in (2, 7)]
    batch = padded(prompts, ours.config.vocabulary)
    options = {"attention_mask": batch["attention_mask"], "repetition_penalty": 1.5, "no_repeat_ngram_size": 8}
    alone = [
        written(wrapped(ours), torch.tensor([prompt]), repetition_penalty=1.5, no_repeat_ngram_size=8)[0]
        for prompt in prompts
    ]
    assert written(wrapped(ours), batch["input_ids"], **options) == alone


def test_what_cannot_be_done_is_refused_by_name():
    theirs = wrapped(build())
    prompt = torch.tensor([[1, 2, 3]])
    with pytest.raises(InputError, match=r"past_key_values: a cache of Static\w+ moves keys"):
        theirs.generate(prompt, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(InputError, match=r"attention_mask: padding between tokens"):
        theirs(prompt, attention_mask=torch.tensor([[1, 0, 1]]))
    with pytest.raises(InputError, match=r"attention_mask: shape \[1, 1\] does not cover 3 tokens of the past"):
        theirs(prompt[:, :1], attention_mask=torch.ones(1, 1), past_key_values=theirs(prompt).past_key_values)
    with pytest.raises(InputError, match=r"past_key_values: a model with memory 0"):
        wrapped(build(memory=0))(prompt, past_key_values=transformers.DynamicCache())
    with pytest.raises(InputError, match=r"tokens: 99 is outside the vocabulary"):
        theirs(torch.tensor([[99]]))
    with pytest.raises(ConfigError, match=r"model.cell: the lstm has no keys and values"):
        huggingface.TransformerXLForCausalLM(
            huggingface.TransformerXLConfig(model={"vocabulary": 5, "cell": "lstm", "d_hidden": 4})
        )
    absolute = {"vocabulary": 5, "encoding": "absolute", "memory": 4}
    with pytest.raises(ConfigError, match=r"model.memory: 4 with encoding absolute"):
        huggingface.TransformerXLForCausalLM(huggingface.TransformerXLConfig(model=absolute))
