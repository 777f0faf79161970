"""The agent, one per node: it carries out the orders that it gets from `job.py`, and reports its workers' state."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ddp_kit.launcher.agent.inbox import Disconnected, Inbox, StartWorkers, StopSignal, WorkerSignal
from ddp_kit.launcher.agent.nodes import MultiNodeLink, SingleNodeLink
from ddp_kit.launcher.agent.sockets import allow_connections, own_loopback
from ddp_kit.launcher.agent.workers import Workers
from ddp_kit.launcher.job import End, Pause, RankAssignment, Report, State, Stop
from ddp_kit.launcher.plan import Plan
from ddp_kit.launcher.verdict import Failure, Outcome
from ddp_kit.launcher.warm.client import WarmServer

_POLL_SECONDS = 0.1  # on systems other than Linux, where nothing wakes the agent when a worker ends


@dataclass(frozen=True)
class RunResult:
    """The result of a job on this node."""

    outcome: Outcome
    shown: frozenset[int] = frozenset()
    """The ranks whose tracebacks are the last output on the console and need not be shown again."""
    folder: str = ""
    """The log folder; empty: no logs are kept."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    """The stacks of this node's ranks, if a rank has hung."""
    lost_output: str = ""
    """Why output of workers could not be written to the console; empty: all of it was written."""
    failures: tuple[Failure, ...] = ()
    """This node's failures in the latest round."""


class Agent:
    """The agent of one node.

    join the job
    loop:
        StartWorkers  start a new store (first node) and the workers with this rank assignment
        Stop          stop the workers; report STOPPED
        Pause         print why the next round starts later
        workers       all succeeded: report DONE; one failed: stop the others, report FAILED
        signal        report LEFT, forward it to the workers, wait for the shutdown timeout
        End           keep the outcome, with which every node gives the same verdict
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
        self._store: TCPStore | None = None  # the workers' store of this round, if this node serves it
        self._workers: Workers | None = None  # the workers of the latest round
        self._running = False
        self._latest_reported = -1  # the latest round that this node reported as failed or stopped
        self._latest: tuple[Failure, ...] = ()  # the failures in this node's latest report
        self._outcome: Outcome | None = None

    def run(self) -> RunResult:
        """Run until the job ends or this node leaves it."""
        self._link.join()
        try:
            while self._outcome is None:
                self._act()
        finally:
            self._stop_workers()
            self._store = None
        if self._workers is None:
            return RunResult(self._outcome)
        folder = self._workers.folder
        return RunResult(
            self._outcome,
            self._ranks_with_shown_trace(),
            "" if folder is None else str(folder.parent),
            self._workers.hang_monitor.stacks,
            self._workers.lost_output,
            self._latest,
        )

    @property
    def _active(self) -> Workers | None:
        """The workers of the latest round while they run."""
        return self._workers if self._running else None

    def _act(self) -> None:
        item = self._inbox.take()
        if isinstance(item, StartWorkers):
            self._start_workers(item)
        elif isinstance(item, Stop):
            if item.round == self._round != self._latest_reported:
                if self._workers is not None and not item.may_save:
                    self._workers.stop_after_failure()
                self._stop_workers()
                self._report_stopped(State.STOPPED)
        elif isinstance(item, Pause):
            self._print_reason(item.why)
        elif isinstance(item, End):
            self._outcome = item.outcome
        elif isinstance(item, Disconnected):
            self._outcome = Outcome(lost=item.why)
            workers = self._active
            if workers is not None:
                workers.stop_after_failure()  # without the other nodes, the workers cannot save
                self._stop_workers()
                workers.record_end(self._outcome)
        elif isinstance(item, StopSignal):
            self._leave(item)
        elif isinstance(item, WorkerSignal):
            if self._active is not None:
                self._active.forward_signal(item.number)
        else:
            self._check_workers()
            self._sleep()

    def _sleep(self) -> None:
        """Wait until the inbox has an item, a worker ends, or the next check is due."""
        timeouts = [self._link.next_check]
        watched = []
        if not hasattr(os, "pidfd_open"):
            timeouts.append(_POLL_SECONDS)
        if self._active is not None:
            timeouts.append(self._active.timeout())
            watched = self._active.watched()
        self._inbox.wait(min((seconds for seconds in timeouts if seconds is not None), default=None), watched)
        self._link.check()

    # Rounds -----------------------------------------------------------------------------------------------------------

    def _start_workers(self, order: StartWorkers) -> None:
        if order.why:
            self._print_reason(order.why)
        assignment = order.assignment
        self._store = self._start_store(assignment)
        if self._workers is not None and self._workers.folder is not None:
            folder = self._workers.folder
            if folder.name == f"attempt_{assignment.restarts}":
                # This round has the same restart count as the previous one, whose logs torch would delete.
                folder.rename(f"{folder}.round_{assignment.round - 1}")
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

    def _start_store(self, assignment: RankAssignment) -> TCPStore | None:
        """Start the workers' store of this round, if this node has to serve one.

        Each round gets a new store, because the old store contains stale addresses.
        """
        if assignment.group_rank != 0:
            return None
        listening = self._link.take_listening()
        if listening is None:
            return None
        if not self._plan.agent_serves_store:
            listening.close()
            return None
        allow_connections(assignment.group_world_size, assignment.world_size, len(self._plan.workers))
        return TCPStore(
            own_loopback(assignment.master_addr),
            assignment.master_port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )

    def _print_reason(self, why: str) -> None:
        """Print, before a restart, the traceback of this node's first failure, and then the reason for the restart."""
        causes = [failure for failure in self._latest if not failure.terminated and not failure.secondary]
        if causes and causes[0].rank not in self._ranks_with_shown_trace() and causes[0].trace:
            lines = [causes[0].trace, *causes[0].others]
            self._print_message(f"rank {causes[0].rank} failed:\n" + "\n  ".join(lines))
        self._latest = ()
        self._print_message(why)

    def _check_workers(self) -> None:
        workers = self._active
        if workers is None or not workers.poll():
            return
        self._stop_workers()
        if workers.failures:
            self._report_stopped(State.FAILED)
        else:
            workers.record_end(Outcome())
            self._report(State.DONE, ended_well=workers.ended_well())

    def _stop_workers(self) -> None:
        """Stop the workers if they are still running."""
        if self._workers is not None:
            self._workers.stop()
        self._running = False

    def _report_stopped(self, state: State) -> None:
        """Close the round's store, and report that all workers of the round on this node have ended."""
        assert self._workers is not None
        workers = self._workers
        self._latest = workers.failures
        self._latest_reported = self._round
        self._store = None
        workers.record_end(Outcome(self._latest, restarts=workers.assignment.restarts))
        more = {"steps": workers.steps(), "gpu_failure": workers.health.gpu_failure()}
        self._report(state, self._latest, ended_well=workers.ended_well(), **more)

    def _leave(self, item: StopSignal) -> None:
        """Leave the job after a stop signal.

        The workers get the same signal, so that they can save a checkpoint.
        """
        self._report(State.LEFT, signal=item.number)
        self._outcome = Outcome(stopped_by=item.number)
        if self._workers is None:
            return
        if self._running:
            self._workers.stop(item.number)
        if self._workers.saved():  # perhaps earlier, when another node left
            self._outcome = Outcome(self._workers.failures, stopped_by=item.number)
        if self._round != self._latest_reported:
            self._workers.record_end(self._outcome)

    # Results ----------------------------------------------------------------------------------------------------------

    @property
    def _round(self) -> int:
        return -1 if self._workers is None else self._workers.assignment.round

    def _report(self, state: State, failures: tuple[Failure, ...] = (), **more: Any) -> None:
        self._link.report(Report(self._link.number, self._round, state, failures, **more))

    def _ranks_with_shown_trace(self) -> frozenset[int]:
        """The ranks on this node whose tracebacks are already on the console."""
        if self._workers is None:
            return frozenset()
        final_output = self._workers.final_output
        return frozenset(
            failure.rank
            for failure in self._latest
            if not failure.hung and final_output(failure.local_rank).shown  # a hung worker has not printed its stack
        )

    def recorded_failures(self) -> tuple[ProcessFailure, ...]:
        """This node's failures; empty if the script has written no error file, as it does with torch's @record."""
        return () if self._workers is None else self._workers.recorded_failures()
