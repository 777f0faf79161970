"""What several ranks compare, join and leave together; see several_ranks.py."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.launching import PROGRAMS

Start = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = PROGRAMS / "several_ranks.py"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_agree_on_their_data_and_share_it(start: Start, tmp_path: Path, ranks: int) -> None:
    run = start("ddpkit", ranks, SCRIPT, str(tmp_path / "runs"))
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("all held") == ranks
