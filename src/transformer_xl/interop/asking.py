"""Asks the child process what foreign files hold: paths in, `Contents` out. The one door to the quarantine, which reads under limits of memory and
time; nothing of a stranger's pickle or index is looked at on this side."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from transformer_xl.console import progress, say
from transformer_xl.errors import ImportRefused
from transformer_xl.interop.quarantine.extraction import Contents

SPARE_MEMORY = 1 << 30
"""Bytes beyond the file's own size that reading it may take."""
SPARE_SECONDS = 4
BYTES_PER_SECOND = 4 << 20
SPARE_OUTPUT = 64 << 20
PATIENCE = 30
"""Seconds to wait for one second of the child's work: other work may fill the machine."""
PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from pathlib import Path; from transformer_xl.interop.quarantine.child import main; main(Path(sys.argv[1]))"


def contents_of(files: Mapping[str, Path], *, scratch: Path) -> dict[str, Contents[Tensor]]:
    """Each file by its role: "bundle" is TensorFlow's, the others are recognised by their content. `scratch` must outlive the tensors."""
    names = ", ".join(str(path) for path in files.values())
    if find_spec("resource") is None:
        raise ImportRefused(
            f"{names}: such files are read by a process whose memory and time the system limits, and this system ({sys.platform}) cannot;"
            " import it on Linux, or bring the weights as safetensors"
        )
    total = sum(_size(path, role) for role, path in files.items())
    seconds = SPARE_SECONDS + total // BYTES_PER_SECOND
    request = {
        "jobs": [{"role": role, "path": str(path.resolve())} for role, path in files.items()],
        "memory": SPARE_MEMORY + total,
        "seconds": seconds,
        "bytes": SPARE_OUTPUT + total,
    }
    (scratch / "request.json").write_text(json.dumps(request), encoding="utf-8")
    title = f"reading {', '.join(path.name for path in files.values())}"
    code = _run(scratch, title=title, total=total, seconds=seconds)
    if (scratch / "unlimited").is_file():
        unlimited = f"this system ({sys.platform}) holds no process to a limit of memory"
        say(f"{unlimited}: only time and output were limited for {names}")
    if (scratch / "refused.json").is_file():
        refused = json.loads((scratch / "refused.json").read_text(encoding="utf-8"))
        raise ImportRefused(f"{refused['path']}: {refused['sentence']}")
    if code != 0:
        raise ImportRefused(f"{names}: reading took more time or memory than a file of its size needs, and was stopped")
    return {role: _contents(scratch, role, path) for role, path in files.items()}


def _run(folder: Path, *, title: str, total: int, seconds: int) -> int:
    command = [sys.executable, "-I", "-B", "-c", PROGRAM, str(folder.resolve()), *sys.path]
    environment = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PATH": os.environ.get("PATH", "")}
    deadline, nowhere = time.monotonic() + PATIENCE * seconds, subprocess.DEVNULL
    with (
        subprocess.Popen(command, cwd=folder, env=environment, stdin=nowhere, stdout=nowhere, stderr=nowhere) as child,
        progress(title, total=total, unit="bytes") as advance,
    ):
        done = 0
        try:
            while child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
                written = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
                advance(written - done)
                done = written
        finally:
            if child.poll() is None:
                child.kill()
        return child.wait()


def _contents(folder: Path, role: str, path: Path) -> Contents[Tensor]:
    try:
        facts = json.loads((folder / f"{role}.json").read_text(encoding="utf-8"))
        flat = load_file(folder / f"{role}.safetensors")
    except (OSError, ValueError, SafetensorError):
        raise ImportRefused(f"{path}: it could not be read whole") from None
    flat |= {name: flat[source] for name, source in facts.pop("aliases").items()}
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, value in flat.items():
        section, _, rest = name.partition(".")
        tensors.setdefault(section, {})[rest] = value
    return Contents(kind=facts.pop("kind"), facts=facts, tensors=tensors)


def _size(path: Path, role: str) -> int:
    if not path.is_file():
        raise ImportRefused(f"{path} is no file")
    size = path.stat().st_size
    if role == "bundle":
        size += sum(part.stat().st_size for part in path.parent.glob(f"{path.stem}.data-*"))
    return size
