"""Training, evaluation and prediction weigh what remains if user code leaves samples out of batches."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Start = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = Path(__file__).with_name("incomplete.py")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_samples_left_out_of_batches_do_not_count_at_any_number_of_ranks(start: Start, ranks: int) -> None:
    run = start("ddpkit", ranks, SCRIPT, str(ranks))
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.split()) == ranks
    assert "has left out samples of a batch" in run.stderr + run.stdout
