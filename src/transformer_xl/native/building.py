"""Loads the kernels: the library that a wheel brought for this processor, or one that is built here, once, from the C++ of this folder.

A wheel's library lies beside this file, under a name that holds its sources: where they were changed, and where there is none, one is built by the C++
compiler that PyTorch itself would use, for exactly this processor, in seconds. It is kept in the user's cache folder under a name that holds everything
it depends on. Both have their own checksum behind them: a damaged one is built again. A library is code that runs as us, so a built one is taken only
from a folder that nobody else can write to; who can write beside this file could change this file. It shares torch's OpenMP threads.
"""

import ctypes
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from transformer_xl.console import say
from transformer_xl.native import recipe

FOLDER = Path(__file__).parent
FLAGS = ("-march=native",)
"""Beside those of the recipe."""
SANITIZER = ("-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-D_GLIBCXX_ASSERTIONS")
BUILD_SECONDS, VERSION_SECONDS = 600, 10
COST = "everything is computed by torch instead: the same numbers, generation about three times slower"


class NoKernels(Exception):
    """Why there are none."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be had; then the reason is said, once."""
    try:
        return _library()
    except (NoKernels, OSError, subprocess.SubprocessError, ValueError, RuntimeError) as error:
        say(f"the fast kernels cannot be used ({_reason(error)}); {COST}")
        return None


def _library() -> ctypes.CDLL:
    if sys.platform != "linux":
        raise NoKernels(f"they are for Linux only, and this is {sys.platform}")
    if not os.environ.get("TXL_SANITIZE") and (shipped := _shipped()) is not None:
        return shipped
    compiler, sources = _compiler(), recipe.sources(FOLDER)
    depends_on = (*compiler, *recipe.FLAGS, *_flags(), _version(compiler), _processor())
    name = f"kernels-{recipe.fingerprint(FOLDER, *depends_on)}.so"
    failure: OSError | None = None
    for folder in _private_folders():
        try:
            if not _sound(folder / name):
                _build(compiler, sources, folder / name)
            return ctypes.CDLL(str(folder / name))
        except OSError as error:  # read-only, full, or nothing may be run from there: the next place may do
            failure = error
    raise NoKernels(str(failure))


def _shipped() -> ctypes.CDLL | None:
    """What a wheel brought for this processor, where it did."""
    features = {word for line in _processor().splitlines() for word in line.partition(":")[2].split()}
    march = recipe.best_set(platform.machine(), features)
    path = FOLDER / recipe.shipped_name(FOLDER, march) if march else None
    if path is None or not path.exists():
        return None
    try:
        if not recipe.is_whole(path.read_bytes()):
            raise OSError("the file is damaged")
        return ctypes.CDLL(str(path))
    except OSError as error:
        say(f"{path.name}, which came with the package, cannot be used ({error}); install the package again")
        return None


def _compiler() -> list[str]:
    """The words of CXX, which may be several: `ccache g++`."""
    words = shlex.split(os.environ.get("CXX") or "c++")
    found = shutil.which(words[0]) if words else None
    if found is None:
        raise NoKernels(f"there is no C++ compiler {words[:1]}; install g++, or name one in the environment's CXX")
    return [found, *words[1:]]


def _flags() -> tuple[str, ...]:
    """TXL_SANITIZE=address,undefined watches every access: for `make test-sanitizers`."""
    wanted = os.environ.get("TXL_SANITIZE")
    if not wanted:
        return FLAGS
    if "libasan" not in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"):
        # Loaded later than everything else, the sanitizer would end the process.
        raise NoKernels("TXL_SANITIZE is set and the sanitizer was not loaded first; use make test-sanitizers")
    return (*FLAGS, *SANITIZER, f"-fsanitize={wanted}")


def _version(compiler: list[str]) -> str:
    asked = [*compiler, "--version"]
    return subprocess.run(
        asked, capture_output=True, encoding="utf-8", errors="replace", check=True, timeout=VERSION_SECONDS
    ).stdout


# --- a place of our own


def _private_folders() -> Iterator[Path]:
    """The usual places that are ours alone, one after the other; then one for this process, gone when the library is loaded."""
    for place in _usual_places():
        try:
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Held open and named by its number: what was looked at is what is used, whoever renames it meanwhile.
            descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if _ours(os.fstat(descriptor)):
                yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
                continue
        finally:
            os.close(descriptor)
        say(f"{place} belongs to somebody else or can be written to by others: no kernels are taken from there")
    with tempfile.TemporaryDirectory(prefix="transformer_xl-") as folder:
        yield Path(folder)


def _usual_places() -> list[Path]:
    shared = Path(tempfile.gettempdir()) / f"transformer_xl-{os.getuid()}"
    cache_folder = os.environ.get("XDG_CACHE_HOME")
    try:
        return [(Path(cache_folder) if cache_folder else Path.home() / ".cache") / "transformer_xl", shared]
    except RuntimeError:  # no HOME, and nobody of our number in the system's list
        return [shared]


def _ours(found: os.stat_result) -> bool:
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _sound(path: Path) -> bool:
    """A library of ours that is whole."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or not _ours(found):
            return False
        return recipe.is_whole(file.read())


def _build(compiler: list[str], sources: list[Path], path: Path) -> None:
    say("building the kernels for this processor (once, a few seconds)")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / "kernels.so"
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
        commands = [
            [*compiler, *recipe.flags_of(source), *_flags(), "-c", str(source), "-o", each]
            for source, each in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(_run, commands))
        _run([*compiler, *recipe.FLAGS, *_flags(), "-shared", *objects, "-o", str(made)])
        made.write_bytes(recipe.with_checksum(made.read_bytes()))
        made.chmod(0o700)
        made.replace(path)


def _run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=True, timeout=BUILD_SECONDS)


def _processor() -> str:
    """What -march=native looks at: a cache folder may be shared by machines of different kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = (error.stderr or "").strip().splitlines()
        said = next(
            (line for line in lines if "error" in line), lines[-1] if lines else f"exit code {error.returncode}"
        )
        return f"{Path(error.cmd[0]).name} failed: {said}"
    return str(error)
