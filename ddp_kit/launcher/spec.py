"""What was asked: a command line, with torchrun's flags and ours, as a `LaunchSpec`."""

import argparse
import math
import shlex
import shutil
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ddp_kit.env import MASTER_PORT_DEFAULT, PROCESSES_DEFAULT, PYTHON
from ddp_kit.errors import UsageError, nearest
from ddp_kit.exit_codes import ExitCode
from ddp_kit.launcher.parser import Parser

_DESCRIPTION = """\
Start a script in several processes, each with its rank and its GPU. Takes every torchrun command line.
One default differs from torchrun: with neither --gpus nor --nproc-per-node there is one process per visible
GPU, and one process where there is no GPU."""

_EXAMPLES = f"""\
examples:
  ddpkit launch train.py
  ddpkit launch --gpus 4 train.py --lr 0.1
  ddpkit launch --gpus 0,2 -m package.train
  ddpkit launch --gpus free:2 train.py
  ddpkit launch --gpus 4 --hang-timeout 60 --max-restarts 3 train.py
  ddpkit launch --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --gpus all train.py

exit codes:
  {ExitCode.OK:<9d} every process ended well
  {ExitCode.USAGE:<9d} the command line cannot be used
  {ExitCode.LAUNCH_FAILED:<9d} the job could not be brought up
  {ExitCode.NODE_LOST:<9d} a node was lost that the job cannot do without
  {ExitCode.REQUEUE:<9d} the processes have saved and ask to be started again
  {ExitCode.HUNG:<9d} a process did nothing any more and was ended, see --hang-timeout
  other     that of the process that failed first; 128 + the signal's number where a signal ended it
"""

_MAX_RESTARTS = """\
Maximum number of worker group restarts in a row without progress: a failure after new steps of a Trainer, in a run that
had resumed from a checkpoint, begins the count anew."""

_SHUTDOWN_TIMEOUT = """\
Seconds from SIGTERM to SIGKILL for worker processes that have to end. Default: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or 25;
torchrun's is 30, after which Kubernetes kills the launcher as well."""


@dataclass(frozen=True)
class LaunchSpec:
    """A launch as it was asked for."""

    gpus: str | None
    """The words after --gpus; None where it was not given."""
    processes: str | None
    """The words after --nproc-per-node, or PET_NPROC_PER_NODE; None where neither was given."""
    cold: bool
    """Whether every worker is to be started by python itself."""
    dry_run: bool
    """Whether to say what would be done instead of doing it."""
    torchrun: Mapping[str, Any]
    """All of torchrun's settings by their names in its own parser, the script and its arguments among them."""
    flags: tuple[str, ...] = ()
    """The launcher's own flags as they were typed."""
    hang_timeout: float | None = None
    """The seconds after --hang-timeout; None where it was not given."""
    ignored_signals: frozenset[str] = frozenset()
    """Names of those that the launcher was started to ignore."""
    gpus_per_process: int | None = None
    """The number after --gpus-per-process; None where it was not given."""

    @property
    def script(self) -> str:
        """The script, module or program to run."""
        return str(self.torchrun["training_script"])

    @property
    def command(self) -> str:
        """How it was typed, `...` for its arguments."""
        kinds = ("module", "no_python", "run_path")
        flags = [f"--{kind.replace('_', '-')}" for kind in kinds if self.torchrun.get(kind)]
        return f"{shlex.join(flags)} {self.script_as_typed}".strip()

    @property
    def script_as_typed(self) -> str:
        """The script, `...` for its arguments."""
        return shlex.quote(self.script) + " ..." * bool(self.torchrun.get("training_script_args"))


def parse(words: Sequence[str], torchrun: argparse.ArgumentParser, env: Mapping[str, str]) -> LaunchSpec:
    """Parse `words` with the flags of torchrun's own parser and ours.

    Raises `UsageError`.
    """
    parser = Parser(
        prog="ddpkit launch",
        usage="ddpkit launch [flags] script.py [arguments of the script]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[torchrun],
        add_help=False,  # torchrun's -h is there already
    )
    ours = parser.add_argument_group("ddpkit's own")
    ours.add_argument(
        "--gpus",
        metavar="N|all|0,2|free:N|UUID",
        help="GPUs to use, one process each: a number of them (free ones first), all, a list of positions in what"
        " `ddpkit devices` shows, a number of free ones, or a list of UUIDs, of MIG devices too",
    )
    ours.add_argument(
        "--gpus-per-process",
        metavar="N",
        type=_count,
        help="give each process N GPUs: --gpus are then those of all processes of this node together. For models on"
        " several devices, see device_map. Default: 1",
    )
    ours.add_argument(
        "--cold", action="store_true", help="start every worker by python itself instead of forking it warm"
    )
    ours.add_argument(
        "--hang-timeout",
        metavar="SECONDS",
        type=_seconds,
        help="end a process that does nothing for so long while something is to be done, with the stacks of all, or"
        " for twice the run's longest pause where that is more; 0: never. Default: 300 in a Trainer's run; what"
        " is given also counts for the collectives of any other script",
    )
    ours.add_argument(
        "--dry-run", action="store_true", help="say what would run where, with which environment, and start nothing"
    )
    for action in parser.actions:  # the positional arguments, in the words of the usage line
        action.metavar = {"training_script": "script.py", "training_script_args": "..."}.get(
            action.dest, action.metavar
        )
        if action.dest == "max_restarts":
            action.help = _MAX_RESTARTS
        if action.dest == "shutdown_timeout":
            action.help = _SHUTDOWN_TIMEOUT
    # None: not given. torch's own defaults would not tell, and that of the port differs between its versions.
    parser.set_defaults(nproc_per_node=env.get(PROCESSES_DEFAULT), master_port=env.get(MASTER_PORT_DEFAULT))
    own, script, arguments = _split(words, parser)
    found, unknown = parser.parse_known_args([*own, *script])
    flags = vars(found) | {"training_script_args": arguments}
    if unknown:
        raise _unknown_flag(unknown[0], parser)
    return LaunchSpec(
        gpus=flags.pop("gpus"),
        processes=flags.pop("nproc_per_node"),
        cold=flags.pop("cold"),
        dry_run=flags.pop("dry_run"),
        hang_timeout=flags.pop("hang_timeout"),
        gpus_per_process=flags.pop("gpus_per_process"),
        flags=tuple(own),
        torchrun=MappingProxyType(flags),
    )


def _seconds(words: str) -> float:
    try:
        seconds = float(words)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{words!r} is no number of seconds")
    return seconds


def _count(words: str) -> int:
    if not words.isdecimal() or int(words) < 1:
        raise argparse.ArgumentTypeError(f"{words!r} is no number of GPUs, at least 1")
    return int(words)


def _split(words: Sequence[str], parser: Parser) -> tuple[list[str], list[str], list[str]]:
    """The launcher's words, the script (none where it is missing), and what follows it, which is the script's own.

    argparse alone would take `--local=3` behind the script for an abbreviation of one of the launcher's flags.
    """
    actions = {flag: action for action in parser.actions for flag in action.option_strings}
    position = 0
    while position < len(words) and words[position].startswith("-") and words[position] not in ("--", "-"):
        position += 2 if _takes_the_next_word(words[position], actions) else 1
    own, rest = list(words[:position]), list(words[position:])
    script, arguments = _without_dashes(rest)[:1], _without_dashes(rest)[1:]
    return own, script, _without_dashes(arguments)


def _takes_the_next_word(word: str, actions: Mapping[str, argparse.Action]) -> bool:
    """Whether a flag's value is the word behind it: not in `--flag=value`, `-r3` or for flags without a value."""
    name, has_value, _ = word.partition("=")
    if name.startswith("--"):
        known = [action for flag, action in actions.items() if flag.startswith(name)]
        action = actions.get(name, known[0] if known else None)
        return not has_value and action is not None and action.nargs != 0
    for position, letter in enumerate(name[1:], 2):  # several short flags may share a dash, as in -mr 3
        action = actions.get(f"-{letter}")
        if action is None or action.nargs != 0:
            return action is not None and not has_value and position == len(name)
    return False


def _without_dashes(words: list[str]) -> list[str]:
    """argparse drops one `--` before the script and one behind it, and so does torchrun."""
    return words[1:] if words[:1] == ["--"] else words


def check_script(spec: LaunchSpec, env: Mapping[str, str]) -> None:
    """Raise `UsageError` where the script or its interpreter is not there; a module is left to python to find."""
    script = spec.script
    if not spec.torchrun["no_python"] and PYTHON in env and shutil.which(env[PYTHON]) is None:
        raise UsageError(f"there is no interpreter {env[PYTHON]!r}", f"check {PYTHON}, or unset it")
    if spec.torchrun["module"] or "${" in script or script == "-":  # the last: python reads it from standard input
        return
    if spec.torchrun["no_python"]:
        if shutil.which(script) is None:
            raise UsageError(f"there is no program {script!r} to run", "check its path, or leave out --no-python")
        return
    try:
        _check_file(script)
    except OSError as error:
        raise UsageError(f"the script {script!r} cannot be read: {error.strerror}", "check its permissions") from None


def _check_file(script: str) -> None:
    path = Path(script)
    if not script or not path.exists():
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise UsageError(f"there is no script {script!r}{where}", _nearest_script(path))
    if path.is_dir() and not (path / "__main__.py").exists():
        raise UsageError(f"{script!r} is a folder without a __main__.py", "name the script in it")
    if path.suffix == ".py" and path.is_file():
        _check_syntax(path)


def _check_syntax(path: Path) -> None:
    """One message now instead of one traceback per process later."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the script's own run shows them
            compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        what = "".join(traceback.format_exception_only(error)).rstrip()
        raise UsageError(f"python cannot read {path}:\n{what}", "fix that line; nothing was started") from None


def _nearest_script(missing: Path) -> str:
    there = {path.stem: path for path in sorted(missing.parent.glob("*.py"))}  # nothing where the folder is missing
    close = nearest(missing.stem, list(there))
    if close:
        return f"the nearest is {there[close]}"
    names = ", ".join(path.name for path in list(there.values())[:10])
    return f"the scripts in {missing.parent.resolve()} are: {names}" if there else "check the path"


def _unknown_flag(word: str, parser: Parser) -> UsageError:
    flags = [flag for action in parser.actions for flag in action.option_strings]
    close = nearest(word.split("=")[0], flags)
    hint = f"did you mean {close}? " if close else ""
    return UsageError(
        f"there is no flag {word!r}", f"{hint}`ddpkit launch --help` lists all; the script's own follow it"
    )
