"""What Section 3.2 promises: segments with memory are one long pass, nothing sees the future, and reach grows by M with every layer."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from small_models import build, random_memory, random_tokens
from transformer_xl.errors import CheckpointError, InputError
from transformer_xl.model import Memory
from transformer_xl.tensor_files import write_tensors

CLOSE = {"rtol": 0, "atol": 1e-10}
RECURRENT = ["relative", "shaw", "shaw_biased"]


RUNS = {"ngrams": (2, 4), "ngram_rows": 11, "d_ngram": 5}


def losses_in_pieces(model, tokens, cuts, **options):
    memory, parts, start = options.get("memory"), [], 0
    for stop in cuts:
        output = model(tokens[:, start:stop], targets_BT=tokens[:, start + 1 : stop + 1], memory=memory)
        memory, start = output.memory, stop
        parts.append(output.loss_BT)
    return torch.cat(parts, dim=1), memory


@given(
    encoding=st.sampled_from(RECURRENT),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    clamp=st.sampled_from([0, 2]),
    norm=st.sampled_from(["post", "pre"]),
    neighbours=st.sampled_from([0, 2, 7]),
    runs=st.sampled_from([{}, RUNS]),
)
@settings(max_examples=60, deadline=None)
@torch.no_grad()
def test_any_cutting_equals_one_pass(encoding, lengths, clamp, norm, neighbours, runs):
    total = sum(lengths)
    model = build(
        encoding=encoding,
        memory=total,
        clamp_len=clamp,
        norm=norm,
        neighbours=neighbours,
        **runs,
        learned_positions=5 if encoding != "relative" else 0,
    )
    tokens = random_tokens(model, lanes=2, length=total + 1)
    whole = model(tokens[:, :-1], targets_BT=tokens[:, 1:]).loss_BT
    cuts = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    pieces, _ = losses_in_pieces(model, tokens, cuts)
    torch.testing.assert_close(pieces, whole, **CLOSE)


@given(
    lengths=st.lists(st.integers(1, 4), min_size=2, max_size=6),
    keys=st.sampled_from(["memory", "memory+1"]),
    neighbours=st.sampled_from([0, 2, 7]),
    runs=st.sampled_from([{}, RUNS]),
)
@settings(max_examples=40, deadline=None)
@torch.no_grad()
def test_same_length_makes_short_memory_independent_of_cutting(lengths, keys, neighbours, runs):
    """Where every token sees its last M, the cut does not show even when memory is shorter than the text."""
    model = build(memory=3, same_length=True, same_length_keys=keys, neighbours=neighbours, **runs)
    tokens = random_tokens(model, lanes=1, length=sum(lengths) + 1)
    one_by_one, _ = losses_in_pieces(model, tokens, range(1, sum(lengths) + 1))
    pieces, _ = losses_in_pieces(model, tokens, [sum(lengths[: i + 1]) for i in range(len(lengths))])
    torch.testing.assert_close(pieces, one_by_one, **CLOSE)


@pytest.mark.parametrize("encoding", ["relative", "shaw", "shaw_biased", "absolute", "per_layer"])
@pytest.mark.parametrize("neighbours", [0, 3])
@pytest.mark.parametrize("runs", [False, True])
@torch.no_grad()
def test_nothing_depends_on_a_later_token(encoding, neighbours, runs):
    model = build(
        encoding=encoding,
        neighbours=neighbours,
        **(RUNS if runs else {}),
        memory=0 if encoding in ("absolute", "per_layer") else 6,
        **({"learned_positions": 9} if encoding in ("shaw", "shaw_biased", "per_layer") else {}),
    )
    tokens = random_tokens(model, lanes=1, length=8)
    base = model(tokens).hidden_BTD
    for position in range(8):
        changed = tokens.clone()
        changed[0, position] = (changed[0, position] + 1) % 13
        moved = (model(changed).hidden_BTD - base).abs().amax(-1)[0]
        assert moved[:position].eq(0).all()
        assert moved[position:].gt(1e-12).all()


def earliest_influence(position, *, layers, memory, segment, sliding):
    """The first token that can reach `position`: each layer looks back from what the one above it looked at."""
    for _ in range(layers):
        looks_from = position if sliding else position - position % segment
        position = max(0, looks_from - memory)
    return position


@pytest.mark.parametrize("sliding", [False, True], ids=["segment-rule", "last-M-rule"])
@pytest.mark.parametrize(
    ("layers", "memory", "segment"), [(1, 3, 3), (2, 4, 4), (3, 3, 3), (2, 5, 2), (2, 2, 4), (3, 1, 2)]
)
@pytest.mark.parametrize(("neighbours", "order"), [(0, 1), (4, 1), (0, 3)])
@torch.no_grad()
def test_reach_is_exactly_the_papers(layers, memory, segment, sliding, neighbours, order):
    """N layers reach N x M behind the segment (M = L: the paper's O(N x L)) and not one token further; runs of tokens their length less one more."""
    sizes = {"n_layer": layers, "memory": memory, "neighbours": neighbours}
    sizes |= {"ngrams": (order,), "ngram_rows": 997, "d_ngram": 5} if order > 1 else {}
    model = build(**sizes, same_length=sliding, same_length_keys="memory+1")
    length = segment * ((layers * memory) // segment + 3)
    tokens = random_tokens(model, lanes=1, length=length)

    def run(sequence):
        state, parts = None, []
        for start in range(0, length, segment):
            output = model(sequence[:, start : start + segment], memory=state)
            state = output.memory
            parts.append(output.hidden_BTD)
        return torch.cat(parts, dim=1)

    base = run(tokens)
    if memory == segment and not sliding:
        start_of_last = length - segment
        assert (
            earliest_influence(length - 1, layers=layers, memory=memory, segment=segment, sliding=False)
            == start_of_last - layers * segment
        )
    for changed_at in range(length):
        changed = tokens.clone()
        changed[0, changed_at] = (changed[0, changed_at] + 1) % 13
        moved = (run(changed) - base).abs().amax(-1)[0]
        for position in range(length):
            first = earliest_influence(position, layers=layers, memory=memory, segment=segment, sliding=sliding)
            first = max(0, first - order + 1)
            assert bool(moved[position] > 0) == (first <= changed_at <= position), (changed_at, position)


@torch.no_grad()
def test_growing_and_full_length_memory_agree():
    model = build(memory=5)
    tokens = random_tokens(model, lanes=2, length=10)
    grown, _ = losses_in_pieces(model, tokens, [3, 6, 9])
    static, memory = losses_in_pieces(model, tokens, [3, 6, 9], memory=model.start_memory(2, full_length=True))
    torch.testing.assert_close(grown, static, **CLOSE)
    assert memory.length == 5


@torch.no_grad()
def test_a_reset_lane_starts_anew_and_the_others_go_on():
    model = build(memory=8)
    tokens = random_tokens(model, lanes=3, length=9)
    before = model(tokens[:, :4]).memory
    after = model(tokens[:, 4:8], targets_BT=tokens[:, 5:], memory=before.reset([1]))
    fresh = model(tokens[:, 4:8], targets_BT=tokens[:, 5:])
    going_on = model(tokens[:, 4:8], targets_BT=tokens[:, 5:], memory=before)
    torch.testing.assert_close(after.loss_BT[1], fresh.loss_BT[1], **CLOSE)
    torch.testing.assert_close(after.loss_BT[[0, 2]], going_on.loss_BT[[0, 2]], **CLOSE)
    assert after.memory.valid_B.tolist() == [8, 4, 8]


@torch.no_grad()
def test_a_zero_start_is_attended_to():
    """The convention of TensorFlow and Hugging Face: fresh memory is M zero vectors, and they take part in the softmax."""
    zeros, empty = build(initial_memory="zeros", memory=4), build(memory=4)
    tokens = random_tokens(zeros, lanes=1, length=4)
    by_hand = Memory(
        layers=tuple(torch.zeros(1, 4, 8, dtype=torch.float64) for _ in range(2)), valid_B=torch.tensor([4])
    )
    torch.testing.assert_close(zeros(tokens).hidden_BTD, empty(tokens, memory=by_hand).hidden_BTD, **CLOSE)
    assert (zeros(tokens).hidden_BTD - empty(tokens).hidden_BTD).abs().max() > 1e-3
    assert zeros(tokens).memory.reset([0]).valid_B.tolist() == [4]


@torch.no_grad()
def test_overlap_keeps_what_is_fed_again_out_of_memory():
    """Half loss: feed context and segment, score the segment, remember only what will not be fed again."""
    model = build(memory=20)
    tokens = random_tokens(model, lanes=2, length=13)
    whole = model(tokens[:, :12], targets_BT=tokens[:, 1:]).loss_BT
    first = model(tokens[:, :8], targets_BT=tokens[:, 5:9], overlap=4)
    second = model(tokens[:, 4:12], targets_BT=tokens[:, 9:13], memory=first.memory, overlap=4)
    assert first.memory.length == 4
    torch.testing.assert_close(torch.cat([first.loss_BT, second.loss_BT], 1), whole[:, 4:], **CLOSE)


@torch.no_grad()
def test_memory_of_another_length_is_cut_to_the_configured_one():
    model = build(memory=3)
    tokens = random_tokens(model, lanes=1, length=4)
    long = random_memory(model, lanes=1, length=7)
    torch.testing.assert_close(
        model(tokens, memory=long).hidden_BTD, model(tokens, memory=long.truncated(3)).hidden_BTD, **CLOSE
    )
    model.set_lengths(memory=7)
    assert (
        model(tokens, memory=long).hidden_BTD - model(tokens, memory=long.truncated(3)).hidden_BTD
    ).abs().max() > 1e-6


def test_memory_saves_loads_selects_and_moves(tmp_path):
    model = build(memory=5)
    memory = random_memory(model, lanes=3, length=5, valid=[5, 2, 0])
    memory.save(tmp_path / "memory.safetensors")
    loaded = Memory.load(tmp_path / "memory.safetensors")
    assert loaded.valid_B.tolist() == [5, 2, 0]
    assert all(torch.equal(a, b) for a, b in zip(memory.layers, loaded.layers, strict=True))
    chosen = memory.select([2, 0, 0])
    assert chosen.valid_B.tolist() == [0, 5, 5]
    assert torch.equal(chosen.layers[1][2], memory.layers[1][0])
    assert memory.to(device="meta", dtype=torch.float32).layers[0].dtype == torch.float32
    with pytest.raises(InputError, match="lane 3"):
        memory.select([3])


def test_memory_that_cannot_be_is_refused_at_every_door(tmp_path):
    """By a program that hands it in, and out of a file with a right checksum: both end in kernels that trust it."""
    model = build(memory=5)
    tokens, path = random_tokens(model, lanes=2, length=3), tmp_path / "memory.safetensors"
    good = random_memory(model, lanes=2, length=5, valid=[5, 2])
    first, second = good.layers
    wrong = {
        "valid is -1099511627776 in a memory of 5": replace(good, valid_B=torch.tensor([-(2**40), 0])),
        "valid is 8589934592 in a memory of 5": replace(good, valid_B=torch.tensor([5, 2**33])),
        "valid is torch.float64": replace(good, valid_B=good.valid_B.double()),
        r"valid is torch.int64 \[1\]": replace(good, valid_B=good.valid_B[:1]),
        r"layer 1 is torch.float64 \[2, 4, 8\]": replace(good, layers=(first, second[:, 1:])),
        r"layer 1 is torch.float64 \[1, 5, 8\]": replace(good, layers=(first, second[:1])),
        r"layer 1 is torch.int64 \[2, 5, 8\]": replace(good, layers=(first, second.long())),
        r"layer 0 has shape \[2, 40\]": replace(good, layers=(first.flatten(1), second.flatten(1))),
    }
    for said, memory in wrong.items():
        with pytest.raises(InputError, match=said):
            model(tokens, memory=memory)
        memory.save(path)
        with pytest.raises(
            CheckpointError, match=rf"memory.safetensors is not a saved memory, or is damaged \(memory: {said}"
        ):
            Memory.load(path)
    with pytest.raises(InputError, match=r"layer 0 is torch.float32 on cpu where the model is torch.float64"):
        model(tokens, memory=good.to(dtype=torch.float32))
    with pytest.raises(InputError, match="does not fit 2 layers"):
        model(tokens, memory=replace(good, layers=(first,)))
    write_tensors(path, {**good.tensors(), "layer_5": first.clone()})
    with pytest.raises(CheckpointError, match="layer_2 is missing"):
        Memory.load(path)
    write_tensors(path, {**good.tensors(), "starts_full": torch.tensor([1.0])})
    with pytest.raises(CheckpointError, match=r"starts_full is torch.float32"):
        Memory.load(path)
    write_tensors(path, {**good.tensors(), "layer_0": first * float("nan")})
    with pytest.raises(CheckpointError, match="layer_0 holds numbers that are not finite"):
        Memory.load(path)
    path.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="is not a saved memory"):
        Memory.load(path)


def test_forward_changes_nothing_it_was_given():
    model = build(train=True, dropout=0.5)
    memory = random_memory(model, lanes=1, length=4)
    copies = [layer.clone() for layer in memory.layers]
    model(random_tokens(model, lanes=1, length=3), memory=memory)
    assert all(torch.equal(layer, copy) for layer, copy in zip(memory.layers, copies, strict=True))


def test_wrong_inputs_are_named():
    model = build()
    with pytest.raises(InputError, match="13 is outside the vocabulary of 13"):
        model(torch.tensor([[13]]))
    with pytest.raises(InputError, match="holds no tokens"):
        model(torch.zeros(1, 0, dtype=torch.int64))
    with pytest.raises(InputError, match=r"expected whole numbers .* of shape \[lanes, positions\]"):
        model(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(InputError, match="does not fit"):
        model(torch.tensor([[1]]), memory=random_memory(model, lanes=2, length=3))
    with pytest.raises(InputError, match="does not fit tokens"):
        model(torch.tensor([[1]]), targets_BT=torch.tensor([[1, 2]]))
