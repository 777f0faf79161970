"""Programs of this package that run in a child process without torch, and answer the requests of their parent.

    ChildProgram    in the parent: starts the process, sends numbered requests, and reads the answers
    serve           in the child: its loop

The child starts in about 50 ms, because it imports only what it needs, and not `site`. It exits when its parent does,
after the request that it is working on.
"""

import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ddp_kit.env import PACKAGE_FOLDER
from ddp_kit.errors import CheckpointError, advice_for

STOP = b"\n"
"""The packet that tells the child to exit."""
_LONGEST_PACKET = 1 << 16
_LONGEST_TEXT = 10_000
_BUG = "this is a bug in ddpkit: please report it"

# --- In the child -----------------------------------------------------------------------------------------------------
# The loop waits for one of:
#
#     a packet with a number and a request                        do it, then answer with the number, the error and the
#                                                                 result
#     a stop packet, end of file, end of the parent               exit


def serve(parent: int, line: int, handle: Callable[[str], Any]) -> None:
    """Answer the requests of the parent, until it says stop or ends.

    `parent`: its process id. `line`: the descriptor of the socket. `handle`: a function that does what a request says,
    and returns the result, which JSON can express.
    Signals were blocked before this process started, because a signal to the whole job must not interrupt a save.
    """
    waits: list[int] = [line]
    with suppress(OSError):  # needed because a forked DataLoader worker may keep the other end of the socket open
        waits.append(os.pidfd_open(parent))
    if os.getppid() != parent:
        return
    done = 0
    with socket.socket(fileno=line) as requests:
        while line in readable(waits):
            try:
                packet = requests.recv(_LONGEST_PACKET)
            except ConnectionResetError:  # raised once if the parent ended without reading an answer;
                continue  # the next recv returns a request that it had sent before
            if packet in (b"", STOP):
                return
            number, _, text = packet.partition(b" ")
            if int(number) <= done:  # the request was sent twice
                continue
            done = int(number)
            problem: dict[str, str | bool] = {}
            result = None
            try:
                result = handle(text.decode())
            except CheckpointError as error:
                problem = {"message": error.message, "hint": error.hint, "transient": error.transient}
            except Exception:
                trace = traceback.format_exc()[-_LONGEST_TEXT:]
                problem = {"message": f"a program of ddpkit has failed:\n{trace}", "hint": _BUG}
            with suppress(OSError):  # the parent has ended
                requests.send(json.dumps([done, problem, result]).encode())


def readable(descriptors: Iterable[int], seconds: float | None = None) -> set[int]:
    """Wait until a descriptor can be read from or has been hung up, and return all such descriptors.

    `seconds`: how long to wait at most; None: forever. Uses poll, because select refuses descriptors of 1024 and more,
    which a training process with many open files has.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if seconds is None else seconds * 1000)}


# --- In the parent ----------------------------------------------------------------------------------------------------


# Runs without site.py, because .pth files may import anything; the folders of the packages it needs are arguments.
_CODE = "import sys; sys.path += sys.argv[1].split('\\n'); from {module} import main; main(*map(int, sys.argv[2:]))"
_BLOCKED_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT}
_LONGEST_ERROR = 2000
_POLL_SECONDS = 0.5  # a signal that arrives just before a wait does not interrupt it, so waits are short


class ChildProgram:
    """The parent's handle on a child process, which does one request at a time. Making one starts the process.

    Requests and answers are numbered packets. A signal handler may raise an exception at any line without losing
    either: a request is sent again unless it is known to have been sent, and an answer stays in the socket until the
    next request.
    """

    purpose = "serves this one"
    """What the process does, for messages."""

    def __init__(self, module: str, packages: Sequence[str], descriptors: Sequence[int] = ()) -> None:
        """`module`: the program, with a function `main(parent, line, *descriptors)`, which calls `serve`.

        `packages`: what it imports in addition to ddpkit and the standard library. `descriptors`: files that it uses.
        Raises `CheckpointError` if no process can be started.
        """
        self._stderr = os.fdopen(os.memfd_create("ddpkit-child", os.MFD_CLOEXEC), "w+b", buffering=0)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        folders = "\n".join(dict.fromkeys((PACKAGE_FOLDER, *map(_folder_of, packages))))
        numbers = os.getpid(), theirs.fileno(), *descriptors
        command = [sys.executable, "-I", "-S", "-c", _CODE.format(module=module), folders, *map(str, numbers)]
        # Block signals before the process starts, so that a signal to the whole job can never terminate it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                cwd="/",
                pass_fds=[theirs.fileno(), *descriptors],
                start_new_session=True,
            )
        except OSError as error:
            self._socket.close()
            self._stderr.close()
            raise CheckpointError(
                f"the process that {self.purpose} cannot be started: {error.strerror}",
                advice_for(error, "raise the limits on processes and open files of this job (`ulimit -u -n`)"),
                transient=True,
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._number = 0  # of the last request
        self._packet: bytes | None = None  # of a request that has not been answered
        self._sent = False
        self.result: Any = None
        """The result of the last request."""
        # Also runs at interpreter exit, and lets a request in progress finish.
        self._finish = weakref.finalize(self, _end, self._process, self._socket, self._stderr, os.getpid())

    @property
    def gone(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def begin(self, request: str) -> None:
        """Send a request; the previous one must be finished."""
        assert self._packet is None, "the process does one request at a time"
        self._number += 1
        self._sent = False
        self._packet = f"{self._number} {request}".encode()  # from here on, the process may work on it
        self._send()

    def finished(self, *, wait: bool) -> bool:
        """Whether the last request is done. `wait`: whether to wait for it. Raises `CheckpointError` if it failed."""
        while self._packet is not None:
            self._send()
            ended = self._process.poll() is not None  # before reading, so that the process's last answer is not missed
            answer = self._answer()
            if answer is not None:
                self._packet = None
                problem, self.result = answer
                if problem:
                    raise CheckpointError(**problem)
            elif ended:
                raise self.release()
            elif not wait:
                return False
            else:
                _continue(self._process)
                readable([self._socket.fileno()], _POLL_SECONDS)
        return True

    def close(self) -> None:
        """Let the process finish its request, then stop it."""
        self._finish()

    def release(self) -> CheckpointError:
        """Release what a process that is gone has used, and return the error for what it was doing."""
        self._packet = None
        self._finish.detach()
        code = self._process.wait()
        self._stderr.seek(0)
        words = self._stderr.read().decode(errors="replace")[-_LONGEST_ERROR:].strip()
        _end(self._process, self._socket, self._stderr, os.getpid())
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return CheckpointError(
            f"the process that {self.purpose} has ended ({how}){words and ': '}{words}",
            "the next use starts a new process; if SIGKILL killed this one, check with dmesg whether memory ran out",
            transient=True,
        )

    def _send(self) -> None:
        if self._packet is not None and not self._sent:
            with suppress(OSError):  # the process is gone; `finished` reports that
                self._socket.send(self._packet)
            self._sent = True

    def _answer(self) -> tuple[dict[str, Any], Any] | None:
        """The answer to the last request: the arguments of a `CheckpointError`, or an empty dict, and the result.

        None if it has not been answered.
        """
        with suppress(OSError):  # no answer yet, or the process is gone
            while packet := self._socket.recv(_LONGEST_PACKET, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                number, problem, result = json.loads(packet)
                if number == self._number:
                    return dict(problem), result
                self._socket.recv(1)  # drop the whole packet, the answer to an earlier request
        return None


def _folder_of(package: str) -> str:
    """The folder from which a package is imported, without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is installed"
    assert spec.origin is not None, f"{package} is a package"
    return str(Path(spec.origin).parents[1])


def _continue(process: "subprocess.Popen[bytes]") -> None:
    """Resume the process if SIGSTOP has stopped it, because training would wait for it forever."""
    process.send_signal(signal.SIGCONT)


def _end(process: "subprocess.Popen[bytes]", requests: socket.socket, stderr: IO[bytes], owner: int) -> None:
    """Let the process finish its request, stop it, and close its files."""
    if os.getpid() != owner:  # a forked child inherits the finalizer
        return
    with suppress(OSError):  # the process is gone
        requests.send(STOP)  # closing the socket is not enough: forked DataLoader workers also hold it open
    while process.poll() is None:
        with suppress(OSError):
            _continue(process)
            if readable([requests.fileno()], _POLL_SECONDS) and not requests.recv(1):
                process.wait()  # the process has closed its end of the socket, and exits
    requests.close()
    stderr.close()
