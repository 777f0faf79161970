"""The process that writes checkpoints. It starts in about 50 ms, because it does not import torch or numpy.

loop:
    a packet with a number and a `Job`:     write the checkpoint from shared memory; answer with the number and the
    error a stop packet, end of file, or the training process has ended:    exit
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

STOP = b"\n"
"""The packet that ends the process."""
LONGEST_PACKET = 1 << 16
_LONGEST_TEXT = 10_000


def main(parent: int, memory: int, line: int) -> None:
    """Serve the training process. `parent`: its process id. `memory`, `line`: descriptors of the memory and the socket.

    Signals were blocked before the start: a signal to the whole job must not interrupt a save in progress.
    """
    waits: list[int] = [line]
    with suppress(OSError):  # needed because a forked DataLoader worker may keep the other end of the socket open
        waits.append(os.pidfd_open(parent))
    if os.getppid() != parent:
        return
    done = 0
    with socket.socket(fileno=line) as jobs:
        while line in select.select(waits, [], [])[0]:
            try:
                packet = jobs.recv(LONGEST_PACKET)
            except ConnectionResetError:  # raised once if the training process ended without reading an answer;
                continue  # the next recv returns a job that it had sent before
            if packet in (b"", STOP):
                return
            number, _, job = packet.partition(b" ")
            if int(number) > done:  # otherwise it was sent twice
                done = int(number)
                problem = _done(Job.from_json(job), memory, parent)
                with suppress(OSError):  # the training process has ended
                    jobs.send(json.dumps([done, problem]).encode())


def _done(job: Job, memory: int, parent: int) -> dict[str, str | bool]:
    """Write a checkpoint. Returns the arguments of its `CheckpointError`, or an empty dict."""
    try:
        with mmap.mmap(memory, 0, prot=mmap.PROT_READ) as shared, memoryview(shared) as view:
            write(job, view, abandoned=lambda: os.getppid() != parent)
    except CheckpointError as error:
        return {"message": error.message, "hint": error.hint, "transient": error.transient}
    except Exception:
        return {
            "message": f"the checkpoint of step {job.step} could not be written:\n"
            f"{traceback.format_exc()[-_LONGEST_TEXT:]}",
            "hint": "this is a bug in ddpkit: please report it; until it is fixed, try checkpoint.background=False",
        }
    return {}
