"""Which device computes, and in what; the machines that have a GPU are told of, since these tests run without one."""

import pytest
import torch

from transformer_xl.devices import choose_device, choose_precision, computing_on
from transformer_xl.errors import ConfigError


@pytest.fixture
def gpus(monkeypatch):
    def are_here(count, *, bfloat16=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bfloat16)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))

    return are_here


def test_the_fastest_that_is_here(gpus, monkeypatch):
    gpus(0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert str(choose_device()) == str(choose_device("auto")) == "cpu"
    assert computing_on(choose_device()) == f"computing on cpu, {torch.get_num_threads()} thread"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert computing_on(choose_device()) == "computing on mps"
    gpus(2)
    assert computing_on(choose_device()) == "computing on cuda (Some GPU)"
    assert str(choose_device("cpu")) == "cpu"


def test_bfloat16_where_a_gpu_computes_in_it(gpus):
    gpus(1)
    assert choose_precision(torch.device("cuda")) == "bfloat16"
    gpus(1, bfloat16=False)
    assert choose_precision(torch.device("cuda")) == "float32"
    assert choose_precision(torch.device("cpu")) == choose_precision(torch.device("mps")) == "float32"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("cdua", "`device=` 'cdua' is no device; give auto, cpu, cuda, cuda:1 or mps"),
        ("", "`device=` '' is no device"),
        ("xpu", "`device=` xpu is not here, or this torch cannot use it; give auto or cpu"),
        ("cuda:2", "`device=` cuda:2 is not here: there are 2, counted from 0"),
    ],
)
def test_what_is_not_here_is_refused(name, sentence, gpus):
    gpus(2)
    with pytest.raises(ConfigError, match=sentence):
        choose_device(name)
