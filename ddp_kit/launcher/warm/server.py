"""The warm server: imports torch, starts a worker for each `Start`, and ends what a job leaves behind.

    import torch                     (not with --cold: then it only starts, watches and clears)
    loop:
        Start         fork a worker, or execute it where a fork would not be like one started by python
        Kill, Clear   end a worker with all that it started; end what the workers of a round have left
        a child ends  tell the launcher
        end of file   the launcher is gone: end everything, remove its folder, go

It runs no tensor operation and no thread. Every descendant whose parent dies becomes its child, so that none gets out
of sight. Started by `client.WarmServer` as a process of its own, never imported by the launcher.
"""

import gc
import os
import re
import select
import shutil
import signal
import socket
import sys
from collections import deque
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from ddp_kit.env import CHECKPOINT_WRITER, IMPORT_TIME_VARIABLES, START_TIME_VARIABLES, THREADS
from ddp_kit.launcher.masking import masked
from ddp_kit.launcher.warm import script, worker
from ddp_kit.launcher.warm.dying import (
    Child,
    adopt_orphans,
    children,
    die_with_parent,
    end_children,
    end_cleaners,
    outlive_parent,
    strike,
    wait_for,
)
from ddp_kit.launcher.warm.messages import (
    Channel,
    Clear,
    ClosedError,
    Ended,
    Kill,
    Message,
    Owns,
    Program,
    Start,
    Started,
)
from ddp_kit.launcher.warm.parent_signals import ParentSignals
from ddp_kit.launcher.warm.script_text import imported_later

_PRELOADED = ("torch", "torch.distributed", "torch.utils.data", "torch.nn.parallel")
# Its own handler looks whether there is a terminal: that is the affair of the worker.
_WITHOUT_LOG = {"LOGURU_AUTOINIT": "False"}
_LEAVING_SECONDS = 2.0  # for what a worker that ended well has started: most of it ends by itself, if given the time
_OWN_FAULTS = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
    signal.SIGTRAP,
    signal.SIGSYS,
}


def main(descriptor: int, launcher: int, warm: bool, hidden: tuple[str, ...]) -> None:
    """Serve until the launcher goes. In a forked worker `serve` returns, and the worker becomes its script.

    Nothing may follow the script but `gc.unfreeze` and this function's own return: then the interpreter finalises the
    worker itself.

    `launcher`: its process. `hidden`: variables that were set for this server alone.
    """
    die_with_parent(launcher)  # as long as there is no worker, nothing else has to be cleared up
    adopt_orphans()
    # What is sent to the whole job is for its workers, who would all die with this process. Blocked rather than
    # ignored: a worker takes back what it inherited, and a signal that has come meanwhile is delivered to it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _OWN_FAULTS - {signal.SIGCHLD})
    wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    parent_signals = ParentSignals(launcher)
    closed = (*wakes, parent_signals.fileno())
    inherited = worker.Inherited(mask, signal.signal(signal.SIGCHLD, _wake), closed)
    signal.set_wakeup_fd(wakes[1], warn_on_full_buffer=False)
    os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=descriptor))
    broken = _preload(_PRELOADED) if warm else ""
    server = _Server(channel, launcher, inherited, parent_signals, wakes[0], warm, broken, hidden)
    outlive_parent()
    if os.getppid() == launcher:
        program = server.serve()
        inherited.restore()
        del server, channel, inherited, parent_signals  # no object of the server outlives the start of the script
        try:
            script.become(program)
        finally:
            if _has_nanobind():
                gc.unfreeze()


def _has_nanobind() -> bool:
    """Whether the interpreter will write lines to stderr about objects that were never collected.

    Objects that the server froze are among them, so they are given back to the collector, whose last pass then takes a
    second, as in plain Python. nanobind is in triton from 3.9 on (torch 2.15).
    """
    version = getattr(sys.modules.get("triton"), "__version__", "")
    return tuple(map(int, re.findall(r"\d+", version)[:2])) >= (3, 9)


def _wake(*_: object) -> None:
    """Python's handler of SIGCHLD: the byte in the pipe is what wakes the server."""


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
    def __init__(
        self,
        channel: Channel,
        launcher: int,
        inherited: worker.Inherited,
        parent_signals: ParentSignals,
        wakes: int,
        warm: bool,
        broken: str,
        hidden: tuple[str, ...],
    ) -> None:
        self._launcher = launcher
        self._channel = channel
        self._inherited = inherited
        self._parent_signals = parent_signals
        self._wakes = wakes  # readable when a child has ended
        self._warm = warm
        self._broken = broken
        self._env = {name: value for name, value in os.environ.items() if name not in hidden}
        self._modules = _top_level_modules()
        self._preloaded: tuple[str, ...] = ()  # besides _PRELOADED
        self._waiting: deque[Message] = deque()
        self._running: dict[int, int] = {}  # pid -> the worker's number
        self._traces: set[Path] = set()
        self._left_saving: set[int] = set()  # processes
        self._folders: list[str] = []

    def serve(self) -> Program:
        """Start workers and report their ends; returns in the forked workers only."""
        watched = [self._channel.fileno(), self._wakes, self._parent_signals.fileno()]
        while True:
            select.select(watched, [], [])
            self._attend()
            while self._waiting:
                program = self._act(self._waiting.popleft())
                if program is not None:
                    return program

    def _attend(self) -> None:
        """Report who has ended, and take what has come: a kill is done at once, before what came earlier."""
        self._parent_signals.pass_on()  # first: a sender that has ended is known until it is reaped
        self._reap()
        while select.select([self._channel], [], [], 0)[0]:
            try:
                for message in self._channel.receive():
                    if isinstance(message, Kill):
                        self._kill(message.number)
                    else:
                        self._waiting.append(message)
            except ClosedError:
                self._end()

    def _preload_more(self, names: tuple[str, ...]) -> bool:
        """Whether there was anything to import: at the first start, before any worker needs to be looked after.

        Where it is not available, workers do without.
        """
        if names == self._preloaded:
            return False
        self._preloaded = names
        before = dict(os.environ)
        os.environ.update(_WITHOUT_LOG)
        _preload(names)
        for name in _WITHOUT_LOG:
            del os.environ[name]
        os.environ.update(before)
        self._modules = _top_level_modules()
        return True

    def _act(self, message: Message) -> Program | None:
        if isinstance(message, Start):
            return self._start(message)
        if isinstance(message, Clear):
            self._clear(message.well)
        elif isinstance(message, Owns):
            self._folders.append(message.folder)
        return None

    # Starting ----------------------------------------------------------------------------------------------------

    def _start(self, start: Start) -> Program | None:
        """Start a worker; returns its program in one that was forked."""
        streams = self._channel.take_descriptors(2) if start.streams else []
        cold, warm = "", None
        if start.program is not None and self._warm:
            cold = self._obstacle(start)
            if not cold and self._preload_more(imported_later(start.program)):
                cold = self._obstacle(start)  # what was imported may be one
            warm = None if cold else start.program
        parent = os.getpid()
        errors, tell = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError as error:
            pid, cold = 0, ""
            self._tell(Started(start.number, 0, error=f"the system refuses another process: {error.strerror}"))
        else:
            if pid == 0:
                die_with_parent(parent)
                os.setsid()
                self._channel.close()
                os.close(errors)
                if warm is None:
                    worker.execute(start, streams, self._inherited, tell)
                os.close(tell)
                worker.set_up(start, streams, self._launcher)
                return warm
        for descriptor in (tell, *streams):
            os.close(descriptor)
        with os.fdopen(errors, "rb") as pipe:  # its other end is closed by the worker's execve
            error_text = pipe.read().decode() if pid and warm is None else ""
        if pid:
            self._running[pid] = start.number
            self._tell(Started(start.number, pid, cold, error_text))
        return None

    def _obstacle(self, start: Start) -> str:
        """Why a worker forked now would not be like one started by python; empty where nothing is in the way."""
        assert start.program is not None
        if self._broken:
            return self._broken
        if len(list(Path("/proc/self/task").iterdir())) != 1:
            return "an import has started a thread"
        if sys.modules["torch"].cuda.is_initialized():
            return "an import has initialised CUDA"
        if any(_points_to(link, "/dev/nvidia") for link in Path("/proc/self/fd").iterdir()):
            return "an import has opened a GPU"
        for name in {*start.env, *self._env}:
            if (
                name.startswith(IMPORT_TIME_VARIABLES + START_TIME_VARIABLES)
                and name != THREADS
                and start.env.get(name) != self._env.get(name)
            ):
                return f"its {name} differs from the launcher's, and imports read it"
        return script.obstacle(start.program, start.env, self._modules)

    # Ending ------------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Take every child that has ended, report the workers among them, and end what failed ones have left."""
        with suppress(BlockingIOError):
            os.read(self._wakes, 4096)
        failed = set()
        with suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG):
                pid, status = ended
                if pid == 0:
                    break
                if pid in self._running:
                    code = os.waitstatus_to_exitcode(status)
                    self._tell(Ended(self._running.pop(pid), code))
                    if code != 0:
                        failed.add(pid)
        if failed:
            strike(lambda child: child.session in failed and self._is_orphan(child), signal.SIGKILL, self._traces)

    def _kill(self, number: int) -> None:
        """End one worker at once; what it leaves follows when it is reaped."""
        strike(lambda child: self._running.get(child.pid) == number, signal.SIGKILL, self._traces)

    def _clear(self, well: bool) -> None:
        """End what the workers of a round have left, and say what that was where nobody failed.

        A save that a failed round has in hand is left to be finished: the next round waits for it and resumes from it.
        It is not left a second time.
        """
        saving: set[int] = (
            set() if well else {child.pid for child in children() if CHECKPOINT_WRITER.encode() in child.command}
        )
        saving -= self._left_saving
        self._left_saving = saving
        strike(lambda child: child.pid in saving, signal.SIGCONT, set())
        if well:
            wait_for(self._is_orphan, _LEAVING_SECONDS, self._reap)
            for child in filter(self._is_orphan, children()):
                if not child.cleans and (command := masked(child.name, self._env)):
                    sys.stderr.write(f"ddpkit: ended what a process of the job had left running: {command}\n")
        end_children(
            lambda child: self._is_orphan(child) and child.pid not in saving,
            self._reap,
            gently=True,
            traces=self._traces,
        )

    def _is_orphan(self, child: Child) -> bool:
        return child.pid not in self._running

    def _end(self) -> NoReturn:
        """The launcher is gone."""
        end_children(lambda child: child.pid in self._running, self._reap, traces=self._traces)
        end_children(self._is_orphan, self._reap, gently=True, traces=self._traces)
        end_cleaners(self._reap)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    def _tell(self, message: Message) -> None:
        with suppress(ClosedError):  # the end of file comes next
            self._channel.send(message)


def _top_level_modules() -> frozenset[str]:
    return frozenset(name for name in sys.modules if "." not in name)


def _points_to(link: Path, beginning: str) -> bool:
    try:
        return str(link.readlink()).startswith(beginning)
    except OSError:  # the listing's own descriptor
        return False
