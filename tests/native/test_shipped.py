"""Kernels that come built in a wheel: tags that are true, a library chosen by the processor, and the numbers that those built on first use compute.

What asks where a library goes is asked of a source that builds at once. What asks for numbers builds the real one, for minutes: it is slow.
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from transformer_xl.native import building, recipe

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
CROSS = "aarch64-linux-gnu-g++"
SMALL = '#include <cmath>\nextern "C" double answer(double x) { return std::exp(x) + 41; }\n'

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("c++") is None, reason="no C++ compiler here"),
]


def run(*command, cwd=None, **environment):
    mine = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CXX", "TXL_SANITIZE")}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=mine | environment, capture_output=True, text=True)


def wheel(project: Path, to: Path, **environment):
    """Built by the backend itself, without pip around it."""
    return run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", to, cwd=project, **environment)


@pytest.fixture(scope="module")
def small_project(tmp_path_factory):
    project = tmp_path_factory.mktemp("small") / "project"
    shutil.copytree(ROOT / "src", project / "src", ignore=shutil.ignore_patterns("__pycache__", "*.cpp"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "hatch_build.py"):
        shutil.copy(ROOT / name, project)
    (project / "src" / "transformer_xl" / "native" / "small.cpp").write_text(SMALL)
    return project


@pytest.fixture(scope="module")
def small_wheel(small_project):
    done = wheel(small_project, small_project.parent / "dist", TXL_WHEEL="x86_64")
    assert done.returncode == 0, done.stderr
    (path,) = (small_project.parent / "dist").iterdir()
    return path


@pytest.fixture
def unpacked(small_wheel, tmp_path):
    with zipfile.ZipFile(small_wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    return tmp_path / "unpacked"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="another processor")
def test_a_library_for_each_set_and_a_tag_by_its_symbols(small_wheel):
    # exp of double has been another symbol since glibc 2.29; nothing newer is asked for.
    assert small_wheel.name.endswith("-py3-none-manylinux_2_29_x86_64.whl")
    with zipfile.ZipFile(small_wheel) as archive:
        names = [Path(name).name for name in archive.namelist()]
        assert "transformer_xl/py.typed" in archive.namelist()
    for march in recipe.SETS["x86_64"]:
        assert sum(name.startswith(f"kernels-{march}-") for name in names if name.count("-v") == march.count("-v")) == 1


@pytest.mark.skipif(platform.machine() != "x86_64", reason="another processor")
def test_no_compiler_is_needed_and_none_is_asked(unpacked, tmp_path):
    code = "import ctypes; from transformer_xl.native import building; found = building.library(); "
    code += "found.answer.restype, found.answer.argtypes = ctypes.c_double, [ctypes.c_double]; "
    (tmp_path / "nothing").mkdir()
    where = {"PATH": str(tmp_path / "nothing"), "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(unpacked)}
    done = run(sys.executable, "-c", code + "print(found.answer(0.0), found._name)", cwd=tmp_path, **where)
    assert done.returncode == 0, done.stderr
    number, path = done.stdout.split()
    assert float(number) == 42
    assert Path(path).parent == unpacked / "transformer_xl" / "native"
    assert done.stderr == ""
    assert not (tmp_path / "cache").exists()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="another processor")
@pytest.mark.parametrize("harm", ["cut", "changed source", "no library at all"])
def test_what_does_not_fit_is_not_loaded_and_said(harm, unpacked, tmp_path, monkeypatch, capsys):
    native = unpacked / "transformer_xl" / "native"
    for library in native.glob("*.so"):
        if harm == "cut":
            library.write_bytes(library.read_bytes()[:-4096])
        elif harm == "no library at all":
            library.write_bytes(recipe.with_checksum(b"nothing of the kind"))
    if harm == "changed source":
        (native / "small.cpp").write_text(SMALL.replace("41", "42"))
    monkeypatch.setattr(building, "FOLDER", native)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.delenv("TXL_SANITIZE", raising=False)  # with which none that came with a package is looked at
    assert building.library.__wrapped__() is None
    said = capsys.readouterr().err
    assert "there is no C++ compiler" in said  # it would be built now
    assert ("came with the package, cannot be used" in said) == (harm != "changed source")
    assert ("the file is damaged" in said) == (harm == "cut")


@pytest.mark.parametrize(
    ("machine", "features", "march"),
    [
        ("x86_64", "fpu sse2", "x86-64"),
        ("x86_64", " ".join(recipe.V3), "x86-64-v3"),
        ("x86_64", " ".join(recipe.V4), "x86-64-v4"),
        ("x86_64", " ".join(sorted(set(recipe.V4) - {"fma"})), "x86-64"),
        ("x86_64", " ".join(sorted(set(recipe.V4) - {"avx512vl"})), "x86-64-v3"),
        ("aarch64", "fp asimd", "armv8-a"),
        ("riscv64", "", None),
    ],
)
def test_the_best_set_that_a_processor_has(machine, features, march):
    assert recipe.best_set(machine, features.split()) == march


def test_this_processor_is_asked_by_the_compiler_too(tmp_path):
    """The compiler's own question at run time gives the same answer as our reading of /proc/cpuinfo."""
    if platform.machine() != "x86_64":
        pytest.skip("another processor")
    names = [march for march in recipe.SETS["x86_64"] if march != "x86-64"]
    asked = "".join(f'if (__builtin_cpu_supports("{name}")) puts("{name}");' for name in names)
    (tmp_path / "ask.cpp").write_text(
        f'#include <cstdio>\nint main() {{ __builtin_cpu_init(); {asked} puts("x86-64"); }}\n'
    )
    made = run("c++", tmp_path / "ask.cpp", "-o", tmp_path / "ask")
    if made.returncode:
        pytest.skip("this compiler knows no levels")
    features = {word for line in building._processor().splitlines() for word in line.partition(":")[2].split()}
    assert recipe.best_set("x86_64", features) == run(tmp_path / "ask").stdout.split()[0]


def test_a_wheel_that_cannot_be_built_is_refused(small_project, tmp_path):
    for environment, reason in (
        ({"TXL_WHEEL": "riscv64"}, "kernels are built for x86_64 and aarch64, not for 'riscv64'"),
        ({"TXL_WHEEL": "x86_64", "CXX": "no-such-compiler"}, "the kernels cannot be built: "),
        ({"TXL_WHEEL": "x86_64", "CXX": "c++ -DSMALL -fno-such-flag"}, "-fno-such-flag"),
    ):
        done = wheel(small_project, tmp_path / "dist", **environment)
        assert done.returncode != 0
        assert reason in done.stderr + done.stdout
    assert not list(tmp_path.glob("dist/*.whl"))


# --- the real ones


def computed(python, to: Path, *words, **environment) -> dict[str, torch.Tensor]:
    done = run(python, HERE / "kernel_calls.py", to, *words, cwd=to.parent, OMP_NUM_THREADS="1", **environment)
    assert done.returncode == 0, done.stderr
    print(done.stdout.strip())
    return load_file(to)


def assert_close(found: torch.Tensor, expected: torch.Tensor, name: str, *, single: float) -> None:
    """`single`: how far single precision may be off, of models whose large weights multiply a rounding; double precision, by the same code, is what tells."""
    if not expected.is_floating_point() or "portable" in name:
        assert torch.equal(found, expected), name
        return
    far = {torch.float64: 1e-10, torch.bfloat16: max(single, 8e-3)}.get(expected.dtype, single)
    torch.testing.assert_close(found, expected, rtol=far, atol=far, equal_nan=True, msg=lambda said: f"{name}: {said}")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_wheels_kernels_compute_what_built_ones_do(tmp_path):
    """Installed in an empty environment, with no compiler to be found: to the bit what this compiler builds on first use for the same set of
    instructions, and within rounding what it builds for exactly this processor."""
    machine = platform.machine()
    done = wheel(ROOT, tmp_path / "dist", TXL_WHEEL=machine)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "dist").iterdir()
    print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    installed = run(python, "-m", "pip", "install", "--no-deps", path)
    assert installed.returncode == 0, installed.stderr
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")  # torch and the others, from here
    (tmp_path / "nothing").mkdir()
    shipped = computed(
        python, tmp_path / "shipped", PATH=str(tmp_path / "nothing"), XDG_CACHE_HOME=str(tmp_path / "none")
    )
    assert not (tmp_path / "none").exists()
    features = {word for line in building._processor().splitlines() for word in line.partition(":")[2].split()}
    source = {"PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    same = computed(sys.executable, tmp_path / "same", "--march", recipe.best_set(machine, features), **source)
    assert shipped.keys() == same.keys()
    for name in shipped:
        assert torch.equal(*(each[name].view(-1).view(torch.uint8) for each in (shipped, same))), name
    native = computed(sys.executable, tmp_path / "native", PYTHONPATH=str(ROOT / "src"))
    for name, result in shipped.items():
        assert_close(result, native[name], name, single=1e-5)
    for march in recipe.SETS[machine]:
        if set(recipe.SETS[machine][march]) <= features:
            other = computed(
                python, tmp_path / march, "--library", site / "transformer_xl" / "native" / name_of(site, march)
            )
            for name, result in shipped.items():
                assert_close(other[name], result, f"{march}: {name}", single=5e-2)


def name_of(site: Path, march: str) -> str:
    return recipe.shipped_name(site / "transformer_xl" / "native", march)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    not (shutil.which(CROSS) and shutil.which("qemu-aarch64")), reason="no cross compiler or no emulator"
)
def test_the_kernels_for_aarch64_compute_the_same_numbers(tmp_path):
    """Each call of each kernel, recorded here by the library without AVX, whose vectors are as long, and made again by an emulated processor."""
    sys.path.insert(0, str(ROOT))
    try:
        import hatch_build
    finally:
        sys.path.remove(str(ROOT))
    parts = vars(recipe)
    plain = hatch_build.build(building.FOLDER, parts, "x86_64", "x86-64", tmp_path)
    other = hatch_build.build(building.FOLDER, parts, "aarch64", "armv8-a", tmp_path)
    computed(
        sys.executable,
        tmp_path / "plain",
        "--library",
        plain,
        "--record",
        tmp_path / "calls",
        PYTHONPATH=str(ROOT / "src"),
    )
    program = tmp_path / "replayed_calls"
    made = run(
        CROSS,
        "-std=c++20",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fopenmp",
        HERE / "replayed_calls.cpp",
        "-o",
        program,
    )
    assert made.returncode == 0, made.stderr
    done = run("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", program, other, tmp_path / "calls", tmp_path / "made")
    assert done.returncode == 0, done.stderr
    data, at, equal = bytearray((tmp_path / "made").read_bytes()), 0, 0
    expected = load_file(f"{tmp_path / 'calls'}.safetensors")
    for name in sorted(expected):
        tensor = expected[name]
        found = torch.frombuffer(data, dtype=tensor.dtype, count=tensor.numel(), offset=at).view(tensor.shape)
        assert_close(found, tensor, name, single=1e-3)  # each call by itself
        equal += torch.equal(found, tensor)
        at += tensor.nbytes
    assert at == len(data)
    assert equal < len(expected)  # fused products round once where the others round twice: it was the other processor
    print(f"{len(expected):,} tensors, {equal:,} of them to the bit")
