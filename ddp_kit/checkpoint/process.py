"""The process that writes checkpoints: starts in about 50 ms, because it imports only the standard library.

loop:
    a packet with a number and a `Job`: write it from the shared memory, answer with the number and what went wrong
    an empty packet, end of file, or the trainer's process ends:    exit
"""

import json
import mmap
import os
import select
import socket
import traceback
from contextlib import suppress

from ddp_kit.checkpoint.files import Job
from ddp_kit.checkpoint.writing import write
from ddp_kit.errors import CheckpointError

ENOUGH = b"\n"
"""The packet that ends it."""
LONGEST_PACKET = 1 << 16
_LONGEST_TEXT = 10_000


def main(parent: int, memory: int, line: int) -> None:
    """Serve the trainer's process `parent`; `memory` and `line` are the descriptors of what the two share.

    Signals are blocked from the start: a signal to the whole job must not interrupt a save in progress.
    """
    waits: list[int] = [line]
    with suppress(OSError):  # a forked DataLoader worker of the trainer may keep the other end open for a moment
        waits.append(os.pidfd_open(parent))
    if os.getppid() != parent:
        return
    done = 0
    with socket.socket(fileno=line) as jobs:
        while line in select.select(waits, [], [])[0]:
            try:
                packet = jobs.recv(LONGEST_PACKET)
            except ConnectionResetError:  # said once where the trainer ended without having read an answer;
                continue  # a job that it had sent before is still there
            if packet in (b"", ENOUGH):
                return
            number, _, job = packet.partition(b" ")
            if int(number) > done:  # else it was sent twice
                done = int(number)
                problem = _done(Job.from_json(job), memory, parent)
                with suppress(OSError):  # the trainer's process has ended
                    jobs.send(json.dumps([done, problem]).encode())


def _done(job: Job, memory: int, parent: int) -> dict[str, str | bool]:
    """Write it; returns what makes the `CheckpointError`, or nothing."""
    try:
        with mmap.mmap(memory, 0, prot=mmap.PROT_READ) as shared, memoryview(shared) as view:
            write(job, view, abandoned=lambda: os.getppid() != parent)
    except CheckpointError as error:
        return {"message": error.message, "hint": error.hint, "transient": error.transient}
    except Exception:
        return {
            "message": f"the checkpoint of step {job.step} could not be written:\n"
            f"{traceback.format_exc()[-_LONGEST_TEXT:]}",
            "hint": "this is a fault of ddpkit's: please report it; checkpoint.background=False may help meanwhile",
        }
    return {}
