"""Other people's implementations, in virtual environments of their own: made once in the user's cache, then kept.

One has the last transformers release that has TransfoXL, another those that learn beside us; both have this interpreter's torch. A third has compressors.
"""

import os
import shutil
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

from transformer_xl.benchmarks.children import BenchmarkError
from transformer_xl.console import progress, say

TRANSFORMERS = "4.35.2"
PEERS = {"transformers": "5.22.2", "x-transformers": "2.31.10"}
"""GPT-2 is in the first."""
CODECS = {"brotli": "1.2.1", "bzip3": "0.1.10", "pyppmd": "1.3.1"}


def huggingface_environment() -> Path:
    return _environment({"transformers": TRANSFORMERS})


def huggingface_python() -> Path:
    return _python({"transformers": TRANSFORMERS})


def peers_environment() -> Path:
    return _environment(PEERS)


def peers_python() -> Path:
    return _python(PEERS)


def codecs_python() -> Path:
    return _python(CODECS, torch=False)


def codecs_environment() -> Path:
    return _environment(CODECS, torch=False)


def _environment(packages: dict[str, str], *, torch: bool = True) -> Path:
    """Where it is or will be; its name says which versions it holds."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    held = "-".join(f"{name}-{release}" for name, release in packages.items())
    return (
        cache / "transformer-xl" / (f"{held}-torch-{_torch()}-python-{python}" if torch else f"{held}-python-{python}")
    )


def _python(packages: dict[str, str], *, torch: bool = True) -> Path:
    """The interpreter there; the environment is made where it is missing."""
    folder = _environment(packages, torch=torch)
    if not folder.exists():
        _make(folder, packages, torch=torch)
    return folder / "bin" / "python"


def _torch() -> str:
    """Without the build's name: pip as configured picked this one's, and picks that one's."""
    return version("torch").split("+")[0]


def _make(folder: Path, packages: dict[str, str], *, torch: bool) -> None:
    try:
        from fcntl import LOCK_EX, flock
    except ImportError:
        raise BenchmarkError(
            "`against=`: the other implementation is installed for Linux and macOS only; leave it out"
        ) from None

    versions = {"torch": _torch(), "numpy": version("numpy"), **packages} if torch else packages
    wanted = [f"{name}=={release}" for name, release in versions.items()]
    say(f"installing {', '.join(wanted)} into {folder} (once; about {'1 GB' if torch else '30 MB'})")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Made beside its place and moved there when whole: only the interpreter is used, and it finds its packages wherever it lies.
    unfinished = folder.with_name(f".making-{folder.name}")
    with folder.with_name(f".lock-{folder.name}").open("w", encoding="utf-8") as lock:
        flock(lock, LOCK_EX)
        if folder.exists():  # somebody else was making it meanwhile
            return
        try:
            venv.create(unfinished, with_pip=True, clear=True)
            _install(
                unfinished / "bin" / "python", wanted, named=", ".join(f"{name} {packages[name]}" for name in packages)
            )
            os.rename(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _install(python: Path, packages: list[str], *, named: str) -> None:
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *packages]
    last = ""
    with (
        progress("installing", total=None, unit="steps of pip") as advance,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace"
        ) as pip,
    ):
        assert pip.stdout is not None
        for line in pip.stdout:
            last = line.strip() or last
            advance(1, note=last[:60])
    if pip.returncode:
        raise BenchmarkError(
            f"{named} could not be installed ({last}); check that pip reaches its index, or leave out `against=`"
        )
