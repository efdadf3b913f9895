"""Puts built kernels into a wheel: `make wheel`, or TXL_WHEEL=x86_64 (aarch64) for any builder of wheels.

Without TXL_WHEEL a wheel is plain Python for every system, and its kernels are built on first use where there is a compiler. With it, a library is built
for each set of instructions of that machine (src/transformer_xl/native/recipe.py), and the wheel's tag is the oldest glibc that all of them run on, as
their own tables of symbols tell it: an older machine builds a wheel for older ones. CXX names another compiler than c++; for another machine it is the
cross compiler by its usual name.
"""

import os
import platform
import re
import runpy
import shlex
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "src/transformer_xl/native"
OLDEST = (2, 17)
"""manylinux begins there."""
NEWEST = {"GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
"""What systems with glibc 2.28 have, which torch itself asks for: of these no tag tells, so nothing newer is taken."""


class KernelsHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        machine = os.environ.get("TXL_WHEEL")
        if not machine or version == "editable":
            return
        native = Path(self.root) / NATIVE
        recipe = runpy.run_path(str(native / "recipe.py"))
        if machine not in recipe["SETS"]:
            raise SystemExit(f"TXL_WHEEL: kernels are built for {' and '.join(recipe['SETS'])}, not for {machine!r}")
        self.made = tempfile.TemporaryDirectory()  # until this process ends: the wheel is written after this
        paths = [build(native, recipe, machine, march, Path(self.made.name)) for march in recipe["SETS"][machine]]
        glibc = max(oldest_glibc(path) for path in paths)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{glibc[0]}_{glibc[1]}_{machine}"
        build_data["force_include"] |= {str(path): f"transformer_xl/native/{path.name}" for path in paths}


def build(native: Path, recipe: dict[str, Any], machine: str, march: str, folder: Path) -> Path:
    """The library for one set of instructions."""
    own = machine == platform.machine()
    compiler = shlex.split(os.environ.get("CXX") or "c++") if own else [f"{machine}-linux-gnu-g++"]
    sources = recipe["sources"](native)
    objects = [folder / f"{march}-{source.stem}.o" for source in sources]
    commands = [
        [*compiler, *recipe["flags_of"](source), f"-march={march}", "-c", str(source), "-o", str(made)]
        for source, made in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(run, commands))
    path: Path = folder / recipe["shipped_name"](native, march)
    # Without -fopenmp: it names no OpenMP library of its own, and takes the one that torch has loaded, whatever its file is called.
    run([*compiler, "-shared", "-s", *map(str, objects), "-o", str(path)])
    path.write_bytes(recipe["with_checksum"](path.read_bytes()))
    return path


def oldest_glibc(path: Path) -> tuple[int, ...]:
    """That the library runs on, by the versions of the symbols it asks for."""
    needed = re.findall(r"Name: ([A-Z]+)_([0-9.]+)", run(["readelf", "--version-info", "--wide", str(path)]))
    versions = [(library, tuple(int(part) for part in version.split("."))) for library, version in needed]
    for library, version in versions:
        if version > NEWEST.get(library, version):
            raise SystemExit(
                f"{path.name} needs {library}_{'.'.join(map(str, version))}, newer than manylinux has; build with an older compiler"
            )
    return max([OLDEST, *(version[:2] for library, version in versions if library == "GLIBC")])


def run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    except OSError as error:
        raise SystemExit(f"the kernels cannot be built: {error}") from None
    if done.returncode:
        raise SystemExit(f"the kernels cannot be built: {shlex.join(command)}\n{done.stderr}")
    return done.stdout
