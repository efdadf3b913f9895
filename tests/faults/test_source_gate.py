"""What the source never does: run what a file holds, or what a user typed."""

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
    return found


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
    ],
)
def test_the_gate_sees_what_it_is_for(line):
    assert len(offences(ast.parse(line))) == 1


@pytest.mark.parametrize(
    "line",
    ["model.eval()", "torch.load(path, weights_only=True)", "np.load(path, allow_pickle=False)", "re.compile(x)"],
)
def test_the_gate_lets_the_rest_pass(line):
    assert offences(ast.parse(line)) == []
