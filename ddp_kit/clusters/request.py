"""Data classes that describe a node of a cluster job (`JobPlace`) and a job to submit (`Request`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ddp_kit.errors import UsageError
from ddp_kit.exit_codes import ExitCode
from ddp_kit.texts import plural

# --- Place in a job ---------------------------------------------------------------------------------------------------

PORT = 29400
"""Rendezvous port in environments where a node runs one job at a time; torch's default for c10d."""


@dataclass(frozen=True)
class JobPlace:
    """This node's rank in a cluster job, and the job's rendezvous settings."""

    environment: str
    """The environment's name, such as `Slurm`."""
    nodes: int
    node_rank: int
    host: str
    """Host name or address of node 0, which hosts the rendezvous."""
    port: int
    run_id: str
    """The job's id, the same on all nodes. The rendezvous rejects a node with a different id."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The variable that provided each value (`nodes`, `node rank`, `host`, ...), for --dry-run and error messages."""
    gpus: int | None = None
    """Number of GPUs that the environment gives this node, or None if not known."""
    end_time: float | None = None
    """Time at which the environment ends the job, in seconds since the epoch, or None if not known."""
    join: float | None = None
    """Seconds until all nodes of the job have started; None: use the launcher's default."""
    replacement: float | None = None
    """Seconds that the environment needs to replace a lost node; None: use the launcher's default."""
    waits_for: str = ""
    """Text for error messages: how to check why other nodes have not joined."""

    def __post_init__(self) -> None:
        """Raise `UsageError` if the node rank is not less than the number of nodes."""
        if self.node_rank >= self.nodes:
            rank = self.sources["node rank"]
            nodes = self.sources["nodes"]
            raise UsageError(
                f"the variables of {self.environment} contradict each other: {rank} says node rank {self.node_rank}, "
                f"{nodes} says {plural(self.nodes, 'node')}",
                f"correct or unset {rank} and {nodes}, or use --nnodes and --node-rank",
            )


def number(env: Mapping[str, str], name: str, environment: str, least: int = 0) -> int:
    """Return the environment variable `name` as an integer.

    Raises `UsageError` if the variable is missing, not an integer, or less than `least`.
    """
    text = env.get(name, "")
    if not text.isdecimal() or int(text) < least:
        problem = f"is {text!r}, which is not a valid number"
        if name not in env:
            problem = "is not set"
        raise UsageError(
            f"this looks like {environment}, but its variable {name} {problem}",
            f"to run on this machine alone, unset all variables of {environment} or pass --nnodes 1; otherwise pass "
            "--nnodes, --node-rank, --master-addr and --master-port",
        )
    return int(text)


def optional_number(env: Mapping[str, str], name: str) -> int | None:
    """Return the environment variable `name` as an integer; None if it is missing or not an integer."""
    text = env.get(name, "")
    return int(text) if text.isdecimal() else None


def derived_port(text: str) -> int:
    """A port derived from a job's id, so that jobs that share a node usually use different ports.

    The port is outside of Linux's default range of ephemeral ports.
    """
    digits = "".join(letter for letter in text if letter.isdecimal())
    return 10_000 + int(digits or "0") % 20_000


# --- Value of --hosts -------------------------------------------------------------------------------------------------


def hosts_of(text: str | None) -> tuple[str, ...]:
    """Host names from a list such as `a,b`, or from a file with one name per line.

    Raises `UsageError` if there are no names, or if one is invalid.
    """
    if text is None:
        return ()
    path = Path(text)
    lines = text.split(",")
    if path.is_file():
        lines = path.read_text().splitlines()
    names = (line.partition("#")[0].strip() for line in lines)
    hosts = tuple(filter(None, names))
    hint = "use --hosts gpu1,gpu2, or the name of a file with one host per line"
    if not hosts:
        raise UsageError(f"--hosts {text} names no hosts", hint)
    for name in hosts:
        if name.startswith("-") or len(name.split()) > 1:
            raise UsageError(f"--hosts: {name!r} is not a host name", hint)
    return hosts


# --- Job request ------------------------------------------------------------------------------------------------------
# What `ddpkit submit` passes to an engine.


AGAIN = (int(ExitCode.NODE_LOST), int(ExitCode.REQUEUE))
"""Exit codes after which the job is restarted without a limit: a node was lost, or the workers have saved."""
COUNTED = (int(ExitCode.LAUNCH_FAILED), int(ExitCode.HUNG))
"""Exit codes after which the job is restarted at most `Request.retries` times, as after codes above 128."""
SIGNALLED = 129
"""Smallest exit code of a process ended by a signal. Exit codes below it that are not listed above end the job."""

_CPUS_PER_GPU = 8


@dataclass(frozen=True)
class Request:
    """A job to submit: the number of nodes, the resources of each node, and the command that runs on each node."""

    nodes: int
    words: tuple[str, ...]
    """The arguments of `ddpkit launch`: flags, the script, and the script's arguments."""
    name: str
    command: str = ""
    """The `ddpkit submit` command line, shown in the first lines of the job file."""
    gpus: int | None = None
    """GPUs per node."""
    gpu_type: str | None = None
    """GPU type as the engine spells it, such as `H100`."""
    cpus: int | None = None
    """CPU cores per node."""
    seconds: int | None = None
    """Time limit of the job in seconds; None: the engine's default."""
    image: str | None = None
    queue: str | None = None
    """Name of the queue or partition."""
    hosts: tuple[str, ...] = ()
    array: str | None = None
    spares: int = 0
    """How many of the nodes are spares: --spares in `words`."""
    requeue: bool = False
    """Whether the engine itself restarts the job after preempting it."""
    retries: int = 3
    grace: int = 120
    """Seconds from SIGTERM to SIGKILL when the engine stops the job."""
    folder: PurePosixPath = field(default_factory=PurePosixPath)
    """The working folder of the command."""
    programs: str = ""
    """The folder that contains `ddpkit` and the other programs of this Python environment."""

    @property
    def cpus_per_node(self) -> int | None:
        """CPU cores per node: `cpus` if given, otherwise 8 per GPU. None for a job without GPUs: the engine decides."""
        return self.cpus or (self.gpus or 0) * _CPUS_PER_GPU or None

    @property
    def counted(self) -> tuple[int, ...]:
        """The exit codes of `COUNTED`; with spares, also that of an excluded node, without which the job continues."""
        if not self.spares:
            return COUNTED
        return *COUNTED, int(ExitCode.FAULTY)

    @property
    def launch(self) -> tuple[str, ...]:
        """The command that runs on each node."""
        return ("ddpkit", "launch", *self.words)


_FEWEST = 2  # nodes that train: the one that hosts the rendezvous cannot be replaced


def without_spares(nodes: int, spares: int) -> int:
    """How many of `nodes` train if `spares` of them are spares. Raises `UsageError` if too few are left."""
    if spares and nodes - spares < _FEWEST:
        hint = f"use at least {spares + _FEWEST} nodes, or remove --spares"
        if nodes > _FEWEST:
            hint = f"use --spares {nodes - _FEWEST}, or at least {spares + _FEWEST} nodes"
        raise UsageError(
            f"--spares {spares} is too many for a job of {plural(nodes, 'node')}: at least two have to train, because "
            "the one that hosts the rendezvous cannot be replaced",
            hint,
        )
    return nodes - spares


NAME_LENGTH = 40
"""Maximum length of a job's name: Kubernetes appends a suffix, and allows 63 characters in total."""


def job_name(stem: str) -> str:
    """A job name derived from a script's name: lower-case letters, digits and dashes, with a letter first."""
    name = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in stem.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"train-{name}"
    return name[:NAME_LENGTH].strip("-")
