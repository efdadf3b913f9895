"""The same bits on every machine: the kernels beside an oracle that has no vectors, and beside those that are built for other processors.

Those of this machine's other sets of instructions run here; those for aarch64 by name, under qemu.
"""

import ctypes
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_calls import PORTABLE, portable_results
from portable_oracle import Oracle, once
from safetensors.torch import load_file

from small_models import build
from transformer_xl import native
from transformer_xl.errors import InputError
from transformer_xl.inference import PortableReader
from transformer_xl.native import building, doors, portable, recipe

HERE = Path(__file__).parent
CROSS = "aarch64-linux-gnu-g++"

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C++ compiler here")
SHAPES = (
    *PORTABLE,
    {},
    {"memory": 30, "d_head": 16, "clamp_len": 7, "share_biases": False, "neighbours": 2},
    {"memory": 9, "same_length": True, "n_layer": 1, "frequencies": "float16"},
)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_oracle_gives_the_same_bits(shape):
    model = build(**shape)
    oracle, tokens_T = Oracle(model), np.random.default_rng(1).integers(model.config.vocabulary, size=45)
    found_TV = PortableReader(model, lanes=1).read_many(tokens_T[None])[0]
    np.testing.assert_array_equal(found_TV, np.stack([oracle.read(int(token)) for token in tokens_T]))


def test_the_oracles_step_is_rounded_once():
    """By whole numbers of any size, which round as the standard says."""
    from fractions import Fraction

    random = np.random.default_rng(2)
    for exponents in ((0, 0, 0), (-60, -60, -120), (-75, -74, -149), (20, -30, -10), (3, 3, -20)):
        a, b, c = (np.ldexp(random.uniform(-1, 1, 400), e).astype(np.float32) for e in exponents)
        c[::3] = -(a * b)[::3]
        for x, y, z, found in zip(a, b, c, once(a, b, c), strict=True):
            exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
            near = (found, np.nextafter(found, np.float32(9)), np.nextafter(found, np.float32(-9)))
            off = [abs(Fraction(float(each)) - exact) for each in near]
            assert off[0] <= min(off[1:])
            if off[0] in off[1:]:  # halfway: to the even one
                assert int(np.float32(found).view(np.int32)) % 2 == 0


def built(folder: Path, march: str, *flags: str, compiler: str = "c++") -> subprocess.Popen[str]:
    source = building.FOLDER / "portable.cpp"
    words = [*recipe.flags_of(source), f"-march={march}", *flags, "-shared", source, "-o", folder / f"{march}.so"]
    command = [compiler, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def use(path: Path, monkeypatch) -> None:
    """As the kernels of this process."""
    library = ctypes.CDLL(str(path))

    def kernel(name: str, dtype: torch.dtype) -> object:
        found = getattr(library, f"{name}_{doors.DTYPES[dtype]}")
        found.argtypes, found.restype = [*doors.SIGNATURES[name], ctypes.c_int], ctypes.c_int
        return found

    monkeypatch.setattr(doors, "_kernel", kernel)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.processes
def test_every_set_of_instructions_gives_the_same_bits(tmp_path, monkeypatch):
    """What is built for exactly this processor, and what wheels bring for lesser ones: another width of vectors, and none that fuses."""
    features = {word for line in building._processor().splitlines() for word in line.partition(":")[2].split()}
    sets = recipe.SETS.get(platform.machine(), {})
    lesser = [march for march, needed in sets.items() if set(needed) <= features]
    lesser.remove(recipe.best_set(platform.machine(), features))
    expected = portable_results()
    for march, compiling in [(march, built(tmp_path, march)) for march in lesser]:
        said, _ = compiling.communicate()
        assert compiling.returncode == 0, said
        use(tmp_path / f"{march}.so", monkeypatch)
        assert_same(portable_results(), expected)


@pytest.mark.processes
def test_a_library_that_would_give_other_bits_is_refused(tmp_path, monkeypatch):
    compiling = built(tmp_path, "native", "-O0", "-ffast-math")
    said, _ = compiling.communicate()
    assert compiling.returncode == 0, said
    use(tmp_path / "native.so", monkeypatch)
    with pytest.raises(InputError, match="do not compute the bits that all others do"):
        PortableReader(build(), lanes=1)


def test_the_known_answer_is_asked_of_every_reader(monkeypatch):
    monkeypatch.setattr(portable, "KNOWN_ANSWER", 1)
    with pytest.raises(InputError, match="known answer"):
        PortableReader(build(), lanes=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    not (shutil.which(CROSS) and shutil.which("qemu-aarch64")), reason="no cross compiler or no emulator"
)
def test_aarch64_gives_the_same_bits(tmp_path):
    """Each call, recorded here and made again by an emulated processor: frequencies, and all that was remembered on the way."""
    run = [sys.executable, HERE / "kernel_calls.py", tmp_path / "here", "--portable", "--record", tmp_path / "calls"]
    recording = subprocess.run([str(word) for word in run], capture_output=True, text=True)
    assert recording.returncode == 0, recording.stderr
    compiling = built(tmp_path, "armv8-a", compiler=CROSS)
    said, _ = compiling.communicate()
    assert compiling.returncode == 0, said
    program = [CROSS, "-std=c++20", "-O1", "-fopenmp", HERE / "replayed_calls.cpp", "-o", tmp_path / "replayed_calls"]
    subprocess.run([str(word) for word in program], check=True)
    words = [tmp_path / "replayed_calls", tmp_path / "armv8-a.so", tmp_path / "calls", tmp_path / "made"]
    emulated = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", *map(str, words)]
    done = subprocess.run(emulated, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    data, at, expected = bytearray((tmp_path / "made").read_bytes()), 0, load_file(f"{tmp_path / 'calls'}.safetensors")
    for name in sorted(expected):
        tensor = expected[name]
        found = torch.frombuffer(data, dtype=tensor.dtype, count=tensor.numel(), offset=at).view(tensor.shape)
        assert torch.equal(found, tensor), name
        at += tensor.nbytes
    assert at == len(data)
    print(f"{len(expected):,} tensors to the bit")
