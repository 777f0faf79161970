"""A loss that is not finite, at a random rank, step, sample and layer, is named in the error."""

import subprocess
from collections.abc import Callable

import pytest

from tests.support.launching import PROGRAMS

Start = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = PROGRAMS / "not_finite.py"
CASES = 17  # for each number of ranks


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_not_finite_loss_of_random_cases_is_named_with_module_and_samples(start: Start, ranks: int) -> None:
    run = start("ddpkit", ranks, SCRIPT, str(CASES), "0")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(f"{CASES} cases named on rank") == ranks
