"""The trainer's handle to the process that writes checkpoints."""

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
from ddp_kit.checkpoint.process import ENOUGH, LONGEST_PACKET
from ddp_kit.env import CHECKPOINT_WRITER
from ddp_kit.errors import CheckpointError

# Without site.py, because .pth files may import anything; the folders that it needs are last on sys.path.
_CODE = (
    f"import sys; sys.path += sys.argv[4:]; from {CHECKPOINT_WRITER} import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))"
)
_NOT_FOR_IT = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT}
_LAST_WORDS = 2000
_LOOK_SECONDS = 0.5  # a signal just before a wait does not interrupt it: its handler runs between two waits


class WriterProcess:
    """Writes the content of the shared memory `memory`, a file descriptor; one checkpoint at a time.

    Jobs and answers are numbered packets. A job is sent again if it may not have been sent, and an answer stays in the
    socket until the next job: an exception raised by a signal handler, at any line, loses neither.
    """

    def __init__(self, memory: int) -> None:
        self._said = os.fdopen(os.memfd_create("ddpkit-writer", os.MFD_CLOEXEC), "w+b", buffering=0)
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        numbers = os.getpid(), memory, theirs.fileno()
        folders = (Path(str(package.__file__)).parents[1] for package in (ddp_kit, xxhash))
        command = [sys.executable, "-I", "-S", "-c", _CODE, *map(str, (*numbers, *folders))]
        # Block signals before the process starts, so that a signal to the whole job can never terminate it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_IT)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                cwd="/",
                pass_fds=[memory, theirs.fileno()],
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._number = 0  # number of the last job
        self._job: bytes | None = None  # not answered yet
        self._sent = False
        # Also at interpreter exit: a save in progress finishes first.
        self._finish = weakref.finalize(self, _end, self._process, self._line, self._said, os.getpid())

    @property
    def gone(self) -> bool:
        """Whether the process has ended."""
        return not self._finish.alive

    @property
    def pid(self) -> int:
        """Process id of the writer."""
        return self._process.pid

    def start(self, job: Job) -> None:
        """Write a checkpoint after the previous one is finished. Raises `CheckpointError` if the process is gone."""
        assert self._job is None, "one at a time: the memory is that of the job before"
        self._number += 1
        self._sent = False
        self._job = f"{self._number} {job.to_json()}".encode()  # from here on the memory is in use
        self._send()

    def finished(self, *, wait: bool) -> bool:
        """Whether the checkpoint is complete; `wait` until it is. Raises its `CheckpointError`."""
        while self._job is not None:
            self._send()
            ended = self._process.poll() is not None  # checked before reading: its last answer counts
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
                select.select([self._line], [], [], _LOOK_SECONDS)
        return True

    def close(self) -> None:
        """Let the process finish its checkpoint, then stop it."""
        self._finish()

    def _send(self) -> None:
        if self._job is not None and not self._sent:
            with suppress(OSError):  # it is gone; `finished` reports it
                self._line.send(self._job)
            self._sent = True

    def _answer(self) -> dict[str, str | bool] | None:
        """The answer to the last job: the error, or an empty dict; None: not answered yet."""
        with suppress(OSError):  # no answer yet, or the process is gone
            while packet := self._line.recv(LONGEST_PACKET, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                number, problem = json.loads(packet)
                if number == self._number:
                    return dict(problem)
                self._line.recv(1)  # answer to an earlier job: drops the whole packet
        return None

    def _gone(self) -> CheckpointError:
        self._job = None
        self._finish.detach()
        code = self._process.wait()
        self._said.seek(0)
        words = self._said.read().decode(errors="replace")[-_LAST_WORDS:].strip()
        _end(self._process, self._line, self._said, os.getpid())
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return CheckpointError(
            f"the process that writes checkpoints has ended ({how}){words and ': '}{words}",
            "the next save starts a new one; if it was killed by SIGKILL, check for out of memory with dmesg",
            transient=True,
        )


def _continue(process: "subprocess.Popen[bytes]") -> None:
    """Send SIGCONT, so that nobody waits for a process that someone has stopped with SIGSTOP."""
    process.send_signal(signal.SIGCONT)


def _end(process: "subprocess.Popen[bytes]", line: socket.socket, said: IO[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a forked child has inherited this; it owns none of it
        return
    with suppress(OSError):  # it is gone
        line.send(ENOUGH)  # closing is not enough: forked DataLoader workers also hold this end open
    while process.poll() is None:
        with suppress(OSError):
            _continue(process)
            if select.select([line], [], [], _LOOK_SECONDS)[0] and not line.recv(1):
                process.wait()  # it has closed its end and exits
    line.close()
    said.close()
