"""Links that connect a node to the state machine of its job (`job.Job`), either directly or over a TCPStore."""

import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore

from ddp_kit.errors import LaunchError
from ddp_kit.launcher.agent.inbox import Disconnected, Inbox, Item, StartWorkers, StoppedError
from ddp_kit.launcher.agent.sockets import allow_connections, is_local, is_loopback, listen, own_loopback, unresolved
from ddp_kit.launcher.agent.waiting import (
    Commands,
    Reminder,
    waiting_for_answer,
    waiting_for_host,
    waiting_for_name,
    waiting_for_nodes,
)
from ddp_kit.launcher.job import End, Job, Limits, Node, Order, Pause, RankAssignment, Report, StartRound, State, Stop
from ddp_kit.launcher.rendezvous import Rendezvous, holder
from ddp_kit.launcher.verdict import Outcome, summary
from ddp_kit.launcher.wire import from_json, to_json

# --- Single node ------------------------------------------------------------------------------------------------------
# The state machine runs in this process, which listens on loopback only.


class SingleNodeLink:
    """Link to a job of one node, with the same methods as `MultiNodeLink`."""

    def __init__(self, node: Node, limits: Limits, inbox: Inbox) -> None:
        self._node = node
        self.number = node.number
        self._inbox = inbox
        self._port = node.port
        self._listening: socket.socket | None = None
        self._job = Job(limits, time.monotonic())

    @property
    def next_check(self) -> float | None:
        """Seconds until the next call of `check`, or None if no round is scheduled."""
        return self._job.timeout(time.monotonic())

    def join(self) -> None:
        """Join the job."""
        self._enqueue(self._job.joined(replace(self._node, port=self._listen()), time.monotonic()))

    def report(self, report: Report) -> None:
        """Report the state of the workers. LEFT and FAILING are ignored, because only other nodes need them."""
        if report.state in (State.LEFT, State.FAILING):
            return
        port = 0 if report.state is State.DONE else self._listen()
        self._enqueue(self._job.reported(replace(report, port=port), time.monotonic()))

    def check(self) -> None:
        """Start the next round when it is due."""
        if self.next_check == 0.0:
            now = time.monotonic()
            self._job.heartbeat(self.number, now)
            self._enqueue(self._job.tick(now))

    def take_listening(self) -> socket.socket | None:
        """Return the socket for the workers' store of the next round."""
        listening = self._listening
        self._listening = None
        return listening

    def close(self) -> None:
        """Close the socket for the workers' store, unless it has been taken."""
        if self._listening is not None:
            self._listening.close()

    def _listen(self) -> int:
        if self._listening is None:
            self._listening = listen(self._node.address, self._port)
        port: int = self._listening.getsockname()[1]
        return port

    def _enqueue(self, orders: list[Order]) -> None:
        for order in orders:
            if isinstance(order, StartRound):
                self._inbox.put(StartWorkers(order.assignments[self.number], order.why))
            else:
                self._inbox.put(order)


# --- Coordinator of several nodes -------------------------------------------------------------------------------------
# Runs the state machine in two threads, on the node that hosts the rendezvous.


class RunningClock:
    """A monotonic clock that stands still while this process is suspended: `scontrol suspend`, a paused machine.

    More than `max_gap` seconds between two readings count as a suspension. Threads must read the clock more often.
    """

    def __init__(self, max_gap: float, read: Callable[[], float] = time.monotonic) -> None:
        self._max_gap = max_gap
        self._read = read
        self._lock = threading.Lock()
        self._latest = read()
        self._suspended = 0.0  # seconds in all suspensions

    def now(self) -> float:
        """Seconds from an arbitrary time, without suspensions."""
        with self._lock:
            latest = self._latest
            self._latest = self._read()
            if self._latest - latest > self._max_gap:
                self._suspended += self._latest - latest
            return self._latest - self._suspended


# Keys in the store.
NODES = "ddpkit/nodes"
EVENTS = "ddpkit/events"
ORDERS = "ddpkit/orders"
ORDER = "ddpkit/order/{number}"
ASSIGNMENT = "ddpkit/assignment/{node}"  # in the latest round
BEAT = "ddpkit/beat/{node}"
# The assignment of a node that the job has removed. The assignment of a node that waits for a later round is null.
LOST = "lost"


class Coordinator:
    """Coordinator of a multi-node job: reads the nodes' events and heartbeats, and writes orders to the nodes.

    `store`: a TCPStore whose timeout is longer than any job.
    """

    def __init__(self, store: Any, limits: Limits, beat_seconds: float) -> None:
        self._store = store
        self._events = store.clone()  # one connection per thread
        self._heartbeats = store.clone()
        self._beat_seconds = beat_seconds
        self._clock = RunningClock(limits.heartbeat_timeout / 2)  # `_watch` reads it six times as often
        self._job = Job(limits, self._clock.now())
        self.outcome = Outcome()  # with all failures, of which the other nodes get only a summary
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._beats: dict[int, bytes] = {}
        self._joined: set[int] = set()  # nodes in the job, including those that do not know yet that they are lost
        self._orders = 0
        self._informed: set[int] = set()  # nodes that know the outcome

    def start(self) -> None:
        """Start the two threads that run the state machine."""
        for work in (self._listen, self._watch):
            threading.Thread(target=self._run_until_closed, args=[work], name="ddpkit-coordinator", daemon=True).start()

    @property
    def nodes_joined(self) -> int:
        """Number of nodes that have joined and are not lost."""
        with self._lock:
            return len(self._job.alive)

    def all_informed(self, host: int) -> bool:
        """Whether all nodes other than `host` know the outcome."""
        with self._lock:
            return not set(self._job.alive) - self._informed - {host}

    def close(self) -> None:
        """Stop the threads that `start` started."""
        self._closed.set()

    def _run_until_closed(self, work: Any) -> None:
        with suppress(DistError, RuntimeError):  # the store closes when the host's launcher ends
            work()

    def _listen(self) -> None:
        while not self._closed.is_set():
            event = json.loads(self._events.queue_pop(EVENTS))
            with self._lock:
                self._publish(self._orders_after(event, self._clock.now()))

    def _orders_after(self, event: dict[str, Any], now: float) -> list[Order]:
        if "bye" in event:
            self._informed.add(event["bye"])
            if self._job.ended:
                return []
            # The node leaves before the end of the job, because its launcher failed.
            return self._job.reported(Report(event["bye"], -1, State.LEFT), now)
        if "report" in event:
            return self._job.reported(from_json(Report, event["report"]), now)
        node = from_json(Node, event["joined"])
        self._store.set(ASSIGNMENT.format(node=node.number), to_json(None))
        orders = self._job.joined(node, now)
        self._joined.update(self._job.alive)
        return orders

    def _watch(self) -> None:
        while not self._closed.wait(self._beat_seconds / 2):
            with self._lock:
                alive = self._job.alive
            keys = [BEAT.format(node=number) for number in alive]
            beats = self._heartbeats.multi_get(keys) if keys else []
            now = self._clock.now()
            with self._lock:
                for number, beat in zip(alive, beats, strict=True):
                    if self._beats.get(number) != beat:
                        self._beats[number] = beat
                        self._job.heartbeat(number, now)
                self._publish(self._job.tick(now))

    def _publish(self, orders: list[Order]) -> None:
        """Write orders to the store. The caller must hold the lock."""
        for order in orders:
            content: object = order
            if isinstance(order, StartRound):
                self._assign(order.assignments)
                content = {"round": next(iter(order.assignments.values())).round, "why": order.why}
            elif isinstance(order, End):
                self._assign({})
                self.outcome = order.outcome
                content = End(summary(order.outcome))
            self._store.set(ORDER.format(number=self._orders), to_json([type(order).__name__, content]))
            self._orders = self._store.add(ORDERS, 1)

    def _assign(self, assignments: Mapping[int, RankAssignment]) -> None:
        alive = set(self._job.alive)
        assigned = dict.fromkeys(alive) | dict.fromkeys(self._joined - alive, LOST) | {**assignments}
        self._joined = alive
        self._store.multi_set([ASSIGNMENT.format(node=node) for node in assigned], [*map(to_json, assigned.values())])


# --- Link to a multi-node job -----------------------------------------------------------------------------------------
# Messages over the TCPStore of the node that hosts the rendezvous:
#
#     node                                         host of the rendezvous (`Coordinator`)
#     adds itself, pushes "joined"           -->   pops events, feeds them to `job.Job`
#     waits for the next order               <--   sets an assignment for each node, then one order for all
#     increments its heartbeat               -->   reads all heartbeats, timed by its own monotonic clock
#     pushes reports                         -->   ...
#
# All messages are JSON. The number of store operations per node and round does not depend on the number of nodes. The
# agent's loop never waits for the network: one thread sends, another receives.


_JOB = "ddpkit/job"
_REMOVED = "the job removed this node: its heartbeat stopped, or another node joined with the same node rank"
_SPARE = "this node is a spare: it takes the place of a node that is lost"
_NO_TIMEOUT = timedelta(days=7)  # long, because torch writes to the terminal when a wait times out
_HANDSHAKE = timedelta(seconds=30)
_BEATS_PER_TIMEOUT = 6
_RETRY_SECONDS = 0.2
_CLOSE_SECONDS = 30.0


class MultiNodeLink:
    """Link of one node to a job of several nodes."""

    def __init__(
        self,
        node: Node,
        rendezvous: Rendezvous,
        inbox: Inbox,
        print_message: Callable[[str], None],
        shutdown_timeout: float,
        commands: Commands,
    ) -> None:
        """Connect to the rendezvous, or host it, and register this node.

        `shutdown_timeout`: seconds that other nodes may take to stop their workers. `commands`: the command lines
        for the other nodes, to show in messages.

        Raises `LaunchError` if the endpoint cannot be opened or reached, and `StoppedError` if a stop signal arrives.
        """
        self._limits = rendezvous.limits
        self._inbox = inbox
        self._print_message = print_message
        self._host = rendezvous.host
        self._port = rendezvous.port or 0
        self._endpoint = f"{self._host}:{self._port}"
        self._place = rendezvous.place
        self._commands = commands
        self._reminder = Reminder(time.monotonic(), at_once=commands.lack_endpoint)
        self._has_started = False  # whether any round has begun
        self._is_spare = False  # whether this node has said that it is one
        self.next_check: float | None = rendezvous.limits.heartbeat_timeout / _BEATS_PER_TIMEOUT
        self._beat_seconds = self.next_check
        self._coordinator: Coordinator | None = None
        self._close_timeout = shutdown_timeout + _CLOSE_SECONDS
        self._obstacle: OSError | None = OSError(0, "no answer yet")  # None: a process has accepted the connection
        self._abandoned = threading.Event()
        self._store: Any = None  # a TCPStore; torch's type stubs lack half of the methods of this class
        try:
            self._node = self._wait_for(lambda: self._register(node, rendezvous))
        except (DistError, OSError) as error:
            raise LaunchError(
                f"lost the connection to the rendezvous at {self._endpoint} while joining the job: {error}",
                "start this node again once the host is running",
            ) from None
        self.number = self._node.number
        self._outgoing: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._clock = RunningClock(rendezvous.limits.heartbeat_timeout / 2)
        self._last_contact = self._clock.now()
        self._is_over = False
        self._sender = threading.Thread(target=self._run, args=[self._send], name="ddpkit-send", daemon=True)

    # Connecting -------------------------------------------------------------------------------------------------------

    def _wait_for(self, enter: Callable[[], Node]) -> Node:
        """Return the result of `enter`, which runs in a thread.

        The calls of the resolver and of torch's store may block for as long as the other side does not answer, and no
        signal handler runs meanwhile. This thread acts on signals and on the join timeout, and says what it waits for.
        """
        result = Future[Node]()

        def run() -> None:
            try:
                result.set_result(enter())
            except BaseException as error:
                result.set_exception(error)
            self._inbox.wake()

        started = time.monotonic()
        threading.Thread(target=run, name="ddpkit-connect", daemon=True).start()
        try:
            while not result.done():
                self._inbox.wait(_RETRY_SECONDS)
                stopped = self._inbox.take_signal()
                now = time.monotonic()
                if stopped is not None:
                    raise StoppedError(stopped.number)
                if now - started > self._limits.join_timeout and not result.done():
                    raise self._no_answer(now - started)
                if self._reminder.due(now):
                    self._print_message(self._waiting_to_enter())
        finally:
            self._abandoned.set()
        return result.result()

    def _waiting_to_enter(self) -> str:
        obstacle = self._obstacle
        if obstacle is None:
            return waiting_for_answer(f"{self._endpoint}{self._holder()}", self._limits)
        why = obstacle.strerror or str(obstacle)
        if self._place is not None and isinstance(obstacle, socket.gaierror):
            return waiting_for_name(self._host, why, self._limits, self._place)
        return waiting_for_host(self._endpoint, why, self._commands, self._place)

    def _no_answer(self, waited: float) -> LaunchError:
        obstacle = self._obstacle
        if obstacle is None:
            return LaunchError(
                f"the process that listens at {self._endpoint} has accepted the connection, but has not answered "
                f"within {waited:.0f} s{self._holder()}",
                "if it is the launcher of this job, check whether it is suspended; if not, set another port: "
                "--rdzv-endpoint HOST:PORT or --master-port PORT",
            )
        if isinstance(obstacle, socket.gaierror):
            return unresolved(self._host, obstacle)
        return LaunchError(
            f"no process answers at {self._endpoint} after {waited:.0f} s: {obstacle.strerror or obstacle}",
            "start ddpkit on the host of the rendezvous, and check that this node can reach that port",
        )

    def _register(self, node: Node, rendezvous: Rendezvous) -> Node:
        """Connect to the rendezvous, get a node number, and open a port for the workers' store."""
        self._store = self._connect(rendezvous.run_id, rendezvous.is_host, node.processes)
        self._orders = self._store.clone()  # a separate connection, because it blocks most of the time
        number = self._store.add(NODES, 1) - 1
        address = node.address
        if self._coordinator is None and address == self._host:  # not set by --local-addr
            with socket.create_connection((self._host, self._port), timeout=_HANDSHAKE.total_seconds()) as probe:
                address = probe.getsockname()[0]
            if is_loopback(address):
                address = "127.0.0.1"
        self._listening = None
        port = self._port
        if self._coordinator is None or node.rank is None:  # otherwise, the workers use the rendezvous store
            self._listening = listen(address, 0)
            port = self._listening.getsockname()[1]
        if self._coordinator is not None:
            self._coordinator.start()
            self._store.set(_JOB, rendezvous.run_id)  # other nodes wait for this key, so that the host gets number 0
        return replace(node, number=number, address=address, port=port)

    def _connect(self, run_id: str, is_host: bool | None, processes: int) -> Any:
        if self._port == 0:
            raise LaunchError(
                "port 0 cannot be used with several nodes",
                "set the same port on all nodes: --rdzv-endpoint HOST:PORT",
            )
        if is_host or (is_host is None and is_local(self._host)):
            allow_connections(self._limits.min_nodes, self._limits.min_nodes * processes, processes)
            try:
                return self._serve()
            except LaunchError:
                if is_host:
                    raise  # no other node can host the rendezvous
        store: Any = self._reach()
        taken = "does not belong to a ddpkit job"
        job = ""
        with suppress(DistError):
            job = store.get(_JOB).decode()
            taken = f"belongs to job {job!r}"
        if job != run_id:
            raise LaunchError(
                f"the rendezvous at {self._endpoint} {taken}, but this node's job is {run_id!r}{self._holder()}",
                "use the same --nnodes and --rdzv-id on all nodes of a job, and a different port for each job",
            )
        store.set_timeout(_NO_TIMEOUT)
        return store

    def _serve(self) -> TCPStore:
        listening = listen(self._host, self._port)
        store = TCPStore(
            own_loopback(self._host),
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
            timeout=_NO_TIMEOUT,
        )
        self._coordinator = Coordinator(store, self._limits, self._beat_seconds)
        return store

    def _reach(self) -> TCPStore:
        """Wait until a process listens at the endpoint, and connect to it."""
        while self._obstacle is not None:
            try:
                with socket.create_connection((self._host, self._port), timeout=_HANDSHAKE.total_seconds()):
                    self._obstacle = None
            except OSError as error:
                self._obstacle = error
                if isinstance(error, socket.gaierror) and self._place is None:
                    raise unresolved(self._host, error) from None
                if self._abandoned.wait(_RETRY_SECONDS):
                    raise
        try:
            return TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=_HANDSHAKE)
        except (DistError, RuntimeError, ValueError):
            raise LaunchError(
                f"the process that listens at {self._endpoint} is not a rendezvous{self._holder()}",
                "end that process, or set another port: --rdzv-endpoint HOST:PORT or --master-port PORT",
            ) from None

    def _holder(self) -> str:
        """Text that names the process which uses the port on this machine; empty if there is none."""
        who = is_local(self._host) and holder(self._port)
        return f"; the port is used{who}" if who else ""

    # Methods for the agent --------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Send the join request."""
        self._sender.start()

    def report(self, report: Report) -> None:
        """Report the state of this node's workers, or that the node is leaving the job."""
        if self._listening is None:
            self._listening = listen(self._node.address, 0)
        self._outgoing.put({"report": replace(report, port=self._listening.getsockname()[1])})

    def take_listening(self) -> socket.socket | None:
        """Return the socket for the workers' store of the next round; None: the workers use the rendezvous store."""
        listening = self._listening
        self._listening = None
        return listening

    def check(self) -> None:
        """Print, at intervals, what this node is waiting for.

        If the host no longer answers, put `Disconnected` into the inbox.
        """
        if not self._has_started and not self._is_over and self._reminder.due(time.monotonic()):
            message = f"joined the job at {self._endpoint}; waiting for the other nodes"
            if self._coordinator is not None:
                joined = self._coordinator.nodes_joined
                endpoint = (self._host, self._port)
                message = waiting_for_nodes(joined, self._limits, endpoint, self._commands, self._place)
            self._print_message(message)
        if not self._is_over and self._clock.now() - self._last_contact > self._limits.heartbeat_timeout:
            self._disconnect()

    def close(self) -> None:
        """Leave the job. On the host, wait until every other node knows the outcome."""
        self._is_over = True
        self._outgoing.put({"bye": self.number})
        self._outgoing.put(None)
        if self._sender.is_alive():
            self._sender.join(self._limits.heartbeat_timeout)
        if self._coordinator is not None:
            deadline = time.monotonic() + self._close_timeout
            while not self._coordinator.all_informed(self.number) and time.monotonic() < deadline:
                self._inbox.wait(self._beat_seconds)
                while self._inbox.take() is not None:
                    pass
                if self._inbox.signals > 1:
                    break
            self._coordinator.close()
        if self._listening is not None:
            self._listening.close()

    # Threads ----------------------------------------------------------------------------------------------------------

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (DistError, RuntimeError):
            self._disconnect()

    def _disconnect(self) -> None:
        if not self._is_over:
            self._is_over = True
            why = f"the host of the rendezvous, {self._endpoint}, has ended or cannot be reached"
            self._inbox.put(Disconnected(why))

    def _send(self) -> None:
        beat = BEAT.format(node=self.number)
        self._store.add(beat, 1)
        first_order = self._store.add(ORDERS, 0)
        self._store.queue_push(EVENTS, to_json({"joined": self._node}))
        listener = threading.Thread(
            target=self._run, args=[lambda: self._listen(first_order)], name="ddpkit-listen", daemon=True
        )
        listener.start()
        while True:
            self._last_contact = self._clock.now()
            try:
                event = self._outgoing.get(timeout=self._beat_seconds)
            except queue.Empty:
                self._store.add(beat, 1)
                continue
            if event is None:
                return
            self._store.queue_push(EVENTS, to_json(event))

    def _listen(self, number: int) -> None:
        item: Item | None = None
        while not isinstance(item, (End, Disconnected)):
            item = self._item(*json.loads(self._orders.get(ORDER.format(number=number))))
            number += 1
            if item is not None:
                self._is_over = self._is_over or isinstance(item, (End, Disconnected))
                self._inbox.put(item)

    def _item(self, kind: str, order: dict[str, Any]) -> Item | None:
        """What this node has to do for an order to all nodes; None: nothing. `kind`: the name of its class."""
        if kind == "Stop":
            return from_json(Stop, order)
        if kind == "Pause":
            return from_json(Pause, order)
        if kind == "StandBy":
            if self._is_spare or self.number not in order["nodes"]:
                return None
            self._is_spare = True
            self._has_started = True
            return Pause(_SPARE)
        if kind == "Dismiss":
            return End(from_json(Outcome, order["outcome"])) if order["node"] == self.number else None
        self._has_started = self._has_started or kind == "StartRound"
        assignment = json.loads(self._orders.get(ASSIGNMENT.format(node=self.number)))
        if assignment == LOST:
            return Disconnected(_REMOVED)
        if kind == "End":
            return End(self._coordinator.outcome if self._coordinator else from_json(Outcome, order["outcome"]))
        if assignment is None or assignment["round"] != order["round"]:  # this node waits, or reads an old order
            return None
        self._is_spare = False
        return StartWorkers(from_json(RankAssignment, assignment), order["why"])
