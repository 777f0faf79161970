"""The warm server, which imports torch, starts the workers, and ends processes that the job leaves behind."""

import ctypes
import gc
import os
import re
import select
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from ddp_kit import memory_folder
from ddp_kit.env import IMPORT_TIME_VARIABLES, START_TIME_VARIABLES, THREADS
from ddp_kit.launcher.processes import (
    Child,
    adopt_orphans,
    children,
    die_with_parent,
    end_children,
    end_cleaners,
    outlive_parent,
    signal_children,
    wait_for,
)
from ddp_kit.launcher.program import Program
from ddp_kit.launcher.warm import imports, traces, worker
from ddp_kit.launcher.warm.looks import Variables, variables_read
from ddp_kit.launcher.warm.messages import (
    Channel,
    Clear,
    Ended,
    FolderMade,
    Import,
    ImportDone,
    Keep,
    Kill,
    MakeFolder,
    Message,
    Start,
    Started,
)
from ddp_kit.launcher.warm.scan import later_imports, reason_for_cold_start
from ddp_kit.launcher.wire import ClosedError
from ddp_kit.masking import masked

# --- Signals from ranks -----------------------------------------------------------------------------------------------
# A preemption handler in a rank may signal its parent: `os.kill(os.getppid(), SIGTERM)`. The handler means the
# launcher, but the parent is the warm server, which blocks these signals and forwards them. A signal to the whole job,
# such as from `scancel`, is not forwarded: it reaches the launcher anyway, and a second signal would make the launcher
# kill the ranks.


_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_SIGSET_BYTES = 128  # sizeof(sigset_t) of glibc and musl


class ParentSignals:
    """Forwards to the launcher the first stop signal that a descendant of this process sends."""

    def __init__(self, launcher: int) -> None:
        """Open a descriptor for stop signals, which must be blocked already. `launcher`: the launcher's process id."""
        self._launcher = launcher
        self._has_forwarded = False
        signals = sum(1 << (number - 1) for number in _STOPPING).to_bytes(_SIGSET_BYTES, sys.byteorder)
        self._descriptor: int = ctypes.CDLL(None).signalfd(-1, signals, os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        """The descriptor for `select`: readable when a signal is pending. Forked workers close it."""
        return self._descriptor

    def forward(self) -> None:
        """Forward the first signal from a worker to the launcher, and discard the signals after it."""
        while (received := signal.sigtimedwait(_STOPPING, 0)) is not None:
            if not self._has_forwarded and _is_descendant(received.si_pid) and os.getppid() == self._launcher:
                self._has_forwarded = True
                os.kill(self._launcher, received.si_signo)


def _is_descendant(pid: int) -> bool:
    """Whether a process, possibly a zombie, is a descendant of this one."""
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # the process has ended
            return False
        if pid == os.getpid():
            return True
    return False


# --- Server -----------------------------------------------------------------------------------------------------------
#     import torch                     (not with --cold: the server then only starts and watches workers, and cleans up)
#     loop:
#         Keep          fork the kept process
#         Import        import what the script imports first
#         Start         fork a worker, or execute it if a fork would differ from a new interpreter
#         Kill, Clear   kill a worker and the processes it started; end what the workers of a round left behind
#         a child ends  report it to the launcher
#         end of file   the launcher has ended: end all processes, remove the launcher's folder, exit
#
# The server uses no tensor operations and no threads. Orphaned descendants become its children, so that it can end all
# of them. `client.WarmServer` starts the server as a separate process; the launcher never imports it.


PRELOADED = ("torch", "torch.distributed", "torch.utils.data", "torch.nn.parallel")
# loguru's default handler checks whether stderr is a terminal, which has to happen in the worker.
WITHOUT_LOG = {"LOGURU_AUTOINIT": "False"}
_LEAVING_SECONDS = 2.0  # most processes that successful workers leave behind exit on their own in this time
_SAVING_SECONDS = 4.0  # to complete saves when the job ends; shorter than `plan._FOR_THE_VERDICT`
_OWN_FAULTS = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
    signal.SIGTRAP,
    signal.SIGSYS,
}


def main(
    descriptor: int,
    launcher: int,
    forks: bool,
    hidden: tuple[str, ...],
    folder: str,
    imported: imports.Imported | None = None,
) -> tuple[Keep, Variables] | None:
    """Handle the launcher's requests until the launcher ends. In a forked worker, run the worker's script instead.

    Nothing but `gc.unfreeze` runs after the script, so that a worker exits as any Python interpreter does. In the
    kept process, return the arguments of `kept_process.main`, which the caller calls when this function's objects are
    gone.

    `launcher`: the launcher's process id. `forks`: whether to import torch and fork the workers. `hidden`: environment
    variables that are set only for this server. `folder`: the launcher's temporary folders that an earlier server has
    created, separated by `os.pathsep`. `imported`: what the script's imports did, if the kept process has made them.
    """
    die_with_parent(launcher)  # sufficient as long as there is no worker
    adopt_orphans()
    # Signals to the whole job are meant for the workers, which would die with this process. The signals are blocked
    # rather than ignored, so that a new worker receives pending ones when it restores the mask.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _OWN_FAULTS - {signal.SIGCHLD})
    wake_pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    parent_signals = ParentSignals(launcher)
    descriptors = [*wake_pipe, parent_signals.fileno()]
    inherited = worker.Inherited(mask, signal.signal(signal.SIGCHLD, _wake), descriptors)
    signal.set_wakeup_fd(wake_pipe[1], warn_on_full_buffer=False)
    os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=descriptor))
    variables = Variables()
    with variables_read(variables):
        broken = _preload(PRELOADED) if forks else ""
    server = _Server(
        channel, launcher, inherited, parent_signals, wake_pipe[0], forks, broken, hidden, folder, imported
    )
    outlive_parent()
    if os.getppid() == launcher:
        program, main_module = server.serve()
        inherited.restore()
        if isinstance(program, Keep):
            return program, variables
        del server, channel, inherited, parent_signals  # so that the script starts without objects of the server
        try:
            worker.run_as_main(program, main_module)
        finally:
            # triton has contained nanobind since version 3.9 (torch 2.15). At interpreter exit, nanobind prints all
            # objects that were not garbage-collected. It would also print those that the server froze with `gc.freeze`,
            # so they are unfrozen first. The last garbage collection then takes a second, as in plain Python.
            version = getattr(sys.modules.get("triton"), "__version__", "")
            if tuple(map(int, re.findall(r"\d+", version)[:2])) >= (3, 9):
                gc.unfreeze()
    return None


def _wake(*_: object) -> None:
    """SIGCHLD handler that does nothing: Python also writes a byte to the wakeup pipe, which wakes the server."""


def _preload(names: tuple[str, ...]) -> str:
    """Import modules for the workers. Return the reason for a failure, or an empty string if all imports succeeded."""
    try:
        for name in names:
            import_module(name)
    except BaseException as error:  # a worker with a new interpreter will show the error
        return f"the warm server cannot import torch ({type(error).__name__}: {error})"
    gc.collect()
    gc.freeze()  # a collection in a worker would write to shared pages, and so copy them
    return ""


def import_modules(program: Program) -> None:
    """Import what a program will need beyond torch because it uses an optimizer or a Trainer.

    If that fails, the workers import the rest themselves.
    """
    before = dict(os.environ)
    os.environ.update(WITHOUT_LOG)
    _preload(later_imports(program))
    for name in WITHOUT_LOG:
        del os.environ[name]
    os.environ.update(before)


class _Server:
    def __init__(
        self,
        channel: Channel,
        launcher: int,
        inherited: worker.Inherited,
        parent_signals: ParentSignals,
        wake: int,
        forks: bool,
        broken: str,
        hidden: tuple[str, ...],
        folder: str,
        imported: imports.Imported | None,
    ) -> None:
        self._launcher = launcher
        self._channel = channel
        self._inherited = inherited
        self._parent_signals = parent_signals
        self._wake = wake  # readable when a child has ended
        self._forks = forks
        self._broken = broken
        self._env = {name: value for name, value in os.environ.items() if name not in hidden}
        self._hidden = {name: os.environ[name] for name in hidden}
        self._modules = _top_level_modules()
        self._imported = imported or imports.Imported()
        self._has_imported = imported is not None
        self._waiting: deque[Message] = deque()
        self._running: dict[int, int] = {}  # pid -> the worker's number
        self._leftovers: set[Path] = set()
        self._left_saving: set[int] = set()  # pids of the checkpoint writers that the latest `Clear` did not end
        self._failed = False  # whether a worker of the latest round has
        self._folders = [*filter(None, folder.split(os.pathsep))]
        for each in self._folders:
            inherited.descriptors.extend(memory_folder.claim(each))

    def serve(self) -> tuple[Program | Keep, ModuleType]:
        """Start workers, and report when they end.

        Returns only in a forked worker, with the program to run and the main module that its imports have seen; and in
        the kept process, with the request for it.
        """
        watched = [self._channel.fileno(), self._wake, self._parent_signals.fileno()]
        while True:
            select.select(watched, [], [])
            self._receive()
            while self._waiting:
                message = self._waiting.popleft()
                match message:
                    case Keep():
                        if self._fork_kept_process():
                            return message, ModuleType("__main__")
                    case Import():
                        self._import(message)
                    case Start():
                        program = self._start(message)
                        if program is not None:
                            return program, self._imported.main
                    case Clear(succeeded):
                        self._clear(succeeded)
                    case MakeFolder(parent, prefix):
                        folder = ""
                        with suppress(OSError):
                            folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
                            self._folders.append(folder)
                            self._inherited.descriptors.extend(memory_folder.claim(folder))
                        self._send(FolderMade(folder))

    def _receive(self) -> None:
        """Report ended workers and read messages. A `Kill` is executed immediately, before earlier messages."""
        self._parent_signals.forward()  # first, because the sender of a signal must not be reaped yet
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

    # Starting ---------------------------------------------------------------------------------------------------------

    def _import(self, request: Import) -> None:
        """Import what the script needs, if the workers can be forked. Ends this process if a package is unfit."""

        def fail(package: str, reason: str) -> NoReturn:
            self._send(ImportDone(package, reason))
            os._exit(0)

        if self._imported.variable_that_differs(request.env) is not None:
            self._send(ImportDone(again=True))
            os._exit(0)
        if not self._has_imported and not self._reason_for_cold_start(request.program, request.env):
            import_modules(request.program)
            self._imported = imports.run(request, self._hidden | WITHOUT_LOG, fail)
            gc.collect()
            gc.freeze()
            self._modules = _top_level_modules()
        self._send(ImportDone())

    def _fork_kept_process(self) -> bool:
        """Fork a process that is not ended with the job. Returns True in that process."""
        if self._broken:
            return False
        adopt_orphans(False)  # it becomes a child of the launcher
        with suppress(OSError):
            pid = os.fork()
            if pid == 0:
                self._channel.close()
                if os.fork():
                    os._exit(0)
                return True
            os.waitpid(pid, 0)
        adopt_orphans()
        return False

    def _start(self, start: Start) -> Program | None:
        """Start a worker. In a forked worker, return the program to run; in the server, None."""
        streams = self._channel.take_descriptors(2 * start.streams)
        cold = ""
        forked_program = None
        if start.program is not None and self._forks:
            cold = self._reason_for_cold_start(start.program, start.env)
            if not cold:
                forked_program = start.program
        parent = os.getpid()
        errors, write_errors = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError as error:
            pid = 0
            self._send(Started(start.number, 0, error=f"the system cannot create another process: {error.strerror}"))
        else:
            if pid == 0:
                die_with_parent(parent)
                os.setsid()
                self._channel.close()
                os.close(errors)
                if forked_program is None:
                    worker.execute(start, streams, self._inherited, write_errors)
                os.close(write_errors)
                worker.set_up(start, streams, self._launcher)
                self._imported.repeat()
                return forked_program
        for descriptor in (write_errors, *streams):
            os.close(descriptor)
        error_text = ""
        with os.fdopen(errors, encoding="utf-8") as pipe:
            if forked_program is None:
                error_text = pipe.read()  # until execve in the worker closes the other end
        if pid:
            self._running[pid] = start.number
            self._send(Started(start.number, pid, cold, error_text))
        return None

    def _reason_for_cold_start(self, program: Program, env: Mapping[str, str]) -> str:
        """Why a fork would now behave differently from a new interpreter, or an empty string if it would not."""
        if self._broken:
            return self._broken
        if traces.has_opened_a_gpu():
            return "an import has opened a GPU"
        if traces.has_started_a_thread():
            return "an import has started a thread"
        for name in {*env, *self._env}:
            if (
                name.startswith(IMPORT_TIME_VARIABLES + START_TIME_VARIABLES)
                and name != THREADS
                and env.get(name) != self._env.get(name)
            ):
                return f"the worker's {name} differs from the launcher's, and imports read this variable"
        differing = self._imported.variable_that_differs(env)
        if differing is not None:
            return f"the worker's {differing} is not that of the job, and an import has read this variable"
        return reason_for_cold_start(program, env, self._modules)

    # Ending -----------------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Reap ended children, report ended workers, and kill processes left in the sessions of workers that failed."""
        with suppress(BlockingIOError):
            os.read(self._wake, 4096)
        failed = set()
        with suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG):
                pid, status = ended
                if pid == 0:
                    break
                if pid in self._running:
                    code = os.waitstatus_to_exitcode(status)
                    self._send(Ended(self._running.pop(pid), code))
                    if code != 0:
                        failed.add(pid)
        if failed:
            signal_children(
                lambda child: child.session in failed and self._is_orphan(child), signal.SIGKILL, self._leftovers
            )

    def _kill(self, number: int) -> None:
        """Kill one worker. The processes that it started are killed when the worker is reaped."""
        signal_children(lambda child: self._running.get(child.pid) == number, signal.SIGKILL, self._leftovers)

    def _clear(self, succeeded: bool) -> None:
        """End the processes that the workers of a round left behind, and name them if no worker failed.

        After a failure, a process that is writing a checkpoint may finish: the next round waits for it and resumes from
        that checkpoint. If it is still running at the next failure, it is ended.
        """
        self._failed = not succeeded
        saving: set[int] = set()
        if succeeded:
            wait_for(self._is_orphan, _LEAVING_SECONDS, self._reap)
            for child in filter(self._is_orphan, children()):
                if not child.is_cleaner and (command := masked(child.name, self._env)):
                    sys.stderr.write(f"ddpkit: ended a process that the job left running: {command}\n")
        else:
            saving = {child.pid for child in children() if child.is_writer} - self._left_saving
            signal_children(lambda child: child.pid in saving, signal.SIGCONT, set())
        self._left_saving = saving
        end_children(
            lambda child: self._is_orphan(child) and child.pid not in saving,
            self._reap,
            gently=True,
            leftovers=self._leftovers,
        )

    def _is_orphan(self, child: Child) -> bool:
        return child.pid not in self._running

    def _end(self) -> NoReturn:
        """End all processes, after the launcher has ended."""
        failed = self._failed or bool(self._running)
        end_children(lambda child: child.pid in self._running, self._reap, leftovers=self._leftovers)
        wait_for(
            lambda child: child.is_writer, _SAVING_SECONDS, self._reap
        )  # after a failure, a save may be unfinished
        end_children(lambda _: True, self._reap, gently=True, leftovers=self._leftovers)
        end_cleaners(self._reap)
        for folder in self._folders:
            memory_folder.remove(folder, save=failed)
        os._exit(0)

    def _send(self, message: Message) -> None:
        with suppress(ClosedError):  # the server reads the end of file next
            self._channel.send(message)


def _top_level_modules() -> frozenset[str]:
    return frozenset(name for name in sys.modules if "." not in name)
