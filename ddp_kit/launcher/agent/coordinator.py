"""Run the state machine `job.Job` for several nodes, in two threads on the node that hosts the rendezvous."""

import json
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from torch.distributed import DistError

from ddp_kit.launcher.job import End, Go, Job, Limits, Node, Order, Pause, Report, State, Stop
from ddp_kit.launcher.restarts import Steps
from ddp_kit.launcher.verdict import Failure, Outcome

# The store's keys.
NODES = "ddpkit/nodes"
EVENTS = "ddpkit/events"
ORDERS = "ddpkit/orders"
ORDER = "ddpkit/order/{number}"
ASSIGNMENT = "ddpkit/assignment/{round}/{node}"
BEAT = "ddpkit/beat/{node}"
# In place of an assignment, for a node that the job has removed. A node that waits for a later round gets null.
LOST = "lost"


class Coordinator:
    """Reads events and heartbeats, writes orders. `store`: a TCPStore whose timeout is longer than any job."""

    def __init__(self, store: Any, limits: Limits, beat_seconds: float) -> None:
        self._store = store
        self._events, self._heartbeats = store.clone(), store.clone()  # one connection per thread
        self._beat_seconds = beat_seconds
        self._job = Job(limits, time.monotonic())
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._beats: dict[int, bytes] = {}
        self._known = 0  # the highest number of any node that has joined, plus 1
        self._orders = 0
        self._latecomers: set[int] = set()  # nodes that joined after the end
        self._informed: set[int] = set()  # nodes that know the outcome

    def start(self) -> None:
        """Start the threads."""
        for work in (self._listen, self._watch):
            threading.Thread(target=self._run_until_closed, args=[work], name="ddpkit-coordinator", daemon=True).start()

    @property
    def nodes_joined(self) -> int:
        """How many nodes have joined and are not lost."""
        with self._lock:
            return len(self._job.alive)

    def all_informed(self, host: int) -> bool:
        """Whether all nodes other than `host` know the outcome."""
        with self._lock:
            return not set(self._job.alive) - self._informed - {host}

    def close(self) -> None:
        """Stop the threads."""
        self._closed.set()

    def _run_until_closed(self, work: Any) -> None:
        with suppress(DistError, RuntimeError):  # the store closes with the host
            work()

    def _listen(self) -> None:
        while not self._closed.is_set():
            event = json.loads(self._events.queue_pop(EVENTS))
            with self._lock:
                self._publish(self._orders_after(event, time.monotonic()))

    def _orders_after(self, event: dict[str, Any], now: float) -> list[Order]:
        if "bye" in event:
            self._informed.add(event["bye"])
            early = not self._job.ended  # the launcher of the node failed
            return self._job.reported(Report(event["bye"], -1, State.LEFT), now) if early else []
        if "report" in event:
            return self._job.reported(_read_report(event["report"]), now)
        node = Node(**event["joined"])
        self._known = max(self._known, node.number + 1)
        if self._job.ended:
            self._latecomers.add(node.number)
        return self._job.joined(node, now)

    def _watch(self) -> None:
        while not self._closed.wait(self._beat_seconds / 2):
            with self._lock:
                alive = self._job.alive
            beats = self._heartbeats.multi_get([BEAT.format(node=number) for number in alive]) if alive else []
            now = time.monotonic()
            with self._lock:
                for number, beat in zip(alive, beats, strict=True):
                    if self._beats.get(number) != beat:
                        self._beats[number] = beat
                        self._job.heartbeat(number, now)
                self._publish(self._job.tick(now))

    def _publish(self, orders: list[Order]) -> None:
        """Write orders to the store. The caller holds the lock."""
        for order in orders:
            if isinstance(order, Go):
                number = next(iter(order.assignments.values())).round
                keys = [ASSIGNMENT.format(round=number, node=node) for node in range(self._known)]
                self._store.multi_set(keys, [json.dumps(self._assigned(order, node)) for node in range(self._known)])
                self._write({"go": number, "nodes": self._known, "why": order.why})
            elif isinstance(order, Stop):
                self._write({"stop": order.round, "may_save": order.may_save})
            elif isinstance(order, Pause):
                self._write({"pause": order.why})
            elif isinstance(order, End):
                lost = sorted(set(range(self._known)).difference(self._job.alive, self._latecomers))
                self._write({"end": asdict(order.outcome), "lost": lost})

    def _assigned(self, order: Go, node: int) -> Any:
        if node in order.assignments:
            return asdict(order.assignments[node])
        return None if node in self._job.alive else LOST

    def _write(self, order: dict[str, Any]) -> None:
        self._store.set(ORDER.format(number=self._orders), json.dumps(order))
        self._orders = self._store.add(ORDERS, 1)


def read_outcome(fields: dict[str, Any]) -> Outcome:
    """An outcome from its JSON form."""
    return Outcome(**_read(fields))


def _read_report(fields: dict[str, Any]) -> Report:
    steps = Steps(**fields["steps"]) if fields["steps"] else None
    return Report(**{**_read(fields), "state": State[fields["state"]], "steps": steps})


def _read(fields: dict[str, Any]) -> dict[str, Any]:
    """Restore the types that JSON does not have."""
    failures = tuple(Failure(**{**failure, "others": tuple(failure["others"])}) for failure in fields["failures"])
    return {**fields, "failures": failures, "ended_well": tuple(fields["ended_well"])}
