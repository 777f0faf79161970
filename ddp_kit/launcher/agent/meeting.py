"""The job of several nodes. The node that hosts the rendezvous decides; all meet at its TCPStore.

    node                                         host of the rendezvous (`coordinator.py`)
    adds itself, pushes "joined"           -->   pops events, feeds them to `job.Job`
    waits for the next order               <--   sets an assignment for each node, then one order for all
    adds to its beat now and then          -->   reads all beats, by its own monotonic clock
    pushes reports                         -->   ...

Everything is JSON, and a node makes a fixed number of store operations per round, however many nodes there are.
The agent's loop never waits for the network: one thread sends, one listens.
"""

import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore

from ddp_kit.errors import LaunchError
from ddp_kit.launcher.agent.coordinator import (
    ASSIGNMENT,
    BEAT,
    EVENTS,
    LOST,
    NODES,
    ORDER,
    ORDERS,
    Coordinator,
    read_outcome,
)
from ddp_kit.launcher.agent.inbox import Cut, Inbox, Placed, StoppedError
from ddp_kit.launcher.agent.listening import (
    allow_connections,
    is_here,
    is_loopback,
    listen,
    own_loopback,
    resolve,
)
from ddp_kit.launcher.agent.waiting import Commands, Reminder, waiting_for_host, waiting_for_nodes
from ddp_kit.launcher.job import End, Node, Pause, RankAssignment, Report, Stop
from ddp_kit.launcher.ports import holder
from ddp_kit.launcher.rendezvous import Rendezvous

_JOB = "ddpkit/job"
_TAKEN_FOR_LOST = "the others have taken this node for lost, or another one has taken its node rank"
_FOREVER = timedelta(days=7)  # a wait that ends in a time-out makes torch write to the terminal
_HANDSHAKE = timedelta(seconds=30)
_BEATS_PER_SILENCE = 6
_CONNECTIONS = 3  # of each node, while it comes
_RETRY_SECONDS = 0.2
_FAREWELL_SECONDS = 30.0


class Meeting:
    """A node's line to a job of several nodes."""

    def __init__(
        self,
        node: Node,
        rendezvous: Rendezvous,
        inbox: Inbox,
        say: Callable[[str], None],
        shutdown_timeout: float,
        commands: Commands,
    ) -> None:
        """`shutdown_timeout`: seconds that other nodes may take to stop their workers. `commands`: what starts others.

        Raises `LaunchError` where the endpoint cannot be opened or reached, `StoppedError` when told to stop meanwhile.
        """
        self._limits, self._inbox, self._say = rendezvous.limits, inbox, say
        self._host, self._port = rendezvous.host, rendezvous.port or 0
        self._commands = commands
        self._reminder = Reminder(time.monotonic())
        self._placed = False  # whether a round has begun
        self.pulse: float | None = rendezvous.limits.silence / _BEATS_PER_SILENCE
        self._beat_seconds = self.pulse
        self._coordinator: Coordinator | None = None
        self._farewell = shutdown_timeout + _FAREWELL_SECONDS
        try:
            self._store = self._meet(
                rendezvous.run_id, rendezvous.is_host
            )  # a TCPStore; torch's type stubs lack half of its methods
            self._node = self._enter(node, rendezvous.run_id)
        except (DistError, OSError) as error:
            raise LaunchError(
                f"the host of the rendezvous, {self._host}:{self._port}, went away while this node joined: {error}",
                "start this node again once the host is up",
            ) from None
        self.number = self._node.number
        self._outgoing: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._contact = time.monotonic()
        self._over = False
        self._sender = threading.Thread(target=self._guarded, args=[self._send], name="ddpkit-send", daemon=True)

    # Meeting -----------------------------------------------------------------------------------------------------

    def _enter(self, node: Node, run_id: str) -> Node:
        """Take a number, and a port for the workers' store."""
        self._orders = self._store.clone()  # a connection of its own: it waits most of the time
        number = self._store.add(NODES, 1) - 1
        address = node.address if self._coordinator else self._own_address(node)
        serves_control = self._coordinator is not None and node.rank is not None
        self._listening = None if serves_control else listen(address, 0)
        port = self._port if self._listening is None else self._listening.getsockname()[1]
        if self._coordinator is not None:
            self._coordinator.start()
            self._store.set(_JOB, run_id)  # whoever waits for this finds the coordinator there, and number 0 taken
        return replace(node, number=number, address=address, port=port)

    def _meet(self, run_id: str, is_host: bool | None) -> Any:
        if self._port == 0:
            raise LaunchError("several nodes cannot meet at port 0", "name one port for all: --rdzv-endpoint HOST:PORT")
        if is_host or (is_host is None and is_here(self._host)):
            try:
                return self._serve()
            except LaunchError:
                if is_host:
                    raise  # this very node was to host it
        store: Any = self._reach()
        try:
            found = store.get(_JOB).decode()
        except DistError:
            found = ""
        if found != run_id:
            taken = f"is that of the job {found!r}" if found else "is not one of ddpkit's"
            raise LaunchError(
                f"the rendezvous at {self._host}:{self._port} {taken}, this node's job is {run_id!r}{self._who()}",
                "give every node of a job the same --rdzv-id, and every job a port of its own",
            )
        store.set_timeout(_FOREVER)
        return store

    def _serve(self) -> TCPStore:
        listening = listen(self._host, self._port)
        allow_connections(_CONNECTIONS * self._limits.max_nodes)
        store = TCPStore(
            own_loopback(self._host),
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
            timeout=_FOREVER,
        )
        self._coordinator = Coordinator(store, self._limits, self._beat_seconds)
        return store

    def _reach(self) -> TCPStore:
        """Connect, as soon as somebody listens there."""
        started = time.monotonic()
        while True:
            try:
                with socket.create_connection((self._host, self._port), timeout=_HANDSHAKE.total_seconds()):
                    break
            except socket.gaierror:
                resolve(self._host)  # says what is wrong
            except OSError as error:
                waited = time.monotonic() - started
                if waited > self._limits.join:
                    raise LaunchError(
                        f"nobody answers at {self._host}:{self._port} after {waited:.0f} s: {error.strerror or error}",
                        "start the node that hosts the rendezvous, and check that its port can be reached from here",
                    ) from None
                if self._reminder.due(time.monotonic()):
                    why = error.strerror or str(error)
                    self._say(waiting_for_host(f"{self._host}:{self._port}", why, self._commands))
            self._inbox.wait(_RETRY_SECONDS)
            stopped = self._inbox.take_signal()
            if stopped is not None:
                raise StoppedError(stopped.number)
        try:
            return TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=_HANDSHAKE)
        except (DistError, RuntimeError, ValueError):
            raise LaunchError(
                f"what listens at {self._host}:{self._port} is no rendezvous{self._who()}",
                "end that process, or name another port: --rdzv-endpoint HOST:PORT or --master-port PORT",
            ) from None

    def _who(self) -> str:
        return f"; the port is held{who}" if is_here(self._host) and (who := holder(self._port)) else ""

    def _own_address(self, node: Node) -> str:
        """The address of this machine on the way to the rendezvous, unless its user named one."""
        if node.address != self._host:
            return node.address
        with socket.create_connection((self._host, self._port), timeout=_HANDSHAKE.total_seconds()) as probe:
            address: str = probe.getsockname()[0]
        return "127.0.0.1" if is_loopback(address) else address

    # The agent's side --------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Take part."""
        self._sender.start()

    def report(self, report: Report) -> None:
        """Say how the workers of this node are, or what stops it."""
        if self._listening is None:
            self._listening = listen(self._node.address, 0)
        port = self._listening.getsockname()[1]
        report = replace(report, port=port)
        self._outgoing.put({"report": asdict(report) | {"state": report.state.name}})

    def take_listening(self) -> socket.socket | None:
        """The socket for the workers' store of the next round; None: the rendezvous' own store is that one."""
        listening, self._listening = self._listening, None
        return listening

    def check(self) -> None:
        """Say who is waited for; put bad news into the inbox where the host does not answer any more."""
        if not self._placed and not self._over and self._reminder.due(time.monotonic()):
            self._say(self._waiting())
        if not self._over and time.monotonic() - self._contact > self._limits.silence:
            self._cut()

    def _waiting(self) -> str:
        if self._coordinator is not None:
            here = self._coordinator.nodes_here
            return waiting_for_nodes(here, self._limits, (self._host, self._port), self._commands)
        return f"has joined the job at {self._host}:{self._port}; waiting for its other nodes"

    def close(self) -> None:
        """Leave, once every other node knows how the job ended."""
        self._over = True
        self._outgoing.put({"bye": self.number})
        self._outgoing.put(None)
        if self._sender.is_alive():
            self._sender.join(self._limits.silence)
        if self._coordinator is not None:
            deadline = time.monotonic() + self._farewell
            while not self._coordinator.deserted(self.number) and time.monotonic() < deadline:
                self._inbox.wait(self._beat_seconds)
                while self._inbox.take() is not None:
                    pass
                if self._inbox.signals > 1:
                    break
            self._coordinator.close()
        if self._listening is not None:
            self._listening.close()

    # The threads -------------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (DistError, RuntimeError):
            self._cut()

    def _cut(self) -> None:
        if not self._over:
            self._over = True
            self._inbox.put(Cut(f"the host of the rendezvous, {self._host}:{self._port}, is gone or out of reach"))

    def _send(self) -> None:
        beat = BEAT.format(node=self.number)
        self._store.add(beat, 1)
        first_order = self._store.add(ORDERS, 0)
        self._store.queue_push(EVENTS, json.dumps({"joined": asdict(self._node)}))
        listener = threading.Thread(
            target=self._guarded, args=[lambda: self._listen(first_order)], name="ddpkit-listen", daemon=True
        )
        listener.start()
        while True:
            self._contact = time.monotonic()
            try:
                event = self._outgoing.get(timeout=self._beat_seconds)
            except queue.Empty:
                self._store.add(beat, 1)
                continue
            if event is None:
                return
            self._store.queue_push(EVENTS, json.dumps(event))

    def _listen(self, number: int) -> None:
        while True:
            order = json.loads(self._orders.get(ORDER.format(number=number)))
            number += 1
            self._placed = self._placed or "go" in order
            if "end" in order:
                self._over = True
                thrown_out = self.number in order["lost"]
                self._inbox.put(Cut(_TAKEN_FOR_LOST) if thrown_out else End(read_outcome(order["end"])))
                return
            if "stop" in order:
                self._inbox.put(Stop(order["stop"], order["joined"]))
            elif "pause" in order:
                self._inbox.put(Pause(order["pause"]))
            elif self.number in range(order["nodes"]):
                assignment = json.loads(self._orders.get(ASSIGNMENT.format(round=order["go"], node=self.number)))
                if assignment == LOST:
                    self._over = True
                    self._inbox.put(Cut(_TAKEN_FOR_LOST))
                    return
                if assignment is not None:
                    self._inbox.put(Placed(RankAssignment(**assignment), order["why"]))
