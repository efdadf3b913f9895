"""What a library of kernels is made of: sources, flags, and for which processors it comes built in a wheel. Imports nothing of ours, because the hook
that builds wheels (hatch_build.py) reads this file alone, where neither torch nor the package is installed.

A wheel has one library for each set of instructions, not one with several inside: functions of the standard library are compiled for each set under
the same name, and a linker that joined them would hand one for AVX-512 to a processor that has none.
"""

import hashlib
from collections.abc import Collection
from pathlib import Path

FLAGS = ("-std=c++20", "-O3", "-fno-math-errno", "-fopenmp", "-fPIC", "-Wno-psabi")
"""Of all sources."""
FLAGS_OF = {"portable.cpp": ("-ffp-contract=off",)}
"""Of one source more: a compiler that fuses products and sums where it likes would give each machine bits of its own."""
V3 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
V4 = (*V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {"x86-64-v4": V4, "x86-64-v3": V3, "x86-64": ()},
    "aarch64": {"armv8-a": ()},
}
"""For each machine the sets of instructions, by their -march, best first, with what /proc/cpuinfo must list for each."""


def sources(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.cpp"))


def flags_of(source: Path) -> tuple[str, ...]:
    """Beside those that say for which processor."""
    return (*FLAGS, *FLAGS_OF.get(source.name, ()))


def fingerprint(folder: Path, *more: str) -> str:
    """Of all sources, and whatever else a library depends on."""
    texts = (path.read_text(encoding="utf-8") for path in (*sources(folder), *sorted(folder.glob("*.h"))))
    return hashlib.sha256("\n".join((*texts, repr(FLAGS_OF), *more)).encode()).hexdigest()[:16]


def shipped_name(folder: Path, march: str) -> str:
    """Of the library that a wheel brings for this set: sources that were changed since have another."""
    return f"kernels-{march}-{fingerprint(folder, *FLAGS, march)}.so"


def best_set(machine: str, features: Collection[str]) -> str | None:
    """The best set that a processor with these features has; None for a machine that no wheel is built for."""
    return next((march for march, needed in SETS.get(machine, {}).items() if set(needed) <= set(features)), None)


def with_checksum(data: bytes) -> bytes:
    """A loader reads what the headers name, and nothing behind it."""
    return data + hashlib.sha256(data).digest()


def is_whole(data: bytes) -> bool:
    """A cut library could be mapped, and end the process when it is touched."""
    size = hashlib.sha256().digest_size
    return len(data) > size and hashlib.sha256(data[:-size]).digest() == data[-size:]
