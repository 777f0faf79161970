"""A TMPDIR with too long a path for the sockets of DataLoader workers: torch's own DataLoader would wait forever."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.support.launching import PROGRAMS, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("length", [75, 76])
def test_dataloader_workers_send_batches_whatever_the_length_of_tmpdir(length: int) -> None:
    folder = Path("/tmp/ddpkit-long" + "x" * (length - len("/tmp/ddpkit-long")))  # tmp_path is longer
    folder.mkdir(exist_ok=True)
    try:
        done = run(
            sys.executable,
            PROGRAMS / "dataloader_workers_in_tmpdir.py",
            folder,
            env={"TMPDIR": str(folder)},
            timeout=60,
        )
    finally:
        shutil.rmtree(folder)
    assert done.stdout == "True\n" * 4, done.stderr
    said = "has too long a path for the sockets of DataLoader workers: they send batches through pipes instead"
    assert done.stderr.count(said) == (length == 76)
