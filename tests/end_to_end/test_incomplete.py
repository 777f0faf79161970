"""Training, evaluation and prediction weigh what remains if user code leaves samples out of batches."""

import subprocess
from collections.abc import Callable

import pytest

from tests.support.launching import PROGRAMS

Start = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = PROGRAMS / "incomplete.py"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_samples_omitted_from_batches_do_not_count_at_any_number_of_ranks(start: Start, ranks: int) -> None:
    run = start("ddpkit", ranks, SCRIPT, str(ranks))
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.split()) == ranks
    assert "has left out samples of a batch" in run.stderr + run.stdout


@pytest.mark.slow
def test_plain_mean_with_omitted_samples_is_refused_with_several_ranks(start: Start) -> None:
    script = PROGRAMS / "omits_samples.py"
    run = start("ddpkit", 2, script)
    assert run.returncode == 1
    assert "has left out 1 of the 4 samples of a batch, but the loss function returns a plain mean" in run.stderr
    assert "return Loss(sum over the samples, weight=number of samples)" in run.stderr
    assert "Traceback" not in run.stderr
    assert start("ddpkit", 1, script).returncode == 0
