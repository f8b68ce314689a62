"""The notebook of the examples runs from its first cell to its last, and is stored without what it printed."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from support import TEMPLATE, Render

NOTEBOOK = "examples/digits.ipynb"


def test_it_is_stored_without_outputs() -> None:
    text = (TEMPLATE / NOTEBOOK).read_text(encoding="utf-8")
    nbformat.validate(nbformat.reads(text, as_version=4))
    cells = json.loads(text)["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    assert not any(cell["metadata"] for cell in cells)
    assert len(text) < 8000


@pytest.mark.slow
def test_it_runs(render: Render) -> None:
    """In a project whose package has another name: it learns, shows a picture, and leaves nothing behind."""
    project = render(proj_name="spin", custom_name="spinlab", examples="all")
    before = sorted(path for path in project.rglob("*") if "__pycache__" not in path.parts)
    notebook = nbformat.read(project / NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(project / "examples")}})
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    accuracy = re.search(r"^accuracy (0\.\d+|1\.0+) on 297 digits$", printed, re.MULTILINE)
    assert accuracy, printed
    assert float(accuracy[1]) > 0.8
    assert "ConvModel" in printed
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert sorted(path for path in project.rglob("*") if "__pycache__" not in path.parts) == before


def test_it_goes_with_the_examples(render: Render) -> None:
    assert (render(examples="all") / NOTEBOOK).is_file()
    assert not list(Path(render()).rglob("*.ipynb"))
