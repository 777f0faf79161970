"""Folders of scripts that a kept process serves."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kept_folder import Folder, script_folder, short_folder


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder with a short path."""
    with short_folder() as path:
        yield path


@pytest.fixture
def folder() -> Iterator[Folder]:
    """A folder with a script, and the kept process of its launches."""
    with script_folder() as here:
        yield here
