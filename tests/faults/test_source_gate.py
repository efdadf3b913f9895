"""What the source never does: run what a file holds, or what a user typed; or read and write text in whatever encoding the locale has."""

import ast
from pathlib import Path

import pytest

import transformer_xl

SOURCE = Path(transformer_xl.__file__).parent


def offences(tree: ast.AST) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [(node.lineno, f"imports {name}") for name in names if name.split(".")[0] in MODULES]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if name in CALLS:
                found.append((node.lineno, f"calls {name}"))
            if name.endswith("torch.load") and given.get("weights_only") != "True":
                found.append((node.lineno, "torch.load without weights_only=True"))
            if given.get("shell", "False") != "False":
                found.append((node.lineno, "shell=True"))
            if given.get("allow_pickle", "False") != "False":
                found.append((node.lineno, "allow_pickle=True"))
            if given.get("trust_remote_code", "False") != "False":
                found.append((node.lineno, "trust_remote_code=True"))
            if "encoding" not in given and is_text(node, given):
                found.append((node.lineno, f"{name} without encoding="))
    return found


def is_text(node: ast.Call, given: dict[str | None, str]) -> bool:
    """Whether a call reads or writes text. A path's own open() has the mode first, the others have it second."""
    name = ast.unparse(node.func).rsplit(".", 1)
    method = name[-1]
    if method in ("read_text", "write_text"):
        return len(name) == 2
    if method in ("run", "Popen", "check_output", "check_call"):
        return any(given.get(word, "False") != "False" for word in ("text", "universal_newlines", "errors"))
    if method in ("open", "fdopen") and (len(name) == 1 or name[0] in ("os", "io", "gzip", "bz2", "lzma")):
        return name != ["os", "open"] and is_text_mode(node.args[1:2], given, default=name[0] not in BINARY)
    if method == "open":
        return name[0].rsplit(".", 1)[-1] not in NOT_PATHS and is_text_mode(node.args[:1], given, default=True)
    if method in ("TemporaryFile", "NamedTemporaryFile", "SpooledTemporaryFile"):
        return is_text_mode(node.args[:1], given, default=False)
    return method in ("TextIOWrapper", "loadtxt", "savetxt", "genfromtxt")


def is_text_mode(place: list[ast.expr], given: dict[str | None, str], *, default: bool) -> bool:
    if not place and "mode" not in given:
        return default
    mode = given["mode"] if "mode" in given else ast.unparse(place[0])
    return "b" not in mode


BINARY = {"gzip", "bz2", "lzma"}
NOT_PATHS = {
    "self",
    "source",
    "Source(path=path)",
    "archive",
    "tarfile",
    "webbrowser",
    "_sessions(request)",
    "lanes[lane]",
}
"""What else has a method of this name here."""


MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "subprocess.getoutput"}


def test_nothing_in_the_source_runs_what_it_is_given():
    wrong = [
        f"{path.relative_to(SOURCE)}:{line} {what}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, what in offences(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import yaml",
        "eval(text)",
        "exec(text)",
        "os.system(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "subprocess.run(text, shell=True)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "open(path)",
        "open(path, 'a')",
        "path.open()",
        "path.open('w')",
        "path.open(mode='a+')",
        "Path(name).read_text(errors='replace')",
        "(folder / name).write_text(text)",
        "os.fdopen(descriptor, 'w')",
        "subprocess.run(words, text=True)",
        "subprocess.Popen(words, universal_newlines=True)",
        "tempfile.TemporaryFile('w+')",
    ],
)
def test_the_gate_sees_what_it_is_for(line):
    assert len(offences(ast.parse(line))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "model.eval()",
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=False)",
        "re.compile(x)",
        "open(path, 'rb')",
        "path.open('ab')",
        "path.open('a', encoding='utf-8')",
        "path.read_text(encoding='utf-8')",
        "write_text(path, text)",
        "os.open(path, os.O_RDONLY)",
        "subprocess.run(words, capture_output=True)",
        "subprocess.run(words, text=True, encoding='utf-8')",
        "tempfile.TemporaryFile()",
    ],
)
def test_the_gate_lets_the_rest_pass(line):
    assert offences(ast.parse(line)) == []
