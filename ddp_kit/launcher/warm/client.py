"""The launcher's end of the warm server."""

import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_kit.contract import HIDDEN_FROM_WORKERS
from ddp_kit.launcher.warm.messages import Channel, ClosedError, Ended, Program, Start, Started

# The package's folder leads the path for this one import only: the current folder is the script's business.
_CODE = """\
import sys
path = sys.path[0 if sys.flags.safe_path else 1:]
sys.path.insert(0, sys.argv[1])
from ddp_kit.launcher.warm import server
sys.path[:] = path
server.main(int(sys.argv[2]), tuple(filter(None, sys.argv[3].split(","))))
"""


class WarmServer:
    """A process that imports torch while the launcher does, and forks workers from then on."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        """Start it. `words`: the launch's command line, which gives `ps` room for those of the workers."""
        ours, theirs = socket.socketpair()
        hidden = {name: value for name, value in HIDDEN_FROM_WORKERS.items() if name not in env}
        package = str(Path(__file__).parents[3])
        command = [sys.executable, "-u", "-c", _CODE, package, str(theirs.fileno()), ",".join(hidden), *words]
        with theirs:
            self._process = subprocess.Popen(
                command, env={**env, **hidden}, pass_fds=[theirs.fileno()], start_new_session=True
            )
        self._channel = Channel(ours)
        self._workers: dict[int, Fork] = {}
        self._count = 0
        self.gone = False

    def fileno(self) -> int:
        """For `select`: readable when a worker may have ended."""
        return self._channel.fileno()

    def fork(
        self, program: Program, env: Mapping[str, str], stdout: str = "", stderr: str = "", cpus: tuple[int, ...] = ()
    ) -> "Fork":
        """Ask for a worker; `pump` until it is answered."""
        self._count += 1
        worker = self._workers[self._count] = Fork(self)
        try:
            self._channel.send(Start(self._count, program, dict(env), stdout, stderr, cpus))
        except ClosedError:
            self._lose()
        return worker

    def pump(self, timeout: float | None = 0) -> None:
        """Note what the server says; wait for that at most `timeout` seconds."""
        if self.gone or not select.select([self._channel], [], [], timeout)[0]:
            return
        try:
            for message in self._channel.receive():
                if isinstance(message, Started):
                    worker = self._workers[message.number]
                    worker.pid, worker.refusal, worker.answered = message.pid, message.refusal, True
                    if message.refusal:
                        del self._workers[message.number]
                elif isinstance(message, Ended):
                    worker = self._workers.pop(message.number)
                    worker.returncode, worker.ended_at = message.returncode, time.monotonic()
        except ClosedError:
            self._lose()

    def close(self) -> None:
        """End the server, and with it every worker that is left."""
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def _lose(self) -> None:
        """The server died, and its workers with it."""
        self.gone = True
        for worker in self._workers.values():
            worker.refusal = "" if worker.answered else "the process that had imported torch is gone"
            worker.answered, worker.lost = True, True
            worker.returncode, worker.ended_at = -signal.SIGKILL, time.monotonic()
        self._workers.clear()


class Fork:
    """A worker that the server forked; what torch needs to know of a process, as `subprocess.Popen` tells it."""

    def __init__(self, server: WarmServer) -> None:
        self._server = server
        self.answered = False
        """Whether it runs, or was refused."""
        self.pid = 0
        self.refusal = ""
        """Why the server did not fork; empty where it did."""
        self.lost = False
        """Whether it died with the server."""
        self.returncode: int | None = None
        self.ended_at = 0.0
        """When its end was noticed: seconds of this machine's monotonic clock."""

    def poll(self) -> int | None:
        """The exit code, minus the signal's number, or None while it runs."""
        self._server.pump()
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
