"""Steps whose gradient is not finite are left out on all ranks together; the rest is as if they had not been."""

import subprocess
from collections.abc import Callable

import pytest

from tests.support.launching import PROGRAMS

Start = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = PROGRAMS / "left_out.py"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_skipped_steps_leave_no_trace_in_fp32_and_fp16(start: Start, ranks: int) -> None:
    run = start("ddpkit", ranks, SCRIPT)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == ranks
