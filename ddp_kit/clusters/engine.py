"""The interface of cluster environments and engines, and the script by which an engine runs a launcher remotely."""

import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ddp_kit.clusters.request import JobPlace, Request


class Environment:
    """A cluster environment that `ddpkit launch` recognises by its environment variables.

    Each environment and each engine is a subclass in its own file, with one instance in `ENVIRONMENTS` (engines.py):

        place = environment.recognise(env)          # `ddpkit launch`, on each node

        engine.check(request)                       # `ddpkit submit`, engines only
        text = engine.text(request)
        exit_code = engine.submit(request, text, write)
    """

    def recognise(self, env: Mapping[str, str]) -> JobPlace | None:  # noqa: ARG002
        """Return this node's rank and the job's rendezvous settings, or None outside of this environment.

        Raises `UsageError` if variables are missing or contradict each other.
        """
        return None


class Engine(Environment):
    """A system that runs jobs on a cluster, and to which `ddpkit submit` submits them."""

    name: str
    """The engine's name for `ddpkit submit --on`."""
    help: str
    """What the engine gets, for `ddpkit submit --help`."""
    examples: tuple[str, ...] = ()
    """Arguments of `ddpkit submit --on NAME` to show as examples."""
    flags: frozenset[str]
    """The flags of `ddpkit submit` that the engine supports, in addition to --nodes, --gpus and --name."""
    suffix: str
    """File name suffix of the job file."""
    program: str
    """The program that submits the job."""
    install: str
    """Hint to show if the program is not installed."""
    script_needed = True
    """Whether a job needs a training script on the command line of `ddpkit submit`."""
    image_needed = False
    """Whether a job needs a container image."""
    copies_folder = False
    """Whether the engine copies the working folder to the nodes."""
    memory_setting = ""
    """How a job file asks for 16 GB of memory, shown in hints; empty: not shown."""
    cpus_setting = ""
    """How a job file asks for 4 CPU cores, shown in hints; empty: not shown."""

    def check(self, request: Request) -> None:
        """Raise `UsageError` if the request is incomplete or invalid for this engine."""

    def text(self, request: Request) -> str:
        """The text of the job file. This is a pure function."""
        raise NotImplementedError

    def submit_command(self, request: Request, path: str) -> tuple[str, ...]:
        """The command that submits the job file at `path`, such as `sbatch PATH`."""
        raise NotImplementedError

    def submit(self, request: Request, text: str, write: Callable[[str], None]) -> int:  # noqa: ARG002
        """Submit the job file `text`, and return the exit code. `write`: prints lines to standard error."""
        with tempfile.TemporaryDirectory(prefix="ddpkit-submit-") as folder:
            path = Path(folder) / f"job{self.suffix}"  # without the name, which may contain slashes
            path.write_bytes(os.fsencode(text))
            return subprocess.run(self.submit_command(request, str(path)), check=False).returncode


# --- Remote script ----------------------------------------------------------------------------------------------------
# A shell script that runs a launcher on another host, and stops it when the script's standard input ends. The input is
# a connection or a pipe to the process that started the script: it ends when that process or the connection ends.

# Descriptor 3 is a copy of standard input, because a background command reads from /dev/null instead.
_SCRIPT = """\
exec 3<&0
{start}{launch} </dev/null 3<&- &
launcher=$!
{{ cat; kill -TERM "$launcher"; }} <&3 >/dev/null 2>&1 &
watcher=$!
exec 3<&-
wait "$launcher"
code=$?
kill "$watcher" 2>/dev/null
exit "$code"
"""


def remote_script(launch: Sequence[str], folder: str = "", programs: str = "") -> tuple[str, ...]:
    """A command `sh -c ...` that runs a launcher, and exits with the launcher's exit code.

    `launch`: the launcher's command line; `folder`: its working folder; `programs`: a folder to put first in PATH. An
    empty string leaves the working folder or PATH unchanged.
    """
    start = ""
    if folder:
        start += f"cd {shlex.quote(folder)} || exit 2\n"
    if programs:
        start += f'PATH={shlex.quote(programs)}:"$PATH"\n'
    return "sh", "-c", _SCRIPT.format(start=start, launch=shlex.join(launch))
