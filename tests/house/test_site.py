"""The documentation site builds without a warning: every link, anchor and page of the navigation is there."""

import sys
from pathlib import Path

import pytest
from launching import ROOT, run


@pytest.mark.slow
def test_documentation_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site")
    build = run(*command, cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"})
    assert build.returncode == 0, build.stdout + build.stderr
    assert (tmp_path / "site" / "index.html").exists()
