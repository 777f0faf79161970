"""No process of a job outlives the job: what the kernel does for that, and what is left to do."""

import ctypes
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SET_PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)

# Small processes that remove shared memory once their clients are gone: they end by themselves.
_CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
# They alone know the names. torch_shm_manager goes two seconds after its last client, more on a busy machine.
_CLEANERS_SECONDS = 5.0
_TERM_SECONDS = 0.2
_LOOK_SECONDS = 0.01
# In the kernel's uninterruptible sleep a process outlives SIGKILL; nobody waits for it longer than this.
_UNKILLABLE_SECONDS = 5.0
# Shared memory whose names libraries make up, and the folders of the sockets of multiprocessing and torch_shm_manager.
_SHARED_MEMORY = re.compile(r"(/dev/shm/(?:torch_|nccl-)\S+)$", re.MULTILINE)
_SOCKET_FOLDER = re.compile(r"/(pymp|torch-shm-dir)-[^/]+$")


def die_with_parent(parent: int) -> None:
    """From now on the kernel ends this process when the thread that forked it ends. Linux only.

    `parent`: the process that forked this one; it may have died before this was set.
    """
    _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def outlive_parent() -> None:
    """Undo `die_with_parent`. Should this process be stopped when its parent dies, the kernel continues it.

    It still has to end what the job leaves behind.
    """
    _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGCONT)


def adopt_orphans() -> None:
    """Let every descendant whose parent dies become this process's child: so that none gets out of sight."""
    _LIBC.prctl(_SET_CHILD_SUBREAPER, 1)


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP, or another signal of job control, has stopped a process."""
    return _read(f"/proc/{pid}/stat").rpartition(b") ")[2][:1] == b"T"


@dataclass(frozen=True)
class Child:
    """A child of this process."""

    pid: int
    session: int

    @property
    def command(self) -> bytes:
        """Its words, with zero bytes between them; empty for a zombie."""
        return _read(f"/proc/{self.pid}/cmdline")

    @property
    def name(self) -> str:
        """Its command line, or else what the kernel calls it, in brackets as in `ps`; empty where it has ended."""
        words = self.command.replace(b"\0", b" ").decode(errors="replace").strip()
        before, _, after = _read(f"/proc/{self.pid}/stat").rpartition(b") ")
        if words or not after or after[:1] in b"ZX":
            return words
        return f"[{before.partition(b'(')[2].decode(errors='replace')}]"

    @property
    def cleans(self) -> bool:
        """Whether it is one of the helpers that remove shared memory and then end by themselves."""
        return any(name in self.command for name in _CLEANERS)


def children() -> list[Child]:
    """The children of this process, zombies left out."""
    own, found = str(os.getpid()).encode(), []
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            fields = _read(f"/proc/{entry.name}/stat").rpartition(b") ")[2].split()  # state, parent, group, session
            if len(fields) > 3 and fields[1] == own and fields[0] not in b"ZX":
                found.append(Child(int(entry.name), int(fields[3])))
    return found


def strike(which: Callable[[Child], bool], number: signal.Signals, traces: set[Path]) -> bool:
    """Send a signal to the children that `which` picks, cleaners left out; whether there were any.

    `traces` gets what they would leave behind.
    """
    there = [child for child in filter(which, children()) if not child.cleans]
    for child in there:
        traces |= traces_of(child.pid)
        with suppress(OSError):
            os.kill(child.pid, number)
    return bool(there)


def end_children(
    which: Callable[[Child], bool], reap: Callable[[], None], gently: bool = False, traces: set[Path] | None = None
) -> None:
    """End the children that `which` picks, cleaners left out, then what becomes a child by that, until none is left.

    `reap` takes the zombies. `gently`: whether they hear SIGTERM a moment before. `traces`: of earlier strikes.
    """
    traces = set() if traces is None else traces
    if gently and strike(which, signal.SIGTERM, traces):
        wait_for(which, _TERM_SECONDS, reap)
    deadline = time.monotonic() + _UNKILLABLE_SECONDS
    while strike(which, signal.SIGKILL, traces) and time.monotonic() < deadline:
        wait_for(which, _LOOK_SECONDS, reap)
    reap()
    _remove(traces)


def end_cleaners(reap: Callable[[], None]) -> None:
    """Let the cleaners end by themselves, once all others are gone; kill those that do not."""
    _wait(lambda: [child for child in children() if child.cleans], _CLEANERS_SECONDS, reap)
    traces: set[Path] = set()
    for child in children():
        traces |= traces_of(child.pid)
        with suppress(OSError):
            os.kill(child.pid, signal.SIGKILL)
    reap()
    _remove(traces)


def wait_for(which: Callable[[Child], bool], seconds: float, reap: Callable[[], None]) -> None:
    """Return when the children that `which` picks, cleaners left out, are gone, or after `seconds`."""
    _wait(lambda: [child for child in filter(which, children()) if not child.cleans], seconds, reap)


def _wait(there: Callable[[], list[Child]], seconds: float, reap: Callable[[], None]) -> None:
    deadline = time.monotonic() + seconds
    while True:
        reap()
        if not there() or time.monotonic() > deadline:
            return
        time.sleep(_LOOK_SECONDS)


def traces_of(pid: int) -> set[Path]:
    """What a process would leave behind if it were killed now: named shared memory, folders of its sockets."""
    found = {Path(name) for name in _SHARED_MEMORY.findall(_read(f"/proc/{pid}/maps").decode(errors="replace"))}
    inodes = set()
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                inodes.add(os.readlink(entry.path).encode())  # noqa: PTH115  # thousands of them
    for line in _read("/proc/net/unix").splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and b"socket:[%b]" % fields[6] in inodes:
            folder = Path(os.fsdecode(fields[7])).parent
            if _SOCKET_FOLDER.search(str(folder)):
                found.add(folder)
    return found


def _remove(traces: Iterable[Path]) -> None:
    for path in traces:
        if _SOCKET_FOLDER.search(str(path)):
            shutil.rmtree(path, ignore_errors=True)
        elif path.parent == Path("/dev/shm"):  # noqa: S108
            with suppress(OSError):
                path.unlink()


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # it is gone, or another user's
        return b""
