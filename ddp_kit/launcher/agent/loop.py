"""The agent, one per node: it executes the job's orders and reports the state of its workers."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.timer import FileTimerServer

from ddp_kit.env import NOTE_MARK
from ddp_kit.launcher import verdict
from ddp_kit.launcher.agent import file_timers
from ddp_kit.launcher.agent.event_records import EventRecords
from ddp_kit.launcher.agent.failures import failure_of, steps_of
from ddp_kit.launcher.agent.inbox import Disconnected, Inbox, StartRound, StopSignal, WorkerSignal
from ddp_kit.launcher.agent.listening import allow_connections, own_loopback
from ddp_kit.launcher.agent.multi_node import MultiNodeLink
from ddp_kit.launcher.agent.single_node import SingleNodeLink
from ddp_kit.launcher.agent.workers import Workers, note_of
from ddp_kit.launcher.job import End, Pause, RankAssignment, Report, State, Stop
from ddp_kit.launcher.plan import Plan
from ddp_kit.launcher.verdict import Failure, Outcome
from ddp_kit.launcher.warm.client import WarmServer

_CONNECTIONS = 2  # per worker, to its store
_POLL_SECONDS = 0.1  # on systems other than Linux, where nothing wakes the agent when a worker ends


class Agent:
    """One node's part of a job.

    join the job
    loop:
        StartRound  start a new store (first node) and the workers with this rank assignment
        Stop        stop the workers; report STOPPED
        Pause       print why the next round starts later
        workers     all succeeded: report DONE; one failed: stop the others, report FAILED
        signal      report LEFT, forward it to the workers, wait for the shutdown timeout
        End         keep the outcome, which is the same on every node
    """

    def __init__(
        self,
        plan: Plan,
        link: SingleNodeLink | MultiNodeLink,
        logs_specs: LogsSpecs,
        warm: WarmServer | None,
        inbox: Inbox,
        print_message: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._link = link
        self._logs_specs = logs_specs
        self._warm = warm
        self._inbox = inbox
        self._print_message = print_message
        self._events = EventRecords(plan)
        self._store: TCPStore | None = None  # the workers' store of this round, if this node serves it
        self._timers: FileTimerServer | None = None
        self._workers: Workers | None = None  # of the latest round
        self._running = False
        self._latest_reported = -1  # the latest round that this node reported as failed or stopped
        self._latest: tuple[Failure, ...] = ()  # the failures in this node's latest report
        self._outcome: Outcome | None = None

    def run(self) -> Outcome:
        """Run until the job ends or this node leaves it."""
        self._link.join()
        try:
            while self._outcome is None:
                self._act()
        finally:
            self._stop_workers()
            self._store = None
        self._events.job_ended(self._outcome)
        return self._outcome

    def _act(self) -> None:
        item = self._inbox.take()
        if isinstance(item, StartRound):
            self._start_round(item)
        elif isinstance(item, Stop):
            self._on_stop(item)
        elif isinstance(item, Pause):
            self._print_reason(item.why)
        elif isinstance(item, End):
            self._outcome = item.outcome
        elif isinstance(item, Disconnected):
            self._outcome = Outcome(lost=item.why)
            if self._workers is not None and self._running:
                self._workers.stop_after_failure()  # without the others they cannot save
                self._stop_workers()
                self._workers.record_end(verdict.record(self._outcome))
        elif isinstance(item, StopSignal):
            self._leave(item)
        elif isinstance(item, WorkerSignal):
            if self._workers is not None and self._running:
                self._workers.forward_signal(item.number)
        else:
            self._check_workers()
            self._sleep()

    def _sleep(self) -> None:
        """Wait for an item in the inbox or the end of a worker."""
        timeouts, watched = [self._link.next_check if hasattr(os, "pidfd_open") else _POLL_SECONDS], []
        if self._workers is not None and self._running:
            timeouts.append(self._workers.timeout())
            watched = self._workers.watched()
        self._inbox.wait(min((seconds for seconds in timeouts if seconds is not None), default=None), watched)
        self._link.check()

    # A round -----------------------------------------------------------------------------------------------------

    def _start_round(self, order: StartRound) -> None:
        if order.why:
            self._print_reason(order.why)
        assignment = order.assignment
        self._store = self._serve(assignment)
        self._keep_logs(assignment)
        self._timers = file_timers.serve(self._plan.rendezvous.run_id, self._events.timer)
        self._workers = Workers(
            self._plan,
            assignment,
            self._logs_specs,
            self._warm,
            self._inbox,
            self._print_message,
            on_failure=lambda: self._report(State.FAILING),
        )
        self._workers.start()
        self._running = True
        self._events.round_began(self._workers)

    def _serve(self, assignment: RankAssignment) -> TCPStore | None:
        """Serve the workers' store on the first node, a new one per round: the old one has stale addresses."""
        listening = self._link.take_listening() if assignment.group_rank == 0 else None
        if listening is None:
            return None
        if not self._plan.rendezvous.agent_serves_store:
            listening.close()
            return None
        allow_connections(_CONNECTIONS * assignment.world_size)
        return TCPStore(
            own_loopback(assignment.master_addr),
            assignment.master_port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )

    def _keep_logs(self, assignment: RankAssignment) -> None:
        """Rename the previous round's logs if this round has the same restart count: torch would remove them."""
        folder = self._attempt_folder
        if folder is not None and folder.name == f"attempt_{assignment.restarts}":
            folder.rename(f"{folder}.round_{assignment.round - 1}")

    @property
    def _attempt_folder(self) -> Path | None:
        """The log folder of the latest workers on this node; None: no logs."""
        files = self._workers.error_files.values() if self._workers is not None else ()
        return next((Path(file).parents[1] for file in files if file != os.devnull), None)

    def _print_reason(self, why: str) -> None:
        """Before a restart, print the traceback of this node's first failure, then the job's reason."""
        causes = [failure for failure in self._latest if not failure.terminated and not failure.secondary]
        if causes and causes[0].rank not in self.shown and causes[0].trace:
            lines = [causes[0].trace, *causes[0].others]
            self._print_message(f"rank {causes[0].rank} failed:\n" + "\n  ".join(lines))
        self._latest = ()
        self._print_message(why)

    def _check_workers(self) -> None:
        if self._workers is None or not self._running or not self._workers.poll():
            return
        self._stop_workers()
        if self._workers.failures():
            self._report_stopped(State.FAILED)
        else:
            self._workers.record_end(verdict.record(Outcome()))
            self._report(State.DONE, ended_well=self._workers.ended_well())

    def _on_stop(self, order: Stop) -> None:
        if order.round == self._round != self._latest_reported:
            if self._workers is not None and not order.may_save:
                self._workers.stop_after_failure()
            self._stop_workers()
            self._report_stopped(State.STOPPED)

    def _stop_workers(self) -> None:
        """Stop the workers, if they still run, and their timers."""
        if self._timers is not None:
            self._timers.stop()
            self._timers = None
        if self._workers is not None:
            self._workers.stop()
        self._running = False

    def _report_stopped(self, state: State) -> None:
        """Close the round's store, and report that none of its workers is left."""
        assert self._workers is not None
        workers = self._workers
        self._latest, self._store, self._latest_reported = self._failures(workers), None, self._round
        workers.record_end(verdict.record(Outcome(self._latest, restarts=workers.assignment.restarts)))
        ended_well, steps = workers.ended_well(), steps_of(workers.error_files.values())
        self._report(state, self._latest, ended_well=ended_well, steps=steps)
        self._events.wait_begins()

    def _leave(self, item: StopSignal) -> None:
        """After a stop signal, forward it to the workers, which may save, and leave the job."""
        self._report(State.LEFT, signal=item.number)
        failures: tuple[Failure, ...] = ()
        if self._workers is not None:
            if self._running:
                self._workers.stop(item.number)
            # They may have saved earlier, when another node left.
            failures = self._failures(self._workers) if self._workers.saved() else ()
        self._outcome = Outcome(failures, stopped_by=item.number)
        if self._workers is not None and self._round != self._latest_reported:
            self._workers.record_end(verdict.record(self._outcome))

    # Results -----------------------------------------------------------------------------------------------------

    @property
    def _round(self) -> int:
        return -1 if self._workers is None else self._workers.assignment.round

    def _report(self, state: State, failures: tuple[Failure, ...] = (), **more: Any) -> None:
        self._link.report(Report(self._link.number, self._round, state, failures, **more))

    def _failures(self, workers: Workers) -> tuple[Failure, ...]:
        host = socket.gethostname() if self._plan.rendezvous.limits.max_nodes > 1 else ""
        return tuple(failure_of(workers, rank, each, host) for rank, each in workers.failures().items())

    @property
    def shown(self) -> frozenset[int]:
        """The ranks of this node whose traceback is already on the console."""
        if self._workers is None:
            return frozenset()
        final_output = self._workers.final_output
        latest = [failure for failure in self._latest if not failure.hung]  # a hung worker has not printed its stack
        return frozenset(failure.rank for failure in latest if final_output(failure.local_rank).shown)

    @property
    def stacks(self) -> dict[int, str]:
        """The stacks of this node's ranks, if one has hung in the latest round."""
        return {} if self._workers is None else self._workers.hang_monitor.stacks

    @property
    def folder(self) -> str:
        """The folder of this job's logs on this node; empty: none."""
        return "" if self._attempt_folder is None else str(self._attempt_folder.parent)

    def recorded_failures(self) -> dict[int, ProcessFailure]:
        """This node's failures if the script wrote an error file for one of them, as torch's @record does."""

        def by_script(failure: ProcessFailure) -> bool:
            note = note_of(failure)
            return bool(note) and NOTE_MARK not in (note.get("extraInfo") or {})

        failures = self._workers.failures() if self._workers is not None else {}
        return failures if any(map(by_script, failures.values())) else {}
