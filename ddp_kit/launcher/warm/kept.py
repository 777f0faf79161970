"""The kept process: a process of this user from which the next launches of a script are forked.

    handover.py (ddpkit launch)         kept process                    launcher
    facts, arguments, descriptors  -->  compares; forks           --->  becomes what `ddpkit launch` would be
                                   <--  refuses, and says why           forks the warm server, runs the job
    forwards signals               ---------------------------------->
    exits with the same code       <----------------------------------  sends its exit code

It has imported torch and what the script imports first (imports.py). It has a single thread, and ends when no launch
has come for some time, or when the script or the socket is gone. A launch that it cannot serve exactly as a new
interpreter would is refused: see `facts_here` in handover.py, and `_Kept._reason_to_refuse`.
"""

import ast
import fcntl
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import chdir, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from ddp_kit.env import HIDDEN_FROM_WORKERS, allocator_defaults, set_environment
from ddp_kit.launcher.warm import handover, imports, server
from ddp_kit.launcher.warm.messages import Import, message_of

_REQUEST_SECONDS = 2.0  # for a client to send its request
_LOOK_SECONDS = 1.0  # between two looks whether the script and the socket are still there
_LOCK_SECONDS = 5.0  # for the process that this one replaces to end

Launch = tuple[dict[str, Any], list[int], socket.socket]
"""A request, the descriptors of stdin, stdout and stderr, and the connection to the client."""


class _Kept:
    """The loop of the kept process."""

    def __init__(self, address: Path, seconds: float, request: Import) -> None:
        """Make the imports, then listen. `seconds`: how long to wait for the next launch."""
        self._address, self._seconds = address, seconds
        self._facts = handover.facts_here()
        self._since, self._launches = time.time(), 0
        self._request = request
        self._statements = _texts(request)
        server.import_modules(request.program)
        self.imported = imports.run(request, HIDDEN_FROM_WORKERS | server.WITHOUT_LOG, _fail)
        gc.collect()
        gc.freeze()
        self._files = _files_of_modules()
        self._listening = socket.socket(socket.AF_UNIX)
        new = address.with_name(f"{address.name}.{os.getpid()}")
        self._listening.bind(str(new))
        self._listening.listen()
        new.replace(address)

    def serve(self) -> Launch | None:
        """Fork a launcher for each request. Returns in a forked launcher, or None at the end of this process."""
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline and self._is_wanted():
            if not select.select([self._listening], [], [], _LOOK_SECONDS)[0]:
                continue
            with suppress(OSError, EOFError, ValueError, KeyError, TypeError):
                connection, _ = self._listening.accept()
                with connection:
                    launch, continues = self._answer(connection)
                    if launch is not None:
                        return launch
                    if not continues:
                        break
            deadline = time.monotonic() + self._seconds
        self._address.unlink(missing_ok=True)
        return None

    def _is_wanted(self) -> bool:
        """Whether the script and the socket still exist; a system may remove the socket when the user logs out."""
        program = self._request.program
        return self._address.exists() and (program.module or Path(program.name).exists())

    def _answer(self, connection: socket.socket) -> tuple[Launch | None, bool]:
        """Answer a client. Returns the launch in a forked launcher, and whether this process continues."""
        connection.settimeout(_REQUEST_SECONDS)
        if handover.peer(connection) != os.geteuid():
            return None, True
        request, descriptors = handover.receive(connection, 3)
        pid = -1
        try:
            if request["for"] == "stop":
                handover.send(connection, self._description())
                return None, False
            reason = self._reason_to_refuse(request)
            if request["for"] == "launch" and not reason:
                signal.pthread_sigmask(signal.SIG_BLOCK, handover.FORWARDED)  # in the launcher, until it handles them
                pid = os.fork()
            if pid == 0:
                self._listening.close()
                launch = request, [os.dup(descriptor) for descriptor in descriptors], connection.dup()
                with suppress(OSError):  # the client is gone: `_end_with_client` ends this process
                    # Sent by the launcher: without an answer, the client is certain that there is no launcher.
                    handover.send(connection, {"launcher": os.getpid()})
                return launch, True
            self._launches += pid > 0
            if pid < 0:
                handover.send(connection, self._description() | {"refused": reason})
            return None, not reason or request["for"] != "launch"
        finally:
            if pid:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, handover.FORWARDED)
            for descriptor in descriptors:
                os.close(descriptor)

    def _description(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "since": self._since,
            "launches": self._launches,
            "script": self._request.program.name,
            "imports": self._statements,
        }

    def _reason_to_refuse(self, request: Mapping[str, Any]) -> str:
        if request["for"] == "description":
            return ""
        for path, state in self._files.items():
            if _state(path) != state:
                return f"{path} has changed"
        reason = handover.difference(self._facts, request["facts"])
        if reason:
            return f"{reason}: not as when the process was started"
        asked = replace(_import_of(request), unfit=self._request.unfit)
        with chdir(request["folder"]):
            own = imports.modules_in(asked.program.folder) & self.imported.names - sys.modules.keys()
            if own:
                return f"the script's folder has {min(own)}, for which an import has looked"
            return "" if _texts(asked) == self._statements else "the imports of the script have changed"


def _import_of(request: Mapping[str, Any]) -> Import:
    message = message_of("Import", dict(request["import"]))
    assert isinstance(message, Import)
    return message


def _texts(request: Import) -> list[str]:
    return [ast.unparse(each.node) for each in imports.statements(request)]


def _fail(package: str, reason: str) -> NoReturn:
    imports.remember(package, reason, os.environ)
    os._exit(1)  # the next launch starts another process, which does not import this package


def _files_of_modules() -> dict[str, tuple[int, int, int] | None]:
    """The states of the files of all imported modules, and of the folders that they are found in."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    paths = {file for file in files if isinstance(file, str)} | {path for path in sys.path if path}
    return {path: _state(path) for path in paths}


def _state(path: str) -> tuple[int, int, int] | None:
    try:
        state = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size, state.st_ino


def main(address: str, seconds: float, added: list[str], pipe: int, lock: int) -> None:
    """Serve launches. Returns at the end, and in a forked worker after its script.

    `address`: the path of the socket. `seconds`: how long to wait for the next launch. `added`: names of variables that
    are set for this process only. `pipe`: a descriptor from which to read what to import, as JSON. `lock`: a descriptor
    of the file that the process of this address has locked.
    """
    with os.fdopen(pipe) as file:
        request = file.read()
    os.set_inheritable(lock, False)
    file_of_lock = Path(f"{address}.lock")
    if not _lock(lock, file_of_lock):
        return
    for name in server.PRELOADED:
        import_module(name)
    for name in added:
        os.environ.pop(name, None)
    kept = _Kept(Path(address), seconds, _import_of({"import": json.loads(request)}))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # launchers need not be waited for
    launch = kept.serve()
    if launch is None:
        file_of_lock.unlink(missing_ok=True)
        return
    asked, descriptors, connection = launch
    imported = kept.imported
    os.close(lock)
    _become_launcher(asked, descriptors)
    ours, theirs = socket.socketpair()
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, asked["blocked"])
        ours.close()
        connection.close()
        defaults = {**allocator_defaults(os.environ), **HIDDEN_FROM_WORKERS}
        os.environ.update({name: value for name, value in defaults.items() if name not in asked["env"]})
        hidden = tuple(name for name in HIDDEN_FROM_WORKERS if name not in asked["env"])
        del kept, launch, asked, connection, ours
        server.main(theirs.detach(), launcher, True, hidden, "", imported)
        return
    theirs.close()
    _launch(asked, pid, ours, connection)


def _lock(descriptor: int, path: Path) -> bool:
    """Lock the file at `path`, which is open as `descriptor`. Returns False if another process keeps the lock.

    The process that has the lock removes the file when it ends, so the file at `path` may be another one by then.
    """
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # a process that ends, or one that another launch has just started
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
            continue
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return True
        other = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.dup2(other, descriptor, inheritable=False)
        os.close(other)


def _become_launcher(asked: Mapping[str, Any], descriptors: list[int]) -> None:
    """Give this process what `ddpkit launch` has when it starts."""
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(asked["folder"])
    os.umask(asked["umask"])
    set_environment(asked["env"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in asked["ignored"]:
        if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_IGN)


def _launch(asked: Mapping[str, Any], server_pid: int, channel: socket.socket, connection: socket.socket) -> NoReturn:
    """Run `ddpkit launch`, and send its exit code to the client. `channel`: to the warm server."""
    from ddp_kit.launcher import cli
    from ddp_kit.launcher.warm.client import ForkedProcess, WarmServer

    connection.settimeout(None)
    threading.Thread(target=_end_with_client, args=[connection], daemon=True).start()
    sys.argv[:] = ["ddpkit", "launch", *asked["argv"]]
    warm = WarmServer(asked["argv"], os.environ, forked=(ForkedProcess(server_pid), channel))
    cli.entry(sys.argv[1:], warm, asked["blocked"], at_exit=lambda code: handover.send(connection, {"code": int(code)}))


def _end_with_client(connection: socket.socket) -> None:
    """Kill this process if the client is killed, as the launcher would be; the warm server then ends the job."""
    with suppress(OSError):
        connection.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)
