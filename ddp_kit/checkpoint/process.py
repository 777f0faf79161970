"""The process that writes checkpoints: starts in some 50 ms, for it imports the standard library alone.

loop:
    a line on stdin     a `Job`: write it from the shared memory, answer with a line on stdout
    an empty line, end of file, or the trainer's process ends:    go
"""

import json
import mmap
import os
import select
import traceback
from contextlib import suppress

from ddp_kit.checkpoint.writing import Job, write
from ddp_kit.errors import CheckpointError

ENOUGH = b"\n"
"""What tells it that there will be no more."""


def main(parent: int, memory: int) -> None:
    """Serve the trainer's process `parent`; `memory` is the descriptor of what the two share.

    Signals are blocked from the start on: what is sent to the whole job is not for a save in hand.
    """
    waits: list[int] = [0]
    with suppress(OSError):  # a forked loader process of the trainer may keep stdin's other end for a moment
        waits.append(os.pidfd_open(parent))
    if os.getppid() != parent:
        return
    pending = b""
    while True:
        ready = select.select(waits, [], [])[0]
        if 0 not in ready:
            return
        more = os.read(0, 65536)
        if not more:
            return
        *lines, pending = (pending + more).split(b"\n")
        for line in lines:
            if not line:
                return
            answer = _done(Job.from_json(line), memory)
            with suppress(BrokenPipeError):
                os.write(1, json.dumps(answer).encode() + b"\n")


def _done(job: Job, memory: int) -> dict[str, str | bool]:
    """Write it; returns what makes the `CheckpointError`, or nothing."""
    try:
        with mmap.mmap(memory, 0, prot=mmap.PROT_READ) as shared, memoryview(shared) as view:
            write(job, view)
    except CheckpointError as error:
        return {"message": error.message, "hint": error.hint, "may_pass": error.may_pass}
    except Exception:
        return {
            "message": f"the checkpoint of step {job.step} could not be written:\n{traceback.format_exc()}",
            "hint": "this is a fault of ddpkit's: please report it; checkpoint.background=False may do meanwhile",
        }
    return {}
