"""The warm server: imports torch, then forks a worker for each `Start`; runs no tensor operation and no thread.

Started by `client.WarmServer` as a process of its own, never imported by the launcher.
"""

import gc
import os
import random
import select
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import current_process
from pathlib import Path
from threading import main_thread
from typing import Any

from ddp_kit.contract import IMPORT_TIME_VARIABLES, THREADS
from ddp_kit.launcher.warm import script
from ddp_kit.launcher.warm.dying import die_with_parent
from ddp_kit.launcher.warm.messages import Channel, ClosedError, Ended, Program, Start, Started

_PRELOADED = ("torch", "torch.distributed", "torch.utils.data", "torch.nn.parallel")
# What DistributedDataParallel and optimizers import when the first one is made; too long to let the first start wait.
_PRELOADED_WHEN_IDLE = ("torch._dynamo",)
_IDLE_SECONDS = 5.0
_OWN_FAULTS = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
    signal.SIGTRAP,
    signal.SIGSYS,
}


@dataclass(frozen=True)
class _Dispositions:
    mask: set[int]
    child_ended: Any


def main(descriptor: int, hidden: tuple[str, ...]) -> None:
    """Serve until the launcher goes. In a worker `serve` returns, and the worker becomes its script.

    `hidden`: variables that were set for this server alone.
    """
    # What is sent to the whole job is for its workers, who would all die with this process. Blocked rather than
    # ignored: a worker takes back what it inherited, and a signal that has come meanwhile is delivered to it.
    inherited = _Dispositions(
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _OWN_FAULTS),
        signal.signal(signal.SIGCHLD, signal.SIG_DFL),  # ignored, it would hide how workers end
    )
    channel = Channel(socket.socket(fileno=descriptor))
    program = _Server(channel, hidden, _preload(_PRELOADED)).serve()
    signal.signal(signal.SIGCHLD, inherited.child_ended)
    signal.pthread_sigmask(signal.SIG_SETMASK, inherited.mask)
    script.become(program)


def _preload(names: tuple[str, ...]) -> str:
    """Import what workers need; returns why that cannot be."""
    try:
        for name in names:
            import_module(name)
    except BaseException as error:  # the worker, started cold, will show it
        return f"torch cannot be imported here ({type(error).__name__}: {error})"
    gc.collect()
    gc.freeze()  # a collection in a worker shall not touch, and so copy, what all of them share
    return ""


class _Server:
    def __init__(self, channel: Channel, hidden: tuple[str, ...], broken: str) -> None:
        self._channel = channel
        self._broken = broken
        self._env = {name: value for name, value in os.environ.items() if name not in hidden}
        self._running: dict[int, tuple[int, int]] = {}  # pidfd -> worker's number, pid
        self._modules = _top_level_modules()

    def serve(self) -> Program:
        """Fork workers and report their ends; returns in the workers only."""
        idle: float | None = _IDLE_SECONDS
        try:
            while True:
                ready, _, _ = select.select([self._channel.fileno(), *self._running], [], [], idle)
                if not ready:
                    idle = None
                    _preload(_PRELOADED_WHEN_IDLE)  # restarts find it there; where it cannot be had, they do without
                    self._modules = _top_level_modules()
                for pidfd in self._running.keys() & ready:
                    self._report_end(pidfd)
                if self._channel.fileno() in ready:
                    for message in self._channel.receive():
                        if isinstance(message, Start) and self._start(message):
                            return message.program
        except ClosedError:
            os._exit(0)  # workers die with this process

    def _start(self, start: Start) -> bool:
        """Fork; True in the worker."""
        refusal = self._broken or self._obstacle(start)
        if refusal:
            self._channel.send(Started(start.number, 0, refusal))
            return False
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._channel.send(Started(start.number, 0, f"the system refuses another process ({error.strerror})"))
            return False
        if pid == 0:
            self._leave(parent)
            _set_up(start)
            return True
        self._running[os.pidfd_open(pid)] = start.number, pid
        self._channel.send(Started(start.number, pid))
        return False

    def _obstacle(self, start: Start) -> str:
        """Why a worker forked now would not be like one started by python; empty where nothing is in the way."""
        if len(list(Path("/proc/self/task").iterdir())) != 1:
            return "an import has started a thread"
        if sys.modules["torch"].cuda.is_initialized():
            return "an import has initialised CUDA"
        if any(_points_to(link, "/dev/nvidia") for link in Path("/proc/self/fd").iterdir()):
            return "an import has opened a GPU"
        for name in {*start.env, *self._env}:
            if (
                name.startswith(IMPORT_TIME_VARIABLES)
                and name != THREADS
                and start.env.get(name) != self._env.get(name)
            ):
                return f"its {name} differs from the launcher's, and imports read it"
        return script.obstacle(start.program, self._modules)

    def _leave(self, parent: int) -> None:
        """The worker's first steps: it dies with the server, and holds nothing of it."""
        die_with_parent(parent)
        os.setsid()
        self._channel.close()
        for descriptor in self._running:
            os.close(descriptor)

    def _report_end(self, pidfd: int) -> None:
        number, pid = self._running.pop(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._channel.send(Ended(number, os.waitstatus_to_exitcode(status)))


def _top_level_modules() -> frozenset[str]:
    return frozenset(name for name in sys.modules if "." not in name)


def _points_to(link: Path, beginning: str) -> bool:
    try:
        return str(link.readlink()).startswith(beginning)
    except OSError:  # the listing's own descriptor
        return False


def _set_up(start: Start) -> None:
    """Give this worker what python would have given it."""
    for path, stream in ((start.stdout, 1), (start.stderr, 2)):
        if path:
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            except OSError as error:
                sys.stderr.write(f"ddpkit: the log {path} cannot be written: {error.strerror}\n")
                os._exit(1)
            os.dup2(descriptor, stream)
            os.close(descriptor)
    if start.cpus:
        os.sched_setaffinity(0, start.cpus)
    _set_threads(start.env.get(THREADS, ""))
    for name in set(os.environ).difference(start.env):  # last: some imports set variables
        del os.environ[name]
    os.environ.update(start.env)
    _reseed()
    main_thread()._set_native_id()  # type: ignore[attr-defined]  # Python 3.11 leaves it at the parent's
    script.set_title(start.program)


def _set_threads(words: str) -> None:
    """torch's and BLAS's threads as they would be in a fresh process: this one's BLAS was held to a single thread."""
    torch = sys.modules["torch"]
    threads = int(words) if words.isdecimal() and int(words) > 0 else 0
    if threads and threads != torch.get_num_threads():  # a needless call changes how many threads later ones start
        torch.set_num_threads(threads)
    if threads != 1:
        limits: Callable[..., object] = import_module("threadpoolctl").threadpool_limits
        limits(threads or len(os.sched_getaffinity(0)), user_api="blas")


def _reseed() -> None:
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in sys.modules:
        numpy.random.seed()
    sys.modules["torch"].default_generator.seed()
    current_process().authkey = os.urandom(32)
