"""Forward signals that a rank sends to its parent, as preemption handlers do: `os.kill(os.getppid(), SIGTERM)`.

The rank means the launcher, but its parent is the warm server, which blocks these signals. A signal to the whole job,
as from `scancel`, is not forwarded: it reaches the launcher anyway, and a second one would make it kill the ranks.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_SIGSET_BYTES = 128  # sizeof(sigset_t) of glibc and musl


class ParentSignals:
    """Forwards to the launcher the first of these signals that a descendant of this process sends."""

    def __init__(self, launcher: int) -> None:
        """`launcher`: its process id. The signals must be blocked."""
        self._launcher = launcher
        self._has_forwarded = False
        signals = sum(1 << (number - 1) for number in _STOPPING).to_bytes(_SIGSET_BYTES, sys.byteorder)
        self._descriptor: int = ctypes.CDLL(None).signalfd(-1, signals, os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        """The descriptor for `select`: readable when a signal is pending. A forked worker closes it."""
        return self._descriptor

    def forward(self) -> None:
        """Consume all pending signals. If several ranks send one, only the first is forwarded."""
        while (found := signal.sigtimedwait(_STOPPING, 0)) is not None:
            if not self._has_forwarded and _is_descendant(found.si_pid) and os.getppid() == self._launcher:
                self._has_forwarded = True
                os.kill(self._launcher, found.si_signo)


def _is_descendant(pid: int) -> bool:
    """Whether a process, possibly a zombie, is a descendant of this one."""
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it is gone
            return False
        if pid == os.getpid():
            return True
    return False
