"""Evaluation and prediction are those of the whole data at once, whatever the number of samples and ranks."""

import importlib.util
import subprocess
from collections.abc import Callable

import pytest

from tests.support.launching import PROGRAMS

Start = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = PROGRAMS / "evaluated.py"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 1, 2, 4])
def test_evaluation_and_predictions_do_not_depend_on_the_ranks(start: Start, ranks: int) -> None:
    run = start("ddpkit", ranks, SCRIPT, "own")
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.split()) == ranks


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchmetrics") is None, reason="torchmetrics is not installed")
@pytest.mark.parametrize("ranks", [2, 4])
def test_torchmetrics_objects_join_their_states(start: Start, ranks: int) -> None:
    run = start("ddpkit", ranks, SCRIPT, "torchmetrics")
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.split()) == ranks
