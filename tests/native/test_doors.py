"""The door to the kernels: what is not exactly what C++ takes it for is refused, in one sentence, before anything is read or written."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from small_models import build
from transformer_xl import native
from transformer_xl.errors import InputError
from transformer_xl.inference import Engine
from transformer_xl.native import doors

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C++ compiler here")

WRONG = {
    "another dtype": lambda tensor: tensor.to(torch.float32 if tensor.dtype == torch.float64 else torch.float64),
    "half the bytes": lambda tensor: tensor.half() if tensor.is_floating_point() else tensor.int(),
    "whole numbers": lambda tensor: tensor.to(torch.int32),
    "a row less": lambda tensor: tensor[:-1].contiguous(),
    "a column less": lambda tensor: tensor[..., :-1].contiguous(),
    "flat": lambda tensor: tensor.reshape(-1)[: tensor.numel() // 2].contiguous(),
    "every second": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
}


def tables(model: Engine) -> tuple[list, list, dict]:
    """What an engine gives `Layers`."""
    given = {}

    class Spy(doors.Layers):
        def __init__(self, matrices, others, **options):
            given["all"] = (matrices, others, options)
            super().__init__(matrices, others, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "Layers", Spy)
        model.read(torch.tensor([[1, 2]]))
    return given["all"]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", [*doors.MATRICES, *doors.OF_A_LAYER])
def test_a_layer_with_one_wrong_tensor_is_refused_by_name(name, wrong):
    matrices, others, options = tables(
        Engine(build(encoding="shaw_biased", learned_positions=20, memory=6, neighbours=3))
    )
    part = matrices[1] if name in doors.MATRICES else others[1]
    right = part[name]
    if right is None:
        pytest.skip(f"this encoding has no {name}")
    if name in doors.MATRICES:
        part[name] = (WRONG[wrong](right[0]), right[1])
    else:
        part[name] = WRONG[wrong](right)
    with pytest.raises(InputError, match=f"a kernel was given {name} as"):
        native.Layers(matrices, others, **options)
    part[name] = right
    native.Layers(matrices, others, **options)


def test_bytes_need_scales_of_the_right_kind_and_a_float32_model():
    matrices, others, options = tables(Engine(build(memory=6).float(), weights="int8"))
    weight, scale = matrices[0]["inner"]
    assert weight.dtype == torch.int8
    for wrong in ((weight, None), (weight, scale.double()), (weight, scale[:-1]), (weight.float(), scale)):
        matrices[0]["inner"] = wrong
        with pytest.raises(InputError, match="a kernel was given inner as"):
            native.Layers(matrices, others, **options)


@pytest.mark.parametrize(
    "where",
    [
        {"end": -1},
        {"end": 1 << 40},
        {"limit": -1},
        {"lowest": -(1 << 40)},
        {"lowest": 1 << 40},
        {"lowest": -1},
        {"room": 1},
    ],
)
@pytest.mark.parametrize("length", [1, 5])
def test_positions_outside_of_the_memory_are_refused_and_nothing_is_touched(where, length):
    model = build(memory=6)
    engine = Engine(model, lanes=2)
    engine.read(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    layers, config = engine._table, model.config
    end = engine.kept.end if "room" not in where else layers.sizes.room
    lowest_B = torch.tensor([engine.kept.end - 3, where.get("lowest", engine.kept.end - 3)])
    at = {"end": where.get("end", end), "limit": where.get("limit", config.memory)}
    before = [buffer.clone() for buffer in (*engine.kept.keys, *engine.kept.values)]
    D, X = config.d_model, config.n_head * config.d_head
    hidden, query, key_value = (torch.zeros(2, length, width, dtype=torch.float64) for width in (D, X, 2 * X))

    def call():
        if length == 1:
            layers.step(hidden[:, 0], lowest_B, **at)
        else:
            layers.attend(0, query, key_value, lowest_B, **at)

    with pytest.raises(InputError, match="positions that lie outside of its memory"):
        call()
    for found, expected in zip((*engine.kept.keys, *engine.kept.values), before, strict=True):
        assert torch.equal(found, expected)


def attention_inputs(dtype=torch.float64) -> dict[str, torch.Tensor]:
    B, T, M, H, K = 2, 5, 7, 3, 4
    shapes = {"query": (B, T, H, K), "memory_key_value": (B, M, 2, H, K), "key_value": (B, T, 2, H, K)}
    shapes |= {"relative": (M + T, H, K), "content_bias": (H, K), "position_bias": (H, K), "neighbours": (3, H, K)}
    return {**{name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}, "lowest": torch.tensor([0, 3])}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", native.INPUTS)
def test_an_attention_of_training_with_one_wrong_tensor_is_refused(name, wrong):
    if (name, wrong) == ("neighbours", "a row less"):
        pytest.skip("that is one neighbour less")
    inputs = attention_inputs()
    right, options = inputs[name], {"limit": 100, "dropout": 0.0, "seed": 0}
    inputs[name] = WRONG[wrong](right)
    if inputs[name].dtype == right.dtype and inputs[name].shape == right.shape and inputs[name].is_contiguous():
        pytest.skip("nothing is wrong with it")
    with pytest.raises(InputError, match="a kernel was given"):
        native.Attention(inputs, **options).forward()
    native.Attention({**inputs, name: right}, **options).forward()


@pytest.mark.parametrize("lowest", [-1, 8, -(1 << 40), 1 << 40, 1 << 33])
def test_an_attention_of_training_begins_within_its_memory(lowest):
    inputs = {**attention_inputs(), "lowest": torch.tensor([0, lowest])}
    for options in ({"limit": 100, "dropout": 0.0}, {"limit": 1 << 40, "dropout": 0.5}):
        attention = native.Attention(inputs, seed=0, **options)
        with pytest.raises(InputError, match="positions that lie outside of its memory"):
            attention.forward()


def test_other_kernels_look_at_what_they_are_given():
    x, matrix, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    native.linear(x, matrix, None, bias)
    scale = torch.ones(5, dtype=torch.float64)
    for wrong in (
        (x.double(), matrix, None, bias),
        (x, matrix.t(), None, None),
        (x, matrix, None, bias[:4]),
        (x, matrix.to(torch.int8), None, None),
        (x, matrix.to(torch.int8), scale, None),
        (x.double(), matrix.to(torch.int8), scale.float(), None),
        (x[:0], matrix, None, None),
        (torch.randn(65, 8), matrix, None, None),
    ):
        with pytest.raises(InputError, match="kernel"):
            native.linear(*wrong)
    for rate in (1.0, -0.1, float("nan"), 2.0):
        with pytest.raises(InputError, match="leaves nothing"):
            native.drop(x, rate, 1)
    with pytest.raises(InputError, match="a kernel was given"):
        native.relu_drop_backward(x, x[:2], 0.5)
    with pytest.raises(InputError, match="a kernel was given"):
        native.few_backward(torch.randn(3, 4), x, matrix, torch.empty_like(matrix))


def test_the_structures_are_those_of_c_plus_plus(monkeypatch, capsys):
    """Compared whenever the library is loaded: a field that only one side has, or in another place, and torch computes instead."""
    assert doors.library.__wrapped__() is not None

    class Sizes(ctypes.Structure):
        _fields_ = tuple((name, kind) for name, kind in reversed(doors.Sizes._fields_))

    monkeypatch.setitem(doors.STRUCTURES, "fields_of_inference", (doors.Layer, Sizes, doors.Words, doors.Choice))
    assert doors.library.__wrapped__() is None
    assert "fields_of_inference: C++ has" in capsys.readouterr().err


def test_weights_that_were_replaced_under_an_engine_are_noticed():
    model = build(memory=4)
    engine = Engine(model)
    engine.read(torch.tensor([[1, 2]]))
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with pytest.raises(InputError, match="make a new engine"):
        engine.read(torch.tensor([[1]]))


LITTLE_ROOM = """
import resource, torch
from transformer_xl import native
from transformer_xl.native import doors
torch.set_num_threads(2)
native.drop(torch.zeros(10000), 0.5, 1)  # the threads are there now
T, K = 30_000, 64
inputs = {"query": torch.zeros(1, T, 1, K), "memory_key_value": torch.zeros(1, 0, 2, 1, K), "key_value": torch.zeros(1, T, 2, 1, K)}
inputs |= {"relative": torch.zeros(T, 1, K), "content_bias": None, "position_bias": None, "neighbours": None, "lowest": torch.zeros(1, dtype=torch.int64)}
attention = native.Attention(inputs, limit=10, dropout=0.0, seed=0)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 22), used + (1 << 22)))
try:
    doors._call("attend_forward", torch.float32, attention.shape, attention._inputs, 1, 1)
except MemoryError as error:
    print(error)
"""


@pytest.mark.processes
@pytest.mark.skipif("TXL_SANITIZE" in os.environ, reason="a sanitizer's own memory knows no limit")
def test_memory_that_is_not_to_be_had_is_an_error_and_not_the_end():
    """It is asked for inside the threads, before any result is written: the results' places, which do not exist here, are never touched."""
    answer = subprocess.run([sys.executable, "-c", LITTLE_ROOM], capture_output=True, text=True, timeout=100)
    assert "the kernel attend_forward found no memory" in answer.stdout, answer.stderr[-2000:]


TOO_FAR = """
import torch
from transformer_xl.native import doors
x, y = torch.zeros(10_000), torch.zeros(5_000)
doors._call("drop", torch.float32, x.data_ptr(), y.data_ptr(), x.numel(), 0.5, 1)
"""


@pytest.mark.skipif("TXL_SANITIZE" not in os.environ, reason="for make test-sanitizers")
def test_the_sanitizer_sees_a_kernel_that_writes_too_far():
    """Or the silence of all other tests would mean nothing."""
    answer = subprocess.run([sys.executable, "-c", TOO_FAR], capture_output=True, text=True, timeout=100)
    assert answer.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in answer.stderr
    assert "/kernels-" in answer.stderr
