"""Describe a failed worker from its exit code, final output, error file, heartbeat, and the kernel's counters."""

import os
from collections.abc import Iterable
from dataclasses import replace
from signal import SIGKILL, SIGTERM

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ddp_kit.env import NOTE_AT_START, NOTE_PRINTED, NOTE_PRINTED_HERE, NOTE_SECONDARY
from ddp_kit.exit_codes import ExitCode
from ddp_kit.heartbeat import read_heartbeat
from ddp_kit.launcher import hints, tracebacks
from ddp_kit.launcher.agent.hang_monitor import Hung
from ddp_kit.launcher.agent.workers import Workers, note_of
from ddp_kit.launcher.restarts import Steps
from ddp_kit.launcher.verdict import Failure
from ddp_kit.masking import masked

_SERVER_LOST = "the process that forks the workers was killed, and the workers with it"


def failure_of(workers: Workers, rank: int, failure: ProcessFailure, host: str) -> Failure:
    """The `Failure` of the worker with global rank `rank`."""
    code = failure.exitcode
    after, terminated = workers.end_of(failure.local_rank)
    output, note = workers.final_output(failure.local_rank), note_of(failure)
    extra = note.get("extraInfo") or {}
    trace = output.trace or str(extra.get("py_callstack", "")).rstrip()
    noted = str(note.get("message", "")).strip()
    message = noted.partition("\n")[0] or tracebacks.message_of(trace)
    trace = trace or (noted if "\n" in noted else "")
    if workers.lost(failure.local_rank):
        message = _SERVER_LOST
    timed_out = hints.is_timeout(noted or message)
    hung = workers.hang_monitor.found
    secondary = bool(extra.get(NOTE_SECONDARY)) or hints.is_secondary(noted or message) or (timed_out and bool(hung))
    if terminated and code == -SIGTERM and message and not secondary:
        code = 1  # it was already ending with an exception of its own when SIGTERM arrived
    out_of_memory = code == -SIGKILL and not terminated and workers.killed_for_memory()
    found = Failure(
        rank=rank,
        local_rank=failure.local_rank,
        pid=failure.pid,
        exit_code=code,
        after=after,
        host=host,
        message=masked(message, os.environ),  # masked here: other nodes do not know the secrets
        trace=masked(trace, os.environ),
        step=read_heartbeat(workers.error_files[failure.local_rank]).step,
        hint=masked(hints.hint(f"{output.tail}\n{trace}\n{message}", code, out_of_memory), os.environ),
        at_start=bool(extra.get(NOTE_AT_START)) or tracebacks.failed_at_start(trace),
        terminated=terminated,
        secondary=secondary,
        printed=bool(extra.get(NOTE_PRINTED)),
        printed_here=bool(extra.get(NOTE_PRINTED_HERE)),
        out_of_memory=out_of_memory,
        others=workers.hang_monitor.others if timed_out and not hung else (),
    )
    return _hung(found, hung[failure.local_rank]) if failure.local_rank in hung else found


def _hung(found: Failure, hung: Hung) -> Failure:
    """The failure of a worker that the launcher killed because it hung."""
    return replace(
        found,
        exit_code=ExitCode.HUNG,
        hung=True,
        message=masked(hung.message, os.environ),
        trace=masked(hung.trace, os.environ),
        others=tuple(masked(line, os.environ) for line in hung.others),
        hint=hung.hint,
        terminated=False,
        secondary=hung.waits,
    )


def steps_of(error_files: Iterable[str]) -> Steps | None:
    """The range of steps of these workers; None: none has begun a step."""
    heartbeats = [read_heartbeat(error_file) for error_file in error_files]
    found = [(each.began, each.step) for each in heartbeats if each.began is not None and each.step is not None]
    return Steps(max(began for began, _ in found), max(reached for _, reached in found)) if found else None
