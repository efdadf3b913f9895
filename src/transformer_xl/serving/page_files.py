"""The page's files: a fixed list of names, each with its file and kind. No path is ever made of what a request says."""

from functools import cache
from importlib.resources import files

SCRIPTS = ("page", "attention", "chart", "learning", "losses", "pane", "server", "settings", "tokens", "wording")
PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8") for name in SCRIPTS},
}


@cache
def page_file(address: str) -> tuple[bytes, str] | None:
    """Its bytes and content type; None where the package holds no page."""
    name, kind = PAGE[address]
    file = files("transformer_xl.serving") / "page" / name
    return (file.read_bytes(), kind) if file.is_file() else None
