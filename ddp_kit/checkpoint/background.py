"""The training process's handle to the process that writes checkpoints."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO

import xxhash

import ddp_kit
from ddp_kit.checkpoint.files import Job
from ddp_kit.checkpoint.process import LONGEST_PACKET, STOP
from ddp_kit.env import CHECKPOINT_WRITER
from ddp_kit.errors import CheckpointError

# Runs without site.py, because .pth files may import anything; the folders of the packages it needs are arguments.
_CODE = (
    f"import sys; sys.path += sys.argv[4:]; from {CHECKPOINT_WRITER} import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))"
)
_BLOCKED_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT}
_LONGEST_ERROR = 2000
_POLL_SECONDS = 0.5  # a signal that arrives just before a wait does not interrupt it, so waits are short


class WriterProcess:
    """A process that writes checkpoints from shared memory, one at a time. `memory`: the memory's file descriptor.

    Jobs and answers are numbered packets. A job is sent again if it may not have been sent, and an answer stays in the
    socket until the next job, so that an exception raised by a signal handler, at any line, loses neither.
    """

    def __init__(self, memory: int) -> None:
        self._stderr = os.fdopen(os.memfd_create("ddpkit-writer", os.MFD_CLOEXEC), "w+b", buffering=0)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        numbers = os.getpid(), memory, theirs.fileno()
        folders = (Path(str(package.__file__)).parents[1] for package in (ddp_kit, xxhash))
        command = [sys.executable, "-I", "-S", "-c", _CODE, *map(str, (*numbers, *folders))]
        # Block signals before the process starts, so that a signal to the whole job can never terminate it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                cwd="/",
                pass_fds=[memory, theirs.fileno()],
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._number = 0  # the number of the last job
        self._job: bytes | None = None  # the packet of a job that has not been answered
        self._sent = False
        # Also runs at interpreter exit, and lets a save in progress finish.
        self._finish = weakref.finalize(self, _end, self._process, self._socket, self._stderr, os.getpid())

    @property
    def gone(self) -> bool:
        """Whether the process has ended."""
        return not self._finish.alive

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def start(self, job: Job) -> None:
        """Start to write a checkpoint; the previous one must be finished."""
        assert self._job is None, "all jobs use the same memory"
        self._number += 1
        self._sent = False
        self._job = f"{self._number} {job.to_json()}".encode()  # from here on, the memory is in use
        self._send()

    def finished(self, *, wait: bool) -> bool:
        """Whether the last checkpoint is complete. `wait`: wait until it is. Raises its `CheckpointError`."""
        while self._job is not None:
            self._send()
            ended = self._process.poll() is not None  # before reading, so that its last answer is not missed
            problem = self._answer()
            if problem is not None:
                self._job = None
                if problem:
                    raise CheckpointError(**problem)  # type: ignore[arg-type]
            elif ended:
                raise self._gone()
            elif not wait:
                return False
            else:
                _continue(self._process)
                select.select([self._socket], [], [], _POLL_SECONDS)
        return True

    def close(self) -> None:
        """Let the process finish its checkpoint, then stop it."""
        self._finish()

    def _send(self) -> None:
        if self._job is not None and not self._sent:
            with suppress(OSError):  # the process is gone; `finished` reports that
                self._socket.send(self._job)
            self._sent = True

    def _answer(self) -> dict[str, str | bool] | None:
        """The answer to the last job: arguments of its `CheckpointError`, or an empty dict; None: not answered yet."""
        with suppress(OSError):  # no answer yet, or the process is gone
            while packet := self._socket.recv(LONGEST_PACKET, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                number, problem = json.loads(packet)
                if number == self._number:
                    return dict(problem)
                self._socket.recv(1)  # drop the whole packet, the answer to an earlier job
        return None

    def _gone(self) -> CheckpointError:
        self._job = None
        self._finish.detach()
        code = self._process.wait()
        self._stderr.seek(0)
        words = self._stderr.read().decode(errors="replace")[-_LONGEST_ERROR:].strip()
        _end(self._process, self._socket, self._stderr, os.getpid())
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return CheckpointError(
            f"the process that writes checkpoints has ended ({how}){words and ': '}{words}",
            "the next save starts a new one; if it was killed by SIGKILL, check for out of memory with dmesg",
            transient=True,
        )


def _continue(process: "subprocess.Popen[bytes]") -> None:
    """Send SIGCONT, in case the process was stopped with SIGSTOP, because training waits for it."""
    process.send_signal(signal.SIGCONT)


def _end(process: "subprocess.Popen[bytes]", jobs: socket.socket, stderr: IO[bytes], owner: int) -> None:
    """Let the process finish its checkpoint, stop it, and close its files."""
    if os.getpid() != owner:  # a forked child inherits the finalizer
        return
    with suppress(OSError):  # the process is gone
        jobs.send(STOP)  # closing the socket is not enough: forked DataLoader workers also hold it open
    while process.poll() is None:
        with suppress(OSError):
            _continue(process)
            if select.select([jobs], [], [], _POLL_SECONDS)[0] and not jobs.recv(1):
                process.wait()  # it has closed its end and exits
    jobs.close()
    stderr.close()
