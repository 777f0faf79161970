"""The link to a single-node job, whose state machine runs in this process. It listens on loopback only."""

import socket
import time
from dataclasses import replace

from ddp_kit.launcher.agent.inbox import Inbox, StartRound
from ddp_kit.launcher.agent.listening import listen
from ddp_kit.launcher.job import Go, Job, Limits, Node, Order, Report, State


class SingleNodeLink:
    """The counterpart of `multi_node.MultiNodeLink` for one node."""

    def __init__(self, node: Node, limits: Limits, inbox: Inbox) -> None:
        self._node, self.number = node, node.number
        self._inbox = inbox
        self._port = node.port
        self._listening: socket.socket | None = None
        self._job = Job(limits, time.monotonic())

    @property
    def next_check(self) -> float | None:
        """Seconds until the next call of `check`; None: no round is due."""
        return self._job.timeout(time.monotonic())

    def join(self) -> None:
        """Join the job."""
        self._enqueue(self._job.joined(replace(self._node, port=self._listen()), time.monotonic()))

    def report(self, report: Report) -> None:
        """Report the state of the workers. LEFT and FAILING only matter to other nodes."""
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
        listening, self._listening = self._listening, None
        return listening

    def close(self) -> None:
        """Close the socket."""
        if self._listening is not None:
            self._listening.close()

    def _listen(self) -> int:
        if self._listening is None:
            self._listening = listen(self._node.address, self._port)
        port: int = self._listening.getsockname()[1]
        return port

    def _enqueue(self, orders: list[Order]) -> None:
        for order in orders:
            self._inbox.put(StartRound(order.assignments[self.number], order.why) if isinstance(order, Go) else order)
