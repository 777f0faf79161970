"""A machine, or container, whose /dev/shm is too small for batches: a real one, in a mount namespace."""

import os
import shutil
import sys

import pytest

from tests.support.hosts import ALONE
from tests.support.launching import PROGRAMS, run

pytestmark = pytest.mark.slow


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare for a small tmpfs")
@pytest.mark.parametrize("loader", ["ours", "own"])
def test_batches_that_exceed_shared_memory_are_sent_otherwise_with_a_warning(loader: str) -> None:
    main = PROGRAMS / "large_batches.py"
    small = f"mount -t tmpfs -o size=1m tmpfs /dev/shm && exec {sys.executable} {main} {loader}"
    done = run(*ALONE, "bash", "-c", small, timeout=120)
    assert done.stdout == "True\n", done.stderr
    warned, started = (done.stderr.index(word) for word in ("/dev/shm has only 1 MiB free", "step 4/4"))
    assert warned < started
    assert done.stderr.count("/dev/shm has only") == 1
