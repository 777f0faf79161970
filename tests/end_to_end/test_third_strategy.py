"""Exactness and resume with the strategy in flat.py; test_third_strategy_whole.py runs all tests of strategies."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end import test_exact, test_resume
from tests.support.launching import PROGRAMS, ROOT

Start = Callable[..., "subprocess.CompletedProcess[str]"]
STRATEGIES = ROOT / "tests" / "strategies"


@pytest.fixture(autouse=True)
def _flat_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STRATEGIES))


@pytest.mark.slow
def test_third_strategy_is_used(start: Start) -> None:
    run = start("ddpkit", 2, PROGRAMS / "prints_strategy.py")
    assert run.stdout.split() == ["FlatAllReduce"] * 2, run.stderr


@pytest.mark.slow
def test_third_strategy_trains_like_the_whole_global_batch(start: Start, tmp_path: Path) -> None:
    test_exact.test_training_at_any_number_of_ranks_equals_that_of_the_whole_global_batch(start, tmp_path, (3,), 1)


@pytest.mark.slow
def test_third_strategy_run_killed_ends_like_an_undisturbed_one(ddpkit: Start, tmp_path: Path) -> None:
    test_resume.test_killed_run_ends_like_an_undisturbed_one(ddpkit, tmp_path, 3, 0, 7, test_resume.WIDE)
