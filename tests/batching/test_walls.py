"""What may know what: batching no HTTP, http no model and nothing of what can be asked."""

import ast
from pathlib import Path

import transformer_xl

SOURCE = Path(transformer_xl.__file__).parent
WEB = {"fastapi", "starlette", "uvicorn", "h11", "pydantic"}


def imported(room: str) -> set[str]:
    found = set()
    for path in (SOURCE / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(str(node.module))
    return found


def test_batching_knows_no_http():
    assert {name.split(".")[0] for name in imported("batching")} & WEB == set()
    assert "torch" in imported("batching"), "nothing was looked at"


def test_http_knows_no_model():
    ours = {name for name in imported("serving/http") if name.startswith("transformer_xl")}
    allowed = ("transformer_xl.serving.http", "transformer_xl.serving.limits", "transformer_xl.errors")
    assert ours == {name for name in ours if name.startswith(allowed)}
    assert "torch" not in imported("serving/http")
    assert "uvicorn" in imported("serving/http"), "nothing was looked at"
