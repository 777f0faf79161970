"""The input of the checks, in one record."""

import ctypes
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_kit.launcher.doctor.driver import Driver
from ddp_kit.launcher.doctor.probes import Probes


@dataclass(frozen=True)
class Machine:
    """This machine, or a made-up one in a test."""

    env: Mapping[str, str]
    checkpoints: Path
    """The folder for checkpoints."""
    driver: Driver
    probes: Probes
    host: str
    python: tuple[int, ...]
    cores: int
    usable_cores: int
    """The cores that this process may run on."""
    open_files: tuple[int, int]
    """The soft and the hard limit; negative: no limit."""
    locked_memory: tuple[int, int]
    """The soft and the hard limit in bytes; negative: no limit."""
    clock_synchronised: bool | None
    """None: not known."""
    space: Callable[[Path], tuple[int, int]]
    """Total and free bytes of the file system of a folder."""
    root: Path = Path("/")
    """The folder of /proc, /sys and /dev."""

    @staticmethod
    def current(env: Mapping[str, str], checkpoints: Path, driver: Driver, probes: Probes) -> "Machine":
        """The machine that this process runs on."""
        cores = os.cpu_count() or 1
        return Machine(
            env=env,
            checkpoints=checkpoints,
            driver=driver,
            probes=probes,
            host=socket.gethostname(),
            python=sys.version_info[:3],
            cores=cores,
            usable_cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else cores,
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
            locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK),
            clock_synchronised=_clock_synchronised(),
            space=_space,
        )


def _space(folder: Path) -> tuple[int, int]:
    usage = shutil.disk_usage(folder)
    return usage.total, usage.free


def _clock_synchronised() -> bool | None:
    """Whether the kernel's clock is synchronised, as set by any time service. Source: adjtimex(2)."""
    timex = ctypes.create_string_buffer(512)  # all zero: change nothing
    with suppress(AttributeError):
        state = ctypes.CDLL(None).adjtimex(timex)
        unsynchronised = 5  # TIME_ERROR
        return None if state < 0 else state != unsynchronised
    return None
