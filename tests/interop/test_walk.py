"""The tour's walk of one foreign file is the walk it takes: the files named there are those that do something in an import."""

import json
import re
import sys
from pathlib import Path

import transformer_xl
from foreign import ORIGINAL, TENSORFLOW
from transformer_xl.cli import import_, main
from transformer_xl.interop import asking, importing  # noqa: F401 (loaded before anything is watched)
from transformer_xl.interop.quarantine import child, tensor_bundle  # noqa: F401

SOURCE = Path(transformer_xl.__file__).parent
TOUR = (Path(__file__).parents[2] / "docs" / "tour.md").read_text(encoding="utf-8").split("## One foreign file")[1]
FOLDERS = (f"{SOURCE}/interop/", import_.__file__)


def walk(source: Path, out: Path, monkeypatch) -> set[str]:
    """Files of interop, and the command's own, with a function called. The child works in this process, so that it is seen."""

    def read_here(folder: Path, **_: object) -> int:
        child.read_jobs(json.loads((folder / "request.json").read_text())["jobs"], folder=folder)
        return 0

    seen = set()
    monkeypatch.setattr(asking, "_run", read_here)
    sys.setprofile(lambda frame, event, _: seen.add(frame.f_code.co_filename) if event == "call" else None)
    try:
        assert main(["import", str(source), "--out", str(out)]) == 0
    finally:
        sys.setprofile(None)
    return {str(Path(name).relative_to(SOURCE)) for name in seen if name.startswith(FOLDERS)}


def test_the_tour_names_the_files_of_an_import(tmp_path, monkeypatch):
    stops = re.findall(r"^\*\*\d+\. .*?\*\*.*?`([\w/]+\.py)`", TOUR, re.MULTILINE)
    assert walk(ORIGINAL / "zip", tmp_path / "torch", monkeypatch) == {*stops}
    assert len(stops) == 13
    theirs = walk(TENSORFLOW, tmp_path / "tensorflow", monkeypatch)
    assert theirs - {*stops} == {"interop/quarantine/tensor_bundle.py", "interop/formats/tensorflow.py"}
    assert len(theirs) == 9


def test_every_file_that_the_tour_names_is_there():
    for name in re.findall(r"`((?:cli|interop|checkpoint)/[\w/]+\.py)`", TOUR):
        assert (SOURCE / name).is_file(), name
