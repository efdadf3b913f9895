"""The rooms import downwards: DESIGN's floors, held by walking every import in the source."""

import ast
from pathlib import Path

import transformer_xl

SOURCE = Path(transformer_xl.__file__).parent
FLOORS = [
    {"errors"},
    {"config", "presets", "files", "progress", "pictures", "native", "tensor_files"},
    {"data", "model"},
    {"checkpoint"},
    {"interop", "inference"},
    {"evaluation", "generation"},
    {"analysis", "training"},
    {"batching"},
    {"serving", "studies", "benchmarks"},
    {"library"},
    {"huggingface", "lm_eval"},
    {"cli"},
    {"__main__", "__init__"},
]
FLOOR_OF = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
STRANGERS = {("data", "model"), ("model", "data")}  # the text knows no mathematics, the mathematics no text


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            found += [(node.lineno, node.module or "")]
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return [(line, name) for line, name in found if name.startswith("transformer_xl.")]


def upward_imports() -> list[str]:
    wrong = []
    for path in SOURCE.rglob("*.py"):
        here = room_of(path)
        for line, name in imported_modules(path):
            there = name.split(".")[1]
            if there not in FLOOR_OF:  # a name of the package itself, such as __version__
                continue
            if FLOOR_OF[there] > FLOOR_OF[here] or (here, there) in STRANGERS:
                wrong.append(f"{path.relative_to(SOURCE)}:{line} {here} -> {there}")
    return wrong


def test_every_room_has_a_floor():
    rooms = {room_of(path) for path in SOURCE.rglob("*.py")}
    assert rooms <= set(FLOOR_OF), f"no floor for {rooms - set(FLOOR_OF)}"


def test_rooms_import_downwards():
    assert upward_imports() == []


def test_the_walk_sees_an_upward_import(tmp_path, monkeypatch):
    source = tmp_path / "transformer_xl"
    (source / "model").mkdir(parents=True)
    (source / "model" / "wrong.py").write_text("def f():\n    from transformer_xl.training import loop\n")
    monkeypatch.setattr("test_floors.SOURCE", source)
    assert upward_imports() == ["model/wrong.py:2 model -> training", "model/wrong.py:2 model -> training"]
