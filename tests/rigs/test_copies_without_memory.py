"""Copies in memory on a machine whose /dev/shm is full, small, read-only or absent: a real one, in a mount namespace.

In each namespace, it is empty at the start. Programs: tests/programs/copied.py.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts import ALONE
from tests.support.launching import DDPKIT, PROGRAMS, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare for mounts"),
]

TMPFS = "mount -t tmpfs -o size={} tmpfs /dev/shm"
READ_ONLY = "mount -t tmpfs -o ro tmpfs /dev/shm"
ABSENT = (
    "mkdir dev && mount -t tmpfs tmpfs dev && for each in null zero full random urandom tty; do "
    "touch dev/$each && mount --bind /dev/$each dev/$each; done && mount --rbind dev /dev"
)


def trained(folder: Path, mount: str, fault: str, *, ranks: int = 1, **parallel: Any) -> Any:
    """A run with a fault in a namespace; its output ends with what is left in /dev/shm."""
    words = [PROGRAMS / "copied.py", folder / "run", json.dumps(parallel), "{}", fault, "callback"]
    command = f'{mount} && "$@"; code=$?; echo left: $(ls -A /dev/shm 2>&1); exit $code'
    launch = [DDPKIT, "launch", "--nproc-per-node", ranks, "--max-restarts", 3, *words]
    done = run(*ALONE, "sh", "-c", command, "sh", *launch, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done


def ended_with(run: Any) -> list[str]:
    return sorted(re.findall(r"ended \d .*", run.stdout))


@pytest.mark.parametrize("parallel", [{}, {"strategy": "fsdp"}], ids=["one rank", "fsdp"])
def test_full_shared_memory_costs_no_complete_copy(parallel: dict[str, Any], tmp_path: Path) -> None:
    ranks = 2 if parallel else 1
    whole = trained(tmp_path, TMPFS.format("1m"), "", ranks=ranks, **parallel)
    shutil.rmtree(tmp_path / "run")
    done = trained(tmp_path, TMPFS.format("1m"), "full then SIGKILL", ranks=ranks, **parallel)
    warning = r"no copy of the state in memory could be made: there is no space for .*; this is tried again"
    before, _, after = done.stderr.partition("restart 1 of 3")
    assert len(re.findall(warning, before)) == 1, done.stderr
    assert len(re.findall(warning, after)) <= 1
    assert done.stderr.count("WARNING") <= 2
    struck = int((tmp_path / "run.struck").read_text())
    (resumed,) = map(int, re.findall(r"resumed from the copy in memory after step (\d+)", after))
    assert resumed >= struck > 0
    assert ended_with(done) == ended_with(whole)
    assert "left: other\n" in done.stdout


@pytest.mark.parametrize(
    ("mount", "warning", "resumes"),
    [
        (READ_ONLY, "the launcher cannot write to /dev/shm; give it more shared memory", False),
        (ABSENT, "the launcher cannot write to /dev/shm; give it more shared memory", False),
        (TMPFS.format("4k"), "/dev/shm has 0 bytes free", False),
        (TMPFS.format("40k"), "no copy of the state in memory could be made: there is no space", True),
    ],
    ids=["read-only", "absent", "no space", "space for one copy"],
)
def test_training_without_shared_memory_warns_once_and_ends_as_an_undisturbed_run(
    mount: str, warning: str, resumes: bool, tmp_path: Path
) -> None:
    whole = trained(tmp_path, TMPFS.format("1m"), "")
    shutil.rmtree(tmp_path / "run")
    done = trained(tmp_path, mount, "SIGKILL")
    before, _, after = done.stderr.partition("restart 1 of 3")
    for attempt in (before, after):
        assert attempt.count(warning) == attempt.count("WARNING") == 1, done.stderr
    assert ("resumed from the copy in memory after step" in after) == resumes
    assert ended_with(done) == ended_with(whole)
    assert "ddpkit-" not in done.stdout.partition("left: ")[2]


def test_folder_of_a_job_that_is_gone_is_removed_but_no_other(tmp_path: Path) -> None:
    prepare = (
        f"{TMPFS.format('1m')} && cd /dev/shm && mkdir -m 700 ddpkit-stale123 ddpkit-locked12 ddpkit-others12 "
        "ddpkit-newjob12 && chown 65534 ddpkit-others12 && mkdir ddpkit-myruns12 ddpkit-runs && "
        "touch -d '2 minutes ago' ddpkit-stale123 ddpkit-locked12 ddpkit-others12 ddpkit-myruns12 ddpkit-runs && "
        "exec 9<ddpkit-locked12 && flock 9 && cd -"
    )
    done = trained(tmp_path, prepare, "")
    left = done.stdout.partition("left: ")[2].split()
    assert left == ["ddpkit-locked12", "ddpkit-myruns12", "ddpkit-newjob12", "ddpkit-others12", "ddpkit-runs"]
