"""The descriptors of the launcher that serves a job's stores."""

import os
import resource
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from ddp_kit.distributed.control import Control
from ddp_kit.errors import LaunchError
from ddp_kit.launcher.agent import sockets
from tests.support import launching
from tests.support.launching import DDPKIT, PROGRAMS

FILES = Path("/proc/self/fd")


def test_launcher_takes_the_hard_limit_or_names_the_limit_that_the_job_needs() -> None:
    pid = os.fork()
    if pid == 0:  # the hard limit of a process cannot be raised again
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 8192))
            sockets.allow_connections(128, 1024, 8)
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (8192, 8192)
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
            sockets.allow_connections(1, 8, 8)
            with pytest.raises(LaunchError, match=r"64 ranks on 8 nodes needs 408 open files .* is 256") as refused:
                sockets.allow_connections(8, 64, 8)
            assert "ulimit -n 408" in refused.value.hint
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("ranks", [2, 6])
def test_rank_makes_as_many_connections_as_the_launcher_counts(ranks: int) -> None:
    """One more is counted, which NCCL makes."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = len([*FILES.iterdir()])
    minute = timedelta(minutes=1)
    stores = [TCPStore("127.0.0.1", server.port, is_master=False, timeout=minute) for _ in range(ranks)]
    controls = [Control(store, rank, ranks, lambda _: None) for rank, store in enumerate(stores)]
    for store in stores:
        store.add("connected", 1)
    opened = len([*FILES.iterdir()]) - before
    for control in controls:
        control.close()
    assert opened <= 2 * ranks * (sockets._PER_RANK - 1)  # both ends are in this process


@pytest.mark.slow
def test_trainer_with_400_ranks_starts_under_a_soft_limit_of_1024() -> None:
    limited = ("sh", "-c", 'ulimit -Sn 1024 && LAUNCHER=$$ && export LAUNCHER && exec "$@"', "sh", DDPKIT)
    done = launching.run(*limited, "launch", "--nproc-per-node", 1, PROGRAMS / "many_ranks.py", 400)
    assert done.returncode == 0, done.stderr
    assert 3 * 400 <= int(done.stdout) < 4 * 400


@pytest.mark.slow
def test_launch_under_a_low_hard_limit_is_refused_before_anything_starts() -> None:
    low = ("sh", "-c", 'ulimit -n 256 && exec "$@"', "sh", DDPKIT)
    where = ("--nnodes", 38, "--node-rank", 0, "--master-port", launching.free_port())
    done = launching.run(*low, "launch", *where, "--nproc-per-node", 8, "-m", "this")
    assert done.returncode == 3, done.stderr
    assert "a job of 304 ranks on 38 nodes needs 1,458 open files in this process" in done.stderr
    assert "hint: raise it first: ulimit -n 1458" in done.stderr
    assert done.stdout == ""
