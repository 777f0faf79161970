"""The messages between the launcher and its warm server: frozen dataclasses, sent as JSON over a socketpair.

A `Start` may carry two open descriptors, the worker's stdout and stderr.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from ddp_kit.launcher.program import Program
from ddp_kit.launcher.wire import Connection, from_json


@dataclass(frozen=True)
class Import:
    """Launcher to server, before the first `Start`: import what the workers will import."""

    program: Program
    env: Mapping[str, str]
    """The variables that all workers have."""
    differing: tuple[str, ...]
    """Prefixes of the variables that differ between workers, or between the rounds of a job."""
    packages: tuple[str, ...] | None = None
    """The packages to import; None: those that the script imports first (see imports.py)."""
    unfit: tuple[str, ...] = ()
    """The packages that must not be imported. The imports end before the first of them."""


@dataclass(frozen=True)
class Keep:
    """Launcher to server, before `Import`: fork the kept process (kept_process.py) for the next launches."""

    address: str
    """The path of its socket."""
    seconds: float
    """How long it waits for a launch."""
    imports: Import
    """The request for its imports."""
    env: Mapping[str, str]
    """The environment of the command that was typed."""
    facts: Mapping[str, Any]
    """The facts of its process (see facts.py)."""
    entry: str
    """The function that runs `ddpkit launch` in the forked launcher, as `module:name`."""


@dataclass(frozen=True)
class ImportDone:
    """Server to launcher: the imports are made; or a package is unfit, and the server ends."""

    unfit: str = ""
    reason: str = ""
    again: bool = False
    """Whether a new server has to make the imports: those of the kept process have read other variables."""


@dataclass(frozen=True)
class Start:
    """Launcher to server: start one worker."""

    number: int
    """Identifies the worker in later messages."""
    command: tuple[str, ...]
    """The command to execute if the worker cannot be forked."""
    env: Mapping[str, str]
    """The complete environment of the worker."""
    program: Program | None = None
    """The program of a forked worker; None: execute `command`."""
    cpus: tuple[int, ...] = ()
    """The CPU cores to run on; empty: all cores that the launcher may use."""
    streams: bool = False
    """Whether two descriptors are sent with the message; if not, the worker inherits the launcher's streams."""
    count_interval: float = 0.0
    """Seconds between two counts of the collectives that a forked worker has started; 0: do not count."""
    stacks: str = ""
    """The file to which a forked worker writes its stacks on STACKS_SIGNAL; empty if py-spy can read the stacks."""


@dataclass(frozen=True)
class Kill:
    """Launcher to server: kill a worker and the processes it started."""

    number: int


@dataclass(frozen=True)
class Clear:
    """Launcher to server: all workers of a round have ended; end the processes that they left behind."""

    succeeded: bool
    """Whether all workers exited with code 0. If so, the server prints a message about each process that it ends."""


@dataclass(frozen=True)
class MakeFolder:
    """Launcher to server: create a temporary folder, and remove it after the launcher has ended.

    The server creates the folder, so that it is also removed if the launcher is killed at that moment.
    """

    parent: str
    prefix: str


@dataclass(frozen=True)
class FolderMade:
    """Server to launcher: the path of the new folder; empty: it could not be created."""

    path: str


@dataclass(frozen=True)
class Started:
    """Server to launcher: a worker was started, or could not be started."""

    number: int
    pid: int
    """The process id; 0: the worker could not be started."""
    cold: str = ""
    """Why the worker was started in a new interpreter; empty: it was forked, or no fork was requested."""
    error: str = ""
    """Why the worker could not be started."""


@dataclass(frozen=True)
class Ended:
    """Server to launcher: a worker has ended."""

    number: int
    returncode: int
    """The worker's exit code; -N if signal N killed the worker."""


Message = Import | Keep | ImportDone | Start | Kill | Clear | MakeFolder | FolderMade | Started | Ended
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}


class Channel(Connection):
    """One end of the socketpair that connects the launcher and the warm server."""

    def send(
        self, message: Message, descriptors: Sequence[int] = (), while_full: Callable[[], object] | None = None
    ) -> None:
        """Send one message. For the parameters, see `Connection`."""
        super().send([type(message).__name__, message], descriptors, while_full)

    def receive(self) -> Iterator[Message]:
        """Wait for data, then yield every complete message. Raises `ClosedError` if the other end is closed."""
        for name, fields in super().receive():
            message: Message = from_json(_KINDS[name], fields)
            yield message
