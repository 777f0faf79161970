"""The launcher's end of the warm server."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ddp_kit.env import HIDDEN_FROM_WORKERS
from ddp_kit.launcher.warm.dying import adopt_orphans, end_children, end_cleaners, is_stopped
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

# The package's folder leads the path for this one import only: the current folder is the script's business.
_CODE = """\
import sys
path = sys.path[0 if sys.flags.safe_path else 1:]
sys.path.insert(0, sys.argv[1])
from ddp_kit.launcher.warm import server
sys.path[:] = path
server.main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "warm", tuple(filter(None, sys.argv[5].split(","))))
"""
_LAST_SECONDS = 10.0  # that the server may take to clear up
# How often to look whether somebody has stopped the server. At one look alone it may be about to be continued, as
# after the whole job was suspended.
_LOOK_SECONDS = 5.0


class WarmServer:
    """A process that imports torch while the launcher does, starts workers from then on, and clears up after them."""

    def __init__(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        warm: bool = True,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Start it. `words`: the launch's command line, which gives `ps` room for those of the workers.

        `warm`: whether it imports torch at all. `say`: tells the user that the server was found stopped.
        """
        ours, theirs = socket.socketpair()
        hidden = {name: value for name, value in HIDDEN_FROM_WORKERS.items() if name not in env} if warm else {}
        package = str(Path(__file__).parents[3])
        how = [package, str(theirs.fileno()), str(os.getpid()), "warm" if warm else "cold", ",".join(hidden)]
        adopt_orphans()  # this process, too: should the server be killed, what it looked after comes here
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _CODE, *how, *words],
                env={**env, **hidden},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._channel = Channel(ours)
        self._workers: dict[int, Process] = {}
        self._count = 0
        self._has_started = False
        self._say = say
        self._looked = time.monotonic()
        self._was_stopped = False
        self._was_continued = False
        self.gone = False

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    def fileno(self) -> int:
        """For `select`: readable when a worker may have ended."""
        return self._channel.fileno()

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        program: Program | None = None,
        streams: Sequence[int] = (),
        cpus: tuple[int, ...] = (),
        counts_every: float = 0.0,
        stacks: str = "",
    ) -> "Process":
        """Ask for a worker; `pump` until it is answered.

        `command`: what to execute where `program` is None or cannot be forked. `streams`: descriptors for its
        standard output and error; none: those of this process. `counts_every`, `stacks`: see `Start`.
        """
        self._count += 1
        worker = self._workers[self._count] = Process(self, self._count)
        self._send(
            Start(self._count, tuple(command), dict(env), program, cpus, bool(streams), counts_every, stacks), streams
        )
        return worker

    def kill(self, worker: "Process") -> None:
        """End a worker, and all that it started, at once; a server that is stopped is continued for that."""
        self._process.send_signal(signal.SIGCONT)
        self._send(Kill(worker.number))

    def clear(self, well: bool) -> None:
        """End what the workers have left behind; before anything that is asked for later. `well`: see `Clear`."""
        self._send(Clear(well))

    def own(self, folder: str) -> None:
        """Have a folder removed when this process is gone."""
        self._send(Owns(folder))

    def pump(self, timeout: float | None = 0) -> None:
        """Note what the server says; wait for that at most `timeout` seconds, and no longer than `silence_left`."""
        self._look_whether_stopped()
        timeout = _LOOK_SECONDS if timeout is None else min(timeout, _LOOK_SECONDS)
        if self.gone or not select.select([self._channel], [], [], timeout)[0]:
            return
        try:
            for message in self._channel.receive():
                if isinstance(message, Started):
                    worker = self._workers[message.number]
                    worker.pid, worker.cold, worker.error = message.pid, message.cold, message.error
                    worker.answered = self._has_started = True
                elif isinstance(message, Ended):
                    worker = self._workers.pop(message.number)
                    worker.returncode, worker.ended_at = message.returncode, time.monotonic()
        except ClosedError:
            self._lose()

    def silence_left(self) -> float:
        """Seconds after which to `pump` though nothing was readable: a server that is stopped tells nothing."""
        return max(0.0, self._looked + _LOOK_SECONDS - time.monotonic())

    def _look_whether_stopped(self) -> None:
        """Continue a server that is stopped; kill one that is stopped again: its workers die with it."""
        if self.gone or self.silence_left():
            return
        self._looked = time.monotonic()
        was_stopped, self._was_stopped = self._was_stopped, is_stopped(self.pid)
        if not (was_stopped and self._was_stopped):
            return
        self._was_stopped = False
        found = f"the process that starts and watches the workers (pid {self.pid}) was stopped by a signal"
        if self._was_continued:
            self._say(f"{found} again: it is killed, and the workers with it")
            self._process.kill()
        else:
            self._was_continued = True
            self._say(f"{found}: it is continued now (SIGCONT), once")
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End every worker that is left, what they have left behind, and the server."""
        self._channel.close()
        self._process.send_signal(signal.SIGCONT)  # a server that is stopped could not clear up
        if self._has_started:  # else it may still import torch
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAST_SECONDS)
                return
        self._process.kill()
        self._process.wait()
        _end_what_is_left()

    def _send(self, message: Message, streams: Sequence[int] = ()) -> None:
        try:
            self._channel.send(message, streams, self._look_whether_stopped)
        except ClosedError:
            self._lose()

    def _lose(self) -> None:
        """The server died, and its workers with it; what these had started is now a child of this process."""
        self.gone = True
        self._process.wait()
        _end_what_is_left()
        for worker in self._workers.values():
            worker.answered, worker.lost = True, True
            worker.returncode, worker.ended_at = -signal.SIGKILL, time.monotonic()
        self._workers.clear()


class Process:
    """A worker that the server started; what torch needs to know of a process, as `subprocess.Popen` tells it."""

    def __init__(self, server: WarmServer, number: int) -> None:
        self._server = server
        self.number = number
        self.answered = False
        """Whether it is known if it runs."""
        self.pid = 0
        self.cold = ""
        """Why it was executed instead of forked."""
        self.error = ""
        """Why it could not be started."""
        self.lost = False
        """Whether it died with the server."""
        self.returncode: int | None = None
        self.ended_at = 0.0
        """When its end was noticed: seconds of this machine's monotonic clock."""

    def poll(self) -> int | None:
        """The exit code, minus the signal's number, or None while none was noted.

        Only `WarmServer.pump` takes news: here it would take those of other workers, too, and whoever has looked at
        these already would wait forever for what has come already.
        """
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit code. Raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.returncode is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired("worker", timeout)
            self._server.pump(left)
        return self.returncode


def _end_what_is_left() -> None:
    end_children(lambda _: True, _reap)
    end_cleaners(_reap)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
