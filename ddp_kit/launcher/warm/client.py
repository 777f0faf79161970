"""The launcher's interface to the warm server, the process that imports torch once and forks the workers."""

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ddp_kit import memory_folder
from ddp_kit.env import HIDDEN_FROM_WORKERS, PACKAGE_FOLDER, RUN_FOLDER_PREFIX, SHARED_MEMORY, child_code
from ddp_kit.launcher.processes import adopt_orphans, end_children, end_cleaners, is_stopped
from ddp_kit.launcher.program import Program
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
from ddp_kit.launcher.wire import ClosedError

_CODE = child_code(
    "from ddp_kit.launcher.warm import server",
    "hidden = tuple(filter(None, sys.argv[5].split(',')))\n"
    "kept = server.main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == 'warm', hidden, sys.argv[6])\n"
    "if kept is not None:\n"
    "    from ddp_kit.launcher.warm import kept_process\n"
    "    kept_process.main(*kept)",
)
_CLOSE_SECONDS = 15.0  # the time that the server has to clean up; it waits for unfinished saves and for helpers
# How often to check whether a signal has stopped the server. The launcher acts only if the server is stopped at two
# checks in a row, and the second check is not late. If it is late, the whole job, including the launcher, was
# suspended, and the server may be about to continue.
_CHECK_SECONDS = 5.0
_FULL_SECONDS = 1.0  # between two checks while the server does not read
_LATE_SECONDS = 1.0


class WarmServer:
    """A process that imports torch concurrently with the launcher, starts the workers, and cleans up after them."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        forks: bool = True,
        print_message: Callable[[str], None] = lambda _: None,
        forked: "tuple[ForkedProcess, socket.socket] | None" = None,
    ) -> None:
        """Start the server.

        `argv`: the launcher's arguments. They make the server's command line long enough: a worker, which is a fork,
        overwrites it with its own, so that `ps` shows the worker's command. `forks`: whether the server imports torch
        and forks the workers; if not, it starts new interpreters. `print_message`: a function that is called with a
        message if a signal stops the server. `forked`: a server that was forked from this process, and this process's
        end of the channel.
        """
        self._argv = argv
        self._env = env
        self._forks = forks
        adopt_orphans()  # if the server is killed, its children become children of this process
        self._folder: str | None = None  # the answer to `MakeFolder`
        self._folders: list[str] = []  # all that the server has created
        self._memory_folder = ""
        self._process: subprocess.Popen[bytes] | ForkedProcess
        if forked is None:
            self._open()
        else:
            self._process, ours = forked
            self._connect(ours)
        self._workers: dict[int, Process] = {}
        self._count = 0
        self._import: Import | None = None  # the latest request
        self.imports = False
        """Whether the server is still importing what the workers need. No worker can be started until then."""
        self._on_unfit: Callable[[str, str], None] = lambda *_: None
        self._has_started = False
        self._print_message = print_message
        self._last_check = time.monotonic()
        self._was_stopped = False
        self._was_continued = False
        self.gone = False

    def _open(self) -> None:
        """Start the process."""
        ours, theirs = socket.socketpair()
        hidden = {name: value for name, value in HIDDEN_FROM_WORKERS.items() if self._forks and name not in self._env}
        how = [PACKAGE_FOLDER, str(theirs.fileno()), str(os.getpid()), "warm" if self._forks else "cold"]
        how += [",".join(hidden), os.pathsep.join(self._folders)]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _CODE, *how, *self._argv],
                env={**self._env, **hidden},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connect(ours)

    def _connect(self, ours: socket.socket) -> None:
        ours.settimeout(_FULL_SECONDS)
        self._channel = Channel(ours)

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self._process.pid

    def fileno(self) -> int:
        """The descriptor for `select`: readable when a worker may have ended."""
        return self._channel.fileno()

    def import_for(self, request: Import, on_unfit: Callable[[str, str], None]) -> None:
        """Ask the server to import what the workers will import. The caller must then call `pump` while it `imports`.

        `on_unfit`: a function that is called with a package that cannot be imported this way, and the reason.
        """
        self._on_unfit = on_unfit
        self._import = request
        if not self.gone:
            self._ask_for_imports()

    def open_again(self) -> None:
        """Start the server again if it was killed. The caller must then call `pump` while it `imports`."""
        if self.gone:
            self.gone = False
            self._reopen()

    def keep(self, request: Keep) -> None:
        """Ask the server to fork the kept process for the next launches."""
        self._send(request)

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        program: Program | None = None,
        streams: Sequence[int] = (),
        cpus: tuple[int, ...] = (),
        count_interval: float = 0.0,
        stacks: str = "",
    ) -> "Process":
        """Ask the server to start a worker. The caller must then call `pump` until the worker's `answered` is true.

        `command`: what to execute if `program` is None or cannot be forked. `streams`: descriptors for the worker's
        stdout and stderr; if empty, the worker inherits both from this process. `count_interval`, `stacks`: see
        `Start`.
        """
        self._count += 1
        worker = self._workers[self._count] = Process(self, self._count)
        self._send(
            Start(self._count, tuple(command), dict(env), program, cpus, bool(streams), count_interval, stacks), streams
        )
        return worker

    def kill(self, worker: "Process") -> None:
        """Kill a worker and the processes it started. A server that was stopped by a signal is continued first."""
        self._process.send_signal(signal.SIGCONT)
        self._send(Kill(worker.number))

    def clear(self, succeeded: bool) -> None:
        """Ask the server to end the processes that the workers left behind. Later requests wait until that is done.

        `succeeded`: see `Clear`.
        """
        self._send(Clear(succeeded))

    def make_folder(self, prefix: str, parent: str = "") -> str:
        """Let the server create a temporary folder, which it removes after this process has ended. Return its path.

        The path is empty if the server cannot create the folder. `parent`: by default, that of temporary files.
        """
        self._folder = None
        self._send(MakeFolder(parent or tempfile.gettempdir(), prefix))
        while self._folder is None and not self.gone:
            self.pump(_CHECK_SECONDS)
        if self._folder:
            self._folders.append(self._folder)
        return self._folder or ""

    def memory_folder(self) -> str:
        """Let the server create a folder in memory, in which the workers of all rounds keep copies of their state.

        The server removes it after this process has ended. Returns its path; empty: it cannot be created.
        """
        self._memory_folder = self._memory_folder or self.make_folder(RUN_FOLDER_PREFIX, SHARED_MEMORY)
        return self._memory_folder

    def pump(self, timeout: float = 0) -> None:
        """Process the server's messages. If there are none, wait up to `timeout` seconds (at most 5 s) for one."""
        self._check_if_stopped()
        if self.gone or not select.select([self._channel], [], [], min(timeout, _CHECK_SECONDS))[0]:
            return
        try:
            for message in self._channel.receive():
                match message:
                    case Started():
                        worker = self._workers[message.number]
                        worker.pid = message.pid
                        worker.cold = message.cold
                        worker.error = message.error
                        worker.answered = self._has_started = True
                    case ImportDone():
                        self._end_import(message)
                    case FolderMade(path):
                        self._folder = path
                    case Ended(number, returncode):
                        self._workers.pop(number).end(returncode)
        except ClosedError:
            self._lose()

    def next_check(self) -> float:
        """Seconds until `pump` must be called even without a message, to check whether the server is stopped."""
        return max(0.0, self._last_check + _CHECK_SECONDS - time.monotonic())

    def _check_if_stopped(self) -> None:
        """Continue the server if a signal has stopped it. If this happens again, kill the server and the workers."""
        if self.gone or self.next_check():
            return
        now = time.monotonic()
        is_late = now > self._last_check + _CHECK_SECONDS + _LATE_SECONDS
        was_stopped = self._was_stopped
        self._was_stopped = is_stopped(self.pid)
        self._last_check = now
        if is_late or not (was_stopped and self._was_stopped):
            return
        self._was_stopped = False
        what = f"the process that starts and watches the workers (pid {self.pid}) was stopped by a signal"
        if self._was_continued:
            self._print_message(f"{what} again: it is killed now, together with the workers")
            self._process.kill()
        else:
            self._was_continued = True
            self._print_message(f"{what}: it is continued now (SIGCONT), but will be killed if this happens again")
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End all remaining workers, the processes they left behind, and the server."""
        self._channel.close()
        self._process.send_signal(signal.SIGCONT)  # a stopped server cannot clean up
        if self._has_started and self._process.poll() is None:  # otherwise, the server may still be importing torch
            watched = os.pidfd_open(self.pid)  # `Popen.wait` with a timeout polls only every 50 ms
            poll = select.poll()
            poll.register(watched, select.POLLIN)
            # It saves the workers' state first, if they have failed.
            poll.poll(None if memory_folder.holds_copies(self._memory_folder) else _CLOSE_SECONDS * 1000)
            os.close(watched)
        if self._process.poll() == 0:
            return
        self._process.kill()
        self._process.wait()
        _end_leftovers()
        memory_folder.remove(self._memory_folder, save=True)

    def _send(self, message: Message, streams: Sequence[int] = ()) -> None:
        try:
            self._channel.send(message, streams, self._check_if_stopped)
        except ClosedError:
            self._lose()

    def _ask_for_imports(self) -> None:
        if self._import is not None:
            self.imports = True
            self._send(self._import)

    def _end_import(self, done: ImportDone) -> None:
        request = self._import
        assert request is not None
        self.imports = False
        if done.unfit:
            self._on_unfit(done.unfit, done.reason)
            self._import = replace(request, unfit=(*request.unfit, done.unfit))
        if done.unfit or done.again:
            self._reopen()

    def _reopen(self) -> None:
        """Start the process again, which was killed, or has made an import that it must not; repeat the request."""
        self._channel.close()
        self._process.wait()
        _end_leftovers()
        self._open()
        self._ask_for_imports()

    def _lose(self) -> None:
        """Handle the death of the server and all workers. Their child processes are now children of this process."""
        if self.imports and self._import is not None and self._import.packages != ():
            self._import = replace(self._import, packages=())  # one may have crashed: the workers will show it
            self._reopen()
            return
        self.imports = False
        self.gone = True
        self._process.wait()
        _end_leftovers()
        for worker in self._workers.values():
            worker.answered = worker.lost = True
            worker.end(-signal.SIGKILL)
        self._workers.clear()


class ForkedProcess:
    """A child that was forked from this process, with a subset of the interface of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code (-N if signal N killed the child), or None if it is running."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the child, and return its exit code."""
        return self._reap(0) or 0

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the child has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the child."""
        self.send_signal(signal.SIGKILL)

    def _reap(self, flags: int) -> int | None:
        if self._returncode is None:
            try:
                pid, status = os.waitpid(self.pid, flags)
            except ChildProcessError:  # `_reap` has waited for it
                self._returncode = 0
            else:
                if pid:
                    self._returncode = os.waitstatus_to_exitcode(status)
        return self._returncode


class Process:
    """A worker that the server starts, with a subset of the interface of `subprocess.Popen`."""

    def __init__(self, server: WarmServer, number: int) -> None:
        self._server = server
        self.number = number
        self.answered = False
        """Whether the server has reported that it started the worker or failed to do so."""
        self.pid = 0
        self.cold = ""
        """Why the worker was started in a new interpreter instead of forked; see `Started`."""
        self.error = ""
        """Why the worker could not be started."""
        self.lost = False
        """Whether the worker died with the server."""
        self.returncode: int | None = None
        self.ended_at = 0.0
        """The time of the monotonic clock at which this process noticed that the worker had ended."""

    def end(self, returncode: int) -> None:
        """Note that the worker has ended."""
        self.returncode = returncode
        self.ended_at = time.monotonic()

    def poll(self) -> int | None:
        """Return the exit code (-N if signal N killed the worker), or None if the server has not reported it yet.

        Call `WarmServer.pump` to read new reports. This method does not call it, because `pump` also reads reports
        about other workers: a caller that has already polled those workers would miss these reports and wait forever.
        """
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the worker, and return its exit code. Raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.returncode is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired("worker", timeout)
            self._server.pump(left)
        return self.returncode


def _end_leftovers() -> None:
    end_children(lambda _: True, _reap)
    end_cleaners(_reap)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
