"""A disk that is full for a while: a real one of 1 MB, in a mount namespace."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.hosts import ALONE
from tests.support.launching import DDPKIT, PROGRAMS, ROOT, run

pytestmark = pytest.mark.slow


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare for a small tmpfs")
@pytest.mark.parametrize("ends", ["freed", "full"])
def test_training_continues_on_a_full_disk_but_the_last_save_must_succeed(tmp_path: Path, ends: str) -> None:
    disk, program = tmp_path / "disk", PROGRAMS / "fills_disk.py"
    disk.mkdir()
    command = f"mount -t tmpfs -o size=1M none {disk} && {DDPKIT} launch --nproc-per-node 2 {program} {disk} {ends}"
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a mount namespace")
    done = run(*ALONE, "sh", "-c", command, cwd=ROOT)
    assert done.stderr.count("WARNING there is no space for the checkpoint of step") >= 1, done.stderr
    assert "Traceback" not in done.stderr
    if ends == "freed":
        assert done.returncode == 0, done.stderr
        assert "['step-00000008', 'step-00000010']" in done.stdout
    else:
        assert done.returncode == 1
        assert "ddpkit: error" in done.stderr
        assert "no space for the checkpoint of step 10" in done.stderr
        assert "['step-00000002']" in done.stdout
