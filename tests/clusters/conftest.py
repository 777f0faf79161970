"""A folder with a script to submit."""

from pathlib import Path

import pytest


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty train.py in the current folder."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
