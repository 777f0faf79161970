"""The worker processes of one round on one node."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ddp_kit.env import GRACE_FILE, MEMORY_FILE, RECORD_FOLDER, attempt_id
from ddp_kit.errors import LaunchError, UsageError
from ddp_kit.health.node import NodeHealth
from ddp_kit.heartbeat import Heartbeat, Phase, read_heartbeat
from ddp_kit.launcher import diagnosis, verdict
from ddp_kit.launcher.agent import torchrun
from ddp_kit.launcher.agent.endings import Decision, Endings, seconds_to_stop
from ddp_kit.launcher.agent.failures import FailureReader
from ddp_kit.launcher.agent.hangs import HangMonitor
from ddp_kit.launcher.agent.inbox import Inbox, wait_readable
from ddp_kit.launcher.agent.stacks import can_be_inspected, has_handler
from ddp_kit.launcher.job import RankAssignment, Steps, combined_steps
from ddp_kit.launcher.output import FinalOutput
from ddp_kit.launcher.plan import Plan
from ddp_kit.launcher.record import RecordKeeper, RoundFile, RoundRecord, WorkerRecord
from ddp_kit.launcher.verdict import Failure, Outcome
from ddp_kit.launcher.warm.client import Process, WarmServer
from ddp_kit.masking import masked_words

_SIGNAL_CHECK_SECONDS = 0.05
# A process in the kernel's uninterruptible sleep survives SIGKILL; the launcher waits at most this long for it.
_UNKILLABLE_SECONDS = 5.0
_EXIT_CHECK_SECONDS = 1.0  # between two checks for workers that do not exit after an uncaught exception
_LAST_OUTPUT_SECONDS = 2.0  # to read the rest of the pipes after all workers have ended


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
        self._plan = plan
        self._warm = warm
        self._inbox = inbox
        self._print_message = print_message
        self._on_failure = on_failure
        self._envs = {rank: plan.environment(assignment, rank, os.environ) for rank in range(len(plan.workers))}
        self._logs = torchrun.RoundLogs(plan, logs_specs, assignment.first_rank, self._envs, self._is_ending)
        self._output = self._logs.output
        self.error_files = self._logs.error_files
        self._round_file: RoundFile | None = None
        self._record_keeper: RecordKeeper | None = None
        host = socket.gethostname() if plan.rendezvous.limits.max_nodes > 1 else ""
        self.hang_monitor = HangMonitor(
            plan.spec.hang_timeout,
            plan.uninterruptible_state_timeout,
            self._envs,
            self.error_files,
            host,
            lambda: inbox.signals > 0,
        )
        self._began = time.monotonic()
        gpus = [worker.gpus for worker in plan.workers]
        self.health = NodeHealth(self._began, host, assignment.first_rank, gpus, os.environ)
        self._failure_reader = FailureReader(
            assignment.first_rank, host, self.error_files, self._output, self.hang_monitor
        )
        self._processes: dict[int, Process | subprocess.Popen[bytes]] = {}
        self._endings = Endings(plan.shutdown_timeout)
        self._interrupted = False
        self._final_output: dict[int, FinalOutput] | None = None  # set after all workers have ended
        self.failures: tuple[Failure, ...] = ()
        """The workers that hung or had another exit code than 0, once all workers have ended.

        They are in the order in which they ended, but those that the launcher terminated come last.
        """

    @property
    def folder(self) -> Path | None:
        """The log folder of this attempt, or None if there are no logs."""
        files = [file for file in self.error_files.values() if file != os.devnull]
        return Path(files[0]).parents[1] if files else None

    # Starting ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all workers.

        Raises `LaunchError` if a worker cannot be started, and `UsageError` if --numa-binding is not available.
        """
        folder = self.folder
        if folder is not None:
            # Not an environment variable, because the environment must be the same as under torchrun.
            shutdown_timeout = folder / GRACE_FILE
            shutdown_timeout.touch(mode=0o600)
            shutdown_timeout.write_text(str(self._plan.shutdown_timeout))
            default_folder = folder.parent / RECORD_FOLDER if self._plan.logs.are_kept else None
            self._record_keeper = RecordKeeper(
                folder, default_folder, self.assignment.group_rank, self.health.gpu_errors
            )
            self._record_keeper.start()
        if self._warm is None:
            self._start_children()
        else:
            self._start_warm(self._warm)
        self._logs.start()
        if folder is not None:
            self._round_file = RoundFile(folder)
            self._round_file.write(self._round_record())

    def _start_children(self) -> None:
        """Start the workers as children of this process, on systems other than Linux, where there is no warm server."""
        for rank, env in self._envs.items():
            command = self._plan.command_line(rank)
            out, err = self._output.descriptors(rank)
            try:
                process = subprocess.Popen(command, env=env, stdout=out, stderr=err, start_new_session=True)
            except OSError as error:
                raise _cannot_start(command[0], error.strerror or str(error)) from None
            self._note_start(rank, process)  # now, so that it is killed if a later worker cannot start

    def _start_warm(self, warm: WarmServer) -> None:
        """Let the warm server start the workers. A stop signal may end the wait for it; there are then no workers."""
        warm.open_again()
        while warm.imports:
            wait_readable([warm], _SIGNAL_CHECK_SECONDS)
            warm.pump()
            if self._inbox.signals:
                return
        if self.folder is not None:
            memory_folder = self.folder / MEMORY_FILE
            memory_folder.touch(mode=0o600)
            memory_folder.write_text(warm.memory_folder())
        is_inspected = can_be_inspected(warm.pid)
        processes = {
            rank: warm.start(
                self._plan.command_line(rank),
                self._envs[rank],
                self._plan.program(rank),
                self._output.descriptors(rank),
                self._cores(rank),
                self.hang_monitor.count_interval,
                "" if is_inspected else self.hang_monitor.stacks_file(rank),
            )
            for rank in self._envs
        }
        while not all(process.answered for process in processes.values()):
            wait_readable([warm], _SIGNAL_CHECK_SECONDS)
            warm.pump()
            # Once a worker has started, the first signal is for the workers.
            has_started = any(process.answered for process in processes.values())
            if self._inbox.signals > has_started:
                return  # the agent's loop acts on the signal and ends the server with its workers
        for rank, process in processes.items():
            if process.error:
                raise _cannot_start(self._plan.command_line(rank)[0], process.error)
        for reason in sorted({process.cold for process in processes.values() if process.cold}):
            self._print_message(f"starting cold: {reason}")
        for rank, process in processes.items():
            self._note_start(rank, process)

    def _note_start(self, local_rank: int, process: "Process | subprocess.Popen[bytes]") -> None:
        self._processes[local_rank] = process
        self._endings.started(local_rank, process.pid)
        self.health.pids[self.assignment.first_rank + local_rank] = process.pid

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
        assignment = self.assignment
        workers = []
        for local_rank, process in self._processes.items():
            path = self.error_files[local_rank]
            error_file = "" if path == os.devnull else str(Path(path).absolute())
            uuids = tuple(gpu.uuid for gpu in self._plan.workers[local_rank].gpus)
            rank = assignment.first_rank + local_rank
            workers.append(WorkerRecord(rank, local_rank, process.pid, error_file, uuids))
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
        if self._record_keeper is None:
            return
        steps = [beat.step for beat in self._heartbeats() if beat.step is not None]
        last_step = max(steps, default=None)
        self._record_keeper.end(attempt_id(self._envs[0]), last_step, verdict.record(outcome), self.hang_monitor.stacks)

    # Watching ---------------------------------------------------------------------------------------------------------

    def watched(self) -> list[Any]:
        """Objects that become readable when a worker ends."""
        return [self._warm] if self._warm is not None and not self._warm.gone else []

    def timeout(self) -> float | None:
        """Seconds after which to call `poll` even if no worker has ended, or None if there is no limit."""
        waits = [self._endings.seconds_left(self._now()), self.hang_monitor.next_check()]
        if self._warm is not None and not self._warm.gone:
            waits.append(self._warm.next_check())
        if self._endings.running:
            waits.append(_EXIT_CHECK_SECONDS)
        return min((seconds for seconds in waits if seconds is not None), default=None)

    def poll(self) -> bool:
        """Return whether all workers have ended. If one has failed or hangs, stop the others first."""
        self._note_ends()
        self._kill_if_hung(self.hang_monitor.check(self._endings.running))
        self._kill_if_hung(self.hang_monitor.check_sleeping(self._endings.running))
        exiting = self._exiting()
        now = self._now()
        decision = self._endings.decide(exiting, now)
        if decision is Decision.WAIT:
            return False
        failed = [rank for rank, code in self._endings.codes.items() if code]
        if decision is Decision.STOP or failed:
            ends_exiting = self._endings.exits_too_late(exiting, now)
            others_run = self._endings.running and self._endings.hung is None
            if others_run and any(map(self._failure_reader.timed_out, failed)):
                self._kill_if_hung(self.hang_monitor.after_timeout(self._endings.running))
                ends_exiting = True
            if ends_exiting:
                self._endings.killed_while_exiting(exiting)
                self._kill(exiting)
            self._on_failure()
        if decision is Decision.STOP:
            self.stop_after_failure()
        else:
            self.stop()
        return True

    def _now(self) -> float:
        """Seconds since the start of the round."""
        return time.monotonic() - self._began

    def _exiting(self) -> dict[int, float]:
        """The running workers that have printed an uncaught exception, and the times at which they did."""
        heartbeats = {rank: read_heartbeat(self.error_files[rank]) for rank in self._endings.running}
        return {
            rank: beat.changed_at / 1e9 - self._began
            for rank, beat in heartbeats.items()
            if beat.phase is Phase.EXITING
        }

    def _kill_if_hung(self, local_rank: int | None) -> None:
        if local_rank is None:
            return
        self._endings.hangs(local_rank)
        self._kill({local_rank})
        deadline = time.monotonic() + _UNKILLABLE_SECONDS
        while local_rank in self._endings.running and time.monotonic() < deadline and self._inbox.signals < 2:
            self._wait_for_ends(deadline - time.monotonic())

    def _note_ends(self) -> None:
        if self._warm is not None:
            self._warm.pump()
        for rank in sorted(self._endings.running):
            process = self._processes[rank]
            code = process.poll()
            if code is not None:
                ended_at = process.ended_at if isinstance(process, Process) else time.monotonic()
                self._endings.ended(rank, code, ended_at - self._began)
                if self._endings.codes[rank]:
                    self._output.failed(rank)

    # Results ----------------------------------------------------------------------------------------------------------

    def recorded_failures(self) -> tuple[ProcessFailure, ...]:
        """The failures as torch's records, for a launcher that has started this one; see `FailureReader.recorded`."""
        return self._failure_reader.recorded(self._endings.failed())

    def _heartbeats(self) -> list[Heartbeat]:
        return [read_heartbeat(path) for path in self.error_files.values()]

    def steps(self) -> Steps | None:
        """The range of steps of all workers; None if no worker has recorded steps."""
        return combined_steps(
            [
                Steps(beat.began, beat.step, beat.on_disk)
                for beat in self._heartbeats()
                if beat.began is not None and beat.step is not None
            ]
        )

    def ended_well(self) -> tuple[int, ...]:
        """The ranks that exited with code 0 before the launcher terminated any worker."""
        return tuple(self.assignment.first_rank + local_rank for local_rank in self._endings.ended_well())

    def saved(self) -> bool:
        """Whether any worker saved a checkpoint and exited with `ExitCode.REQUEUE`, and no worker failed."""
        return self._endings.saved()

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
        for rank, pid in self._endings.running.items():
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
        else:
            self._end(signal.SIGTERM, lambda: seconds_to_stop(self._phases(), self._plan.shutdown_timeout))

    def _phases(self) -> set[Phase]:
        return {read_heartbeat(self.error_files[rank]).phase for rank in self._endings.running}

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal `number` to all workers, and SIGKILL to those that do not end within the shutdown timeout.

        A second signal to the launcher ends the timeout early.
        """
        if self._processes:
            self._end(number, lambda: self._plan.shutdown_timeout)

    def _end(self, number: signal.Signals, allowed: Callable[[], float]) -> None:
        """Send a signal to the workers, and SIGKILL after as many seconds as `allowed` returns. Then clean up."""
        self._note_ends()
        running = self._endings.running
        if running:
            self._signal_workers(number)
            began = time.monotonic()
            while running and self._inbox.signals < 2 and (left := began + allowed() - time.monotonic()) > 0:
                self._wait_for_ends(left)
            self._kill(running)
            deadline = time.monotonic() + max(allowed(), _UNKILLABLE_SECONDS)
            while running and time.monotonic() < deadline:
                self._wait_for_ends(deadline - time.monotonic())
        self._clean_up()

    def _clean_up(self) -> None:
        """Clean up after all workers have ended, and keep the final output of the failed workers."""
        if self._final_output is not None:
            return
        if self._warm is not None:
            self._warm.clear(succeeded=not any(self._endings.codes.values()))
        self.hang_monitor.remove_empty_files()
        if self.folder is not None:  # the folder then has the same files as with torchrun
            for name in (GRACE_FILE, MEMORY_FILE):
                (self.folder / name).unlink(missing_ok=True)
        if self._record_keeper is not None:
            self._record_keeper.stop()
        self.health.end()
        if self._round_file is not None:
            self._round_file.close()
        failed = self._endings.failed()
        # The tracebacks of terminated ranks are shown only if no other rank failed.
        has_cause = any(not worker.terminated for worker in failed)
        self._final_output = self._output.end(
            [worker.local_rank for worker in failed],
            has_cause,
            is_secondary=lambda trace: diagnosis.is_secondary(trace) or diagnosis.is_interrupt(trace),
            seconds=_LAST_OUTPUT_SECONDS,
            interrupted=lambda: self._inbox.signals > 1,
        )
        if failed:
            self._output.end_line()
        self._logs.end()
        failures = []
        for worker in failed:
            process = self._processes[worker.local_rank]
            server_lost = isinstance(process, Process) and process.lost
            failure = self._failure_reader.read(worker, self.final_output(worker.local_rank), server_lost)
            failures.append(replace(failure, health=self.health.lines(failure)))
        self.failures = tuple(failures)

    def _is_ending(self, local_rank: int) -> bool:
        """Whether a rank that printed a traceback is ending: it has written its error file, or was sent SIGINT."""
        return self._interrupted or Path(self.error_files[local_rank]).is_file()

    def _signal_workers(self, number: signal.Signals) -> None:
        """Send a signal to the ranks, but not to their DataLoader workers, which are needed to save a checkpoint.

        If the workers are wrappers, such as shells, the signal goes to their whole process groups.
        """
        self._endings.signalled()
        self._interrupted |= number == signal.SIGINT
        send = os.killpg if self._plan.is_wrapped else os.kill
        for pid in self._endings.running.values():
            with suppress(ProcessLookupError):
                send(pid, number)

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
