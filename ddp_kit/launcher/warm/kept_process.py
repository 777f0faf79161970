"""The kept process: a process of this user from which the next launches of a script are forked.

    kept_client.py (ddpkit launch)      kept process                    launcher
    facts, arguments, descriptors  -->  compares; forks           --->  becomes what `ddpkit launch` would be
                                   <--  refuses, and says why           forks the warm server, runs the job
    forwards signals               ---------------------------------->
    exits with the same code       <----------------------------------  sends its exit code

It is a fork of the warm server of the launch that started it, and has imported torch and what the script imports first
(imports.py). It has a single thread, and ends when no launch has come for some time, or when the script or the socket
is gone. A launch that it cannot serve exactly as a new interpreter would is refused: see facts.py for what a process
inherits, looks.py for what imports look at, and `_Kept._reason_to_refuse`.
"""

import ast
import fcntl
import gc
import os
import select
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import chdir, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from ddp_kit.env import (
    GPU_ORDER,
    HIDDEN_FROM_WORKERS,
    IMPORT_TIME_VARIABLES,
    READ_BY_LIBRARIES,
    START_TIME_VARIABLES,
    VISIBLE_GPUS,
    allocator_defaults,
    function_named,
    set_environment,
)
from ddp_kit.launcher.program import Program
from ddp_kit.launcher.warm import imports, kept_client, server, worker
from ddp_kit.launcher.warm.facts import difference, facts_of
from ddp_kit.launcher.warm.looks import Looks, Variables, looks_of, variables_read
from ddp_kit.launcher.warm.messages import Import, Keep
from ddp_kit.launcher.wire import ClosedError, Connection, from_json

_REQUEST_SECONDS = 2.0  # for a client to send its request
_LOOK_SECONDS = 1.0  # between two looks whether the script and the socket are still there
_LOCK_SECONDS = 5.0  # for the process that this one replaces to end
_READ_WHEN_LOADED = (*START_TIME_VARIABLES, *IMPORT_TIME_VARIABLES, *READ_BY_LIBRARIES)
_READ_LATER = (VISIBLE_GPUS, GPU_ORDER)  # by the GPU's driver, when a process first uses a GPU
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)

Launch = tuple[dict[str, Any], list[int], socket.socket]
"""A request, the descriptors of stdin, stdout and stderr, and the connection to the client."""


class _Kept:
    """The loop of the kept process."""

    def __init__(self, first: Keep, variables: Variables) -> None:
        """Make the imports, then listen.

        `first`: the request of the launch that started this process. `variables`: those that imports have read so far.
        """
        self._first = first
        self._address = address = Path(first.address)
        self._folder = os.getcwd()  # noqa: PTH109
        self._since = time.time()
        self._launches = 0
        self._request = first.imports
        self._read = variables
        with variables_read(variables):
            server.import_modules(self._request.program)
        statements = imports.statements(self._request)
        self._statements = _import_statements(self._request)
        self._looks = Looks([], [], folder=False, arguments=False)
        if any(each.package not in ("torch", "ddp_kit") for each in statements):  # these two look at nothing
            looks = looks_of(lambda: self._run(_fail))
            if looks is None:  # the fork has remembered an unfit package, or has crashed
                os._exit(1)
            self._looks = looks
        self.imported = self._run(_fail)
        variables.names |= self.imported.read.keys()
        gc.collect()
        gc.freeze()
        # The files of all imported modules, and the folders that they are found in.
        files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        paths = {file for file in files if isinstance(file, str)} | {path for path in sys.path if path}
        self._files = {path: _state(path) for path in (*paths, *self._looks.listed)}
        self._seen = {path: _state(path, lists=False) for path in self._looks.files}
        self._facts = facts_of(os.getpid())
        self._listening = socket.socket(socket.AF_UNIX)
        new = address.with_name(f"{address.name}.{os.getpid()}")
        self._listening.bind(str(new))
        self._listening.listen()
        new.replace(address)

    def _run(self, fail: imports.Fail) -> imports.Imported:
        return imports.run(self._request, HIDDEN_FROM_WORKERS | server.WITHOUT_LOG, fail)

    def serve(self) -> Launch | None:
        """Fork a launcher for each request. Returns in a forked launcher, or None at the end of this process."""
        deadline = time.monotonic() + self._first.seconds
        launches = 0
        program = self._request.program
        # A system may remove the socket when the user logs out.
        while time.monotonic() < deadline and self._address.exists():
            if not program.module and not Path(program.name).exists():
                break
            if not select.select([self._listening], [], [], _LOOK_SECONDS)[0]:
                continue
            with (
                suppress(OSError, EOFError, ValueError, KeyError, TypeError),
                closing(Connection(self._listening.accept()[0])) as connection,
            ):
                launch, continues = self._answer(connection)
                if launch is not None:
                    return launch
                if not continues:
                    break
            if self._launches > launches:  # a request that only asks does not prolong the time
                launches = self._launches
                deadline = time.monotonic() + self._first.seconds
        self._address.unlink(missing_ok=True)
        return None

    def _answer(self, connection: Connection) -> tuple[Launch | None, bool]:
        """Answer a client. Returns the launch in a forked launcher, and whether this process continues."""
        connection.socket.settimeout(_REQUEST_SECONDS)
        command, user = kept_client.peer(connection.socket)
        if user != os.geteuid():
            return None, True
        request = connection.receive_object()
        descriptors = connection.take_descriptors(3)
        pid = -1
        try:
            if request["for"] == "stop":
                connection.send(self._description())
                return None, False
            reason = self._reason_to_refuse(request, command)
            if request["for"] == "launch" and not reason:
                signal.pthread_sigmask(
                    signal.SIG_BLOCK, kept_client.FORWARDED
                )  # in the launcher, until it handles them
                pid = os.fork()
            if pid == 0:
                self._listening.close()
                launch = request, [os.dup(descriptor) for descriptor in descriptors], connection.socket.dup()
                with suppress(ClosedError):  # the client is gone: `_end_with_client` ends this process
                    # Sent by the launcher: without an answer, the client is certain that there is no launcher.
                    connection.send({"launcher": os.getpid()})
                return launch, True
            self._launches += pid > 0
            if pid < 0:
                connection.send(self._description() | {"refused": reason})
            return None, not reason or request["for"] != "launch"
        finally:
            if pid:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, kept_client.FORWARDED)
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

    def _reason_to_refuse(self, request: Mapping[str, Any], command: int) -> str:
        """Why a launch must not be forked from this process; empty if it may. `command`: the id of its process."""
        if request["for"] == "description":
            return ""
        for path, state in self._files.items():
            if _state(path) != state:
                return f"{path} has changed"
        for path, state in self._seen.items():
            if _state(path, lists=False) != state:
                return f"{path} has changed, and an import has looked at it"
        asked = replace(from_json(Import, request["import"]), unfit=self._request.unfit)
        reason = self._fact_that_differs(request, command) or self._looked_at(request, asked)
        if reason:
            return f"{reason}: not as when the process was started"
        with chdir(request["folder"]):
            own = imports.modules_in(asked.program.folder) & self.imported.names - sys.modules.keys()
            if own:
                return f"the script's folder has {min(own)}, for which an import has looked"
            if _import_statements(asked) != self._statements:
                return "the imports of the script have changed"
        return ""

    def _fact_that_differs(self, request: Mapping[str, Any], command: int) -> str:
        if os.readlink("/proc/self") != str(os.getpid()):  # noqa: PTH115
            return "/proc"  # that of another namespace of process ids
        try:
            facts = facts_of(command)
        except OSError:
            return "the rights to inspect the command's process"
        changed = difference(self._facts, facts_of(os.getpid()))  # from outside, as by renice
        return changed or difference(self._first.facts, {**request["facts"], **facts})

    def _looked_at(self, request: Mapping[str, Any], asked: Import) -> str:
        """The first thing that imports have looked at and that differs in this launch; empty if nothing differs."""
        env: dict[str, str] = request["env"]
        for name in sorted({*env, *self._first.env}):
            by_library = name.startswith(_READ_WHEN_LOADED) and name not in _READ_LATER
            if env.get(name) != self._first.env.get(name) and (by_library or self._read.includes(name)):
                return name
        if self._looks.folder and request["folder"] != self._folder:
            return "the current folder, which an import has used"
        program = self._request.program
        if self._looks.arguments and (asked.program.name, asked.program.arguments) != (program.name, program.arguments):
            return "the script's arguments, which an import has read"
        return ""


def _import_statements(request: Import) -> list[str]:
    return [ast.unparse(each.node) for each in imports.statements(request)]


def _fail(package: str, reason: str) -> NoReturn:
    imports.remember(package, reason, os.environ)
    os._exit(1)  # the next launch starts another process, which does not import this package


def _state(path: str, lists: bool = True) -> tuple[int, int, int] | None:
    """The state of a file or folder. `lists`: whether a folder has another state when its entries are others."""
    try:
        state = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    if stat.S_ISREG(state.st_mode) or lists:
        return state.st_mtime_ns, state.st_size, state.st_ino
    return 0, stat.S_IFMT(state.st_mode), state.st_ino


def main(first: Keep, variables: Variables) -> None:
    """Serve launches. Returns at the end, and in a forked worker after its script. The parameters are those of `_Kept`.

    This process is a fork of the warm server of the launch that started it.
    """
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in range(3):
        os.dup2(null, number)
    os.close(null)
    script = first.imports.program.name
    worker.set_title(Program(sys.executable, __name__, (script,), module=True))
    _set_ignored(_IGNORED_BY_PYTHON)  # the launch may have been started with `nohup`
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    set_environment(first.env)
    file_of_lock = Path(f"{first.address}.lock")
    lock = os.open(file_of_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not _lock(lock, file_of_lock):
        return
    kept = _Kept(first, variables)
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
    _launch(function_named(first.entry), asked, pid, ours, connection)


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
    _set_ignored(asked["ignored"])


def _set_ignored(numbers: Collection[int]) -> None:
    """Ignore these signals, and no others."""
    for number in signal.valid_signals():
        if number in numbers:
            signal.signal(number, signal.SIG_IGN)
        elif signal.getsignal(number) is signal.SIG_IGN:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)


def _launch(
    entry: Callable[..., NoReturn],
    asked: Mapping[str, Any],
    server_pid: int,
    channel: socket.socket,
    connection: socket.socket,
) -> NoReturn:
    """Run `ddpkit launch` (`entry`), and send its exit code to the client. `channel`: to the warm server."""
    from ddp_kit.launcher.warm.client import ForkedProcess, WarmServer

    connection.settimeout(None)
    threading.Thread(target=_end_with_client, args=[connection], daemon=True).start()
    sys.argv[:] = ["ddpkit", "launch", *asked["argv"]]
    warm = WarmServer(asked["argv"], os.environ, forked=(ForkedProcess(server_pid), channel))
    client = Connection(connection)
    entry(sys.argv[1:], warm, asked["blocked"], at_exit=lambda code: client.send({"code": int(code)}))


def _end_with_client(connection: socket.socket) -> None:
    """Kill this process if the client is killed, as the launcher would be; the warm server then ends the job."""
    with suppress(OSError):
        connection.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)
