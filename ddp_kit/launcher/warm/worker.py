"""Set up a forked worker like a new Python process, or execute another program."""

import os
import random
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import current_process
from threading import main_thread
from typing import Any, NoReturn

from ddp_kit.env import BLAS_THREADS, THREADS
from ddp_kit.launcher.warm import script
from ddp_kit.launcher.warm.messages import Start
from ddp_kit.launcher.warm.observation import allow_inspection_by, count_collectives, write_stacks_on_signal

_CANNOT_EXECUTE = 127  # as in a shell
_SET_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores these; other programs expect the default


@dataclass(frozen=True)
class Inherited:
    """The signal state before the server changed it; a worker restores it."""

    mask: set[signal.Signals | int]
    child_ended: Any
    descriptors: tuple[int, ...]
    """The server's descriptors for the ends of children and for signals."""

    def restore(self) -> None:
        """Restore it; pending signals are delivered now."""
        signal.set_wakeup_fd(-1)
        for descriptor in self.descriptors:
            os.close(descriptor)
        signal.signal(signal.SIGCHLD, self.child_ended)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)


def execute(start: Start, streams: Sequence[int], inherited: Inherited, errors: int) -> NoReturn:
    """Execute the worker's command; if that fails, write the reason to the descriptor `errors`."""
    try:
        _set_streams_and_cores(start, streams)
        for number in _SET_BY_PYTHON:
            signal.signal(number, signal.SIG_DFL)
        inherited.restore()
        os.execvpe(start.command[0], start.command, start.env)  # noqa: S606  # no shell is wanted
    except OSError as error:
        os.write(errors, (error.strerror or str(error)).encode())
    finally:
        os._exit(_CANNOT_EXECUTE)


def set_up(start: Start, streams: Sequence[int], launcher: int) -> None:
    """Give a forked worker the state of a new Python process, and permit the launcher to inspect it."""
    assert start.program is not None
    _set_streams_and_cores(start, streams)
    _set_threads(start.env)
    for name in set(os.environ).difference(start.env):  # last, because some imports set variables
        del os.environ[name]
    os.environ.update(start.env)
    _reseed()
    _init_loguru()
    main_thread()._set_native_id()  # type: ignore[attr-defined]  # Python 3.11 leaves it at the parent's
    script.set_title(start.program)
    allow_inspection_by(launcher)
    os.register_at_fork(after_in_child=lambda: allow_inspection_by(launcher))  # DataLoader workers
    if start.stacks:
        write_stacks_on_signal(start.stacks)
    if start.count_interval:
        count_collectives(start.count_interval)


def _set_streams_and_cores(start: Start, streams: Sequence[int]) -> None:
    for number, descriptor in enumerate(streams, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if start.cpus:
        os.sched_setaffinity(0, start.cpus)


def _set_threads(env: Mapping[str, str]) -> None:
    """Give torch and BLAS the number of threads that they would have in a new process with this environment.

    OpenMP has read the server's environment, and torch asks it and MKL, which allows one thread per core, at its first
    operation in this process. Only the launcher's own value, which is not above the number of cores, is set here.
    """
    torch, value = sys.modules["torch"], env.get(THREADS, "")
    is_launchers = value.isdecimal() and value != os.environ.get(THREADS)
    if is_launchers and int(value) != torch.get_num_threads():  # a redundant call: later calls start other threads
        torch.set_num_threads(int(value))
    if not _leading_number(env.get(BLAS_THREADS, "")):  # else the server's BLAS has read it
        cores = len(os.sched_getaffinity(0))
        threads = min(_leading_number(value) or cores, cores)
        if threads != 1:  # the server's number
            limits: Callable[..., object] = import_module("threadpoolctl").threadpool_limits
            limits(threads, user_api="blas")


def _leading_number(text: str) -> int:
    """The positive number that a text begins with, as OpenBLAS reads it; 0: none."""
    found = re.match(r"\s*\+?(\d+)", text)
    return int(found[1]) if found else 0


def _init_loguru() -> None:
    """Add loguru's default handler, which the server disabled while it imported loguru."""
    if "loguru" in sys.modules:
        defaults = import_module("loguru._defaults")
        if defaults.env("LOGURU_AUTOINIT", bool, True):
            sys.modules["loguru"].logger.add(sys.stderr)


def _reseed() -> None:
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in sys.modules:
        numpy.random.seed()
    sys.modules["torch"].default_generator.seed()
    current_process().authkey = os.urandom(32)
