"""What reads the files of strangers has no torch: nothing in quarantine asks for it, neither by name nor through another module of ours."""

import ast
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from transformer_xl import errors
from transformer_xl.interop import formats, quarantine

FOLDER = Path(quarantine.__file__).parent
ALLOWED = {"numpy", "transformer_xl.errors", "transformer_xl.interop.quarantine", *sys.stdlib_module_names}


def imported(path: Path) -> list[str]:
    """Everywhere in the file, in functions too."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} imports relatively"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def strangers(paths: list[Path], allowed: set[str]) -> list[str]:
    """Imports of anything that is not allowed, nor inside of what is."""
    found = []
    for path in paths:
        for name in imported(path):
            parts = name.split(".")
            if not {".".join(parts[: length + 1]) for length in range(len(parts))} & allowed:
                found.append(f"{path.name}: {name}")
    return found


def test_quarantine_asks_for_numpy_errors_and_itself_only():
    assert strangers(sorted(FOLDER.glob("*.py")), ALLOWED) == []
    assert strangers([Path(errors.__file__)], {*sys.stdlib_module_names}) == []


@pytest.mark.parametrize(
    "line",
    [
        "import torch",
        "def f():\n    from torch import Tensor",
        "from transformer_xl import files",
        "import safetensors.torch",
    ],
)
def test_the_walk_sees_what_does_not_belong(line, tmp_path):
    (tmp_path / "wrong.py").write_text(line, encoding="utf-8")
    assert len(strangers([tmp_path / "wrong.py"], ALLOWED)) == 1


IMPORTS = """
import importlib, json, sys
sys.path[:] = sys.argv[2:]
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""


def test_no_module_of_quarantine_brings_torch_along():
    """As the child is started: isolated, with the paths of this process."""
    pytest.importorskip("resource")
    names = [f"{quarantine.__name__}.{module.name}" for module in pkgutil.iter_modules(quarantine.__path__)]
    assert len(names) == len(list(FOLDER.glob("*.py"))) - 1
    command = [sys.executable, "-I", "-B", "-c", IMPORTS, json.dumps(names), *sys.path]
    loaded = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert {"numpy", "transformer_xl"} <= {*loaded}
    assert not {"torch", "safetensors", "tqdm"} & {*loaded}


def test_formats_know_no_child():
    """Of quarantine they know what a file's `Contents` are, and nothing else; nor do they know who finds files and has them read."""
    doors = ("transformer_xl.interop.asking", "transformer_xl.interop.sources", "transformer_xl.interop.importing")
    for path in Path(formats.__file__).parent.glob("*.py"):
        for name in imported(path):
            assert not name.startswith(doors), (path.name, name)
            inside = name.startswith("transformer_xl.interop.quarantine")
            assert not inside or name.endswith("extraction.Contents"), (path.name, name)
