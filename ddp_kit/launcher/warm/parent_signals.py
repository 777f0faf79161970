"""Signals that a rank sends to its parent process, as preemption handlers do: `os.kill(os.getppid(), SIGTERM)`.

The parent is the server, which blocks them; the rank means the launcher. A signal to the whole job, as `scancel` sends
it, reaches the launcher by itself: passed on, it would count there as a second one, and end the ranks at once.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_SIGSET_BYTES = 128  # sizeof(sigset_t) of glibc and musl


class ParentSignals:
    """Passes the first of these signals that comes from a descendant of this process on to the launcher."""

    def __init__(self, launcher: int) -> None:
        """`launcher`: its process. The signals have to be blocked."""
        self._launcher = launcher
        self._is_passed = False
        signals = sum(1 << (number - 1) for number in _STOPPING).to_bytes(_SIGSET_BYTES, sys.byteorder)
        self._descriptor: int = ctypes.CDLL(None).signalfd(-1, signals, os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        """For `select`: readable when a signal is pending. A forked worker closes it."""
        return self._descriptor

    def pass_on(self) -> None:
        """Take all pending signals. Several ranks may send one each, and mean the same."""
        while (found := signal.sigtimedwait(_STOPPING, 0)) is not None:
            if not self._is_passed and _is_descendant(found.si_pid) and os.getppid() == self._launcher:
                self._is_passed = True
                os.kill(self._launcher, found.si_signo)


def _is_descendant(pid: int) -> bool:
    """Whether a process, which may be a zombie by now, was started by this one or by a descendant of it."""
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it is gone
            return False
        if pid == os.getpid():
            return True
    return False
