"""`examples/first_run.ipynb` runs to its last cell, teaches its model something, and is kept without outputs."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tests.conftest import PROJECT

NOTEBOOK = PROJECT / "examples" / "first_run.ipynb"


def test_the_notebook_trains_a_model(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{PROJECT}:{NOTEBOOK.parent}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    before, after = (float(found) for found in re.findall(r"held-out reward \w+: ([\d.]+)", text))
    assert before < 0.2
    assert after > 0.6
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    warnings = [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]
    assert [text for text in warnings if "TqdmWarning" not in text] == []  # which misses widgets that nobody needs here
    assert [path.name for path in tmp_path.iterdir() if path.name != "ipython"] == ["first-run"]


def test_the_notebook_is_kept_without_outputs():
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert len(cells) > 5
    assert [cell for cell in cells if cell.outputs or cell.execution_count is not None] == []
