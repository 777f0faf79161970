"""Hand a launch over to the kept process (kept_process.py). To start at once, imports only the standard library."""

import json
import os
import signal
import socket
import stat
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any

from ddp_kit.env import RUNTIME_FOLDER, qualified_name
from ddp_kit.launcher.program import Program
from ddp_kit.launcher.warm.facts import facts_of, own_facts
from ddp_kit.launcher.wire import Connection
from ddp_kit.texts import plural

if TYPE_CHECKING:
    from ddp_kit.launcher.warm.client import WarmServer
    from ddp_kit.launcher.warm.messages import Import

FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
)
"""The signals that the client passes on to the launcher."""
ROOM = " " * 4096  # for the command lines of later launchers and their workers, see `WarmServer`
_LONGEST_FOLDER = 70  # the path of a socket has at most 107 bytes
_DIGEST = 2**80 - 65  # a prime: each byte of a text counts in its remainder
_ANSWER_SECONDS = 2.0  # a kept process that takes longer is not used
_START_SECONDS = 60.0  # for the imports of a kept process that another launch has just started


def peer(connection: socket.socket) -> tuple[int, int]:
    """The process id and the user id of the process at the other end."""
    pid_uid_gid = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", pid_uid_gid)
    return pid, user


def folder() -> Path | None:
    """The folder for the sockets of kept processes, which only this user can access; None if there is none."""
    path = _folder_path()
    if len(os.fsencode(path)) > _LONGEST_FOLDER:
        return None
    with suppress(OSError):
        path.mkdir(mode=0o700, exist_ok=True)
        state = path.lstat()
        if stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o077:
            return path
    return None


def _folder_path() -> Path:
    base = os.environ.get(RUNTIME_FOLDER, "")
    if base.startswith("/") and os.access(base, os.W_OK):
        return Path(base, "ddpkit")
    from tempfile import gettempdir  # slow to import

    return Path(gettempdir(), f"ddpkit-{os.getuid()}")


def hand_over(
    argv: Sequence[str], program: Program, packages: tuple[str, ...] | None, print_message: Callable[[str], None]
) -> int | None:
    """Let a kept process run `ddpkit launch`, and return the exit code; None if this process has to run it.

    `argv`: the arguments of `ddpkit launch`. `program`, `packages`: its script, and the packages to import (`Import`).
    """
    address = address_of(program, packages)
    if address is None or any(word.startswith(("/dev/fd/", "/proc/self/fd/")) for word in argv):
        return None  # in the second case, the launcher would need a descriptor of this process
    _wait_while_starting(address)
    umask = os.umask(0o077)
    os.umask(umask)
    request = {
        "argv": [*argv],
        "umask": umask,
        "ignored": [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN],
        "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        **_conditions(program, packages),
    }
    with closing(Connection(socket.socket(socket.AF_UNIX))) as connection:
        answer = _answer(connection, address, "launch", request)
        if answer is None:
            return None
        if "launcher" in answer:
            return _attend(connection, answer["launcher"])
    print_message(f"the kept process cannot be used and is replaced: {answer['refused']}")
    return None


def _wait_while_starting(address: Path) -> None:
    """Wait for a kept process that is making its imports: it has begun before this process would begin with its own."""
    if address.exists():
        return
    import fcntl
    import time

    with suppress(OSError):
        lock = os.open(f"{address}.lock", os.O_RDONLY | os.O_CLOEXEC)
        deadline = time.monotonic() + _START_SECONDS
        while not address.exists() and time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:  # the kept process has locked the file, from its start to its end
                time.sleep(0.01)
            else:
                break
        os.close(lock)


def state_of(program: Program, packages: tuple[str, ...] | None) -> str:
    """Whether a launch would use a kept process, as text."""
    address = address_of(program, packages)
    answer = None
    if address is not None:
        answer = ask(address, "question", _conditions(program, packages))
    if answer is None:
        return "none yet"
    use = f"which would be replaced: {answer['refused']}" if answer["refused"] else "used"
    return f"pid {answer['pid']}, {use}"


def _conditions(program: Program, packages: tuple[str, ...] | None) -> dict[str, Any]:
    """The part of a request that says whether a kept process can serve it."""
    return {
        "folder": os.getcwd(),  # noqa: PTH109
        "env": dict(os.environ),
        "import": {"program": program, "env": {}, "differing": (), "packages": packages},
        "facts": own_facts(),
    }


def command_here() -> dict[str, Any]:
    """The environment and the facts of this process, with which later launches are compared."""
    return {"env": dict(os.environ), "facts": {**facts_of(os.getpid()), **own_facts()}}


def ask(address: Path, what: str, request: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any] | None:
    """Send a request to a kept process, with stdin, stdout and stderr, and return its answer; None: there is none.

    `what`: "launch", "question" (would it be served?), "description" or "stop".
    """
    with closing(Connection(socket.socket(socket.AF_UNIX))) as connection:
        return _answer(connection, address, what, request)


def _answer(connection: Connection, address: Path, what: str, request: Mapping[str, Any]) -> dict[str, Any] | None:
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    end = connection.socket
    try:
        end.settimeout(_ANSWER_SECONDS)
        end.connect(str(address))
        if peer(end)[1] != os.geteuid():
            return None
        connection.send({"for": what, **request}, [number if _is_open(number) else null for number in range(3)])
        answer = connection.receive_object()
        end.settimeout(None)
    except (OSError, EOFError, ValueError):
        return None
    finally:
        os.close(null)
    return answer


def kept_processes(what: str = "description") -> list[dict[str, Any]]:
    """The descriptions of the kept processes of this user. `what`: "description", or "stop" to end them."""
    found: list[dict[str, Any]] = []
    place = folder()
    if place is None:
        return found
    for address in sorted(place.glob("*.kept")):
        answer = ask(address, what)
        if answer is not None:
            found.append(answer)
        else:  # it was killed
            address.unlink(missing_ok=True)
    return found


def kept_processes_text() -> str:
    """How many processes are kept, for other commands; empty if none is."""
    number = len(kept_processes())
    if not number:
        return ""
    return f"{plural(number, 'process', 'processes')} kept for the next launches; `ddpkit warm` lists them"


def keep_process(
    request: "Import | None",
    seconds: float,
    command: Mapping[str, Any],
    server: "WarmServer",
    entry: Callable[..., object],
    print_message: Callable[[str], None],
) -> None:
    """Let the warm server fork a kept process for the next launches, which ends at once if the script has one already.

    `request`: what it imports. `seconds`: how long it waits for the next launch. `command`: see `command_here`.
    `entry`: the function that runs `ddpkit launch`.
    """
    from ddp_kit.launcher.warm.messages import Keep  # slow to import, and not needed to hand over a launch

    if request is None:
        return
    address = address_of(request.program, request.packages)
    if address is None:
        print_message(
            f"no process is kept: {_folder_path()} is not a folder that only you can access, or its path is too long; "
            f"set {RUNTIME_FOLDER} to another folder"
        )
        return
    try:
        os.close(os.open(f"{address}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        print_message(f"no process is kept: {address.parent} cannot be written to: {error.strerror}")
        return
    server.keep(Keep(str(address), seconds, request, command["env"], command["facts"], qualified_name(entry)))


def address_of(program: Program, packages: tuple[str, ...] | None) -> Path | None:
    """The socket of a script's kept process; None if there is no folder for it."""
    place = folder()
    if place is None:
        return None
    name = program.name if program.module else str(Path(program.name).resolve())
    content = json.dumps([name, program.module and os.getcwd(), packages, sys.prefix])  # noqa: PTH109
    digest = int.from_bytes(content.encode(), "big") % _DIGEST  # hashlib is slow to import
    return place / f"{digest:020x}.kept"


def _attend(connection: Connection, launcher: int) -> int:
    """Forward signals to the launcher until it ends, and return its exit code."""

    def forward(number: int, _frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(launcher, number)

    def suspend(number: int, _frame: FrameType | None) -> None:
        forward(signal.SIGSTOP, None)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # the shell sees which signal it was; returns after SIGCONT
        signal.signal(number, suspend)
        forward(signal.SIGCONT, None)

    for number in FORWARDED:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)
    if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
        signal.signal(signal.SIGTSTP, suspend)
    try:
        return int(connection.receive_object()["code"])
    except (EOFError, OSError, ValueError):
        return 128 + signal.SIGKILL  # the launcher was killed; its warm server ends the job


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
