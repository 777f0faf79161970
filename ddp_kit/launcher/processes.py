"""Clean-up by the warm server when a job ends: ends all processes of the job, and removes the files that they left."""

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

from ddp_kit.env import CHECKPOINT_WRITER

_SET_PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)

# Helper processes that remove shared memory once their clients have ended, and then exit on their own.
_CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
# The server waits for these helpers, because only they know the names of that memory. torch_shm_manager exits two
# seconds after its last client, or later on a busy machine.
_CLEANERS_SECONDS = 5.0
_TERM_SECONDS = 0.2
_POLL_SECONDS = 0.01
# A process in uninterruptible sleep in the kernel survives SIGKILL. This limits the time spent waiting for it.
_UNKILLABLE_SECONDS = 5.0
# Shared memory that libraries name, and the socket folders of multiprocessing and torch_shm_manager.
_SHARED_MEMORY = re.compile(r"(/dev/shm/(?:torch_|nccl-)\S+)$", re.MULTILINE)
_SOCKET_FOLDER = re.compile(r"/(pymp|torch-shm-dir)-[^/]+$")


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send a signal to this process when the thread that forked it ends. Works only on Linux.

    `parent`: the process id of the parent. If the parent has already died, this process exits at once.
    """
    _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, number)
    if os.getppid() != parent:
        os._exit(0)


def outlive_parent() -> None:
    """Undo `die_with_parent`, so that this process can clean up after its parent has died.

    When the parent dies, the kernel then sends SIGCONT, which only continues a stopped process, instead of SIGKILL.
    """
    _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGCONT)


def adopt_orphans(adopts: bool = True) -> None:
    """Make every descendant that is orphaned from now on a child of this process, or no longer."""
    _LIBC.prctl(_SET_CHILD_SUBREAPER, int(adopts))


def state(pid: int) -> str:
    """The letter for a process's state (see proc(5)), or an empty string if there is no such process."""
    return _read(f"/proc/{pid}/stat").rpartition(b") ")[2][:1].decode()


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP or another job control signal has stopped a process."""
    return state(pid) == "T"


@dataclass(frozen=True)
class Child:
    """A child of this process."""

    pid: int
    session: int

    @property
    def command(self) -> bytes:
        """The command line, with its arguments separated by NUL bytes; empty for a zombie."""
        return _read(f"/proc/{self.pid}/cmdline")

    @property
    def name(self) -> str:
        """The command line or, if there is none, the name in brackets as in `ps`; empty if the child has ended."""
        command_line = self.command.replace(b"\0", b" ").decode(errors="replace").strip()
        before, _, after = _read(f"/proc/{self.pid}/stat").rpartition(b") ")
        if command_line or not after or after[:1] in b"ZX":
            return command_line
        return f"[{before.partition(b'(')[2].decode(errors='replace')}]"

    @property
    def is_writer(self) -> bool:
        """Whether the child writes checkpoints. It exits once its save is complete and its rank has ended."""
        return CHECKPOINT_WRITER.encode() in self.command

    @property
    def is_cleaner(self) -> bool:
        """Whether the child is a helper that removes shared memory and then exits on its own."""
        return any(name in self.command for name in _CLEANERS)


def has_children() -> bool:
    """Whether this process has children that have not been waited for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def children() -> list[Child]:
    """The children of this process that have not been waited for, including zombies.

    A killed process with several threads is a zombie that cannot be waited for until its last thread has ended. Only
    then do the children of the killed process become children of this one.
    """
    if not has_children():  # as is usual at the end of a job; a search would take milliseconds
        return []
    pid = str(os.getpid()).encode()
    result = []
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            fields = _read(f"/proc/{entry.name}/stat").rpartition(b") ")[2].split()  # state, parent, group, session
            if len(fields) > 3 and fields[1] == pid:
                result.append(Child(int(entry.name), int(fields[3])))
    return result


def signal_children(which: Callable[[Child], bool], number: signal.Signals, leftovers: set[Path]) -> bool:
    """Send the signal `number` to the children that `which` selects. Returns whether there was any such child.

    Helpers that remove shared memory (see `Child.is_cleaner`) are skipped. The files that the signalled children would
    leave behind are added to `leftovers`.
    """
    selected = [child for child in filter(which, children()) if not child.is_cleaner]
    for child in selected:
        leftovers |= leftovers_of(child.pid)
        with suppress(OSError):
            os.kill(child.pid, number)
    return bool(selected)


def end_children(
    which: Callable[[Child], bool], reap: Callable[[], None], gently: bool = False, leftovers: set[Path] | None = None
) -> None:
    """End the children that `which` selects, and the orphans that these children leave behind.

    Helpers that remove shared memory (see `Child.is_cleaner`) are skipped. `reap`: a function that waits for ended
    children. `gently`: whether to send SIGTERM before SIGKILL. `leftovers`: files to remove in addition to those that
    the ended processes leave behind.
    """
    if leftovers is None:
        leftovers = set()
    if gently and signal_children(which, signal.SIGTERM, leftovers):
        wait_for(which, _TERM_SECONDS, reap)
    deadline = time.monotonic() + _UNKILLABLE_SECONDS
    while signal_children(which, signal.SIGKILL, leftovers) and time.monotonic() < deadline:
        wait_for(which, _POLL_SECONDS, reap)
    reap()
    _remove(leftovers)


def end_cleaners(reap: Callable[[], None]) -> None:
    """Wait for the helpers that remove shared memory (see `Child.is_cleaner`), then kill the children that remain.

    Called after all other children have ended. `reap`: a function that waits for ended children.
    """
    leftovers: set[Path] = set()
    for child in children():  # while their sockets are open: a helper that is killed during its exit has none
        leftovers |= leftovers_of(child.pid)
    _wait(lambda: [child for child in children() if child.is_cleaner], _CLEANERS_SECONDS, reap)
    for child in children():
        leftovers |= leftovers_of(child.pid)
        with suppress(OSError):
            os.kill(child.pid, signal.SIGKILL)
    reap()
    _remove(leftovers)


def wait_for(which: Callable[[Child], bool], seconds: float, reap: Callable[[], None]) -> None:
    """Wait until the children that `which` selects have ended, but at most `seconds`.

    Helpers that remove shared memory (see `Child.is_cleaner`) are not waited for.
    """
    _wait(lambda: [child for child in filter(which, children()) if not child.is_cleaner], seconds, reap)


def _wait(remaining: Callable[[], list[Child]], seconds: float, reap: Callable[[], None]) -> None:
    deadline = time.monotonic() + seconds
    while True:
        reap()
        if not remaining() or time.monotonic() > deadline:
            return
        time.sleep(_POLL_SECONDS)


def leftovers_of(pid: int) -> set[Path]:
    """The files that a process would leave behind if it were killed now: shared memory and socket folders."""
    paths = {Path(name) for name in _SHARED_MEMORY.findall(_read(f"/proc/{pid}/maps").decode(errors="replace"))}
    inodes = set()
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                inodes.add(os.readlink(entry.path).encode())  # noqa: PTH115  # faster, because there may be thousands
    for line in _read("/proc/net/unix").splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and b"socket:[%b]" % fields[6] in inodes:
            folder = Path(os.fsdecode(fields[7])).parent
            if _SOCKET_FOLDER.search(str(folder)):
                paths.add(folder)
    return paths


def _remove(leftovers: Iterable[Path]) -> None:
    for path in leftovers:
        if _SOCKET_FOLDER.search(str(path)):
            shutil.rmtree(path, ignore_errors=True)
        elif path.parent == Path("/dev/shm"):  # noqa: S108
            with suppress(OSError):
                path.unlink()


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # the process has ended, or belongs to another user
        return b""
