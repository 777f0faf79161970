"""A value that is logged in each step costs no collective in a step: ranks exchange it at log points alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import PROGRAMS


@pytest.mark.slow
def test_logged_value_adds_no_collective_to_a_step(ddpkit: Callable[..., Any], tmp_path: Path) -> None:
    done = ddpkit("launch", "--nproc-per-node", 2, PROGRAMS / "logs_in_each_step.py", tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in ("0", "1"):
        without, logged = json.loads((tmp_path / rank).read_text())
        steps = [number for number in range(2, 13) if number % 4 not in (0, 1)]  # without the steps at log points
        assert steps
        assert [logged[step - 2] for step in steps] == [without[step - 2] for step in steps]
        assert all(without[step - 2] > 0 for step in steps), "the reduction of the gradient is counted"
