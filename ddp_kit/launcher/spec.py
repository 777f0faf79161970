"""Parse the command line, which may contain torchrun's flags and ddpkit's own flags, into a `LaunchSpec`."""

import argparse
import math
import re
import shlex
import shutil
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ddp_kit.env import FLAG_DEFAULT, MASTER_PORT_DEFAULT, PROCESSES_DEFAULT, PYTHON
from ddp_kit.errors import UsageError, nearest
from ddp_kit.exit_codes import ExitCode
from ddp_kit.launcher.clusters.request import JobPlace
from ddp_kit.launcher.parser import Parser

_DESCRIPTION = """\
Run a script in several processes, each with its own rank and GPU. Accepts every torchrun command line.
One default differs from torchrun: without --gpus and --nproc-per-node, ddpkit starts one process per
visible GPU, or a single process on a machine without GPUs."""

_USAGE = "ddpkit launch [flags] script.py [script arguments]"

_EXAMPLES = f"""\
examples:
  ddpkit launch train.py
  ddpkit launch --gpus 4 train.py --lr 0.1
  ddpkit launch --gpus 0,2 -m package.train
  ddpkit launch --gpus free:2 train.py
  ddpkit launch --gpus 4 --hang-timeout 60 --max-restarts 3 train.py
  ddpkit launch --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --gpus all train.py

exit codes:
  {ExitCode.OK:<9d} every process exited with code 0
  {ExitCode.USAGE:<9d} the command line is invalid
  {ExitCode.LAUNCH_FAILED:<9d} the job could not be started
  {ExitCode.NODE_LOST:<9d} the job lost a node and could not continue without it
  {ExitCode.REQUEUE:<9d} the processes saved a checkpoint: run the same command again to continue
  {ExitCode.HUNG:<9d} a process hung and was killed (see --hang-timeout)
  other     the exit code of the process that failed first; 128 + signal number if a signal killed it
"""

_MAX_RESTARTS = """\
Maximum number of consecutive restarts of the worker group without progress. The count is reset once a run that
resumed from a checkpoint has completed new Trainer steps."""

_SHUTDOWN_TIMEOUT = """\
Seconds from SIGTERM to SIGKILL when workers are stopped. Default: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or 25 if it is
not set. torchrun's default is 30, but after 30 s a cluster may kill the launcher too."""

_PREFIX_TEMPLATE = """\
Template for the label at the start of each output line. Macros: ${role_name}, ${local_rank}, ${rank}, ${hostname}.
An empty template removes all labels except those that torchrun adds with --tee. Default: the rank, if several ranks
write to the same stream."""


@dataclass(frozen=True)
class LaunchSpec:
    """The parsed command line."""

    gpus: str | None
    """The value of --gpus; None: not given."""
    processes: str | None
    """The value of --nproc-per-node or PET_NPROC_PER_NODE; None: neither was given."""
    cold: bool
    """Whether --cold was given: start every worker with a new interpreter."""
    dry_run: bool
    """Whether --dry-run was given: print what would run and start nothing."""
    torchrun: Mapping[str, Any]
    """torchrun's settings by their names in its parser, including the script and its arguments."""
    flags: tuple[str, ...] = ()
    """The launcher's flags as they were typed."""
    hang_timeout: float | None = None
    """The value of --hang-timeout in seconds; None: not given."""
    ignored_signals: frozenset[str] = frozenset()
    """Names of the signals that were ignored when the launcher started, as under nohup."""
    gpus_per_process: int | None = None
    """The value of --gpus-per-process; None: not given."""
    typed: frozenset[str] = frozenset()
    """Names of the settings in `torchrun` that were set by a flag on the command line."""
    given: frozenset[str] = frozenset()
    """Names of the settings in `torchrun` that were set by a flag on the command line or by a PET_ variable."""
    place: JobPlace | None = None
    """This node's place in the job, from the cluster's variables; None: no cluster, or flags set the place."""

    @property
    def script(self) -> str:
        """The script, module or program to run."""
        return str(self.torchrun["training_script"])

    @property
    def command(self) -> str:
        """The script as it was typed, with -m or a similar flag, and `...` in place of its arguments."""
        kinds = ("module", "no_python", "run_path")
        flags = [f"--{kind.replace('_', '-')}" for kind in kinds if self.torchrun.get(kind)]
        return f"{shlex.join(flags)} {self.script_as_typed}".strip()

    @property
    def script_as_typed(self) -> str:
        """The script as it was typed, with `...` in place of its arguments."""
        return shlex.quote(self.script) + " ..." * bool(self.torchrun.get("training_script_args"))


def parse(argv: Sequence[str], torchrun: argparse.ArgumentParser, env: Mapping[str, str]) -> LaunchSpec:
    """Parse `argv`, which may contain torchrun's flags and ddpkit's own flags. Raises `UsageError`."""
    known = parser(torchrun)
    # None means not given. torch's defaults would hide that a flag was not given, and its default port differs between
    # versions.
    known.set_defaults(nproc_per_node=env.get(PROCESSES_DEFAULT), master_port=env.get(MASTER_PORT_DEFAULT))
    own, script, arguments = _split(argv, known)
    found, unknown = known.parse_known_args([*(_written_out(word, known) for word in own), *script])
    flags = vars(found) | {"training_script_args": arguments}
    if unknown:
        raise _unknown_flag(unknown[0], known)
    typed = _typed(own, known)
    return LaunchSpec(
        gpus=flags.pop("gpus"),
        processes=flags.pop("nproc_per_node"),
        cold=flags.pop("cold"),
        dry_run=flags.pop("dry_run"),
        hang_timeout=flags.pop("hang_timeout"),
        gpus_per_process=flags.pop("gpus_per_process"),
        flags=tuple(own),
        typed=typed,
        given=typed | {name for name in flags if FLAG_DEFAULT.format(name=name.upper()) in env},
        torchrun=MappingProxyType(flags),
    )


# --- Flags of torchrun as data ----------------------------------------------------------------------------------------
# A misspelt flag is refused at once: torch's own parser can only be asked after an import of torch. A test holds these
# names equal to those of the installed torch.


NEWEST_TORCH = (2, 15)
"""The newest torch whose flags are listed here. With a later one, its own parser decides about unknown flags."""
FLAGS_WITH_VALUE = (
    "nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts",
    "monitor-interval", "start-method", "event-log-handler", "role", "log-dir", "redirects", "tee",
    "log-line-prefix-template", "local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters",
    "node-rank", "master-addr", "master-port", "local-addr", "logs-specs", "numa-binding", "signals-to-handle",
    "shutdown-timeout", "print-completion",
)  # fmt: skip
FLAGS_WITHOUT_VALUE = ("help", "standalone", "module", "no-python", "run-path", "virtual-local-rank")
SHORT_FLAGS = {"help": "-h", "redirects": "-r", "tee": "-t", "module": "-m"}


def check_flags(argv: Sequence[str], torch_version: Callable[[], str]) -> None:
    """Raise `UsageError` if `argv` has a flag that neither torchrun nor ddpkit has, or that lacks its value.

    `torch_version`: a function that returns the version of the installed torch; called only for an unknown flag.
    """
    known = _add_own_flags(Parser(prog="ddpkit launch", usage=_USAGE, add_help=False))
    for name in (*FLAGS_WITH_VALUE, *FLAGS_WITHOUT_VALUE):
        spellings = dict.fromkeys((SHORT_FLAGS.get(name, f"--{name}"), f"--{name}", f"--{name.replace('-', '_')}"))
        known.add_argument(*spellings, action="store_true" if name in FLAGS_WITHOUT_VALUE else "store")
    own, _, _ = _split(argv, known)
    found, unknown = known.parse_known_args([_written_out(word, known) for word in own])
    if unknown and not found.help:
        major, minor = re.findall(r"\d+", f"{torch_version()}.0.0")[:2]
        if (int(major), int(minor)) <= NEWEST_TORCH:
            raise _unknown_flag(unknown[0], known)


# --- Parser -----------------------------------------------------------------------------------------------------------


def parser(torchrun: argparse.ArgumentParser) -> Parser:
    """The flags of `ddpkit launch`: torchrun's and ddpkit's own."""
    flags = Parser(
        prog="ddpkit launch",
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[torchrun],
        add_help=False,  # torchrun's parser has -h
    )
    _add_own_flags(flags)
    for action in flags.actions:  # name the positional arguments as in the usage line
        action.metavar = {"training_script": "script.py", "training_script_args": "..."}.get(
            action.dest, action.metavar
        )
        if action.dest == "max_restarts":
            action.help = _MAX_RESTARTS
        if action.dest == "shutdown_timeout":
            action.help = _SHUTDOWN_TIMEOUT
        if action.dest == "log_line_prefix_template":
            action.help = _PREFIX_TEMPLATE
    return flags


def _add_own_flags(flags: Parser) -> Parser:
    ours = flags.add_argument_group("ddpkit's own flags")
    ours.add_argument(
        "--gpus",
        metavar="N|all|0,2|free:N|UUID",
        help="GPUs to use, with one process per GPU: N GPUs (free GPUs first), all, a list of GPU numbers as shown by"
        " `ddpkit devices`, free:N for N free GPUs, or a list of UUIDs of GPUs or MIG devices",
    )
    ours.add_argument(
        "--gpus-per-process",
        metavar="N",
        type=_count,
        help="give each process N GPUs, for a model that spans several devices (see device_map); --gpus is then the"
        " total for all processes of this node. Default: 1",
    )
    ours.add_argument(
        "--cold", action="store_true", help="start every worker with a new interpreter instead of forking it"
    )
    ours.add_argument(
        "--hang-timeout",
        metavar="SECONDS",
        type=_seconds,
        help="kill a process that has made no progress for SECONDS (or for twice the longest pause so far, if that is"
        " longer), and print where every rank was. 0: no limit. Default: 300, but only for scripts with a Trainer. If"
        " given, the limit also applies to other scripts: collectives and executed Python code then count as progress",
    )
    ours.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would run, where and in which environment, without starting anything",
    )
    return flags


def _typed(argv: Sequence[str], known: Parser) -> frozenset[str]:
    """Names of the settings that are set by a flag in `argv`, the launcher's arguments."""
    actions = {flag: action.dest for action in known.actions for flag in action.option_strings}
    names = (_written_out(word, known).partition("=")[0] for word in argv)
    return frozenset(actions[name] for name in names if name in actions)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid number of seconds: use a number of at least 0")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid number of GPUs: use a whole number of at least 1")
    return int(text)


def _split(argv: Sequence[str], known: Parser) -> tuple[list[str], list[str], list[str]]:
    """Split `argv` into the launcher's arguments, the script (an empty list if missing) and the script's arguments.

    argparse alone would parse `--local=3` after the script as an abbreviation of a launcher flag.
    """
    actions = {flag: action for action in known.actions for flag in action.option_strings}
    position = 0
    while position < len(argv) and argv[position].startswith("-") and argv[position] not in ("--", "-"):
        position += 2 if _takes_next_word(argv[position], actions) else 1
    own, rest = list(argv[:position]), list(argv[position:])
    script, arguments = _without_dashes(rest)[:1], _without_dashes(rest)[1:]
    return own, script, _without_dashes(arguments)


def _written_out(word: str, known: Parser) -> str:
    """The word, with an abbreviated flag such as `--nproc` replaced by its full name.

    In some Python versions, argparse rejects such an abbreviation as ambiguous, because each flag has two spellings
    (with `-` and with `_`).
    """
    name, equals, value = word.partition("=")
    spellings = [(flag, action) for action in known.actions for flag in action.option_strings]
    found = [(flag, action) for flag, action in spellings if flag.startswith(name)] if name.startswith("--") else []
    several = len({id(action) for _, action in found}) != 1
    return word if several or name in dict(spellings) else f"{found[0][0]}{equals}{value}"


def _takes_next_word(word: str, actions: Mapping[str, argparse.Action]) -> bool:
    """Whether the next word is the flag's value: false for `--flag=value`, `-r3` and flags without a value."""
    name, has_value, _ = word.partition("=")
    if name.startswith("--"):
        known = [action for flag, action in actions.items() if flag.startswith(name)]
        action = actions.get(name, known[0] if known else None)
        return not has_value and action is not None and action.nargs != 0
    for position, letter in enumerate(name[1:], 2):  # short flags may be combined, as in -mr 3
        action = actions.get(f"-{letter}")
        if action is None or action.nargs != 0:
            return action is not None and not has_value and position == len(name)
    return False


def _without_dashes(arguments: list[str]) -> list[str]:
    """Drop a leading `--`, as argparse and torchrun do before the script and again after the script."""
    return arguments[1:] if arguments[:1] == ["--"] else arguments


def check_script(spec: LaunchSpec, env: Mapping[str, str]) -> None:
    """Raise `UsageError` if the script or its interpreter does not exist; modules are not checked."""
    script = spec.script
    if not spec.torchrun["no_python"] and PYTHON in env and shutil.which(env[PYTHON]) is None:
        raise UsageError(f"the interpreter {env[PYTHON]!r} does not exist", f"check {PYTHON}, or unset it")
    if spec.torchrun["module"] or "${" in script or script == "-":  # `-`: Python reads standard input
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
        raise UsageError(f"{script!r} is a folder without a __main__.py", "give the path of the script in this folder")
    if path.suffix == ".py" and path.is_file():
        _check_syntax(path)


def _check_syntax(path: Path) -> None:
    """Report a syntax error in the script once, before any process starts. Otherwise, each would print a traceback."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # these warnings are shown when the script runs
            compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        what = "".join(traceback.format_exception_only(error)).rstrip()
        raise UsageError(f"Python cannot parse {path}:\n{what}", "fix this error; nothing was started") from None


def _nearest_script(missing: Path) -> str:
    scripts = {path.stem: path for path in sorted(missing.parent.glob("*.py"))}  # empty if the folder does not exist
    close = nearest(missing.stem, list(scripts))
    if close:
        return f"did you mean {scripts[close]}?"
    names = ", ".join(path.name for path in list(scripts.values())[:10])
    return f"the scripts in {missing.parent.resolve()} are: {names}" if scripts else "check the path"


def _unknown_flag(word: str, known: Parser) -> UsageError:
    flags = [flag for action in known.actions for flag in action.option_strings]
    close = nearest(word.split("=")[0], flags)
    hint = f"did you mean {close}? " if close else ""
    return UsageError(
        f"there is no flag {word!r}",
        f"{hint}`ddpkit launch --help` lists all flags; put the script's flags after the script",
    )
