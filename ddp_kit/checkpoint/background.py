"""The process that writes checkpoints, as the trainer's process sees it."""

import json
import os
import select
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO

import ddp_kit
from ddp_kit.checkpoint.process import ENOUGH
from ddp_kit.checkpoint.writing import Job
from ddp_kit.contract import CHECKPOINT_WRITER
from ddp_kit.errors import CheckpointError

# Without site-packages, whose .pth files may import anything; the package's own folder comes last on the path.
_CODE = (
    f"import sys; sys.path.append(sys.argv[1]); from {CHECKPOINT_WRITER} import main; "
    "main(int(sys.argv[2]), int(sys.argv[3]))"
)
_NOT_FOR_IT = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT}
_LAST_WORDS = 2000


class WriterProcess:
    """Writes what lies in the shared memory `memory`, a descriptor; one checkpoint at a time."""

    def __init__(self, memory: int) -> None:
        self._said = os.fdopen(os.memfd_create("ddpkit-writer", os.MFD_CLOEXEC), "w+b", buffering=0)
        root = str(Path(ddp_kit.__file__).parents[1])
        # Blocked before it exists, so that there is no moment in which a signal to the whole job ends it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_IT)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CODE, root, str(os.getpid()), str(memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                bufsize=0,
                cwd="/",
                pass_fds=[memory],
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._answer = b""
        # Also at the interpreter's end: a save in hand is finished first.
        self._finish = weakref.finalize(self, _end, self._process, self._said, os.getpid())

    @property
    def gone(self) -> bool:
        """Whether it has ended, which it does not by itself."""
        return not self._finish.alive

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def start(self, job: Job) -> None:
        """Let it write a checkpoint; `finished` says when it has. Raises `CheckpointError` where it is gone."""
        try:
            _pipe(self._process.stdin).write(job.to_json().encode() + b"\n")
        except OSError:
            raise self._gone() from None

    def finished(self, *, wait: bool) -> bool:
        """Whether the checkpoint is whole; `wait` until it is. Raises its `CheckpointError`."""
        answers = _pipe(self._process.stdout)
        while b"\n" not in self._answer:
            if not wait and not select.select([answers], [], [], 0)[0]:
                return False
            more = os.read(answers.fileno(), 65536)
            if not more:
                raise self._gone()
            self._answer += more
        line, _, self._answer = self._answer.partition(b"\n")
        problem = json.loads(line)
        if problem:
            raise CheckpointError(**problem)
        return True

    def close(self) -> None:
        """Let it finish, and end it."""
        self._finish()

    def _gone(self) -> CheckpointError:
        self._finish.detach()
        code = self._process.wait()
        self._said.seek(0)
        words = self._said.read().decode(errors="replace")[-_LAST_WORDS:].strip()
        _end(self._process, self._said, os.getpid())
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return CheckpointError(
            f"the process that writes checkpoints is gone ({how}){words and ': '}{words}",
            "the next save starts another one; where SIGKILL ended it, look for a lack of memory: dmesg",
            may_pass=True,
        )


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _end(process: "subprocess.Popen[bytes]", said: IO[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a forked child has inherited this, and nothing in it is its own
        return
    with suppress(OSError):  # it is gone
        _pipe(process.stdin).write(ENOUGH)  # closing it would not do: forked loader processes hold its other end
    for pipe in (process.stdin, said):
        _pipe(pipe).close()
    process.wait()
    _pipe(process.stdout).close()
