"""Notebooks are kept without what running them adds, small, and linked from their page."""

import json
from pathlib import Path

import pytest

from tests.support.launching import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").iterdir())
MOST_BYTES = 8000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_has_no_outputs_and_is_small(path: Path) -> None:
    assert path.suffix == ".ipynb"
    notebook = json.loads(path.read_text())
    for cell in notebook["cells"]:
        assert not cell.get("outputs"), f"{path.name}: clear all outputs before saving"
        assert cell.get("execution_count") is None, f"{path.name}: clear all outputs before saving"
        assert cell["metadata"].keys() <= {"tags"}, "what an editor adds"
    assert notebook["metadata"].keys() == {"kernelspec", "language_info"}
    assert notebook["metadata"]["language_info"] == {"name": "python"}, "any version"
    assert path.stat().st_size < MOST_BYTES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_linked_from_its_page(path: Path) -> None:
    assert f"](../examples/notebooks/{path.name})" in (ROOT / "docs" / "notebooks.md").read_text()
