"""The corpus every machine has: the source of Python's own standard library. Documents are files, tokens are bytes.

Left out, so that two machines with the same Python have the same corpus: tests (which some installations lack), what is
generated for one platform, and packages that distributors ship apart from the rest.
"""

import hashlib
import os
import platform
import sysconfig
from pathlib import Path

from transformer_xl.data.corpora import encoding
from transformer_xl.data.corpora.dealing import Engine
from transformer_xl.data.corpora.encoding import make_store
from transformer_xl.data.corpora.pieces import BY_FILE, Part
from transformer_xl.data.corpora.sources import Source
from transformer_xl.data.store import Manifest, Store, encoded_by
from transformer_xl.data.text.tokenizers import ByteTokenizer, Tokenizer
from transformer_xl.errors import DataError

LEFT_OUT_FOLDERS = {
    *("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"),
    *("idlelib", "tkinter", "turtledemo", "lib2to3", "distutils", "ensurepip", "pydoc_data"),
}
LEFT_OUT_FILES = ("_sysconfigdata", "_distutils_system", "sitecustomize", "usercustomize", "turtle")
LEFT_OUT_PREFIXES = ("config-", "lib-dynload")
PER_MILLE = {"valid": 50, "test": 50}
"""Of a thousand file names, how many go to each split; the rest is train. A name alone decides, so no file ever moves."""


def prepare_python(*, out: Path | str, engine: Engine = "processes") -> Store:
    library = Path(sysconfig.get_paths()["stdlib"])
    files = python_files(library)
    if not files:
        raise DataError(f"{library} holds no Python source, so there is no such corpus; prepare a text of your own")

    def fill(folder: Path, scratch: Path) -> tuple[Manifest, Tokenizer]:
        parts: dict[str, list[Part]] = {"train": [], "valid": [], "test": []}
        checksum = hashlib.sha256()
        for name in files:
            parts[split_of(name)].append(Part(source=Source(path=library / name)))
            checksum.update(f"{name}\0".encode() + hashlib.sha256((library / name).read_bytes()).digest())
        tokenizer = ByteTokenizer()
        records = encoding.write_splits(folder, parts=parts, tokenizer=tokenizer, rule=BY_FILE, engine=engine)
        manifest = Manifest(
            name="python",
            rule="bytes of the standard library's .py files without tests, in order of name; split by file",
            unit="bits_per_byte",
            documents=BY_FILE.description,
            origin={"python": platform.python_version(), "files": str(len(files)), "sha256": checksum.hexdigest()},
            splits=records,
            **encoded_by(tokenizer),
        )
        return manifest, tokenizer

    return make_store(out, fill)


def python_files(library: Path) -> list[str]:
    """The names of the corpus's files, relative to the library, in an order no file system decides."""
    found = []
    for place, folders, files in os.walk(library):
        # Pruned in place, so that thousands of installed packages and tests are never looked at.
        folders[:] = [name for name in folders if not name.startswith(LEFT_OUT_PREFIXES)]
        folders[:] = [name for name in folders if name not in LEFT_OUT_FOLDERS]
        here = Path(place).relative_to(library)
        at_top = here == Path()
        found += [
            (here / name).as_posix()
            for name in files
            if name.endswith(".py") and not (at_top and name.startswith(LEFT_OUT_FILES))
        ]
    return sorted(found)


def split_of(name: str) -> str:
    drawn = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 1000
    if drawn < PER_MILLE["test"]:
        return "test"
    return "valid" if drawn < PER_MILLE["test"] + PER_MILLE["valid"] else "train"
