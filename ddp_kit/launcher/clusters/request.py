"""What `ddpkit submit` asks of an engine."""

import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from ddp_kit.errors import UsageError
from ddp_kit.exit_codes import ExitCode

AGAIN = (int(ExitCode.NODE_LOST), int(ExitCode.REQUEUE))
"""Exit codes after which the job is started again, however often: a node was lost, or the workers have saved."""
COUNTED = (int(ExitCode.LAUNCH_FAILED), int(ExitCode.HUNG))
"""Exit codes after which it is started again at most `Request.retries` times; so it is after those above 128."""
SIGNALLED = 129
"""The least exit code of a process ended by a signal. All other codes end the job: ddpkit has restarted already."""

_CPUS_PER_GPU = 8


@dataclass(frozen=True)
class Request:
    """One job: how many nodes, what each gets, and the command that runs on each."""

    nodes: int
    words: tuple[str, ...]
    """The words after `ddpkit launch`: its flags, the script, the script's arguments."""
    name: str
    command: str = ""
    """The command line that made this request, for the first lines of the job file."""
    gpus: int | None = None
    """Per node."""
    gpu_type: str | None = None
    """Such as `H100`, in the engine's words."""
    cpus: int | None = None
    """Per node."""
    seconds: int | None = None
    """The time limit."""
    image: str | None = None
    queue: str | None = None
    """Slurm's partition, or the name of a queue."""
    hosts: tuple[str, ...] = ()
    array: str | None = None
    requeue: bool = False
    """Whether the engine starts the job again by itself after it has preempted it."""
    retries: int = 3
    grace: int = 120
    """Seconds from SIGTERM to SIGKILL that the engine leaves the job."""
    folder: PurePosixPath = field(default_factory=PurePosixPath)
    """The folder that the command runs in."""
    programs: str = ""
    """The folder of this environment's programs, `ddpkit` among them."""

    @property
    def cpus_per_node(self) -> int | None:
        """The CPU cores of a node's processes together; None: as many as the engine gives."""
        return self.cpus if self.cpus is not None else (self.gpus * _CPUS_PER_GPU if self.gpus else None)

    @property
    def launch(self) -> tuple[str, ...]:
        """The command that runs on each node."""
        return ("ddpkit", "launch", *self.words)


def seconds_of(text: str) -> int:
    """The seconds of a time limit: `90m`, `12h`, `2d`, `24:00:00` or `1-12:00:00`. Raises `UsageError`."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    if found := re.fullmatch(r"(\d+)([smhd])", text):
        return int(found[1]) * units[found[2]]
    if found := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text):
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    raise UsageError(f"--time {text} is not a time", "for example: --time 90m, --time 12h or --time 1-12:00:00")


def clock(seconds: int) -> str:
    """`1-12:00:00` for a day and a half."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hour:02}:{minute:02}:{second:02}"
