"""Explanation of failed workers: their exceptions, tracebacks and causes, and what to do about them."""

import os
import signal
from collections.abc import Iterable, Mapping

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ddp_kit.control_groups import oom_kills
from ddp_kit.env import NOTE_AT_START, NOTE_FAULTY, NOTE_MARK, NOTE_PRINTED, NOTE_PRINTED_HERE, NOTE_SECONDARY
from ddp_kit.exit_codes import ExitCode
from ddp_kit.heartbeat import read_heartbeat
from ddp_kit.launcher import diagnosis
from ddp_kit.launcher.agent.endings import FailedWorker
from ddp_kit.launcher.agent.hangs import HangMonitor
from ddp_kit.launcher.output import FinalOutput, Output
from ddp_kit.launcher.verdict import Failure
from ddp_kit.masking import masked
from ddp_kit.uncaught import read_error_file

_SERVER_LOST = "the process that forks the workers was killed, along with all workers"


class FailureReader:
    """Reads why workers of one round on one node have failed, from their error files, output and heartbeats.

    `first_rank`: the rank of local rank 0. `host`: the name of this node in failures.
    """

    def __init__(
        self, first_rank: int, host: str, error_files: Mapping[int, str], output: Output, hang_monitor: HangMonitor
    ) -> None:
        self._first_rank = first_rank
        self._host = host
        self._error_files = error_files
        self._output = output
        self._hang_monitor = hang_monitor
        self._oom_kills = oom_kills()

    def timed_out(self, local_rank: int) -> bool:
        """Whether a failed worker ended because of a timeout in a collective that other ranks did not reach."""
        message, _ = read_error_file(self._error_files[local_rank]) or ("", {})
        return diagnosis.is_timeout(message or self._output.tail(local_rank))

    def recorded(self, workers: Iterable[FailedWorker]) -> tuple[ProcessFailure, ...]:
        """The failures that have an error file, as torch's records; empty if the script has written no such file.

        A script writes error files with torch's `record`. Files that torch cannot read are left out: torch would print
        a traceback about them.
        """
        failures = []
        by_script = False
        for worker in workers:
            path = self._error_files[worker.local_rank]
            content = read_error_file(path)
            if content is not None:
                failures.append(ProcessFailure(worker.local_rank, worker.pid, worker.code, path))
                by_script = by_script or NOTE_MARK not in content[1]
        return tuple(failures) if by_script else ()

    def read(self, worker: FailedWorker, output: FinalOutput, server_lost: bool) -> Failure:
        """The failure of a worker. `server_lost`: whether the worker died with the warm server.

        Secrets are masked here, because other nodes do not know them.
        """
        hung = self._hang_monitor.failure
        if hung is not None and hung.local_rank == worker.local_rank:
            return hung
        path = self._error_files[worker.local_rank]
        written, notes = read_error_file(path) or ("", {})
        written = written.strip()
        trace = output.trace or str(notes.get("py_callstack", "")).rstrip()
        message = written.partition("\n")[0] or diagnosis.message_of(trace)
        if not trace and "\n" in written:
            trace = written
        if server_lost:
            message = _SERVER_LOST
        timed_out = diagnosis.is_timeout(written or message)
        secondary = (
            bool(notes.get(NOTE_SECONDARY))
            or diagnosis.is_secondary(written or message)
            or (timed_out and hung is not None)
        )
        code = worker.code
        if worker.terminated and code == -signal.SIGTERM and message and not secondary:
            code = 1  # the worker was already ending with its own exception when SIGTERM arrived
        faulty = code > 0 and bool(notes.get(NOTE_FAULTY))
        out_of_memory = code == -signal.SIGKILL and not worker.terminated and oom_kills() > self._oom_kills
        hint = diagnosis.hint(f"{output.tail}\n{trace}\n{message}", code, out_of_memory)
        return Failure(
            rank=self._first_rank + worker.local_rank,
            local_rank=worker.local_rank,
            pid=worker.pid,
            exit_code=ExitCode.FAULTY if faulty else code,
            after=worker.after,
            host=self._host,
            message=diagnosis.with_short_lines(masked(message, os.environ)),
            trace=diagnosis.with_short_lines(masked(trace, os.environ)),
            step=read_heartbeat(path).step,
            hint=masked(hint, os.environ),
            at_start=bool(notes.get(NOTE_AT_START)) or diagnosis.failed_at_start(trace),
            terminated=worker.terminated,
            secondary=secondary,
            printed=bool(notes.get(NOTE_PRINTED)),
            printed_here=bool(notes.get(NOTE_PRINTED_HERE)),
            out_of_memory=out_of_memory,
            faulty=faulty,
            others=self._hang_monitor.others if timed_out and hung is None else (),
        )
