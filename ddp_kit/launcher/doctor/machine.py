"""What the checks look at, in one record."""

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
from ddp_kit.launcher.doctor.trials import Trials

GIB = 1024**3


@dataclass(frozen=True)
class Machine:
    """This machine, or the one that a test has made up."""

    env: Mapping[str, str]
    checkpoints: Path
    """The folder that checkpoints would be written to."""
    driver: Driver
    trials: Trials
    host: str
    python: tuple[int, ...]
    cores: int
    usable_cores: int
    """Those that this process may run on."""
    open_files: tuple[int, int]
    """The soft and the hard limit; below 0: none."""
    locked_memory: tuple[int, int]
    """The same, in bytes."""
    clock_synchronised: bool | None
    """None where the kernel does not tell."""
    space: Callable[[Path], tuple[int, int]]
    """All and free bytes of the file system that holds a folder."""
    root: Path = Path("/")
    """Where /proc, /sys and /dev are."""

    @staticmethod
    def this(env: Mapping[str, str], checkpoints: Path, driver: Driver, trials: Trials) -> "Machine":
        """The machine that this process runs on."""
        cores = os.cpu_count() or 1
        return Machine(
            env=env,
            checkpoints=checkpoints,
            driver=driver,
            trials=trials,
            host=socket.gethostname(),
            python=sys.version_info[:3],
            cores=cores,
            usable_cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else cores,
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
            locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK),
            clock_synchronised=_clock_synchronised(),
            space=_space,
        )


def size(number: float) -> str:
    """A number of bytes as people write it."""
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:,.1f} GiB"


def _space(folder: Path) -> tuple[int, int]:
    usage = shutil.disk_usage(folder)
    return usage.total, usage.free


def _clock_synchronised() -> bool | None:
    """The kernel's own word, which any time service keeps up to date. Source: adjtimex(2)."""
    timex = ctypes.create_string_buffer(512)  # all zero: nothing is to be changed
    with suppress(AttributeError):
        state = ctypes.CDLL(None).adjtimex(timex)
        unsynchronised = 5  # TIME_ERROR
        return None if state < 0 else state != unsynchronised
    return None
