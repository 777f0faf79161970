"""From three ranks on, the order in which gradients are reduced decides how sums are rounded."""

import re
from pathlib import Path

import pytest

from tests.support.launching import PROGRAMS, launch

SCRIPT = PROGRAMS / "reduced_alike.py"


@pytest.mark.slow
def test_run_killed_in_its_first_steps_resumes_bitwise_at_three_ranks(tmp_path: Path) -> None:
    run = launch("--nproc-per-node", 3, SCRIPT, tmp_path / "runs", timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    found = re.findall(r"([a-z ]+ left after [123]): (same|other)", run.stdout)
    assert len(found) == 3 * 3 * 3, run.stdout
    assert not [name for name, same in found if same == "other"]
