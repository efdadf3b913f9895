"""Systems that are not Linux, played on Linux: modules that are missing, folders that cannot be opened, limits that nobody holds.

Nothing is excluded by an import; what cannot work says so in one sentence where it is tried.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from transformer_xl.checkpoint import RunFolder
from transformer_xl.cli import main
from transformer_xl.interop import asking

EXTRAS = ("transformer_xl.huggingface", "transformer_xl.lm_eval", "transformer_xl.benchmarks.entrants")

BEFORE = """
import asyncio, errno, importlib, json, multiprocessing.spawn, os, pkgutil, shutil, sys, tempfile, zipfile, tarfile
sys.path[:0] = sys.argv[2:]
import platform, sysconfig, torch, numpy, safetensors.torch, fastapi, uvicorn, matplotlib.pyplot, tqdm
sysconfig.get_config_vars(), platform.uname()  # of this system, whatever is played
from torch.utils.tensorboard.writer import SummaryWriter
import tokenizers, huggingface_hub.hf_api
"""

WINDOWS = """
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("fork", "wait4", "sysconf", "getuid", "geteuid", "sched_getaffinity", "O_NOFOLLOW", "O_DIRECTORY", "uname"):
    if hasattr(os, name):
        delattr(os, name)
sys.platform = "win32"
shutil._use_fd_functions = False
really_open, really_sync = os.open, os.fsync

def open_as_there(path, *options, **more):
    if not isinstance(path, int) and os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return really_open(path, *options, **more)

def sync_as_there(descriptor):
    flags = next(line for line in open(f"/proc/self/fdinfo/{descriptor}") if line.startswith("flags:"))
    if int(flags.split()[1], 8) & 3 == 0:
        raise OSError(errno.EBADF, "Bad file descriptor")
    really_sync(descriptor)

os.open, os.fsync = open_as_there, sync_as_there
"""

MACOS = """
import builtins, io
for name in ("sched_getaffinity", "posix_fallocate", "memfd_create", "O_TMPFILE", "O_PATH"):
    if hasattr(os, name):
        delattr(os, name)
sys.platform = "darwin"
platform.system, platform.machine = lambda: "Darwin", lambda: "arm64"

def without_proc(really):
    def opened(path, *options, **more):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith("/proc/"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return really(path, *options, **more)
    return opened

builtins.open = io.open = without_proc(io.open)
os.open, os.stat = without_proc(os.open), without_proc(os.stat)
import transformer_xl.files
transformer_xl.files._exchanging_call = lambda: None  # whose name there no library has here
"""

AFTER = """
import transformer_xl
skipped = json.loads(sys.argv[1])["skipped"]
for module in pkgutil.walk_packages(transformer_xl.__path__, "transformer_xl."):
    if not module.name.startswith(tuple(skipped)) and not module.name.endswith(("__main__", "quarantine.child")):
        importlib.import_module(module.name)
print(json.dumps({"imported": True}), flush=True)
from transformer_xl.cli import main
for words in json.loads(sys.argv[1])["commands"]:
    torch.set_num_threads(1)
    code = main(words)
    print(json.dumps({"code": code, "command": words[0]}), flush=True)
"""


def as_on(system: str, commands: list[list[str]], folder: Path) -> tuple[list[dict[str, object]], str]:
    request = json.dumps({"commands": commands, "skipped": EXTRAS})
    command = [sys.executable, "-c", BEFORE + system + AFTER, request, *sys.path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")], done.stderr


def everyday(tmp_path: Path) -> list[list[str]]:
    """A look at the commands, text, a model of it, and its words."""
    (tmp_path / "text.txt").write_text("a line of text for a small model\n" * 200)
    fields = {"steps": 2, "lanes": 2, "segment": 8, "validation_tokens": 50, "save_every": 1}
    sizes = {"n_layer": 1, "d_model": 8, "n_head": 1, "d_head": 8, "d_inner": 8, "memory": 8}
    options = [f"--training.{name}={value}" for name, value in fields.items()]
    options += [f"--model.{name}={value}" for name, value in sizes.items()]
    data, run = str(tmp_path / "data"), str(tmp_path / "run")
    return [
        ["--help"],
        ["prepare", str(tmp_path / "text.txt"), "--tokenizer", "word", "--out", data],
        ["train", "demo", "--data", data, "--run", run, *options],
        ["generate", run, "--prompt", "a", "--tokens", "5"],
    ]


EVERYDAY = [("--help", 0), ("prepare", 0), ("train", 0), ("generate", 0)]


@pytest.mark.timeout(300)
def test_windows_trains_and_writes_and_refuses_pickles(tmp_path):
    torch.save({"weight": torch.zeros(2)}, tmp_path / "model.pt")
    refused = [
        ["import", str(tmp_path / "model.pt"), "--out", str(tmp_path / "imported")],
        ["bench", "evaluation", "--against", "huggingface"],
    ]
    answers, said = as_on(WINDOWS, everyday(tmp_path) + refused, tmp_path)
    assert answers[0] == {"imported": True}
    assert [(answer["command"], answer["code"]) for answer in answers[1:]] == [*EVERYDAY, ("import", 2), ("bench", 2)]
    assert "Traceback" not in said
    assert "the fast kernels cannot be used (they are for Linux only, and this is win32)" in said
    assert "this system has no locks for files: see to it that nobody else uses" in said
    assert "model.pt: such files are read by a process whose memory and time the system limits" in said
    assert "txl: --against: the other implementation is installed for Linux and macOS only" in said
    assert RunFolder(tmp_path / "run").steps() == [1, 2]
    assert b"\r" not in (tmp_path / "data" / "vocabulary.txt").read_bytes()
    # What was written there is read here.
    assert main(["generate", str(tmp_path / "run"), "--tokens", "5"]) == 0


@pytest.mark.timeout(300)
def test_macos_trains_and_writes_by_torch(tmp_path):
    answers, said = as_on(MACOS, [*everyday(tmp_path), ["bench", "serving"]], tmp_path)
    assert answers[0] == {"imported": True}
    assert [(answer["command"], answer["code"]) for answer in answers[1:]] == [*EVERYDAY, ("bench", 2)]
    assert "Traceback" not in said
    assert said.count("the fast kernels cannot be used (they are for Linux only, and this is darwin)") == 1
    assert "no locks for files" not in said
    assert RunFolder(tmp_path / "run").steps() == [1, 2]
    assert main(["generate", str(tmp_path / "run"), "--tokens", "5"]) == 0


def test_a_limit_of_memory_that_nobody_holds_is_said(tmp_path, monkeypatch, capsys):
    """As on macOS, which takes the limit and does nothing."""
    torch.save({"weight": torch.zeros(2)}, tmp_path / "model.pt")
    words = ["import", str(tmp_path / "model.pt"), "--out", str(tmp_path / "run")]
    assert main(words) == 2
    assert "holds no process to a limit" not in capsys.readouterr().err
    deaf = "import sys, resource; resource.setrlimit = lambda *words: None;"
    monkeypatch.setattr(asking, "PROGRAM", asking.PROGRAM.replace("import sys;", deaf, 1))
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "holds no process to a limit of memory: only time and output were limited for" in said
    assert said.count("\n") == 2


def test_no_module_asks_for_what_only_some_systems_have():
    """Imports of such modules stand in a `try`, in a function, or in the child that only such a system starts."""
    import ast

    import transformer_xl

    source = Path(transformer_xl.__file__).parent
    found = []
    for path in source.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if set(names) & {"fcntl", "resource", "pwd", "grp", "termios", "posix", "pty", "syslog"}:
                found.append(str(path.relative_to(source)))
    assert found == ["interop/quarantine/child.py"]
