"""What a cluster's variables say about this node: its rank, and where the nodes of its job meet."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddp_kit.errors import UsageError

PORT = 29400
"""Where the nodes meet, in environments where a node runs one job at a time. torch's default for c10d."""


@dataclass(frozen=True)
class JobPlace:
    """The place of this node in a job of several nodes."""

    environment: str
    """Such as `Slurm`."""
    nodes: int
    node_rank: int
    host: str
    """A name or address of node 0, which hosts the rendezvous."""
    port: int
    run_id: str
    """The same on all nodes; another job at this port is refused by it."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The variable that each value comes from: `nodes`, `node rank`, `host` and others, for --dry-run."""
    gpus: int | None = None
    """How many GPUs the environment gives this node; None: it does not say."""
    end_time: float | None = None
    """When the environment ends the job, as `time.time`; None: it does not say."""
    replacement: float | None = None
    """Seconds in which the environment replaces a lost node; None: the launcher's default."""
    waits_for: str = ""
    """What to check while other nodes do not come."""


def number(env: Mapping[str, str], name: str, environment: str, least: int = 0) -> int:
    """The whole number in the variable `name`. Raises `UsageError` if it is not one, or below `least`."""
    text = env.get(name, "")
    if not text.isdecimal() or int(text) < least:
        found = f"is {text!r}" if name in env else "is not set"
        raise UsageError(
            f"this looks like {environment}, but its variable {name} {found}",
            "unset its variables to run on this machine alone (--nnodes 1 does so too), or type --nnodes, --node-rank, "
            "--master-addr and --master-port",
        )
    return int(text)


def optional_number(env: Mapping[str, str], name: str) -> int | None:
    """The whole number in the variable `name`; None if it has none."""
    text = env.get(name, "")
    return int(text) if text.isdecimal() else None


def check_rank(place: JobPlace) -> JobPlace:
    """The place itself. Raises `UsageError` if its node rank and its number of nodes contradict each other."""
    if place.node_rank < place.nodes:
        return place
    rank, nodes = place.sources["node rank"], place.sources["nodes"]
    raise UsageError(
        f"the variables of {place.environment} contradict each other: {rank} says node rank {place.node_rank}, "
        f"{nodes} says {place.nodes} node{'s' * (place.nodes != 1)}",
        f"correct or unset {rank} and {nodes}, or type --nnodes and --node-rank",
    )


def derived_port(text: str) -> int:
    """A port for a job that shares its nodes with others, from its id; Linux hands out none of these by itself."""
    digits = "".join(letter for letter in text if letter.isdecimal())
    return 10_000 + int(digits or "0") % 20_000
