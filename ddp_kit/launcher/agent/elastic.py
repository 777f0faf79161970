"""The agent: one per node. It acts on the job's orders and reports how its workers are."""

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torch.distributed import HashStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.utils import macros

from ddp_kit.env import NOTE_MARK, JobEnv, WorkerEnv, agent_serves_store, to_env
from ddp_kit.errors import LaunchError, UsageError
from ddp_kit.launcher.agent.failures import failure_of, steps_of
from ddp_kit.launcher.agent.inbox import Cut, Inbox, Notified, Placed, Signalled
from ddp_kit.launcher.agent.listening import allow_connections, own_loopback
from ddp_kit.launcher.agent.workers import Means, Workers, note_of
from ddp_kit.launcher.job import End, Pause, Seat, State, Stop
from ddp_kit.launcher.restarts import Steps
from ddp_kit.launcher.verdict import Failure, Outcome

_CONNECTIONS = 2  # of each worker to its store
_TELLS_OF_ENDS = hasattr(os, "pidfd_open")  # Linux; elsewhere the agent looks for itself
_POLL_SECONDS = 0.1
_SLEEP_LOOK_SECONDS = 1.0  # between two looks for workers in uninterruptible sleep, where the user has asked for them


class Link(Protocol):
    """A node's line to its job: `Solo` or `Meeting`. Orders come through the inbox."""

    @property
    def pulse(self) -> float | None:
        """Seconds after which `check` wants to be called again; None: never."""

    def join(self) -> None:
        """Take part."""

    def report(
        self,
        round_: int,
        state: State,
        failures: tuple[Failure, ...] = (),
        ended_well: tuple[int, ...] = (),
        signal: int = 0,
        steps: Steps | None = None,
    ) -> None:
        """Say how the workers of this node are, or what stops it."""

    def check(self) -> None:
        """Put what time has brought into the inbox: that the job is out of reach, or that the next round is due."""

    def take_listening(self) -> socket.socket | None:
        """The socket for the workers' store of the next round; None: that store is there already."""

    def close(self) -> None:
        """Leave, once every other node knows how the job ended."""


class Seats(RendezvousHandler):
    """torch's name for what says where this node stands: here the seat that the job has given it."""

    def __init__(self, link: Link, run_id: str, backend: str) -> None:
        self._link = link
        self._run_id = run_id
        self._backend = backend
        self._store: Store = HashStore()
        self.seat: Seat | None = None

    @property
    def use_agent_store(self) -> bool:
        """Whether the agent serves the workers' store; else the worker of rank 0 does."""
        return self._backend == "static" or agent_serves_store()

    def next_rendezvous(self) -> RendezvousInfo:
        """The seat as torch's agent wants it. On the first node this starts the round's store, a fresh one each."""
        assert self.seat is not None
        if self.seat.group_rank == 0:
            self._store = self._serve(self.seat)
        place = RendezvousStoreInfo(self.seat.master_addr, self.seat.master_port)
        return RendezvousInfo(self._store, self.seat.group_rank, self.seat.group_world_size, place)

    def _serve(self, seat: Seat) -> Store:
        listening = self._link.take_listening()
        if listening is None:
            return HashStore()
        if not self.use_agent_store:
            listening.close()
            return HashStore()
        allow_connections(_CONNECTIONS * seat.world_size)
        return TCPStore(
            own_loopback(seat.master_addr),
            seat.master_port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )

    def end_round(self) -> None:
        """Close the round's store: the next one may want its port."""
        self._store = HashStore()

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self.end_round()
        return True


class Agent(LocalElasticAgent):
    """torch's agent with its events, metrics, log files and timers, on orders instead of polls.

    join the job
    loop:
        Placed   start a fresh store (first node) and the workers at this seat
        Stop     stop the workers; report STOPPED
        Pause    say why the next round is not yet
        workers  all ended well: report DONE; one failed: stop the others, report FAILED
        signal   report LEFT, pass it on to the workers, give them their grace
        End      keep the outcome, which is the same on every node
    """

    def __init__(
        self,
        spec: WorkerSpec,
        link: Link,
        inbox: Inbox,
        means: Means,
        say: Callable[[str], None],
        host: str,
        **torch_settings: Any,
    ) -> None:
        super().__init__(spec, **torch_settings)
        assert isinstance(spec.rdzv_handler, Seats)
        self._seats = spec.rdzv_handler
        self._link = link
        self._inbox = inbox
        self._means = means
        self._say = say
        self._host = host
        # From TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT, in newer versions of torch; checked in `_monitor_workers`.
        allowed = float(getattr(self, "_uninterruptible_state_timeout", 0.0))
        self._sleep_look = min(_SLEEP_LOOK_SECONDS, allowed / 4) if allowed else None
        self._running = False
        self._latest: tuple[Failure, ...] = ()  # the failures that this node has reported last
        self._down = -1  # the latest round that this node has reported as failed or stopped
        self._last = RunResult(WorkerState.SUCCEEDED)
        self.outcome = Outcome()

    def _invoke_run(self, role: str = "") -> RunResult:  # noqa: ARG002  # torch's own signature
        self._link.join()
        while True:
            item = self._inbox.take()
            if isinstance(item, Placed):
                self._place(item)
            elif isinstance(item, Stop):
                self._obey_stop(item)
            elif isinstance(item, Pause):
                self._tell_why(item.why)
            elif isinstance(item, End):
                return self._finish(item.outcome)
            elif isinstance(item, Cut):
                return self._finish(Outcome(lost=item.why))
            elif isinstance(item, Signalled):
                self._leave(item)
            elif isinstance(item, Notified):
                self._pass_on(item)
            else:
                self._look_at_workers()
                self._sleep()

    def _sleep(self) -> None:
        """Until something happens: an item in the inbox, or the end of a worker."""
        watched = self._pcontext.watched() if isinstance(self._pcontext, Workers) and self._running else ()
        pulses = [self._link.pulse if _TELLS_OF_ENDS else _POLL_SECONDS]
        if isinstance(self._pcontext, Workers) and self._running:
            pulses += [self._pcontext.patience(), self._sleep_look]
        self._inbox.wait(min((pulse for pulse in pulses if pulse is not None), default=None), watched)
        self._link.check()

    def _pass_on(self, item: Notified) -> None:
        if isinstance(self._pcontext, Workers) and self._running:
            self._pcontext.pass_on(item.number)

    def _place(self, order: Placed) -> None:
        if order.why:
            self._tell_why(order.why)
        self._seats.seat = order.seat
        self._remaining_restarts = self._worker_group.spec.max_restarts - order.seat.restarts
        self._initialize_workers(self._worker_group)
        self._running = True

    def _tell_why(self, why: str) -> None:
        """A restart: what this node knows of the reason, then the job's word."""
        causes = [failure for failure in self._latest if not failure.told and not failure.echo]
        if causes and causes[0].rank not in self.shown and causes[0].trace:
            lines = [causes[0].trace, *causes[0].others]
            self._say(f"rank {causes[0].rank} ended with\n" + "\n  ".join(lines))
        self._latest = ()
        self._say(why)

    def _assign_worker_ranks(
        self,
        store: Store,  # noqa: ARG002  # torch asks the store; here the seat says it all
        group_rank: int,  # noqa: ARG002
        group_world_size: int,  # noqa: ARG002
        spec: WorkerSpec,
    ) -> list[Worker]:
        seat = self._seats.seat
        assert seat is not None
        return [
            Worker(
                local_rank=local_rank,
                global_rank=seat.first_rank + local_rank,
                role_rank=seat.first_role_rank + local_rank,
                world_size=seat.world_size,
                role_world_size=seat.role_world_size,
            )
            for local_rank in range(spec.local_world_size)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        envs = {worker.local_rank: self._environment(worker, worker_group) for worker in worker_group.workers}
        self._setup_local_watchdog(envs=envs)  # type: ignore[arg-type]
        self._setup_healthcheck()
        try:
            self._pcontext = self._make_workers(envs, spec)
        except OSError as error:
            raise LaunchError(
                f"the folder for logs, {self._logs_specs.root_log_dir}, cannot be used: {error.strerror or error}",
                "name another one with --log-dir, or make room where TMPDIR is",
            ) from None
        self._pcontext.start()
        return self._pcontext.pids()

    def _make_workers(self, envs: dict[int, dict[str, str | None]], spec: WorkerSpec) -> Workers:
        self._keep_logs()
        return Workers(
            means=self._means,
            inbox=self._inbox,
            say=self._say,
            on_failure=lambda: self._link.report(self._round, State.FAILING),
            name=spec.role,
            entrypoint=spec.entrypoint,
            args={rank: tuple(macros.substitute(list(spec.args), str(rank))) for rank in envs},
            envs=envs,
            logs_specs=self._logs_specs,
            numa_options=spec.numa_options,
            duplicate_stdout_filters=spec.duplicate_stdout_filters,
            duplicate_stderr_filters=spec.duplicate_stderr_filters,
        )

    def _keep_logs(self) -> None:
        """A round without a failure before it has the number of the one before, whose logs torch would remove."""
        folder, seat = self._attempt_folder, self._seats.seat
        if folder is not None and seat is not None and folder.name == f"attempt_{seat.restarts}":
            folder.rename(f"{folder}.round_{seat.round - 1}")

    @property
    def _attempt_folder(self) -> Path | None:
        """Where torch has put the logs of the latest workers on this node; None: nowhere."""
        files = self._pcontext.error_files.values() if self._pcontext is not None else ()
        return next((Path(file).parents[1] for file in files if file != os.devnull), None)

    def _environment(self, worker: Worker, group: WorkerGroup) -> dict[str, str | None]:
        spec, seat = group.spec, self._seats.seat
        assert seat is not None
        place = WorkerEnv(
            rank=worker.global_rank,
            local_rank=worker.local_rank,
            world_size=worker.world_size,
            local_world_size=spec.local_world_size,
            node_rank=seat.group_rank,
        )
        job = JobEnv(
            nodes=seat.group_world_size,
            role=spec.role,
            role_rank=worker.role_rank,
            role_world_size=worker.role_world_size,
            master_addr=seat.master_addr,
            master_port=seat.master_port,
            restarts=seat.restarts,
            max_restarts=spec.max_restarts,
            run_id=self._seats.get_run_id(),
            agent_serves_store=self._seats.use_agent_store,
        )
        env: dict[str, str | None] = {**to_env(place, job)}
        try:
            self._set_local_rank_env(env, worker.local_rank, spec)
        except ValueError as error:
            raise UsageError(
                f"--virtual-local-rank: {error}", "ask for no more processes than GPUs are visible"
            ) from None
        return env

    def _look_at_workers(self) -> None:
        if not self._running:
            return
        result = self._monitor_workers(self._worker_group)
        if result.state is WorkerState.UNHEALTHY and isinstance(self._pcontext, Workers):
            self._pcontext.end_asleep()
            result = self._monitor_workers(self._worker_group)
        if result.state in (WorkerState.HEALTHY, WorkerState.UNHEALTHY):
            return
        if result.state not in (WorkerState.SUCCEEDED, WorkerState.FAILED):
            raise LaunchError(
                f"torch's agent calls the workers {result.state.name} and names no failure",
                "start the job again; with LOGLEVEL=INFO torch says more",
            )
        self._running = False
        self._last = result
        if result.state is WorkerState.SUCCEEDED:
            self._link.report(self._round, State.DONE, ended_well=self._ended_well())
        else:
            self._report_down(State.FAILED)

    def _obey_stop(self, order: Stop) -> None:
        if order.round == self._round != self._down:
            if isinstance(self._pcontext, Workers) and not order.joined:
                self._pcontext.stop_after_failure()
            self._stop_workers(self._worker_group)
            self._report_down(State.STOPPED)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()
        if self._running:
            self._running = False
            self._last = self._monitor_workers(worker_group)

    def _report_down(self, state: State) -> None:
        """Report that no worker of the round is left; only then is its store closed."""
        failures = self._latest = self._failures()
        self._shutdown()  # torch's timers and health check go with the workers
        self._seats.end_round()
        self._store = self._worker_group.store = None
        self._down = self._round
        steps = steps_of(self._pcontext.error_files.values()) if self._pcontext is not None else None
        self._link.report(self._round, state, failures, self._ended_well(), steps=steps)

    @property
    def _round(self) -> int:
        return -1 if self._seats.seat is None else self._seats.seat.round

    def _ended_well(self) -> tuple[int, ...]:
        assert isinstance(self._pcontext, Workers)
        assert self._seats.seat is not None
        return tuple(self._seats.seat.first_rank + local_rank for local_rank in self._pcontext.ended_well())

    def _failures(self) -> tuple[Failure, ...]:
        assert isinstance(self._pcontext, Workers)
        return tuple(
            failure_of(self._pcontext, rank, failure, self._host) for rank, failure in self._last.failures.items()
        )

    @property
    def shown(self) -> frozenset[int]:
        """The ranks of this node whose traceback is on the console already."""
        if not isinstance(self._pcontext, Workers):
            return frozenset()
        words = self._pcontext.last_words
        latest = [failure for failure in self._latest if not failure.hung]  # else the stack is ours to show
        return frozenset(failure.rank for failure in latest if words(failure.local_rank).shown)

    @property
    def stacks(self) -> dict[int, str]:
        """Where the ranks of this node stood, if one of the latest has hung."""
        return self._pcontext.hangs.stacks if isinstance(self._pcontext, Workers) else {}

    @property
    def run_folder(self) -> str:
        """Where torch has put this job's logs on this node; empty: nowhere."""
        return "" if self._attempt_folder is None else str(self._attempt_folder.parent)

    def _leave(self, item: Signalled) -> None:
        self.outcome = Outcome(stopped_by=item.number)
        self._link.report(self._round, State.LEFT, signal=item.number)
        raise SignalException(
            f"stopped by {item.number.name}", item.number
        )  # torch's agent passes it on to the workers

    def left(self) -> None:
        """The workers have ended after a signal to the launcher: have they saved?"""
        if isinstance(self._pcontext, Workers) and self._running and self._pcontext.saved():
            self._last = self._monitor_workers(self._worker_group)
            self.outcome = replace(self.outcome, failures=self._failures())

    def _finish(self, outcome: Outcome) -> RunResult:
        self._stop_workers(self._worker_group)
        self.outcome = outcome
        if outcome == Outcome():
            return RunResult(WorkerState.SUCCEEDED, {worker.global_rank: None for worker in self._worker_group.workers})
        return RunResult(WorkerState.FAILED, failures=self._last.failures)

    def recorded_failures(self) -> dict[int, ProcessFailure]:
        """The failures of this node's workers of which the script itself left a record, as torch's @record does."""

        def by_script(failure: ProcessFailure) -> bool:
            note = note_of(failure)
            return bool(note) and NOTE_MARK not in (note.get("extraInfo") or {})

        failures = self._last.failures
        return failures if any(map(by_script, failures.values())) else {}
