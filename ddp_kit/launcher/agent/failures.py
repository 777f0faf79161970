"""What is known of a worker that failed: from its exit code, its last words, its error file and the kernel."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ddp_kit import contract
from ddp_kit.contract import NOTE_AT_START
from ddp_kit.launcher import hints, last_words
from ddp_kit.launcher.agent.workers import Workers
from ddp_kit.launcher.masking import masked
from ddp_kit.launcher.restarts import Steps
from ddp_kit.launcher.verdict import Failure

_SERVER_LOST = "the process that forks the workers was killed, and all of them with it"


def failure_of(workers: Workers, rank: int, failure: ProcessFailure, host: str) -> Failure:
    """All that is known of the end of the worker of global rank `rank`."""
    code = failure.exitcode
    after, told = workers.story(failure.local_rank)
    words, note = workers.last_words(failure.local_rank), note_of(failure)
    extra = note.get("extraInfo") or {}
    trace = words.trace or str(extra.get("py_callstack", "")).rstrip()
    message = str(note.get("message", "")) or last_words.message_of(trace)
    if workers.lost(failure.local_rank):
        message = _SERVER_LOST
    echo = hints.is_echo(message)
    if told and code == -SIGTERM and message and not echo:
        code = 1  # it was ending with its own exception already; a peer that missed it had ended before it
    out_of_memory = code == -SIGKILL and not told and workers.killed_for_memory()
    return Failure(
        rank=rank,
        local_rank=failure.local_rank,
        pid=failure.pid,
        exit_code=code,
        after=after,
        host=host,
        message=masked(message, os.environ),  # here: other nodes, which show it too, do not know the values
        trace=masked(trace, os.environ),
        step=step_of(workers.error_files[failure.local_rank]),
        hint=masked(hints.hint(f"{words.tail}\n{trace}\n{message}", code, out_of_memory), os.environ),
        at_start=bool(extra.get(NOTE_AT_START)) or last_words.failed_at_start(trace),
        told=told,
        echo=echo,
        out_of_memory=out_of_memory,
    )


def note_of(failure: ProcessFailure) -> dict[str, Any]:
    """What the script, or `warm.script` in its place, left behind in torch's form; empty where there is nothing."""
    return failure.message if isinstance(failure.message, dict) else {}


def step_of(error_file: str) -> int | None:
    """The last optimizer step that a worker's Trainer has noted beside its error file."""
    with suppress(OSError, ValueError):
        return contract.read_step(Path(error_file).with_name(contract.STEP_FILE))
    return None


def steps_of(error_files: Iterable[str]) -> Steps | None:
    """Between which steps the workers were that have noted any."""
    found = []
    for error_file in error_files:
        with suppress(OSError, ValueError):
            path = Path(error_file).with_name(contract.STEP_FILE)
            found.append((contract.read_first_step(path), contract.read_step(path)))
    return Steps(max(began for began, _ in found), max(reached for _, reached in found)) if found else None
