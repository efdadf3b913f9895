"""The notebook of examples/ runs as a reader runs it, in a kernel of its own; only its training is shorter."""

import base64
from pathlib import Path

import pytest

nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

NOTEBOOK = Path(__file__).parents[1] / "examples" / "own_text.ipynb"


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """The code and its outputs; cells that fail raise."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert notebook.cells[1].source.count("MINUTES = 1.5") == 1
    notebook.cells[1].source = notebook.cells[1].source.replace("MINUTES = 1.5", "MINUTES = 0.05")
    for cell in notebook.cells:
        cell.source = cell.source.replace("tokens=20_000", "tokens=2_000")
        cell.outputs = []
    place = tmp_path_factory.mktemp("notebook")
    nbclient.NotebookClient(
        notebook, kernel_name="python3", timeout=200, resources={"metadata": {"path": place}}
    ).execute()
    return {cell.source: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


def outputs(cells, code):
    (found,) = [given for source, given in cells.items() if code in source]
    return found


def test_every_figure_is_a_picture(cells):
    for code in ("run.plot()", "sweep.plot()", "looked.plot(layer=2, head=1)", "looked.plot()"):
        pictures = [one.data["image/png"] for one in outputs(cells, code) if "image/png" in one.get("data", {})]
        assert len(pictures) == 1, code
        assert base64.b64decode(pictures[0]).startswith(b"\x89PNG"), code


def test_the_bar_redraws_in_place(cells):
    shown = outputs(cells, "txl.train(")
    bars = [one.data["text/plain"] for one in shown if one.output_type == "display_data"]
    assert len(bars) == 1, bars
    assert bars[0].startswith("training ████████████████████████ ")
    assert "(100%)  loss " in bars[0]
    said = "".join(one.text for one in shown if one.output_type == "stream")
    assert "computing on cpu" in said
    assert "steps fit into 0.05 minutes" in said
    assert {one.name for one in shown if one.output_type == "stream"} == {"stdout"}
    assert shown[-1].data["text/plain"].startswith("<run runs/my_text: step ")


def test_tables_are_tables(cells):
    assert "<table" in outputs(cells, "run.metrics.to_pandas()")[-1].data["text/html"]
    assert "(trained with)" in outputs(cells, "loaded.sweep(")[-1].data["text/plain"]


def test_what_is_committed_is_what_runs():
    """With outputs, so that who only reads sees something, and none of an error."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    kinds = [output.output_type for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert "error" not in kinds
    assert kinds.count("execute_result") >= 8
