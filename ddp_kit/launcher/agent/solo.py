"""The job of a single node: decided in this process, with nothing listening beyond loopback."""

import socket
import time
from dataclasses import replace

from ddp_kit.launcher.agent.inbox import Inbox, Placed
from ddp_kit.launcher.agent.listening import listen
from ddp_kit.launcher.job import Go, Job, Limits, Node, Order, Report, State


class Solo:
    """What `meeting.Meeting` is for several nodes."""

    def __init__(self, node: Node, limits: Limits, inbox: Inbox) -> None:
        self._node, self.number = node, node.number
        self._inbox = inbox
        self._port = node.port
        self._listening: socket.socket | None = None
        self._job = Job(limits, time.monotonic())

    @property
    def pulse(self) -> float | None:
        """Seconds until the next round starts, where it waits; the job is here, and nothing else takes time."""
        return self._job.timeout(time.monotonic())

    def join(self) -> None:
        """Take part."""
        self._pass_on(self._job.joined(replace(self._node, port=self._listen()), time.monotonic()))

    def report(self, report: Report) -> None:
        """Say how the workers of this node are. That it leaves, or is about to fail, there is nobody to tell."""
        if report.state in (State.LEFT, State.FAILING):
            return
        port = 0 if report.state is State.DONE else self._listen()
        self._pass_on(self._job.reported(replace(report, port=port), time.monotonic()))

    def check(self) -> None:
        """Start the round that was waiting, once it is time."""
        if self.pulse == 0.0:
            now = time.monotonic()
            self._job.heard(self.number, now)
            self._pass_on(self._job.tick(now))

    def take_listening(self) -> socket.socket | None:
        """The socket for the workers' store of the next round."""
        listening, self._listening = self._listening, None
        return listening

    def close(self) -> None:
        """Leave nothing open."""
        if self._listening is not None:
            self._listening.close()

    def _listen(self) -> int:
        if self._listening is None:
            self._listening = listen(self._node.address, self._port)
        port: int = self._listening.getsockname()[1]
        return port

    def _pass_on(self, orders: list[Order]) -> None:
        for order in orders:
            self._inbox.put(Placed(order.assignments[self.number], order.why) if isinstance(order, Go) else order)
