"""One launched job of a benchmark: the marks its ranks leave, its processes, and its certain end."""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

WORKER = Path(__file__).with_name("launch_worker.py")
_PR_SET_CHILD_SUBREAPER = 36
_FROM_OUTSIDE = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "PET_", "OMP_", "MKL_", "ACCELERATE_")


@dataclass(frozen=True)
class Launcher:
    """A way to start processes; in its words `{ranks}` and `{restarts}` stand for numbers."""

    name: str
    words: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    restarts: bool = True
    """Whether it is asked for restarts too."""

    def command(self, ranks: int, restarts: int) -> list[str]:
        return [word.format(ranks=ranks, restarts=restarts) for word in self.words]


@dataclass(frozen=True)
class Mark:
    """A rank has got through its first all_reduce."""

    moment: float
    pid: int


class Job:
    """`with Job(command, ranks, then) as job`: started on entering, and gone, whole, on leaving."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], ranks: int, then: str, script: Path = WORKER
    ) -> None:
        self.command, self.env, self.ranks, self.then, self.script = command, env, ranks, then, script

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="launch-"))
        self.said = self.folder / "said"
        words = [*self.command, str(self.script), str(self.folder), *self.then.split()]
        with self.said.open("wb") as output:
            self.started = time.monotonic()
            self.process = start(words, self.env, output.fileno())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_everything(self.process)
        shutil.rmtree(self.folder, ignore_errors=True)

    def all_there(self, attempt: int, seconds: float) -> tuple[int, list[Mark]] | None:
        """The marks of all ranks in this attempt or a later one, and its number; None where they do not come."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None
            seen: dict[int, list[Path]] = {}
            for path in self.folder.glob("*.*"):
                if path.suffix[1:].isdecimal():
                    seen.setdefault(int(path.stem), []).append(path)
            for number, paths in sorted(seen.items()):
                if number >= attempt and len(paths) == self.ranks:
                    words = [path.read_text().split() for path in paths]
                    return number, [Mark(float(moment), int(pid)) for moment, pid in words]
            if ended:
                return None
            time.sleep(0.02)
        return None

    def stop(self) -> None:
        (self.folder / "stop").touch()

    def wait(self, seconds: float) -> float | None:
        """When it ended; None where it did not, or not well."""
        watched = os.pidfd_open(self.process.pid)  # Popen.wait with a timeout looks 20 times a second only
        try:
            select.select([watched], [], [], seconds)
            moment = time.monotonic()
        finally:
            os.close(watched)
        return moment if self.process.poll() == 0 else None


def start(words: Sequence[str], env: Mapping[str, str], output: int) -> "subprocess.Popen[bytes]":
    """Start a program with one thread per process, and without what a launcher outside may have put there."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_FROM_OUTSIDE)}
    return subprocess.Popen(
        list(words),
        env=clean | {"OMP_NUM_THREADS": "1"} | dict(env),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def adopt_orphans() -> None:
    """Make this process the parent of whatever its jobs leave behind, and have SIGTERM unwind it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def end_everything(process: "subprocess.Popen[bytes]") -> None:
    """Kill a job whole: its launcher first, then all that is left, until nothing is."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while left := psutil.Process().children(recursive=True):  # what was orphaned is ours, see adopt_orphans
        for each in left:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        for each in left:
            with suppress(ChildProcessError):
                os.waitpid(each.pid, 0)
