"""With a sampler of the user's own, each step takes the same samples at any number of ranks, without a rank in it."""

import subprocess
from collections.abc import Callable

import pytest

from tests.support.launching import PROGRAMS

Start = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = PROGRAMS / "own_order.py"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sampler_over_the_whole_dataset_trains_as_in_one_process(start: Start, ranks: int) -> None:
    run = start("ddpkit", ranks, SCRIPT)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.split()) == ranks
