"""What the jobs on several hosts are doing: runs `ddpkit top` on each of them, over ssh."""

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ddp_kit.launcher.clusters import remote_shell
from ddp_kit.launcher.readings import JobReading, from_json, merged

_SECONDS = 30.0


@dataclass(frozen=True)
class HostReadings:
    """The jobs on all hosts."""

    jobs: tuple[JobReading, ...]
    problems: tuple[str, ...] = ()
    """A line for each host that could not be read."""


def readings_of(hosts: Sequence[str]) -> HostReadings:
    """Read all hosts concurrently, as the same user, with ssh's own choice of keys."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        found = list(pool.map(_read, hosts))
    jobs = merged([job for each in found if not isinstance(each, str) for job in each])
    return HostReadings(jobs, tuple(each for each in found if isinstance(each, str)))


def _read(host: str) -> tuple[JobReading, ...] | str:
    """The readings of a host, or why there are none."""
    remote = remote_shell.found_first(("ddpkit", "top", "--once", "--json"), str(Path(sys.executable).parent))
    command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", host, remote]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
        if done.returncode == 0:
            return from_json(done.stdout)
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return f"{host}: {last}"
    except FileNotFoundError:
        return f"{host}: there is no ssh on this machine; install OpenSSH's client"
    except subprocess.TimeoutExpired:
        return f"{host}: no answer within {_SECONDS:.0f} s"
    except (ValueError, TypeError, KeyError):
        return f"{host}: its ddpkit prints another format; install the same version there"
