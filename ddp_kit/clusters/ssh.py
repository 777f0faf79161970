"""Run a job on several hosts over ssh, without a cluster engine: one launcher per host."""

import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, TextIO

from ddp_kit.clusters.engine import Engine, remote_script
from ddp_kit.clusters.request import AGAIN, COUNTED, SIGNALLED, Request, derived_port, without_spares
from ddp_kit.errors import UsageError
from ddp_kit.exit_codes import ExitCode


class Ssh(Engine):
    """Hosts that are reached over ssh, without a cluster: one launcher per host, which stops with its connection."""

    name = "ssh"
    help = "one ssh command per host; needs no cluster"
    examples = ("--hosts gpu1,gpu2 --gpus 8 train.py",)
    flags = frozenset({"hosts", "retries"})
    suffix = ".sh"
    program = "ssh"
    install = "install OpenSSH's client (the package openssh-client)"

    def check(self, request: Request) -> None:
        """Check that the hosts are given."""
        if not request.hosts:
            raise UsageError(
                "ssh needs the names of the hosts",
                "use --hosts gpu1,gpu2 or --hosts FILE, where FILE has one host per line",
            )

    def text(self, request: Request) -> str:
        """A shell script that contains the ssh commands. It is only shown by --dry-run; `submit` does not run it."""
        lines = (f"{shlex.join(command)} &" for command in commands(request).values())
        return f"#!/usr/bin/env bash\n# Made by: {request.command}\n" + "\n".join(lines) + "\nwait\n"

    def submit(self, request: Request, text: str, write: Callable[[str], None]) -> int:  # noqa: ARG002
        """Run the job until it ends."""
        return run(commands(request), request.retries, request.spares, write)


def commands(request: Request) -> dict[str, tuple[str, ...]]:
    """The ssh command for each host. The first host is node 0, which hosts the rendezvous."""
    hosts = request.hosts
    address = hosts[0].rpartition("@")[2]
    port = derived_port(str(sum(" ".join((*hosts, str(request.folder), *request.words)).encode())))
    gpus = [] if request.gpus is None else ["--gpus", str(request.gpus)]
    by_host: dict[str, tuple[str, ...]] = {}
    for rank, host in enumerate(hosts):
        place = []
        if len(hosts) > 1:
            nodes = without_spares(len(hosts), request.spares)
            place = ["--nnodes", str(nodes), "--node-rank", str(rank)]
            place += ["--master-addr", address, "--master-port", str(port)]
        launch = ("ddpkit", "launch", *place, *gpus, *request.words)
        remote = shlex.join(remote_script(launch, str(request.folder), request.programs))
        by_host[host] = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=10", host, remote)
    return by_host


# --- Session ----------------------------------------------------------------------------------------------------------
# Runs a job on all hosts: prints the hosts' output here, returns one exit code, and leaves no process on the hosts.


_SSH_FAILED = 255  # ssh's own exit code
_NOT_FOUND = 127  # the shell's exit code for a missing program
_BETWEEN_TRIES = 5.0
_LOOK_SECONDS = 0.05
_OURS = "ddpkit: "
_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Write = Callable[[str], None]


def run(commands: Mapping[str, Sequence[str]], retries: int, spares: int, write: Write) -> int:
    """Run one command per host, restart the job after retryable exit codes, and return the last exit code.

    `retries`: the maximum number of restarts after exit codes 3, 124 and above 128, and after failures of ssh. Restarts
    after exit codes 4 (a node was lost) and 75 (saved) are not limited. `spares`: how many hosts the job can lose.
    """
    while True:
        session = _Session(commands, spares, write)
        code = session.run()
        if session.stopped or session.missing:
            return code
        counted = bool(session.unreachable) or code in COUNTED or code >= SIGNALLED
        if (counted and not retries) or (not counted and code not in AGAIN):
            return code
        retries -= counted
        why = f"it ended with exit code {code}"
        if session.unreachable:
            why = f"{', '.join(session.unreachable)} could not be reached"
        write(f"{_OURS}restarting the job: {why}\n")
        if session.unreachable:
            time.sleep(_BETWEEN_TRIES)


class _Session:
    """One attempt to run the job on all hosts."""

    def __init__(self, commands: Mapping[str, Sequence[str]], spares: int, write: Write) -> None:
        self._commands = commands
        self._first = next(iter(commands))  # the host of the rendezvous, without which the job ends
        self._spares = spares
        self._write = write
        self._lock = threading.Lock()
        self._said: dict[str, str] = {}
        self._running: dict[str, subprocess.Popen[str]] = {}
        self.stopped = False
        """Whether a signal has ended the attempt."""
        self.unreachable: list[str] = []
        self.missing: list[str] = []
        """The hosts without ddpkit."""

    def run(self) -> int:
        """Run all launchers, and return the exit code of the first one that failed, or 0.

        Returns NODE_LOST if ssh could not reach a host, or lost the connection. With spares, the exit code is that of
        the first host, unless that one was lost.
        """
        stops = [number for number in _STOP if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores SIGHUP
        before = {number: signal.signal(number, self._stop) for number in stops}
        try:
            for host, command in self._commands.items():
                # In a new session, so that Ctrl-C only reaches this process, which stops the launchers and prints their
                # last lines.
                self._running[host] = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    text=True, errors="backslashreplace", start_new_session=True,
                )  # fmt: skip
            readers = [
                threading.Thread(target=self._copy, args=[host, source, target], daemon=True)
                for host, process in self._running.items()
                for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
            ]
            for reader in readers:
                reader.start()
            codes = self._wait()
            for reader in readers:
                reader.join()
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)
        self._explain(codes)
        if self._spares and codes[self._first] not in (_SSH_FAILED, _NOT_FOUND):
            self.unreachable = []
            return codes[self._first]
        if self.unreachable:
            return ExitCode.NODE_LOST
        return next((code for code in codes.values() if code), 0)

    def _wait(self) -> dict[str, int]:
        """Wait for all launchers, and return the exit codes by host, in the order in which the launchers ended.

        If ddpkit is not installed on a host, or if ssh fails for the first host or for more hosts than there are
        spares, the launchers on all hosts are stopped.
        """
        codes: dict[str, int] = {}
        while len(codes) < len(self._running):
            for host, process in self._running.items():
                if host not in codes and process.poll() is not None:
                    codes[host] = process.returncode % 256
                    lost = [*codes.values()].count(_SSH_FAILED)
                    if _NOT_FOUND in codes.values() or lost > self._spares or codes.get(self._first) == _SSH_FAILED:
                        self._close_inputs()
            time.sleep(_LOOK_SECONDS)
        return codes

    def _copy(self, host: str, source: IO[str], target: TextIO) -> None:
        """Copy the output of one host to `target`.

        With several hosts, each line that the training script printed is prefixed with the host's name. Lines from the
        launchers are printed unchanged, and only once if several hosts send the same line.
        """
        for line in source:
            if not line.startswith(_OURS):
                text = f"{host}: {line}" if len(self._commands) > 1 else line
            elif self._said.setdefault(line, host) == host:
                text = line
            else:
                continue
            with self._lock:
                target.write(text)
                target.flush()

    def _explain(self, codes: Mapping[str, int]) -> None:
        for host, code in codes.items():
            if code == _NOT_FOUND:
                self.missing.append(host)
                self._write(
                    f"{_OURS}error: there is no ddpkit on {host}\n  hint: install it in the same folder as on this "
                    "machine, or in a folder of the PATH that `ssh {host} env` prints\n".replace("{host}", host)
                )
            elif code == _SSH_FAILED:
                self.unreachable.append(host)
                self._write(
                    f"{_OURS}error: ssh could not reach {host}, or lost the connection\n  hint: try `ssh {host} true`\n"
                )

    def _stop(self, _number: int, _frame: object) -> None:
        """Handle a signal: the first one stops the launchers, the second one kills ssh.

        Launchers may take some time to stop, because the workers may save a checkpoint first.
        """
        if self.stopped:
            for process in self._running.values():
                process.kill()
        self.stopped = True
        self._close_inputs()

    def _close_inputs(self) -> None:
        for process in self._running.values():
            if process.stdin is not None:
                with suppress(OSError, ValueError):
                    process.stdin.close()

    def _end(self) -> None:
        self._close_inputs()
        for process in self._running.values():
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
