"""The worker processes of one round on one node."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ddp_kit.devices.cpus import oom_kills
from ddp_kit.env import (
    GRACE_FILE,
    NOTE_AT_START,
    NOTE_FAULTY,
    NOTE_PRINTED,
    NOTE_PRINTED_HERE,
    NOTE_SECONDARY,
    RECORD_FOLDER,
    attempt_id,
)
from ddp_kit.errors import LaunchError, UsageError
from ddp_kit.exit_codes import ExitCode
from ddp_kit.heartbeat import Phase, read_heartbeat
from ddp_kit.launcher import diagnosis, verdict
from ddp_kit.launcher.agent import torchrun
from ddp_kit.launcher.agent.hangs import HangMonitor
from ddp_kit.launcher.agent.inbox import Inbox, wait_readable
from ddp_kit.launcher.agent.stacks import can_be_inspected, has_handler
from ddp_kit.launcher.job import RankAssignment
from ddp_kit.launcher.output import FinalOutput
from ddp_kit.launcher.plan import Plan
from ddp_kit.launcher.processes import state
from ddp_kit.launcher.record import RecordKeeper, RoundFile, RoundRecord, WorkerRecord
from ddp_kit.launcher.verdict import Failure, Outcome
from ddp_kit.launcher.warm.client import Process, WarmServer
from ddp_kit.masking import masked, masked_words
from ddp_kit.uncaught import read_error_file

_SIGNAL_CHECK_SECONDS = 0.05
_SLEEP_CHECK_SECONDS = 1.0  # between two checks for uninterruptible sleep; the user has to enable these checks
# A process in the kernel's uninterruptible sleep survives SIGKILL; the launcher waits at most this long for it.
_UNKILLABLE_SECONDS = 5.0
# Time from SIGTERM to SIGKILL for ranks in a Trainer, after another rank failed: they cannot save without it, and
# Python does not run signal handlers during an NCCL collective.
_TRAINING_SECONDS = 0.2
_SAVING_SECONDS = 1.0  # the same while one of these ranks is saving
# A worker that has printed an uncaught exception gets at least this long to exit, or --shutdown-timeout if that is
# longer. NCCL's clean-up may wait for other ranks, which wait for this rank: only the launcher can end that.
_EXIT_SECONDS = 5.0
_EXIT_CHECK_SECONDS = 1.0  # between two checks for such workers
_LAST_OUTPUT_SECONDS = 2.0  # to read the rest of the pipes after all workers have ended
_SERVER_LOST = "the process that forks the workers was killed, along with all workers"


class Workers:
    """The workers of one round.

    Usage: call `start`. Then call `poll` whenever an object in `watched` is readable or `timeout` seconds have passed,
    until `poll` returns True.
    """

    def __init__(
        self,
        plan: Plan,
        assignment: RankAssignment,
        logs_specs: LogsSpecs,
        warm: WarmServer | None,
        inbox: Inbox,
        print_message: Callable[[str], None],
        on_failure: Callable[[], None],
    ) -> None:
        """Prepare the workers' environments, log files and monitors.

        `warm`: the server that starts the workers; None: this process starts them.

        `on_failure`: a function that is called after a failure, before the other workers are stopped.

        Raises `LaunchError` if the log folder cannot be used.
        """
        self.assignment = assignment
        self._plan, self._warm, self._inbox = plan, warm, inbox
        self._print_message, self._on_failure = print_message, on_failure
        self._envs = {rank: plan.environment(assignment, rank, os.environ) for rank in range(len(plan.workers))}
        self._logs = torchrun.RoundLogs(plan, logs_specs, assignment.first_rank, self._envs, self._is_ending)
        self._output, self.error_files = self._logs.output, self._logs.error_files
        path = next((file for file in self.error_files.values() if file != os.devnull), None)
        self._folder = None if path is None else Path(path).parents[1]  # the folder of this attempt
        self._round_file: RoundFile | None = None
        self._record_keeper: RecordKeeper | None = None
        self._host = socket.gethostname() if plan.rendezvous.limits.max_nodes > 1 else ""  # in failures
        self.hang_monitor = HangMonitor(
            plan.spec.hang_timeout, self._envs, self.error_files, self._host, lambda: inbox.signals > 0
        )
        self._processes: dict[int, Process | subprocess.Popen[bytes]] = {}
        self._running: set[int] = set()
        self._interrupted = False
        self._began = time.monotonic()
        self._oom_kills = oom_kills()
        self._asleep_since: dict[int, float] = {}  # ranks in the kernel's uninterruptible sleep
        self._raised_at: dict[int, float] = {}  # local rank -> time of its exception, if killed during its exit
        self._after: dict[int, float] = {}  # local rank -> seconds from the start of the round to the worker's end
        self._terminated: set[int] = set()
        self._final_output: dict[int, FinalOutput] | None = None  # set after all workers have ended
        self.failures: tuple[Failure, ...] = ()
        """The workers that hung or had another exit code than 0, once all workers have ended.

        They are in the order in which they ended, but those that the launcher terminated come last.
        """

    @property
    def pids(self) -> dict[int, int]:
        """The process ids of all started workers, by local rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    # Starting ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all workers.

        Raises `LaunchError` if a worker cannot be started, and `UsageError` if --numa-binding is not available.
        """
        if self._folder is not None:
            # Not an environment variable, because the environment must be the same as under torchrun.
            shutdown_timeout = self._folder / GRACE_FILE
            shutdown_timeout.touch(mode=0o600)
            shutdown_timeout.write_text(str(self._plan.shutdown_timeout))
            default_folder = self._folder.parent / RECORD_FOLDER if self._plan.logs.are_kept else None
            self._record_keeper = RecordKeeper(self._folder, default_folder, self.assignment.group_rank)
            self._record_keeper.start()
        if self._warm is None:
            self._start_children()
        else:
            self._start_warm(self._warm)
        self._running = set(self._processes)
        self._logs.start()
        if self._folder is not None:
            self._round_file = RoundFile(self._folder)
            self._round_file.write(self._round_record())

    def _start_children(self) -> None:
        """Start the workers as children of this process, on systems other than Linux, where there is no warm server."""
        for rank, env in self._envs.items():
            command, (out, err) = self._plan.command_line(rank), self._output.descriptors(rank)
            try:
                self._processes[rank] = subprocess.Popen(
                    command, env=env, stdout=out, stderr=err, start_new_session=True
                )
            except OSError as error:
                raise _cannot_start(command[0], error.strerror or str(error)) from None
            self._running.add(rank)  # so that it is killed if a later worker cannot start

    def _start_warm(self, warm: WarmServer) -> None:
        """Let the warm server start the workers. A stop signal may end the wait for it; there are then no workers."""
        while warm.imports:
            wait_readable([warm], _SIGNAL_CHECK_SECONDS)
            warm.pump()
            if self._inbox.signals:
                return
        processes = {
            rank: warm.start(
                self._plan.command_line(rank),
                self._envs[rank],
                self._plan.program(rank),
                self._output.descriptors(rank),
                self._cores(rank),
                self.hang_monitor.count_interval,
                "" if can_be_inspected(warm.pid) else self.hang_monitor.stacks_file(rank),
            )
            for rank in self._envs
        }
        while not all(process.answered for process in processes.values()):
            wait_readable([warm], _SIGNAL_CHECK_SECONDS)
            warm.pump()
            # Once a worker has started, the first signal is for the workers.
            signals = 2 if any(process.answered for process in processes.values()) else 1
            if self._inbox.signals >= signals:
                return  # the agent's loop acts on the signal and ends the server with its workers
        for rank, process in processes.items():
            if process.error:
                raise _cannot_start(self._plan.command_line(rank)[0], process.error)
        for reason in sorted({process.cold for process in processes.values() if process.cold}):
            self._print_message(f"starting cold: {reason}")
        self._processes.update(processes)

    def _cores(self, local_rank: int) -> tuple[int, ...]:
        """The cores that --numa-binding selects, or else the cores near the worker's GPU."""
        if self._plan.numa_binding is None:
            return self._plan.workers[local_rank].cpus
        try:
            first = local_rank * (self._plan.spec.gpus_per_process or 1)
            return tuple(sorted(torchrun.numa_cpus(first, self._plan.numa_binding)))
        except Exception as error:  # torch raises different errors, depending on what is missing
            raise UsageError(
                f"--numa-binding is not available on this machine: {error}", "remove the flag, or install numactl"
            ) from None

    def _round_record(self) -> RoundRecord:
        assignment, workers = self.assignment, []
        for local_rank, pid in self.pids.items():
            path, gpus = self.error_files[local_rank], self._plan.workers[local_rank].gpus
            error_file = "" if path == os.devnull else str(Path(path).absolute())
            rank, uuids = assignment.first_rank + local_rank, tuple(gpu.uuid for gpu in gpus)
            workers.append(WorkerRecord(rank, local_rank, pid, error_file, uuids))
        return RoundRecord(
            run_id=self._plan.rendezvous.run_id,
            script=self._plan.script,
            host=socket.gethostname(),
            node_rank=assignment.group_rank,
            nodes=assignment.group_world_size,
            world_size=assignment.world_size,
            restarts=assignment.restarts,
            began=time.time(),
            workers=tuple(workers),
            arguments=tuple(masked_words(self._plan.script_arguments, os.environ)),
        )

    def record_end(self, outcome: Outcome) -> None:
        """Add to the run record, if there is one, how this attempt ended on this node."""
        if self._record_keeper is not None:
            steps = [step for path in self.error_files.values() if (step := read_heartbeat(path).step) is not None]
            self._record_keeper.end(
                attempt_id(self._envs[0]), max(steps, default=None), verdict.record(outcome), self.hang_monitor.stacks
            )

    # Watching ---------------------------------------------------------------------------------------------------------

    def watched(self) -> list[Any]:
        """Objects that become readable when a worker ends."""
        return [self._warm] if self._warm is not None and not self._warm.gone else []

    def timeout(self) -> float | None:
        """Seconds after which to call `poll` even if no worker has ended, or None if there is no limit."""
        server = self._warm.next_check() if self._warm is not None and not self._warm.gone else None
        allowed = self._plan.uninterruptible_state_timeout
        asleep = min(_SLEEP_CHECK_SECONDS, allowed / 4) if allowed else None
        exiting = _EXIT_CHECK_SECONDS if self._running else None
        waits = (self._timeout_of_others(), self.hang_monitor.next_check(), asleep, server, exiting)
        return min((seconds for seconds in waits if seconds is not None), default=None)

    def _timeout_of_others(self) -> float | None:
        """Seconds left for the other workers after one has exited with `ExitCode.REQUEUE`, or None for no limit."""
        left = [self._after[rank] for rank in self._after if self._exit_code(rank) == ExitCode.REQUEUE]
        limit = self._plan.shutdown_timeout
        return max(0.0, self._began + min(left) + limit - time.monotonic()) if left else None

    def poll(self) -> bool:
        """Return whether all workers have ended. If one has failed or hangs, stop the others first."""
        self._note_ends()
        self._kill_if_hung(self.hang_monitor.check(self._pids_running()))
        self._kill_if_hung(self._asleep_too_long())
        exiting = self._exiting()
        allowed = max(_EXIT_SECONDS, self._plan.shutdown_timeout)
        late = any(time.monotonic() - raised_at >= allowed for raised_at in exiting.values())
        codes = {rank: self._exit_code(rank) for rank in self._after}
        failed = late or self.hang_monitor.failure is not None
        failed = failed or any(code not in (0, ExitCode.REQUEUE) for code in codes.values())
        if self._running and not failed and self._timeout_of_others() != 0.0:
            return False
        if failed or any(codes.values()):
            alone = self.hang_monitor.failure is None
            timed_out = bool(self._running) and alone and any(map(self._timed_out, codes))
            if timed_out:
                self._kill_if_hung(self.hang_monitor.after_timeout(self._pids_running()))
            if late or timed_out:
                self._raised_at = exiting
                self._kill(exiting)
            self._on_failure()
        if failed:
            self.stop_after_failure()
        self.stop()
        return True

    def _exiting(self) -> dict[int, float]:
        """The running workers that have printed an uncaught exception, and the times at which they did."""
        heartbeats = {rank: read_heartbeat(self.error_files[rank]) for rank in self._running}
        return {rank: beat.changed_at / 1e9 for rank, beat in heartbeats.items() if beat.phase is Phase.EXITING}

    def _pids_running(self) -> dict[int, int]:
        return {rank: self._processes[rank].pid for rank in sorted(self._running)}

    def _asleep_too_long(self) -> int | None:
        """Return a local rank that has been in uninterruptible sleep for too long, or None. This counts as a hang."""
        allowed, now, pids = self._plan.uninterruptible_state_timeout, time.monotonic(), self._pids_running()
        if not allowed:
            return None
        asleep = [rank for rank, pid in pids.items() if state(pid) == "D"]
        self._asleep_since = {rank: self._asleep_since.get(rank, now) for rank in asleep}
        late = {rank: pids[rank] for rank, since in self._asleep_since.items() if now - since >= allowed}
        return self.hang_monitor.check_sleeping(late)

    def _timed_out(self, local_rank: int) -> bool:
        """Whether this worker ended because of a timeout in a collective that other ranks did not reach."""
        if not self._exit_code(local_rank):
            return False
        message, _ = read_error_file(self.error_files[local_rank]) or ("", {})
        return diagnosis.is_timeout(message or self._output.tail(local_rank))

    def _kill_if_hung(self, local_rank: int | None) -> None:
        if local_rank is None:
            return
        self._kill({local_rank})
        deadline = time.monotonic() + _UNKILLABLE_SECONDS
        while local_rank in self._running and time.monotonic() < deadline and self._inbox.signals < 2:
            self._wait_for_ends(deadline - time.monotonic())

    def _note_ends(self) -> None:
        if self._warm is not None:
            self._warm.pump()
        for rank in list(self._running):
            code = self._exit_code(rank)
            if code is not None:
                ended = getattr(self._processes[rank], "ended_at", None) or time.monotonic()
                self._after[rank] = self._raised_at.get(rank, ended) - self._began
                self._running.discard(rank)
                if code:
                    self._output.failed(rank)

    def _exit_code(self, local_rank: int) -> int | None:
        code = self._processes[local_rank].poll()
        return 1 if code is not None and local_rank in self._raised_at else code

    # Results ----------------------------------------------------------------------------------------------------------

    def _failed(self) -> dict[int, int]:
        """The exit codes of the workers that have failed, by local rank, in the order of `failures`."""
        hung = self._hung_rank()  # in uninterruptible sleep, it survives SIGKILL and has no exit code
        order = sorted(self._processes, key=lambda rank: (rank in self._terminated, self._after.get(rank, 0.0)))
        codes = {rank: self._exit_code(rank) or -signal.SIGKILL * (rank == hung) for rank in order}
        return {rank: code for rank, code in codes.items() if code}

    def _hung_rank(self) -> int | None:
        return None if self.hang_monitor.failure is None else self.hang_monitor.failure.local_rank

    def _failure(self, local_rank: int, code: int) -> Failure:
        """The failure of a worker, from its exit code, final output, error file and heartbeat.

        Secrets are masked here, because other nodes do not know them.
        """
        hung = self.hang_monitor.failure
        if hung is not None and hung.local_rank == local_rank:
            return hung
        path, output = self.error_files[local_rank], self.final_output(local_rank)
        written, fields = read_error_file(path) or ("", {})
        written = written.strip()
        trace = output.trace or str(fields.get("py_callstack", "")).rstrip()
        message = written.partition("\n")[0] or diagnosis.message_of(trace)
        trace = trace or (written if "\n" in written else "")
        if getattr(self._processes[local_rank], "lost", False):  # because the warm server died
            message = _SERVER_LOST
        terminated, timed_out = local_rank in self._terminated, diagnosis.is_timeout(written or message)
        secondary = (
            bool(fields.get(NOTE_SECONDARY))
            or diagnosis.is_secondary(written or message)
            or (timed_out and hung is not None)
        )
        if terminated and code == -signal.SIGTERM and message and not secondary:
            code = 1  # the worker was already ending with its own exception when SIGTERM arrived
        faulty = code > 0 and bool(fields.get(NOTE_FAULTY))
        out_of_memory = code == -signal.SIGKILL and not terminated and oom_kills() > self._oom_kills
        return Failure(
            rank=self.assignment.first_rank + local_rank,
            local_rank=local_rank,
            pid=self._processes[local_rank].pid,
            exit_code=ExitCode.FAULTY if faulty else code,
            after=self._after.get(local_rank, 0.0),
            host=self._host,
            message=masked(message, os.environ),
            trace=masked(trace, os.environ),
            step=read_heartbeat(path).step,
            hint=masked(diagnosis.hint(f"{output.tail}\n{trace}\n{message}", code, out_of_memory), os.environ),
            at_start=bool(fields.get(NOTE_AT_START)) or diagnosis.failed_at_start(trace),
            terminated=terminated,
            secondary=secondary,
            printed=bool(fields.get(NOTE_PRINTED)),
            printed_here=bool(fields.get(NOTE_PRINTED_HERE)),
            out_of_memory=out_of_memory,
            faulty=faulty,
            others=self.hang_monitor.others if timed_out and hung is None else (),
        )

    def process_failures(self) -> tuple[ProcessFailure, ...]:
        """`failures` as torch's records, for event handlers and for a launcher that has started this one."""
        records = []
        for local_rank, code in self._failed().items():
            path = self.error_files[local_rank]
            readable = read_error_file(path) is not None  # otherwise torch would print a traceback of its own
            records.append(ProcessFailure(local_rank, self.pids[local_rank], code, path if readable else ""))
        return tuple(records)

    def ended_well(self) -> tuple[int, ...]:
        """The ranks that exited with code 0 before the launcher terminated any worker."""
        well = [rank for rank in sorted(self._after) if rank not in self._terminated and self._exit_code(rank) == 0]
        return tuple(self.assignment.first_rank + rank for rank in well)

    def saved(self) -> bool:
        """Whether any worker saved a checkpoint and exited with `ExitCode.REQUEUE`, and no worker failed."""
        codes = {self._exit_code(rank) for rank in self._after}
        return ExitCode.REQUEUE in codes and codes <= {0, ExitCode.REQUEUE}

    @property
    def lost_output(self) -> str:
        """Why output could not be written to the console; empty: all of it was written."""
        return self._output.lost

    def final_output(self, local_rank: int) -> FinalOutput:
        """The final output of a failed worker."""
        return (self._final_output or {}).get(local_rank, FinalOutput())

    # Signals and stopping ---------------------------------------------------------------------------------------------

    def forward_signal(self, number: signal.Signals) -> None:
        """Send a signal to every worker that handles or ignores it, but not to the others, which it would kill."""
        without_handler = []
        for rank in sorted(self._running):
            pid = self._processes[rank].pid
            if not has_handler(pid, number, or_ignores=True):
                without_handler.append(str(rank))
                continue
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if without_handler:
            ranks = ", ".join(without_handler)
            self._print_message(f"{number.name} was not forwarded to workers that have no handler: local rank {ranks}")

    def stop_after_failure(self) -> None:
        """Stop the workers that are still running after another worker failed."""
        if Phase.OUTSIDE in self._phases():
            self.stop()
            return
        self._signal_workers(signal.SIGTERM)
        began = time.monotonic()
        while self._running and self._inbox.signals < 2:
            saving = Phase.CHECKPOINT in self._phases()
            allowed = min(self._plan.shutdown_timeout, _SAVING_SECONDS if saving else _TRAINING_SECONDS)
            left = began + allowed - time.monotonic()
            if left <= 0:
                break
            self._wait_for_ends(left)
        self._end(signal.SIGTERM, 0.0)

    def _phases(self) -> set[Phase]:
        return {read_heartbeat(self.error_files[rank]).phase for rank in self._running}

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal `number` to all workers, and SIGKILL to those that do not end within the shutdown timeout.

        A second signal to the launcher ends the timeout early.
        """
        if self._processes:
            self._end(number, self._plan.shutdown_timeout)

    def _end(self, number: signal.Signals, seconds: float) -> None:
        self._note_ends()
        if self._running:
            self._signal_workers(number)
            deadline = time.monotonic() + seconds
            while self._running and time.monotonic() < deadline and self._inbox.signals < 2:
                self._wait_for_ends(deadline - time.monotonic())
            self._kill(self._running)
            deadline = time.monotonic() + max(seconds, _UNKILLABLE_SECONDS)
            while self._running and time.monotonic() < deadline:
                self._wait_for_ends(deadline - time.monotonic())
        self._clean_up()

    def _clean_up(self) -> None:
        """Clean up after all workers have ended, and keep the final output of the failed workers."""
        if self._final_output is not None:
            return
        if self._warm is not None:
            self._warm.clear(succeeded=not any(map(self._exit_code, self._after)))
        self.hang_monitor.remove_empty_files()
        if self._folder is not None:  # the folder then has the same files as with torchrun
            (self._folder / GRACE_FILE).unlink(missing_ok=True)
        if self._record_keeper is not None:
            self._record_keeper.stop()
        if self._round_file is not None:
            self._round_file.close()
        failed = [rank for rank in self._after if self._exit_code(rank)]
        # The tracebacks of terminated ranks are shown only if no other rank failed.
        has_cause = any(rank not in self._terminated for rank in failed)
        self._final_output = self._output.end(
            failed,
            suppress_trace=lambda trace: has_cause or diagnosis.is_secondary(trace) or diagnosis.is_interrupt(trace),
            is_secondary=lambda trace: diagnosis.is_secondary(trace) or diagnosis.is_interrupt(trace),
            seconds=_LAST_OUTPUT_SECONDS,
            interrupted=lambda: self._inbox.signals > 1,
        )
        if failed:
            self._output.end_line()
        self._logs.end()
        self.failures = tuple(self._failure(rank, code) for rank, code in self._failed().items())

    def _is_ending(self, local_rank: int) -> bool:
        """Whether a rank that printed a traceback is ending: it has written its error file, or was sent SIGINT."""
        return self._interrupted or Path(self.error_files[local_rank]).is_file()

    def _signal_workers(self, number: signal.Signals) -> None:
        """Send a signal to the ranks, but not to their DataLoader workers, which are needed to save a checkpoint.

        If the workers are wrappers, such as shells, the signal goes to their whole process groups.
        """
        self._terminated |= self._running - {self._hung_rank()} - self._raised_at.keys()
        self._interrupted |= number == signal.SIGINT
        for rank in self._running:
            pid = self._processes[rank].pid
            with suppress(ProcessLookupError):
                (os.killpg if self._plan.is_wrapped else os.kill)(pid, number)

    def _kill(self, local_ranks: Iterable[int]) -> None:
        """Kill these ranks and the processes that they started."""
        for rank in local_ranks:
            proc = self._processes[rank]
            if self._warm is not None and isinstance(proc, Process):
                self._warm.kill(proc)
            else:
                with suppress(ProcessLookupError):
                    os.killpg(proc.pid, signal.SIGKILL)

    def _wait_for_ends(self, timeout: float) -> None:
        """Wait for a worker to end. The wait is short, so that the caller can check for signals in between."""
        wait_readable(self.watched(), min(timeout, _SIGNAL_CHECK_SECONDS))
        self._note_ends()


def _cannot_start(command: str, why: str) -> LaunchError:
    return LaunchError(f"{command} cannot be started: {why}", "check that you can run this command yourself")
