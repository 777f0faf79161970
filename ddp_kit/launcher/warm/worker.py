"""A worker's first steps: what python, or `subprocess`, would have given it."""

import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import current_process
from threading import main_thread
from typing import Any, NoReturn

from ddp_kit.env import THREADS
from ddp_kit.launcher.warm import script
from ddp_kit.launcher.warm.messages import Start
from ddp_kit.launcher.warm.observation import answer_with_stacks, count_collectives, may_be_seen_by

_CANNOT_EXECUTE = 127  # the shell's exit code for it
_SET_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)  # ignored by the interpreter for itself


@dataclass(frozen=True)
class Inherited:
    """What the server has changed for itself, and a worker takes back."""

    mask: set[signal.Signals | int]
    child_ended: Any
    descriptors: tuple[int, ...]
    """By which a child's end, or a signal, wakes the server."""

    def restore(self) -> None:
        """Take it back; a signal that has come meanwhile is delivered now."""
        signal.set_wakeup_fd(-1)
        for descriptor in self.descriptors:
            os.close(descriptor)
        signal.signal(signal.SIGCHLD, self.child_ended)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)


def execute(start: Start, streams: Sequence[int], inherited: Inherited, tell: int) -> NoReturn:
    """Become another program; where that fails, `tell` is told why."""
    try:
        _take(start, streams)
        for number in _SET_BY_PYTHON:
            signal.signal(number, signal.SIG_DFL)
        inherited.restore()
        os.execvpe(start.command[0], start.command, start.env)  # noqa: S606  # no shell is wanted
    except OSError as error:
        os.write(tell, (error.strerror or str(error)).encode())
    finally:
        os._exit(_CANNOT_EXECUTE)


def set_up(start: Start, streams: Sequence[int], launcher: int) -> None:
    """Give a forked worker what python would have given it, and the launcher leave to look at it."""
    assert start.program is not None
    _take(start, streams)
    _set_threads(start.env.get(THREADS, ""))
    for name in set(os.environ).difference(start.env):  # last: some imports set variables
        del os.environ[name]
    os.environ.update(start.env)
    _reseed()
    _begin_log()
    main_thread()._set_native_id()  # type: ignore[attr-defined]  # Python 3.11 leaves it at the parent's
    script.set_title(start.program)
    may_be_seen_by(launcher)
    os.register_at_fork(after_in_child=lambda: may_be_seen_by(launcher))  # DataLoader workers
    if start.stacks:
        answer_with_stacks(start.stacks)
    if start.counts_every:
        count_collectives(start.counts_every)


def _take(start: Start, streams: Sequence[int]) -> None:
    for number, descriptor in enumerate(streams, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if start.cpus:
        os.sched_setaffinity(0, start.cpus)


def _set_threads(words: str) -> None:
    """torch's and BLAS's threads as they would be in a fresh process: this one's BLAS was held to a single thread."""
    torch = sys.modules["torch"]
    threads = int(words) if words.isdecimal() and int(words) > 0 else 0
    if threads and threads != torch.get_num_threads():  # a needless call changes how many threads later ones start
        torch.set_num_threads(threads)
    if threads != 1:
        limits: Callable[..., object] = import_module("threadpoolctl").threadpool_limits
        limits(threads or len(os.sched_getaffinity(0)), user_api="blas")


def _begin_log() -> None:
    """What loguru does when it is imported, which the server has kept it from."""
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
