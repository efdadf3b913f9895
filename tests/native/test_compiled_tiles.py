"""The kernels for NVIDIA cards compiled for three generations of them, without any, in the shape of every preset: they fit a card's registers and shared
memory, multiply on tensor cores and read whole words. Prints what each takes (-s)."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from tile_cases import Case, by_the_kernels
from transformer_xl import native
from transformer_xl.config import ModelConfig
from transformer_xl.native.cuda import fixed_sizes
from transformer_xl.presets import PRESETS

triton = pytest.importorskip("triton", reason="there is no Triton here")
CARDS = {"A100": 80, "H100": 90, "B200": 100}
SPILLED = {"forward": 0, "backward_queries": 128, "backward_keys": 128}
"""Bytes of a thread at most, by which compilers fall short of registers."""
SHARED = 99 * 1024
"""Bytes that a program has on cards for desks; those above have more."""
NUMBERS = {"scale": "fp32", "raised": "fp32", "seed": "i64", "lowest_B": "*i64"}
FLOATS = ("total_BHT", "delta_BHT", "bias_HK")
TENSOR_CORES = re.compile(r"mma\.sync|wgmma\.mma|tcgen05\.mma")


def shapes() -> dict[str, tuple[int, int, int, bool]]:
    """Heads, their width, a segment's length and whether there is dropout; presets of one shape under the first one's name."""
    found = {}
    for preset in PRESETS:
        model = preset.run.model
        if isinstance(model, ModelConfig) and native.supports("tiles", model):
            width = -(-model.d_head // 16) * 16
            few = min(64, preset.run.training.segment)
            found.setdefault((width, few, model.attention_dropout > 0), (preset.name, model, preset.run.training))
    return {
        name: (model.n_head, model.d_head, training.segment, model.attention_dropout > 0)
        for name, model, training in found.values()
    }


def compiled(kernel: str, card: int, *, dtype: torch.dtype, heads: int, width: int, queries: int, dropped: bool):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from transformer_xl.native import tiles

    function = getattr(tiles, kernel)
    fixed = fixed_sizes(kernel, queries=queries, heads=heads, width=width, dtype=dtype)
    options = {name: fixed.pop(name) for name in fixed.keys() - function.arg_names}
    fixed["dropped"] = dropped
    element = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
    kinds = {name: "i32" if len(name) == 1 or name in ("border", "reach") else element for name in function.arg_names}
    kinds |= NUMBERS | dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(fixed, "constexpr")
    signature = {name: kinds[name] for name in function.arg_names}
    aligned = {(place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values()) if "*" in kind}
    source = ASTSource(fn=function, signature=signature, constexprs=fixed, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)


def spilled(built, folder: Path) -> tuple[int, int]:
    """Registers of a thread, and bytes of it that found none."""
    (folder / "kernel.cubin").write_bytes(built.asm["cubin"])
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    said = subprocess.run(
        [cuobjdump, "-res-usage", folder / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", said).groups()
    return int(registers), int(stack)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("preset", shapes())
def test_every_preset_fits_every_card(preset, card, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    heads, width, queries, dropped = shapes()[preset]
    for kernel, most in SPILLED.items():
        shape = {"heads": heads, "width": width, "queries": queries, "dropped": dropped}
        built = compiled(kernel, CARDS[card], dtype=torch.bfloat16, **shape)
        registers, stack = spilled(built, tmp_path)
        print(f"{preset} {card} {kernel}: {registers} registers, {stack} bytes spilled, {built.metadata.shared} shared")
        assert stack <= most, kernel
        assert built.metadata.shared <= SHARED, kernel
        assert TENSOR_CORES.search(built.asm["ptx"]), kernel
        assert re.search(r"cp\.async\.c[ag]\.shared\.global .*(0x10|16)\b", built.asm["ptx"]), kernel


@pytest.mark.parametrize("width", [64, 128])
def test_float32_by_way_of_tf32_fits_an_a100(width, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel, most in SPILLED.items():
        built = compiled(kernel, 80, dtype=torch.float32, heads=8, width=width, queries=512, dropped=True)
        assert spilled(built, tmp_path)[1] <= most, kernel
        assert built.metadata.shared <= SHARED, kernel
        assert "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32" in built.asm["ptx"], kernel


class Card:
    """A driver that knows what to compile for, and runs nothing."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 80, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.mark.parametrize(
    "case",
    [
        Case(dtype=torch.bfloat16, valid=(20, 3), visible=30, dropout=0.2, precise_tables=True, tiles=None),
        Case(dtype=torch.bfloat16, memory=0, segment=1, biased=False, tiles=None),
    ],
    ids=["all there is", "as little as there can be"],
)
def test_what_the_door_hands_over_is_what_the_compiler_takes(case, tmp_path, monkeypatch):
    """Through Triton's own launch, up to the launch."""
    from triton.runtime import driver

    from transformer_xl.native import tiles

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", Card(), raising=False)
    built = {}

    def only_compiling(name):
        kernel = getattr(tiles, name)

        class Launched:
            def __getitem__(self, grid):
                return lambda *given, **named: built.update({name: kernel.warmup(*given, grid=grid, **named)})

        return Launched()

    for name in SPILLED:
        monkeypatch.setattr(tiles, name, only_compiling(name))
    by_the_kernels(case)
    assert built.keys() == SPILLED.keys()
    for name, kernel in built.items():
        assert spilled(kernel, tmp_path)[1] <= SPILLED[name], name
