"""Messages of a node that waits for other nodes: how many have joined, and what to type on the others."""

import re
import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from ddp_kit.clusters.request import JobPlace
from ddp_kit.launcher.agent.sockets import is_loopback
from ddp_kit.launcher.job import Limits

_FIRST_SECONDS = 3.0
_FACTOR = 3.0  # 3 s, 9 s, 27 s, ...
_MAX_SECONDS = 300.0
_STATIC_SETTINGS = {"node_rank", "master_addr", "master_port"}


class Reminder:
    """Timer for messages of a waiting node: due after 3 s, then at growing intervals.

    `at_once`: whether the first message is due immediately.
    """

    def __init__(self, now: float, at_once: bool = False) -> None:
        self._interval = _FIRST_SECONDS
        self._next = now + self._interval
        if at_once:
            self._interval /= _FACTOR
            self._next = now

    def due(self, now: float) -> bool:
        """Whether a message is due now; true at most once per interval."""
        if now < self._next:
            return False
        self._interval = min(self._interval * _FACTOR, _MAX_SECONDS)
        self._next = now + self._interval
        return True


@dataclass(frozen=True)
class Commands:
    """Command lines to type on the other nodes of a job.

    They are this node's command line with different values for the flags that must differ between nodes.
    """

    flags: Mapping[str, tuple[str, ...]]
    """The flags that were typed here, with their values, by the names of the settings."""
    script: str
    nodes: int
    """The maximum number of nodes."""
    static: bool = False
    """Whether every node needs --node-rank (static rendezvous)."""
    master: tuple[str, int] | None = None
    """The values of --master-addr and --master-port; None: these flags do not set the endpoint."""

    @property
    def lack_endpoint(self) -> bool:
        """Whether no flag sets a node rank or an endpoint, for example if `--nnodes 2` is the only flag."""
        return not any(name in _STATIC_SETTINGS or name.startswith("rdzv_") for name in self.flags)

    def command_for_host(self) -> str:
        """The command for the node that hosts the rendezvous."""
        return self._command("0", "1")

    def command_for_other_nodes(self) -> str:
        """The command for another node."""
        return self._command("1" if self.nodes == 2 else "N", "0")

    def _command(self, node_rank: str, is_host: str) -> str:
        changed = _STATIC_SETTINGS if self.static else set[str]()
        typed = chain.from_iterable(words for name, words in self.flags.items() if name not in changed)
        flags = [re.sub(r"\bis_host=\w+", f"is_host={is_host}", word) for word in typed]
        if self.static:
            flags += ["--node-rank", node_rank]
        if self.master is not None:
            host, port = self.master
            if is_loopback(host):
                host = socket.gethostname()
            flags += ["--master-addr", host, "--master-port", str(port)]
        return shlex.join(["ddpkit", "launch", *flags]) + f" {self.script}"


def waiting_for_name(host: str, why: str, limits: Limits, place: JobPlace) -> str:
    """The message that a cluster node prints while the host name of node 0 does not resolve yet."""
    return (
        f"the host name {host!r} of node 0 does not resolve yet ({why}); waiting up to {limits.join_timeout:g} s for it"
        f"{_to_check(place)}"
    )


def waiting_for_host(endpoint: str, why: str, commands: Commands, place: JobPlace | None = None) -> str:
    """The message that a node prints while it cannot reach the host of the rendezvous."""
    if place is not None:
        return (
            f"no launcher answers at {endpoint} ({why}), which is the address of node 0 in {place.environment}"
            f"{_to_check(place)}"
        )
    return (
        f"no launcher answers at {endpoint} ({why}); on the node with this address, type: {commands.command_for_host()}"
    )


def waiting_for_answer(endpoint: str, limits: Limits) -> str:
    """The message that a node prints while the process at the endpoint accepts its connection but does not answer."""
    return (
        f"the process that listens at {endpoint} has accepted the connection, but does not answer; waiting up to "
        f"{limits.join_timeout:g} s for it"
    )


def waiting_for_nodes(
    here: int, limits: Limits, endpoint: tuple[str, int], commands: Commands, place: JobPlace | None = None
) -> str:
    """The message that the host prints while it waits for other nodes.

    `here`: the number of nodes that have joined, including the host.
    """
    verb = "has" if here == 1 else "have"
    joined = f"{here} of {limits.min_nodes} nodes {verb} joined"
    if here >= limits.min_nodes:
        return f"{joined}, which is enough; waiting up to {limits.last_call_timeout:g} s for more (last_call_timeout)"
    waiting = f"{joined}; waiting up to {limits.join_timeout:g} s at {endpoint[0]}:{endpoint[1]}"
    if place is not None:
        return f"{waiting}{_to_check(place)}"
    if is_loopback(endpoint[0]):
        return (
            f"{waiting}, which no other machine can reach. To use several machines, start ddpkit on each with this "
            f"machine's address and a different node rank: {commands.command_for_other_nodes()}"
        )
    return f"{waiting}; on the other nodes, type: {commands.command_for_other_nodes()}"


def _to_check(place: JobPlace) -> str:
    return f"; {place.waits_for}" if place.waits_for else ""
