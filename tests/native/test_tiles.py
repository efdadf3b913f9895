"""The kernels for NVIDIA cards where there is none: interpreted by Triton against the spelled-out formula, values and every gradient, and compiled for three
generations of cards. Not shown by any of this: races, bfloat16 on tensor cores, speed."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from small_models import build
from tile_cases import Case, by_the_kernels, interpreter, learned, leaves, off_the_formula, weights
from transformer_xl import native
from transformer_xl.errors import InputError
from transformer_xl.model.attention import Mask, backend_of
from transformer_xl.model.encodings import Distances
from transformer_xl.model.reference import reference_attend
from transformer_xl.native import INPUTS, TiledAttention, cuda
from transformer_xl.presets import PRESETS

pytest.importorskip("triton", reason="there is no Triton here")
WIDTHS = sorted({preset.run.model.d_head for preset in PRESETS if hasattr(preset.run.model, "d_head")})
CLOSE = {torch.float32: 2e-6, torch.float16: 2e-3}
"""Of the largest value."""


@pytest.fixture(scope="module")
def interpreted():
    with interpreter() as call:
        yield call


def by_the_formula(case: Case, stays_BHTS: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """In float64; `stays_BHTS`: what dropout leaves."""
    named = {name: tensor.double().requires_grad_() for name, tensor in leaves(case).items()}
    key_BHSK, value_BHSK = torch.cat([named["memory_key_value"], named["key_value"]], 1).permute(2, 0, 3, 1, 4)
    mask = Mask(
        memory=case.memory,
        segment=case.segment,
        valid_B=None if case.valid is None else torch.tensor(case.valid),
        visible_distance=case.visible,
        device=torch.device("cpu"),
    )
    distances = Distances(
        relative_key_HSK=named["relative"].transpose(0, 1),
        content_bias_HK=named.get("content_bias"),
        position_bias_HK=named.get("position_bias"),
    )
    mixed_BHTK = reference_attend(
        named["query"].transpose(1, 2),
        key_BHSK,
        value_BHSK,
        distances=distances,
        mask_BTS=mask.cells_BTS,
        dropout=lambda share: share if stays_BHTS is None else share * stays_BHTS / (1 - case.dropout),
    )
    out = mixed_BHTK.transpose(1, 2)
    gradients = torch.autograd.grad((out * weights(case).double()).sum(), list(named.values()))
    return {"out": out.detach(), **dict(zip(named, gradients, strict=True))}


def off(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """How far, as a share of the largest value of each."""
    assert found.keys() == expected.keys()
    assert all(found[name].shape == theirs.shape for name, theirs in expected.items())
    return {
        name: float((found[name].double() - theirs).abs().max() / theirs.abs().max())
        for name, theirs in expected.items()
        if theirs.numel()
    }


def off_together(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """As a share of the largest value of all: a gradient of few numbers may be what large ones left of each other."""
    joined = [torch.cat([named[name].double().flatten() for name in expected]) for named in (found, expected)]
    return off(*({"all": numbers} for numbers in joined))["all"]


@st.composite
def cases(draw):
    lanes, memory, segment = draw(st.integers(1, 2)), draw(st.integers(0, 40)), draw(st.integers(1, 40))
    dtype = draw(st.sampled_from(list(CLOSE)))
    return Case(
        lanes=lanes,
        memory=memory,
        segment=segment,
        heads=draw(st.integers(1, 2)),
        width=draw(st.sampled_from([*WIDTHS, 1, 17])),
        valid=draw(st.none() | st.tuples(*[st.integers(0, memory)] * lanes)),
        visible=draw(st.none() | st.integers(0, memory + segment)),
        biased=draw(st.booleans()),
        dtype=dtype,
        precise_tables=dtype == torch.float16 and draw(st.booleans()),
        tiles=draw(st.sampled_from([None, (16, 16), (32, 16), (16, 32)])),
        seed=draw(st.integers(0, 2**16)),
    )


@given(case=cases())
@settings(max_examples=50, deadline=None)
def test_attention_is_the_formula_with_gradients(interpreted, case):
    assert off_together(interpreted(by_the_kernels, case), by_the_formula(case)) < CLOSE[case.dtype]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_of_the_presets_in_the_tiles_of_a_card(interpreted, width, dtype):
    case = Case(memory=33, segment=70, heads=1, width=width, valid=(33, 4), visible=60, dtype=dtype, tiles=None)
    shares = off(interpreted(by_the_kernels, case), by_the_formula(case))
    assert max(shares.values()) < CLOSE[dtype], shares


@pytest.mark.parametrize("visible", [0, 1, 15, 16, 17])
@pytest.mark.parametrize("memory", [0, 16])
def test_sight_that_ends_where_tiles_end(interpreted, memory, visible):
    case = Case(lanes=1, memory=memory, segment=33, heads=1, visible=visible)
    assert off_together(interpreted(by_the_kernels, case), by_the_formula(case)) < CLOSE[case.dtype]


def test_the_same_bits_again(interpreted):
    case = Case(memory=9, segment=20, valid=(9, 3), visible=15, dropout=0.3)
    first, second = (interpreted(by_the_kernels, case) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


# --- dropout

DROPPED = Case(memory=9, segment=23, width=32, valid=(9, 2), visible=20, dropout=0.25)


def mask_of(interpreted, case: Case) -> torch.Tensor:
    """What dropout left, [B, H, T, S]: values that are unit vectors make what is gathered the probabilities themselves."""
    case = replace(case, unit_values=True)
    dropped, whole = (interpreted(by_the_kernels, case)["out"] for case in (case, replace(case, dropout=0.0)))
    stays = dropped != 0
    torch.testing.assert_close(dropped, torch.where(stays, whole / (1 - case.dropout), 0), rtol=0, atol=1e-6)
    assert bool(((whole > 0) >= stays).all())
    return (stays | (whole == 0)).transpose(1, 2)


def test_gradients_go_through_the_mask_that_was_drawn(interpreted):
    stays_BHTS = mask_of(interpreted, DROPPED)
    shares = off(interpreted(by_the_kernels, DROPPED), by_the_formula(DROPPED, stays_BHTS))
    assert max(shares.values()) < CLOSE[torch.float32], shares


def test_a_mask_depends_on_lane_head_query_and_key_alone(interpreted):
    stays_BHTS = mask_of(interpreted, DROPPED)
    for tiles in (None, (16, 32)):
        assert torch.equal(mask_of(interpreted, replace(DROPPED, tiles=tiles)), stays_BHTS)
    assert not torch.equal(mask_of(interpreted, replace(DROPPED, seed=1)), stays_BHTS)


@pytest.mark.parametrize("rate", [0.02, 0.25, 0.9])
def test_dropout_has_its_rate_and_cells_are_independent(interpreted, rate):
    case = Case(memory=64, segment=64, lanes=3, width=128, dropout=rate, tiles=None)
    drawn = ~mask_of(interpreted, case)[..., :64].flatten(0, 1)
    cells, spread = drawn.numel(), (rate * (1 - rate)) ** 0.5
    assert float(drawn.double().mean()) == pytest.approx(rate, abs=4 * spread / cells**0.5)
    for other in (drawn.roll(1, 0), drawn.roll(1, 1), drawn.roll(1, 2), drawn.roll(2, 2)):
        both = float((drawn & other).double().mean())
        assert both == pytest.approx(rate**2, abs=4 * rate * (1 - rate**2) ** 0.5 / cells**0.5)


# --- bfloat16, which the interpreter gets wrong


def rounded(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What the kernels compute, by torch in float32, rounded to `dtype` wherever they round: operands of every product, and every result."""
    B, M, T, H, K = case.lanes, case.memory, case.segment, case.heads, case.width

    def r(values: torch.Tensor) -> torch.Tensor:
        return values.to(dtype).float()

    named = {name: r(tensor) for name, tensor in leaves(case).items()}
    query, relative, weight_BTHK = named["query"], named["relative"], r(weights(case))
    key_BSHK, value_BSHK = torch.cat([named["memory_key_value"], named["key_value"]], 1).unbind(2)
    content_BTHK, asking_BTHK = (r((query + named[bias]) * K**-0.5) for bias in ("content_bias", "position_bias"))
    distance_TS = M + torch.arange(T)[:, None] - torch.arange(M + T)
    column_TS = (M + T - 1 - distance_TS).clamp(max=M + T - 1)
    position_BHTS = r(torch.einsum("bthk,shk->bhts", asking_BTHK, relative)).gather(3, column_TS.expand(B, H, T, -1))
    score_BHTS = torch.einsum("bthk,bshk->bhts", content_BTHK, key_BSHK) + position_BHTS
    score_BHTS = score_BHTS.masked_fill(distance_TS < 0, float("-inf"))
    share_BHTS = (score_BHTS - score_BHTS.amax(-1, keepdim=True)).exp()
    out_BTHK = torch.einsum("bhts,bshk->bthk", r(share_BHTS), value_BSHK)
    out_BTHK = r(out_BTHK / share_BHTS.sum(-1).transpose(1, 2)[..., None])

    probability_BHTS = score_BHTS.softmax(-1)
    upward_BHTS = torch.einsum("bthk,bshk->bhts", weight_BTHK, value_BSHK)
    delta_BHT = (weight_BTHK * out_BTHK).sum(-1).transpose(1, 2)
    change_BHTS = r(probability_BHTS * (upward_BHTS - delta_BHT[..., None]))
    by_distance_BHTS = torch.zeros_like(change_BHTS).scatter_add(3, column_TS.expand(B, H, T, -1), change_BHTS)
    content = r(torch.einsum("bhts,bshk->bthk", change_BHTS, key_BSHK) * K**-0.5)
    position = r(r(torch.einsum("bhts,shk->bthk", by_distance_BHTS, relative)) * K**-0.5)
    keys_values = [
        r(torch.einsum("bhts,bthk->bshk", change_BHTS, content_BTHK)),
        r(torch.einsum("bhts,bthk->bshk", r(probability_BHTS), weight_BTHK)),
    ]
    memory, segment = torch.stack(keys_values, 2).split([M, T], 1)
    return {
        "out": out_BTHK,
        "query": r(content + position),
        "memory_key_value": memory,
        "key_value": segment,
        "relative": r(torch.einsum("bhts,bthk->shk", by_distance_BHTS, asking_BTHK)),
        "content_bias": r(content.sum((0, 1))),
        "position_bias": r(position.sum((0, 1))),
    }


@pytest.mark.parametrize("width", WIDTHS)
def test_bfloat16_rounds_as_it_should_and_the_emulation_rounds_as_the_kernels(interpreted, width):
    case = Case(memory=40, segment=48, heads=1, width=width, dtype=torch.float16, tiles=None)
    found = interpreted(by_the_kernels, case)
    # Where they can be compared, the emulation is nearer to the kernels than both are to the formula.
    alike, apart = off(rounded(case, torch.float16), found), off(found, by_the_formula(case))
    assert max(alike.values()) < CLOSE[torch.float16]
    assert sum(alike.values()) < sum(apart.values())
    coarse = replace(case, dtype=torch.bfloat16)
    shares = off(rounded(coarse, torch.bfloat16), by_the_formula(coarse))
    assert max(shares.values()) < 8 * CLOSE[torch.float16], shares  # three bits fewer


# --- in a model

KINDS = [
    {},
    {"d_head": 41, "n_head": 1},
    {"norm": "pre", "final_norm": True},
    {"share_biases": False},
    {"same_length": True},
    {"clamp_len": 3},
    {"encoding": "shaw"},
    {"initial_memory": "zeros"},
    {"neighbours": 3},
    {"neighbours": 9, "same_length": True},
    {"ngrams": (2, 3), "ngram_rows": 11, "d_ngram": 5},
]


@pytest.mark.parametrize("changes", KINDS, ids=lambda changes: "-".join(map(str, changes.values())) or "plain")
def test_a_model_learns_the_same_with_and_without_the_kernels(interpreted, changes):
    shares = off(interpreted(learned, changes, by="triton"), learned(changes, by=None))
    assert max(shares.values()) < 2e-5, shares


@pytest.mark.parametrize("changes", [{}, {"neighbours": 3}, {"encoding": "shaw"}], ids=str)
def test_a_model_learns_the_same_under_autocast(interpreted, changes):
    """There relative keys and biases are more precise than queries, keys and values."""
    shares = off(interpreted(learned, changes, by="triton", autocast=True), learned(changes, by=None))
    assert max(shares.values()) < 2e-2, shares


def test_the_kernels_check_themselves_before_they_are_used(interpreted):
    assert interpreted(off_the_formula, torch.float32) < CLOSE[torch.float32]
    assert interpreted(off_the_formula, torch.float16) < CLOSE[torch.float16]


# --- at the door


def small(**changes: object) -> dict[str, object]:
    named: dict[str, object] = dict(zip(INPUTS, (*leaves(Case()).values(), None, None), strict=True))
    return named | changes


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({"relative": None}, {}, "given no relative"),
        (
            {"relative": torch.zeros(56, 2, 16)},
            {},
            r"relative as torch.float32 \[56, 2, 16\] on cpu.* takes .*\[57, 2, 16\]",
        ),
        ({"key_value": torch.zeros(2, 37, 2, 2, 16).half()}, {}, "key_value as torch.float16 .*takes torch.float32"),
        ({"lowest": torch.zeros(2, dtype=torch.int32)}, {}, "lowest as torch.int32 .*takes torch.int64"),
        (
            {"lowest": torch.zeros(2, dtype=torch.int64, device="meta")},
            {},
            "lowest .* on meta, .*give the whole model one device",
        ),
        ({"content_bias": torch.zeros(2, 15)}, {}, "content_bias"),
        ({}, {"dropout": 1.0}, "a dropout of 1.0 leaves nothing"),
        ({}, {"dropout": -0.1}, "a dropout of -0.1 leaves nothing"),
    ],
)
def test_what_does_not_fit_is_refused(changes, options, said):
    with pytest.raises(InputError, match=said):
        TiledAttention(small(**changes), **{"limit": 9, "dropout": 0.0, "seed": 0, **options})


def test_what_is_too_large_to_count_is_refused():
    query, memory = torch.empty(1, 1 << 16, 1, 16, device="meta"), torch.empty(1, 0, 2, 1, 16, device="meta")
    segment, relative = (torch.empty(shape, device="meta") for shape in ((1, 1 << 16, 2, 1, 16), (1 << 16, 1, 16)))
    inputs = (query, memory, segment, relative, None, None, None, None)
    with pytest.raises(InputError, match=r"65,536 queries and 65,536 keys .*shorter segments"):
        TiledAttention(dict(zip(INPUTS, inputs, strict=True)), limit=9, dropout=0.0, seed=0)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (1e-3, ""),
        (0.4, "the kernels for cpu are wrong there, by 0.4 of the largest value"),
        (float("nan"), "are wrong there, by nan"),
        (RuntimeError("no compiler\nat all"), r"cannot be had \(RuntimeError: no compiler\); torch's own"),
    ],
)
def test_kernels_that_are_wrong_or_cannot_be_built_are_not_used(found, said, monkeypatch, capsys):
    def answer(*_: object) -> float:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(cuda, "_off_the_formula", answer)
    assert cuda._right.__wrapped__(torch.device("cpu"), torch.float32) == (said == "")
    printed = "".join(capsys.readouterr())
    assert re.search(said, printed) if said else not printed


def test_without_triton_it_is_said(monkeypatch, capsys):
    monkeypatch.setattr(cuda, "find_spec", lambda name: None)
    assert not cuda._right.__wrapped__(torch.device("cpu"), torch.float32)
    assert "pip install triton" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("dtype", "precision", "capability", "usable"),
    [
        (torch.bfloat16, "highest", (8, 0), True),
        (torch.float16, "highest", (9, 0), True),
        (torch.float32, "high", (8, 6), True),
        (torch.float32, "highest", (9, 0), False),
        (torch.float64, "high", (9, 0), False),
        (torch.bfloat16, "highest", (7, 5), False),
    ],
)
def test_types_and_cards_that_the_kernels_are_for(dtype, precision, capability, usable, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(cuda, "_right", lambda *question: asked.append(question) or True)
    like = SimpleNamespace(is_cuda=True, dtype=dtype, device=torch.device("cuda", 0))
    assert cuda.cuda_usable(like) == usable
    assert asked == ([(like.device, dtype)] if usable else [])
    like.dtype = torch.float64
    assert not cuda.cuda_usable(like)
    like.is_cuda = False
    assert not cuda.cuda_usable(like)


def test_the_layer_takes_the_kernels_where_they_are_right(monkeypatch):
    config, like = build().config, torch.zeros(1, device="meta")
    assert backend_of("attention", config, like) == "torch"
    monkeypatch.setattr(native, "cuda_usable", lambda like: True)
    assert backend_of("attention", config, like) == "triton"
    assert backend_of("layers", config, like) == "torch"
    for other in (build(d_head=129), build(encoding="shaw_biased"), build(encoding="absolute", memory=0)):
        assert backend_of("attention", other.config, like) == "torch"
    held = replace(config, attention_dropout=0.1, locked_dropout=("attention",))
    assert backend_of("attention", held, like, training=True) == "torch"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_card_computes_the_formula(width, dtype):
    case = Case(memory=100, segment=150, width=width, valid=(100, 4), visible=200, dtype=dtype, tiles=None)
    shares = off(by_the_kernels(case, device="cuda"), by_the_formula(case))
    assert max(shares.values()) < {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype], shares
