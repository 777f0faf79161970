"""The job of a single node: decided in this process, with nothing listening beyond loopback."""

import socket
import time
from dataclasses import replace

from ddp_kit.launcher.agent.inbox import Inbox, Placed
from ddp_kit.launcher.agent.listening import listen
from ddp_kit.launcher.job import Go, Job, Limits, Node, Order, Report, State
from ddp_kit.launcher.restarts import Steps
from ddp_kit.launcher.verdict import Failure


class Solo:
    """What `meeting.Meeting` is for several nodes."""

    def __init__(self, node: Node, limits: Limits, inbox: Inbox) -> None:
        self._node = node
        self._inbox = inbox
        self._port = node.port
        self._listening: socket.socket | None = None
        self._job = Job(limits, time.monotonic())

    @property
    def pulse(self) -> float | None:
        """Seconds until the next round starts, where it waits; the job is here, and nothing else takes time."""
        return self._job.patience(time.monotonic())

    def join(self) -> None:
        """Take part."""
        self._pass_on(self._job.joined(replace(self._node, port=self._listen()), time.monotonic()))

    def report(
        self,
        round_: int,
        state: State,
        failures: tuple[Failure, ...] = (),
        ended_well: tuple[int, ...] = (),
        signal: int = 0,  # noqa: ARG002
        steps: Steps | None = None,
    ) -> None:
        """Say how the workers of this node are. That it leaves, or is about to fail, there is nobody to tell."""
        if state in (State.LEFT, State.FAILING):
            return
        port = 0 if state is State.DONE else self._listen()
        report = Report(self._node.number, round_, state, failures, port, ended_well=ended_well, steps=steps)
        self._pass_on(self._job.reported(report, time.monotonic()))

    def check(self) -> None:
        """Start the round that was waiting, once it is time."""
        if self.pulse == 0.0:
            now = time.monotonic()
            self._job.heard(self._node.number, now)
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
            self._inbox.put(Placed(order.seats[self._node.number], order.why) if isinstance(order, Go) else order)
