"""Messages while a node waits for others: how many have joined, at which endpoint, and what to type on the others."""

import re
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_kit.launcher.agent.listening import is_loopback
from ddp_kit.launcher.clusters.job_place import JobPlace
from ddp_kit.launcher.job import Limits

_FIRST_SECONDS = 3.0
_FACTOR = 3.0  # 3 s, 9 s, 27 s, ...
_MAX_SECONDS = 300.0
_STATIC_FLAGS = ("--node-rank", "--master-addr", "--master-port")


class Reminder:
    """Decides when to print the message: after 3 s, then at growing intervals. `at_once`: also immediately."""

    def __init__(self, now: float, at_once: bool = False) -> None:
        self._interval = _FIRST_SECONDS / _FACTOR if at_once else _FIRST_SECONDS
        self._next = now if at_once else now + self._interval

    def due(self, now: float) -> bool:
        """Whether to print now; true once per interval."""
        if now < self._next:
            return False
        self._interval = min(self._interval * _FACTOR, _MAX_SECONDS)
        self._next = now + self._interval
        return True


@dataclass(frozen=True)
class Commands:
    """The command line for the other nodes of a job: this node's, with different flags where they must differ."""

    flags: Sequence[str]
    """The launcher's flags as they were typed here."""
    script: str
    nodes: int
    """The maximum number of nodes."""
    static: bool = False
    """Whether the nodes need --node-rank."""
    master: tuple[str, int] | None = None
    """The values of --master-addr and --master-port, if these set the endpoint."""

    @property
    def lack_endpoint(self) -> bool:
        """Whether no flag gives a node rank or an endpoint, as with `--nnodes 2` alone."""
        names = [word.partition("=")[0].replace("_", "-") for word in self.flags]
        return not any(name in _STATIC_FLAGS or name.startswith("--rdzv") for name in names)

    def for_host(self) -> str:
        """The command for the node that hosts the rendezvous."""
        return self._command(0, "1")

    def for_others(self) -> str:
        """The command for another node."""
        return self._command(1 if self.nodes == 2 else None, "0")

    def _command(self, node_rank: int | None, is_host: str) -> str:
        flags = [re.sub(r"\bis_host=\w+", f"is_host={is_host}", word) for word in self.flags]
        if self.static:
            flags = [*_without_static(flags), "--node-rank", "N" if node_rank is None else str(node_rank)]
        if self.master is not None:
            host, port = self.master
            host = socket.gethostname() if is_loopback(host) else host
            flags += ["--master-addr", host, "--master-port", str(port)]
        return shlex.join(["ddpkit", "launch", *flags]) + f" {self.script}"


def waiting_for_name(host: str, why: str, limits: Limits, place: JobPlace) -> str:
    """The message of a node in a cluster, while the host's name does not resolve yet."""
    return (
        f"the host name {host!r} of node 0 does not resolve yet ({why}); waiting up to {limits.join_timeout:g} s for it"
        f"{_to_check(place)}"
    )


def waiting_for_host(endpoint: str, why: str, commands: Commands, place: JobPlace | None = None) -> str:
    """The message of a node that cannot reach the host."""
    if place is not None:
        return f"no launcher answers at {endpoint} ({why}), where node 0 of {place.environment} is{_to_check(place)}"
    return f"no launcher answers at {endpoint} ({why}); on the node with this address, type: {commands.for_host()}"


def waiting_for_nodes(
    here: int, limits: Limits, endpoint: tuple[str, int], commands: Commands, place: JobPlace | None = None
) -> str:
    """The message of the host of the rendezvous. `here`: how many nodes have joined, including itself."""
    joined = f"{here} of {limits.min_nodes} nodes {'has' if here == 1 else 'have'} joined"
    if here >= limits.min_nodes:
        return f"{joined}, which is enough; waiting up to {limits.last_call_timeout:g} s for more (last_call_timeout)"
    waiting = f"{joined}; waiting up to {limits.join_timeout:g} s at {endpoint[0]}:{endpoint[1]}"
    if place is not None:
        return f"{waiting}{_to_check(place)}"
    if is_loopback(endpoint[0]):
        return (
            f"{waiting}, which no other machine can reach. To use several machines, start ddpkit on each with this "
            f"machine's address and a different node rank: {commands.for_others()}"
        )
    return f"{waiting}; on the other nodes, type: {commands.for_others()}"


def _to_check(place: JobPlace) -> str:
    return f"; {place.waits_for}" if place.waits_for else ""


def _without_static(flags: Sequence[str]) -> list[str]:
    kept, skip = list[str](), False
    for word in flags:
        name, equals, _ = word.partition("=")
        given = name.replace("_", "-") in _STATIC_FLAGS
        if not given and not skip:
            kept.append(word)
        skip = given and not equals
    return kept
