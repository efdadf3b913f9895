"""The rooms import downwards, and only the highest speaks of flags: DESIGN's floors, held by walking the source."""

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

import transformer_xl
from transformer_xl.cli import COMMANDS, in_flags, module_of

SOURCE = Path(transformer_xl.__file__).parent
FLOORS = [
    {"errors"},
    {
        "arguments",
        "config",
        "presets",
        "files",
        "locks",
        "console",
        "pictures",
        "native",
        "tensor_files",
        "devices",
        "rows",
    },
    {"data", "model"},
    {"checkpoint"},
    {"interop", "inference"},
    {"evaluation", "decoding"},
    {"analysis", "training", "adaptation", "compression"},
    {"batching"},
    {"serving", "studies", "benchmarks", "doctor"},
    {"library", "running", "fitting", "compressing"},
    {"huggingface", "lm_eval"},
    {"cli"},
    {"__main__", "__init__"},
]
FLOOR_OF = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
WALLS = {
    ("data", "model"),  # the text knows no mathematics, the mathematics no text
    ("model", "data"),
    ("data", "torch"),
    ("data/text", "data/store"),
    ("data/text", "data/corpora"),
    ("data/text", "data/feeding"),
    ("data/store", "data/corpora"),
    ("data/store", "data/feeding"),
    ("data/corpora", "data/feeding"),
    ("data/feeding", "data/corpora"),
    ("config", "torch"),
    ("presets", "torch"),
}
"""(here, there): nothing in here, a room or a file of ours, imports anything of there, which is ours or a package of somebody's."""

STILL_NAMESAKE = "serving/http/aside.py"


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
    return found


def upward_imports() -> list[str]:
    wrong = []
    for path in SOURCE.rglob("*.py"):
        here = room_of(path)
        for line, name in imported_modules(path):
            package, _, rest = name.partition(".")
            there = rest.split(".")[0]
            # A name of the package itself, such as __version__, has no floor.
            if package == "transformer_xl" and there in FLOOR_OF and FLOOR_OF[there] > FLOOR_OF[here]:
                wrong.append(f"{path.relative_to(SOURCE)}:{line} {here} -> {there}")
    return wrong


def lies_in(place: str, room: str) -> bool:
    return f"{place}/".startswith(f"{room}/")


def imports_through_walls() -> list[str]:
    wrong = set()
    for path in SOURCE.rglob("*.py"):
        place = path.relative_to(SOURCE).with_suffix("").as_posix()
        for line, name in imported_modules(path):
            module = name.removeprefix("transformer_xl.").replace(".", "/")
            wrong |= {
                f"{place}.py:{line} {here} -> {there}"
                for here, there in WALLS
                if lies_in(place, here) and lies_in(module, there)
            }
    return sorted(wrong)


def namesakes() -> list[str]:
    """What a module defines under its own name, so that `from room import name` could mean either. A class differs by its capital."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.lower() == path.stem
            if function or (isinstance(node, ast.ClassDef) and node.name == path.stem):
                found.append(f"{path.relative_to(SOURCE).as_posix()}:{node.lineno}")
    return found


def test_every_room_has_a_floor():
    rooms = {room_of(path) for path in SOURCE.rglob("*.py")}
    assert rooms <= set(FLOOR_OF), f"no floor for {rooms - set(FLOOR_OF)}"


def test_rooms_import_downwards():
    assert upward_imports() == []


def test_nothing_is_imported_through_a_wall():
    assert imports_through_walls() == []


def test_no_module_holds_its_namesake():
    assert [place for place in namesakes() if not place.startswith(STILL_NAMESAKE)] == []


def test_walls_stand_around_something():
    for here, _ in WALLS:
        assert (SOURCE / here).is_dir() or (SOURCE / f"{here}.py").is_file(), here


def write(source: Path, name: str, text: str, monkeypatch) -> None:
    (source / name).parent.mkdir(parents=True)
    (source / name).write_text(text)
    monkeypatch.setattr("test_floors.SOURCE", source)


def test_the_walk_sees_an_import_through_a_wall(tmp_path, monkeypatch):
    wrong = "import torch.nn\ndef f():\n    from transformer_xl.data import corpora, store\n"
    write(tmp_path, "data/feeding/wrong.py", wrong, monkeypatch)
    assert imports_through_walls() == [
        "data/feeding/wrong.py:1 data -> torch",
        "data/feeding/wrong.py:3 data/feeding -> data/corpora",
    ]


def test_the_walk_sees_an_upward_import(tmp_path, monkeypatch):
    write(tmp_path, "model/wrong.py", "def f():\n    from transformer_xl.training import loop\n", monkeypatch)
    assert upward_imports() == ["model/wrong.py:2 model -> training", "model/wrong.py:2 model -> training"]


FLAG = re.compile(r"(?<![\w-])--[a-z]")
ARGUMENT = re.compile(r"`\w+=[^`]*`")
COMMAND = re.compile(r"\b(txl|torchrun|start it with|start the server with) [^,;)]*")
"""Whole commands, where the command line is the only way out; a server is started by nothing else."""
WITH_FLAGS = {
    "analysis/attention_page.py": "properties of CSS",
    "studies/ablation_report.py": "ends of commands that made a table",
}


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Every string that is no docstring; what an f-string fills in is left open."""
    tree = ast.parse(path.read_text())
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            told |= {id(value) for value in node.values}
            yield (
                node.lineno,
                "".join(value.value if isinstance(value, ast.Constant) else "{}" for value in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.lineno, node.value


def below_the_command_line() -> Iterator[tuple[str, str]]:
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE).as_posix()
        if room_of(path) != "cli" and place not in WITH_FLAGS:
            yield from ((f"{place}:{line}", text) for line, text in strings(path))


def flags_below_the_command_line() -> list[str]:
    # A string that is a flag and nothing else is an argument for another process.
    return [
        place
        for place, text in below_the_command_line()
        if FLAG.search(COMMAND.sub("", text)) and not re.fullmatch(r"--[a-z-]+", text)
    ]


def test_only_the_command_line_speaks_of_flags():
    assert flags_below_the_command_line() == []


def test_the_walk_sees_a_flag(tmp_path, monkeypatch):
    told, child = "'''Not --this.'''\n", "child = ['--port']\n"
    wrong = "way = f'{1}; give --data {2}'\nout = 'make it: txl prepare --out X; or --source'\n"
    write(tmp_path, "data/wrong.py", told + child + wrong, monkeypatch)
    assert flags_below_the_command_line() == ["data/wrong.py:3", "data/wrong.py:4"]


def test_arguments_in_sentences_are_options_of_a_command():
    parser = argparse.ArgumentParser(conflict_handler="resolve")
    for name in COMMANDS:
        module_of(name).configure(parser)
    named = [said for _, text in below_the_command_line() for said in ARGUMENT.findall(text)]
    assert named
    for said in named:
        assert in_flags(said).split()[0] in parser._option_string_actions, said


def test_the_walk_sees_a_namesake_but_not_a_class_with_a_capital(tmp_path, monkeypatch):
    write(tmp_path, "model/memory.py", "class Memory: ...\n\n\nasync def memory(): ...\n", monkeypatch)
    assert namesakes() == ["model/memory.py:4"]
