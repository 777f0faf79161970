"""Event records for --event-log-handler, with the names and fields of torch's agent."""

import json
import logging
import socket
import time
from pathlib import Path
from typing import Any

from torch.distributed.elastic import events
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ddp_kit.launcher.agent.workers import Workers
from ddp_kit.launcher.plan import Plan
from ddp_kit.launcher.verdict import Outcome


class EventRecords:
    """The records of one node. Source: `SimpleElasticAgent._construct_event` of torch 2.13."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._is_on = not isinstance(events.get_logging_handler(plan.event_log_handler), logging.NullHandler)
        self._began = self._waits_since = time.monotonic()
        self._workers: Workers | None = None

    def wait_begins(self) -> None:
        """The wait for the next round begins."""
        self._waits_since = time.monotonic()

    def round_began(self, workers: Workers) -> None:
        """The node got its rank assignment and has started its workers."""
        self._workers = workers
        self._record("RENDEZVOUS", duration_ms=(time.monotonic() - self._waits_since) * 1000)
        self._record("ASSIGN_WORKER_RANKS", duration_ms=0.0)  # they came with the assignment
        for local_rank in workers.pids:
            self._record("START", local_rank)

    def timer(self, name: str, request: Any = None) -> None:
        """An event of the server for the workers' timers."""
        inner = {"watchdog_event": name}
        if request is not None:
            fields = ("worker_pid", "scope_id", "expiration_time", "signal")
            inner |= {field: str(getattr(request, field)) for field in fields}
        self._write(name, EventSource.AGENT, self._metadata("RUNNING") | {"metadata": json.dumps(inner)})

    def job_ended(self, outcome: Outcome) -> None:
        """Record how each worker of the last round ended, then the agent itself."""
        if outcome.stopped_by and not outcome.lost:
            self._record("FAILED", raw_error=f"stopped by signal {outcome.stopped_by}")
            return
        if self._workers is not None:
            failures = {failure.local_rank: failure for failure in self._workers.failures().values()}
            others = "SUCCEEDED" if outcome == Outcome() else "TERMINATED"
            for local_rank in self._workers.pids:
                self._record("FAILED" if local_rank in failures else others, local_rank, failures.get(local_rank))
        self._record("SUCCEEDED")

    def _record(
        self, state: str, local_rank: int | None = None, failure: ProcessFailure | None = None, **more: float | str
    ) -> None:
        """Record a state of a worker, or of the agent if `local_rank` is None."""
        if self._is_on:
            source = EventSource.AGENT if local_rank is None else EventSource.WORKER
            metadata = self._metadata(state, local_rank, failure) | more
            self._write(f"torchelastic.worker.status.{state}", source, metadata)

    def _write(self, name: str, source: EventSource, metadata: dict[str, Any]) -> None:
        events.record(Event(name, source=source, metadata=metadata), self._plan.event_log_handler)

    def _metadata(
        self, state: str, local_rank: int | None = None, failure: ProcessFailure | None = None
    ) -> dict[str, Any]:
        plan, assignment = self._plan, self._workers.assignment if self._workers is not None else None
        inner: dict[str, Any] = {
            "group_world_size": assignment.group_world_size if assignment is not None else None,
            "entry_point": Path(plan.command[0]).name,
        }
        found = {
            "run_id": plan.rendezvous.run_id,
            "global_rank": None,
            "group_rank": assignment.group_rank if assignment is not None else None,
            "worker_id": None,
            "role": plan.role,
            "hostname": socket.getfqdn(),
            "state": state,
            "total_run_time": int(time.monotonic() - self._began),
            "rdzv_backend": plan.rendezvous.backend,
            "raw_error": None if failure is None else json.dumps(failure.error_file_data),
            "agent_restarts": assignment.restarts if assignment is not None else 0,
            "duration_ms": None,
        }
        if local_rank is not None and assignment is not None and self._workers is not None:
            found |= {
                "global_rank": assignment.first_rank + local_rank,
                "worker_id": str(self._workers.pids[local_rank]),
            }
            inner |= {
                "local_rank": [local_rank],
                "role_rank": [assignment.first_role_rank + local_rank],
                "role_world_size": [assignment.role_world_size],
                "exit_code": [failure and failure.exitcode],
                "worker_pid": [failure and failure.pid],
            }
        return found | {"metadata": json.dumps(inner)}
