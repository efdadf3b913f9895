"""Score before learning, and a state that is a value: held by changing what comes later and comparing, by cutting the text anyhow, and by slow oracles."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from small_models import build, random_tokens
from transformer_xl import native
from transformer_xl.adaptation import AdaptiveReader, Statistics
from transformer_xl.adaptation.fast_weights import SMALLEST, FastWeights
from transformer_xl.config import AdaptationConfig, RecurrentConfig
from transformer_xl.errors import ConfigError, InputError
from transformer_xl.inference import make_reader
from transformer_xl.model import build_model
from transformer_xl.model.adapters import attach

SEGMENT, LENGTH = 5, 23
PLACES = (1, 2, 4, 5, 6, 10, 14, 15, 16, 22)
"""At and around the borders of segments, and at both ends."""
WAYS = {
    "sgd": AdaptationConfig(rate=0.2, segment=SEGMENT),
    "decay": AdaptationConfig(rate=0.2, decay=0.3, segment=SEGMENT, learns="layers"),
    "rms": AdaptationConfig(rate=0.02, rule="rms", decay=0.1, segment=SEGMENT),
    "adapters": AdaptationConfig(rate=0.5, learns="adapters", rank=2, segment=SEGMENT),
    "cache": AdaptationConfig(cache_lambda=0.3, cache_theta=0.4, cache_size=7, segment=SEGMENT),
    "endless": AdaptationConfig(cache_lambda=0.3, cache_theta=0.4, cache_size=0, cache_context=1, segment=SEGMENT),
    "both": AdaptationConfig(rate=0.2, segment=SEGMENT, cache_lambda=0.3, cache_theta=0.4, cache_size=7),
    "all of it": AdaptationConfig(
        rate=0.02, rule="rms", segment=SEGMENT, cache_lambda=0.3, cache_size=0, cache_context=2, learns="attention"
    ),
}


def sizes(model):
    generator = torch.Generator().manual_seed(5)
    named = FastWeights(model, AdaptationConfig())
    found = {
        name: torch.rand(weight.shape, generator=generator) + 0.1
        for name, weight in zip(named.names, named.trained, strict=True)
    }
    return Statistics(segment=SEGMENT, tokens=100, rank=0, sizes=found)


def reader_of(model, how, **options):
    return AdaptiveReader(model, how, statistics=sizes(model) if how.rule == "rms" else None, **options)


def read(reader, tokens_BT, *pieces):
    """In pieces of these lengths, then the rest."""
    found, start = [], 0
    for length in (*pieces, tokens_BT.shape[1] - sum(pieces)):
        if length:
            found.append(reader.score(tokens_BT[:, start : start + length]))
        start += length
    return torch.cat(found, dim=1)


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def tokens(model):
    return random_tokens(model, lanes=1, length=LENGTH)


@pytest.mark.parametrize("way", WAYS)
def test_no_token_sees_itself_or_what_follows(model, tokens, way):
    """A token becomes another: what was told before it stays, to the bit; it and what follows changes."""
    whole = read(reader_of(model, WAYS[way]), tokens)
    for place in PLACES:
        other = tokens.clone()
        other[0, place] = (other[0, place] + 1) % model.config.vocabulary
        changed = read(reader_of(model, WAYS[way]), other)
        assert torch.equal(changed[0, 1:place], whole[0, 1:place])
        assert bool((changed[0, place:] != whole[0, place:]).any())


@pytest.mark.parametrize("way", WAYS)
def test_a_probability_is_one(model, tokens, way):
    """The mixture of every next token sums to 1: nothing of the token itself went into its own score."""
    total = 0.0
    for token in range(model.config.vocabulary):
        row = torch.cat([tokens[:, :17], torch.tensor([[token]])], dim=1)
        total += float((-read(reader_of(model, WAYS[way]), row)[0, -1]).exp())
    assert total == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_however_it_is_cut(model, tokens, way):
    """Also at the borders of segments. What was learned is the same to the bit, where weights move."""
    reader = reader_of(model, WAYS[way])
    whole = read(reader, tokens)
    for pieces in ([1] * 12, [5, 5, 5], [6, 5, 1], [13]):
        other = reader_of(model, WAYS[way])
        torch.testing.assert_close(read(other, tokens, *pieces), whole, rtol=0, atol=1e-12, equal_nan=True)
        if WAYS[way].moves:
            assert all(map(torch.equal, other.lane(0).weights, reader.lane(0).weights))


@pytest.mark.parametrize("way", WAYS)
def test_lanes_know_nothing_of_each_other(model, way):
    both = random_tokens(model, lanes=2, length=LENGTH)
    together = read(reader_of(model, WAYS[way], lanes=2), both, 7)
    for lane in range(2):
        alone = read(reader_of(model, WAYS[way]), both[lane : lane + 1], 7)
        assert torch.equal(alone[0, 1:], together[lane, 1:])


@pytest.mark.parametrize("way", WAYS)
def test_a_lane_that_is_reset_is_a_fresh_one(model, way):
    tokens = random_tokens(model, lanes=2, length=LENGTH)
    reader = reader_of(model, WAYS[way], lanes=2)
    reader.score(random_tokens(model, lanes=2, length=13, seed=9))
    gone_on = reader.select([1])
    reader.reset([0])
    after = reader.score(tokens)
    assert torch.equal(after[:1, 1:], reader_of(model, WAYS[way]).score(tokens[:1])[:, 1:])
    assert torch.equal(after[1:], gone_on.score(tokens[1:]))
    with pytest.raises(InputError, match="lane 2 does not exist"):
        reader.reset([2])


@pytest.mark.parametrize("way", WAYS)
def test_a_fork_goes_on_alone(model, tokens, way):
    reader = reader_of(model, WAYS[way])
    reader.score(tokens[:, :12])
    fork = reader.fork()
    fork.score(random_tokens(model, lanes=1, length=9, seed=4))
    again = reader.fork().score(tokens[:, 12:])
    assert torch.equal(again, reader.score(tokens[:, 12:]))


@pytest.mark.parametrize("way", WAYS)
def test_the_model_is_never_written_to(model, tokens, way):
    before = copy.deepcopy(model.state_dict())
    learning = [weight.requires_grad for weight in model.parameters()]
    read(reader_of(model, WAYS[way]), tokens, 3)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert learning == [weight.requires_grad for weight in model.parameters()]
    assert all(weight.grad is None for weight in model.parameters())


def test_where_nothing_learns_it_is_the_reader(model, tokens):
    """To the bit, in streams; an almost still weight gives the same numbers by the other path."""
    static = read(make_reader(model), tokens, 7)
    assert torch.equal(read(AdaptiveReader(model, AdaptationConfig()), tokens, 7)[0, 1:], static[0, 1:])
    by_segments = read(make_reader(model, sight="segment"), tokens, *[SEGMENT] * 4)
    for learns in ("all", "adapters"):
        almost = AdaptationConfig(rate=1e-300, segment=SEGMENT, learns=learns, rank=2)
        found = read(AdaptiveReader(model, almost), tokens)
        torch.testing.assert_close(found, by_segments, rtol=0, atol=1e-12, equal_nan=True)


def test_a_hair_of_a_cache_is_a_hair(model, tokens):
    static = read(make_reader(model), tokens)
    found = read(AdaptiveReader(model, AdaptationConfig(cache_lambda=1e-13)), tokens)
    torch.testing.assert_close(found, static, rtol=0, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("way", ["sgd", "decay", "rms", "adapters"])
def test_weights_move_as_the_formula_says(model, tokens, way):
    """Segment by segment with a model of its own, autograd and plain arithmetic."""
    how, found = WAYS[way], reader_of(model, WAYS[way])
    told = read(found, tokens)
    net = copy.deepcopy(model)
    if how.learns == "adapters":
        attach(net, rank=how.rank)
        net.load_state_dict(found.lane(0).fast.model.state_dict())
        for name, weight in net.named_parameters():
            weight.requires_grad_(name in found.lane(0).fast.names)
            if weight.requires_grad:
                weight.data = torch.zeros_like(weight)
    moving = {name: weight for name, weight in net.named_parameters() if name in found.lane(0).fast.names}
    assert moving
    trained = {name: weight.detach().clone() for name, weight in moving.items()}
    of_text = {name: size.double() for name, size in sizes(model).sizes.items()}
    mean = sum(float(size.sum()) for size in of_text.values()) / sum(size.numel() for size in of_text.values())
    memory, expected = None, []
    for start in range(0, LENGTH - 1, SEGMENT):
        row = tokens[:, start : start + SEGMENT + 1]
        output = net(row[:, :-1], targets_BT=row[:, 1:], memory=memory)
        expected.append(output.loss_BT.detach())
        memory = output.memory
        if row.shape[1] <= SEGMENT:
            break
        gradients = torch.autograd.grad(output.loss_BT.mean(), list(moving.values()), allow_unused=True)
        for (name, weight), gradient in zip(moving.items(), gradients, strict=True):
            gradient = torch.zeros_like(weight) if gradient is None else gradient
            back = how.decay
            if how.rule == "rms":
                size = of_text[name]
                gradient = gradient / (size + SMALLEST * size.mean())
                back = (how.decay * size / mean).clamp(max=1.0)
            weight.data = weight.data - how.rate * gradient
            weight.data = weight.data + back * (trained[name] - weight.data)
    torch.testing.assert_close(told[:, 1:], torch.cat(expected, dim=1), rtol=0, atol=1e-11)


@pytest.mark.parametrize("way", WAYS)
def test_without_kernels_the_same(model, tokens, way, monkeypatch):
    found = read(reader_of(model, WAYS[way]), tokens, 7)
    monkeypatch.setattr(native, "usable", lambda like: False)
    torch.testing.assert_close(read(reader_of(model, WAYS[way]), tokens, 7), found, rtol=0, atol=1e-11, equal_nan=True)


def test_a_models_own_words_are_read_and_not_learned_from(model, tokens):
    """The middle is its own: a segment that holds some of it is learned from by the rest alone."""
    how, own = WAYS["sgd"], slice(8, 16)
    reader = reader_of(model, how)
    told = [reader.score(tokens[:, :8]), reader.score(tokens[:, own], own=True), reader.score(tokens[:, 16:])]
    net, memory, expected = copy.deepcopy(model), None, []
    for start in range(0, LENGTH - 1, SEGMENT):
        row = tokens[:, start : start + SEGMENT + 1]
        output = net(row[:, :-1], targets_BT=row[:, 1:], memory=memory)
        expected.append(output.loss_BT.detach())
        memory = output.memory
        given = [not own.start <= place < own.stop for place in range(start + 1, start + SEGMENT + 1)]
        if row.shape[1] <= SEGMENT or not any(given):
            continue
        lesson = output.loss_BT[0][torch.tensor(given)].sum() / SEGMENT
        gradients = torch.autograd.grad(lesson, list(net.parameters()), allow_unused=True)
        for weight, gradient in zip(net.parameters(), gradients, strict=True):
            weight.data = weight.data - how.rate * (0 if gradient is None else gradient)
    torch.testing.assert_close(torch.cat(told, dim=1)[:, 1:], torch.cat(expected, dim=1), rtol=0, atol=1e-11)
    alone = reader_of(model, how)
    alone.score(tokens, own=True)
    assert all(map(torch.equal, alone.lane(0).weights, alone.lane(0).fast.trained))


@pytest.mark.parametrize("way", ["sgd", "adapters", "both"])
def test_forks_learn_on_several_threads_at_once(model, way):
    """Each as if it were alone, to the bit."""
    texts = random_tokens(model, lanes=4, length=40 * SEGMENT)
    reader = reader_of(model, WAYS[way])
    reader.score(random_tokens(model, lanes=1, length=8, seed=3))
    forks = [reader.fork() for _ in texts]
    with ThreadPoolExecutor(len(forks)) as threads:
        together = list(threads.map(lambda fork, text: read(fork, text[None], *[SEGMENT] * 30), forks, texts))
    for text, found in zip(texts, together, strict=True):
        assert torch.equal(found, read(reader.fork(), text[None], *[SEGMENT] * 30))


def test_groups_of_weights(model):
    def names(learns):
        return set(FastWeights(model, AdaptationConfig(learns=learns, rank=2)).names)

    everything = {name for name, _ in model.named_parameters()}
    assert names("all") == everything
    assert names("attention") | names("feed_forward") == names("layers") < everything
    assert not names("attention") & names("feed_forward")
    assert not names("adapters") & everything
    assert all(name.endswith(".adapter.up_OR") for name in names("adapters"))


@pytest.mark.parametrize("learns", ["all", "adapters"])
def test_a_writer_continues_with_what_was_learned(model, tokens, learns):
    how = AdaptationConfig(rate=0.2, segment=SEGMENT, learns=learns, rank=2)
    reader = AdaptiveReader(model, how)
    reader.score(tokens[:, :16])  # one of them pending, which sees as far by either rule of sight
    lane = reader.lane(0)
    writer = lane.writer()
    assert writer.last_hidden_BD is not None
    with torch.no_grad():
        output = lane.fast.use(lane.weights)(lane.pending_P[None], memory=lane.memory)
    torch.testing.assert_close(writer.last_hidden_BD, output.hidden_BTD[:, -1], rtol=0, atol=1e-12)
    before = copy.deepcopy(writer.model.state_dict())
    reader.score(tokens[:, 16:])  # learns on, and the writer does not
    assert all(torch.equal(before[name], weight) for name, weight in writer.model.state_dict().items())


def test_recurrent_models_learn_too(tokens):
    torch.manual_seed(0)
    net = build_model(RecurrentConfig(vocabulary=13, cell="lstm", n_layer=1, d_model=8, d_hidden=9)).double().eval()
    how = WAYS["both"]
    whole = read(AdaptiveReader(net, how), tokens)
    torch.testing.assert_close(read(AdaptiveReader(net, how), tokens, 3, 4), whole, atol=1e-12, rtol=0, equal_nan=True)
    assert not torch.equal(whole[0, 9:], make_reader(net).score(tokens)[0, 9:])
    with pytest.raises(ConfigError, match="take 'all'"):
        AdaptiveReader(net, AdaptationConfig(rate=0.1, segment=5, learns="layers"))


def test_a_model_with_clusters_and_runs_of_tokens(tokens):
    net = build(cutoffs=(4, 9), ngrams=(2, 3), ngram_rows=16, d_ngram=4, neighbours=2, norm="pre", final_norm=True)
    whole = read(AdaptiveReader(net, WAYS["both"]), tokens)
    found = read(AdaptiveReader(net, WAYS["both"]), tokens, 3, 4)
    torch.testing.assert_close(found, whole, atol=1e-12, rtol=0, equal_nan=True)
    assert not any("ngrams.tables" in name for name in FastWeights(net, WAYS["both"]).names)


def test_a_gradient_that_is_not_finite_moves_nothing(model, tokens):
    fast = FastWeights(model, WAYS["sgd"])
    weights = fast.fresh()
    output = fast.use(weights)(tokens[:, :-1], targets_BT=tokens[:, 1:])
    assert not fast.learn(output.loss_BT.mean() * float("inf"))
    assert all(map(torch.equal, weights, fast.trained))


def test_after_an_error_a_lane_stands_where_it_learned_last(model, tokens, monkeypatch):
    """The third lesson fails; it goes on as one that was given only what the first two are of."""
    reader, other = (reader_of(model, WAYS["both"]) for _ in range(2))
    lane, lessons = reader.lane(0), []
    really = lane._lesson

    def failing(*given):
        lessons.append(given)
        if len(lessons) == 3:
            raise InputError("no numbers")
        return really(*given)

    monkeypatch.setattr(lane, "_lesson", failing)
    with pytest.raises(InputError, match="no numbers"):
        reader.score(tokens)
    assert lane.read == 2 * SEGMENT + 1
    other.score(tokens[:, : lane.read])
    rest = tokens[:, lane.read :]
    assert torch.equal(reader.score(rest), other.score(rest))


def test_what_cannot_be_is_refused(model, tokens):
    with pytest.raises(ConfigError, match=r"adaptation\.segment: 0"):
        AdaptiveReader(model, AdaptationConfig(rate=0.1))
    with pytest.raises(InputError, match="which this run does not have"):
        AdaptiveReader(model, AdaptationConfig(rate=0.1, segment=5, rule="rms"))
    with pytest.raises(InputError, match="training mode"):
        AdaptiveReader(build(train=True), WAYS["sgd"])
    with pytest.raises(InputError, match="memory 0"):
        AdaptiveReader(build(memory=0), WAYS["sgd"])
    with pytest.raises(InputError, match="2 lanes, where this reader has 1"):
        AdaptiveReader(model, WAYS["sgd"]).score(torch.cat([tokens, tokens]))
    with pytest.raises(InputError, match="take a smaller"):
        read(AdaptiveReader(model, AdaptationConfig(rate=1e6, segment=5)), tokens.repeat(1, 4))
    for wrong in (
        {"rate": -1.0},
        {"cache_lambda": 1.0},
        {"rank": 0},
        {"decay": float("nan")},
        {"learns": "everything"},
    ):
        with pytest.raises(ConfigError, match="adaptation"):
            AdaptationConfig(**wrong)
