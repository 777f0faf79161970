"""No worker outlives who started it."""

import ctypes
import os
import signal

_SET_PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
_LIBC = ctypes.CDLL(None)


def die_with_parent(parent: int) -> None:
    """From now on the kernel ends this process when the thread that forked it ends. Linux only.

    `parent`: the process that forked this one; it may have died before this was set.
    """
    _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
