"""Every process of one job, however far it has gone from its parent: all inherit a mark in their environment."""

import os
import select
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "DDPKIT_TEST_JOB"


def has_ended(pid: int) -> bool:
    """Whether a process has ended; where nobody adopts orphans, one whose parent has ended stays a zombie."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class JobProcesses:
    """Those that were started with `env`."""

    def __init__(self) -> None:
        self.env = {MARK: str(uuid.uuid4())}

    def alive(self) -> dict[int, str]:
        """Pid -> command line."""
        wanted, found = f"{MARK}={self.env[MARK]}".encode(), {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                with suppress(OSError):
                    if wanted in (folder / "environ").read_bytes().split(b"\0"):  # empty for a zombie
                        found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def wait_until_gone(self, pids: "dict[int, str]") -> None:
        """Wait for the end of each; the test's own time limit ends a wait in vain."""
        for pid in pids:
            with suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                select.select([descriptor], [], [])
                os.close(descriptor)
