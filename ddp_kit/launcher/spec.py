"""The command line of `ddpkit launch`: the table of its flags, and the parser that reads it once, into a `LaunchSpec`.

Nothing here imports torch, so a command line is parsed in milliseconds, and a misspelt flag is reported at once.
"""

import argparse
import shlex
import shutil
import sys
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ddp_kit.arguments import Parser, count, duration, seconds, whole_number
from ddp_kit.env import FILE_TIMER, FLAG_DEFAULT, GRACE_DEFAULT, KEEP_WARM, LINE_PREFIX_DEFAULT, PYTHON
from ddp_kit.errors import UsageError, nearest
from ddp_kit.exit_codes import ExitCode
from ddp_kit.launcher.program import Program

if TYPE_CHECKING:
    from ddp_kit.clusters.request import JobPlace

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
  {ExitCode.FAULTY:<9d} a process computes wrong gradients (verify_ranks="replay"), or this node's GPU has failed
  {ExitCode.REQUEUE:<9d} the processes saved a checkpoint: run the same command again to continue
  {ExitCode.HUNG:<9d} a process hung and was killed (see --hang-timeout)
  other     the exit code of the process that failed first; 128 + signal number if a signal killed it
"""


# --- Flags ------------------------------------------------------------------------------------------------------------


_BLANK = "'\" \t\n"


def _time_to_keep(text: str) -> float | None:
    return None if text in ("", "off") else duration(text)


def _modules(text: str) -> str:
    if not all(name.isidentifier() for name in text.replace(",", ".").split(".")):
        raise argparse.ArgumentTypeError(f"{text!r} is not auto, off, or names of modules separated by commas")
    return text


def _words(text: str) -> list[str]:
    """The words of a comma-separated list, in which `,,` is a comma that belongs to a word."""
    return [word.replace("\0", ",") for word in text.replace(",,", "\0").split(",")]


class Flag(NamedTuple):
    """A flag of `ddpkit launch`."""

    name: str
    """The name with dashes, such as `--log-dir`. On the command line, underscores are accepted as well."""
    metavar: str
    """The name of the flag's value in the help text; empty: the flag is a switch, without a value."""
    help: str
    default: Any = None
    """The value if neither the flag nor its variable is given. A switch is off by default."""
    type: Callable[[str], Any] = str
    choices: tuple[str, ...] | None = None
    short: str = ""
    """The short spelling, such as `-m`."""
    has_variable: bool = True
    """Whether an environment variable sets the default: PET_LOG_DIR for `--log-dir`."""
    variable: str = ""
    """The name of that variable, if it is another one."""
    without_value: str | None = None
    """The value of the flag if it is given without one; None: it needs a value, as in `--log-dir FOLDER`."""

    @property
    def dest(self) -> str:
        """The name of the setting, as in torchrun's parser."""
        return self.name.removeprefix("--").replace("-", "_")

    def add_to(self, group: "argparse._ActionsContainer", env: Mapping[str, str]) -> None:
        """Add the flag to a parser or a group. Raises `UsageError` if the flag's variable is not a number."""
        spellings = [spelling for spelling in (self.short, self.name) if spelling]
        variable = self.variable or FLAG_DEFAULT.format(name=self.dest.upper())
        default = self.default
        if self.has_variable:
            default = env.get(variable, default)
        if self.metavar:
            group.add_argument(
                *spellings,
                metavar=self.metavar,
                nargs="?" if self.without_value else None,
                const=self.without_value,
                type=self.type,
                choices=self.choices,
                default=default,
                help=self.help,
            )
            return
        try:
            is_on = default is not None and bool(int(default))
        except ValueError:
            raise UsageError(f"{variable}={default} is not a number", f"set {variable} to 0 or 1") from None
        group.add_argument(*spellings, action="store_true", default=is_on, help=self.help)


NEWEST_TORCH = (2, 15)
"""The newest torch whose flags are in `TORCHRUN_FLAGS`."""

# Names, types, choices, defaults and variables are those of torch 2.10 to 2.15; a test compares them with the installed
# torch. --nproc-per-node and --master-port have no default here, because the launcher chooses their values itself.
TORCHRUN_FLAGS = (
    Flag("--nnodes", "N|MIN:MAX", "number of nodes, or the smallest and the largest number. Default: 1", "1:1"),
    Flag("--nproc-per-node", "N|auto|cpu|gpu|xpu", "number of processes on this node"),
    Flag(
        "--rdzv-backend",
        "NAME",
        "how the nodes find each other: static, c10d, etcd, etcd-v2 or the name of a plug-in. Default: static",
        "static",
    ),
    Flag(
        "--rdzv-endpoint",
        "HOST:PORT",
        "address at which the nodes meet. Default port of c10d: 29400",
        "",
    ),
    Flag("--rdzv-id", "ID", "name of the job, which is the same on all nodes", "none"),
    Flag("--rdzv-conf", "NAME=VALUE,...", "further settings of the rendezvous, such as join_timeout=600", ""),
    Flag(
        "--standalone",
        "",
        "run on this node only, at a free port, with a new job name. --rdzv-backend, --rdzv-endpoint and --rdzv-id are"
        " then ignored",
    ),
    Flag(
        "--max-restarts",
        "N",
        "maximum number of consecutive restarts of all processes without progress. The count is reset once a run that"
        " resumed from a checkpoint has completed new Trainer steps. Default: 0",
        0,
        int,
    ),
    Flag(
        "--monitor-interval",
        "SECONDS",
        "time between two checks of the processes; only used where torchrun itself runs the job. Default: 0.1",
        0.1,
        float,
    ),
    Flag(
        "--start-method",
        "METHOD",
        "spawn, fork or forkserver; has no effect on scripts, as in torchrun",
        "spawn",
        choices=("spawn", "fork", "forkserver"),
    ),
    Flag("--event-log-handler", "NAME", "handler for torch's events: null, console or the name of a plug-in", "null"),
    Flag("--role", "NAME", "role of the processes, which they find in ROLE_NAME. Default: default", "default"),
    Flag("--module", "", "run a Python module, as `python -m` does", short="-m"),
    Flag("--no-python", "", "run the script as a program, without Python"),
    Flag("--run-path", "", "run the script with runpy.run_path; --no-python is then ignored"),
    Flag(
        "--log-dir",
        "FOLDER",
        "keep logs in a new folder inside FOLDER: what each process prints, and the verdict",
    ),
    Flag(
        "--redirects",
        "STREAMS",
        "write streams to log files instead of the console. 0: none, 1: stdout, 2: stderr, 3: both; or for some local"
        " ranks only, such as 0:1,1:3. Default: 0",
        "0",
        short="-r",
    ),
    Flag(
        "--tee",
        "STREAMS",
        "write streams to log files as well as to the console; the values are those of --redirects. Default: 0",
        "0",
        short="-t",
    ),
    Flag(
        "--log-line-prefix-template",
        "TEMPLATE",
        "template for the label at the start of each output line. Macros: ${role_name}, ${local_rank}, ${rank},"
        " ${hostname}. An empty template removes all labels except those that torchrun adds with --tee. Default:"
        f" {LINE_PREFIX_DEFAULT}, or the rank, if several ranks write to the same stream",
        "",
    ),
    Flag("--local-ranks-filter", "0,1,...", "local ranks whose output is shown on the console. Default: all", ""),
    Flag(
        "--duplicate-stdout-filters",
        "WORD,...",
        "also copy each line of the stdout log files that contains one of these words to one file for all ranks."
        " Write a comma inside a word as ,,",
        [],
        _words,
    ),
    Flag("--duplicate-stderr-filters", "WORD,...", "the same for the stderr log files", [], _words),
    Flag("--node-rank", "N", "rank of this node, for the static rendezvous. Default: 0", 0, int),
    Flag("--master-addr", "HOST", "address of node 0, for the static rendezvous. Default: 127.0.0.1", "127.0.0.1"),
    Flag(
        "--master-port",
        "PORT",
        "port on node 0, for the static rendezvous. Default: a free port for a single node, otherwise 29500",
        type=int,
    ),
    Flag("--local-addr", "HOST", "address at which other nodes reach this node. Default: chosen by the launcher"),
    Flag(
        "--logs-specs", "NAME", "plug-in (entry point torchrun.logs_specs) that chooses log files", has_variable=False
    ),
    Flag(
        "--numa-binding",
        "MODE",
        "bind each process to CPU cores near its GPU: node, socket, exclusive or core-complex",
        choices=("node", "socket", "exclusive", "core-complex"),
        has_variable=False,
    ),
    Flag(
        "--signals-to-handle",
        "SIGNAL,...",
        "signals that stop the job. Default: SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    ),
    Flag(
        "--shutdown-timeout",
        "SECONDS",
        f"seconds from SIGTERM to SIGKILL when processes are stopped. Default: {GRACE_DEFAULT}, or 25 if it is not set."
        " torchrun's default is 30, but after 30 s a cluster may kill the launcher too",
        type=int,
    ),
    Flag(
        "--virtual-local-rank",
        "",
        "give each process LOCAL_RANK=0 and a CUDA_VISIBLE_DEVICES with a single GPU",
    ),
    Flag(
        "--print-completion",
        "SHELL",
        "print the completion script for a shell, as `ddpkit --print-completion` does",
        has_variable=False,
    ),
)

OWN_FLAGS = (
    Flag(
        "--gpus",
        "N|all|0,2|free:N|UUID",
        "GPUs of this node to use, with one process per GPU: N GPUs (free GPUs first), all, a list of GPU numbers as"
        " shown by `ddpkit devices`, free:N for N free GPUs, or a list of UUIDs of GPUs or MIG devices",
        has_variable=False,
    ),
    Flag(
        "--gpus-per-process",
        "N",
        "give each process N GPUs, for a model that spans several devices (see device_map); --gpus is then the total"
        " for all processes of this node. Default: 1",
        type=count,
        has_variable=False,
    ),
    Flag(
        "--keep-warm",
        "TIME",
        "keep a process that has imported torch and what the script imports, so that the next launches of the script"
        " start at once. It ends when none has come for TIME, such as 90s or 2h. `ddpkit warm` lists and stops such"
        " processes. Without TIME: 10m",
        type=_time_to_keep,
        variable=KEEP_WARM,
        without_value="10m",
    ),
    Flag("--cold", "", "start every process with a new interpreter instead of forking it", has_variable=False),
    Flag(
        "--preload",
        "auto|off|MODULE,...",
        "modules to import once per node, before the processes are forked. auto: the installed packages that the script"
        " imports before it does anything else, if they are known to leave nothing that processes would notice."
        " Default: auto",
        "auto",
        type=_modules,
        has_variable=False,
    ),
    Flag(
        "--hang-timeout",
        "SECONDS",
        "kill a process that has made no progress for SECONDS (or for twice the longest pause so far, if that is"
        " longer), and print where every rank was. 0: no limit. Default: 300, but only for scripts with a Trainer. If"
        " given, the limit also applies to other scripts: collectives and executed Python code then count as progress",
        type=seconds,
        has_variable=False,
    ),
    Flag(
        "--spares",
        "K",
        "K nodes of the job only wait, and take the place of nodes that are lost. Of the nodes of a cluster's job, all"
        " but K train. Elsewhere, --nnodes is the number of nodes that train, and every further launcher is a spare."
        " Default: 0",
        0,
        whole_number,
        has_variable=False,
    ),
    Flag(
        "--dry-run",
        "",
        "print what would run, where and in which environment, without starting anything",
        has_variable=False,
    ),
)


# --- Parsing ----------------------------------------------------------------------------------------------------------


class LaunchSpec(NamedTuple):
    """The parsed command line."""

    gpus: str | None
    """The value of --gpus; None: not given."""
    processes: str | None
    """The value of --nproc-per-node or PET_NPROC_PER_NODE; None: neither was given."""
    keep_warm: float | None
    """The value of --keep-warm in seconds; None: not given."""
    cold: bool
    """Whether --cold was given: start every worker with a new interpreter."""
    preload: str
    """The value of --preload: "auto", "off", or names of modules separated by commas."""
    dry_run: bool
    """Whether --dry-run was given: print what would run and start nothing."""
    torchrun: Mapping[str, Any]
    """torchrun's settings by their names in its parser, including the script and its arguments."""
    flags: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """The typed flags with their values, such as ("--nnodes", "2"), by the names of the settings."""
    hang_timeout: float | None = None
    """The value of --hang-timeout in seconds; None: not given."""
    ignored_signals: frozenset[str] = frozenset()
    """Names of the signals that were ignored when the launcher started, as under nohup."""
    gpus_per_process: int | None = None
    """The value of --gpus-per-process; None: not given."""
    spares: int = 0
    """The value of --spares."""
    given: frozenset[str] = frozenset()
    """Names of the settings in `torchrun` that were set by a flag on the command line or by a PET_ variable."""
    place: "JobPlace | None" = None
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

    def program(self) -> Program:
        """The script, for an interpreter that is forked."""
        arguments = tuple(self.torchrun["training_script_args"])
        return Program(sys.executable, self.script, arguments, self.torchrun["module"])

    def preloaded(self) -> tuple[str, ...] | None:
        """The packages to import before the workers are forked; None: those that the script imports first."""
        return {"auto": None, "off": ()}.get(self.preload, tuple(self.preload.split(",")))

    def may_fork(self, env: Mapping[str, str]) -> bool:
        """Whether the warm server may fork the workers. `env`: the launcher's environment."""
        started_cold = self.cold or self.torchrun["no_python"] or self.torchrun["run_path"] or PYTHON in env
        return not (started_cold or self.torchrun_only(env))

    def torchrun_only(self, env: Mapping[str, str]) -> str:
        """The setting that only torchrun supports, so that torchrun itself runs the job; empty: ddpkit runs it."""
        settings = self.torchrun
        if env.get(FILE_TIMER) == "1":
            return f"{FILE_TIMER}=1"
        if settings["event_log_handler"] != "null":
            return f"--event-log-handler {settings['event_log_handler']}"
        if not settings["standalone"] and settings["rdzv_backend"] not in ("static", "c10d"):
            return f"--rdzv-backend {settings['rdzv_backend']}"
        store = rendezvous_settings(settings["rdzv_conf"]).get("store_type", "tcp")
        return "" if store.lower() == "tcp" else f"--rdzv-conf store_type={store}"


class UnknownFlagError(UsageError):
    """The command line has a flag that neither ddpkit nor torchrun has. `flag`: the flag, without its value."""

    def __init__(self, flag: str, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.flag = flag


def parse(
    argv: Sequence[str],
    env: Mapping[str, str],
    later_torchrun: Callable[[], argparse.ArgumentParser | None] = lambda: None,
) -> LaunchSpec:
    """Parse `argv`, which may contain torchrun's flags and ddpkit's own flags. Raises `UsageError`.

    `env`: the launcher's environment, whose PET_ variables set defaults. `later_torchrun`: a function that returns the
    parser of the installed torchrun if it may have flags that are not listed here; called only for an unknown flag.
    """
    known = parser(env)
    flags, words = split(argv, known)
    if any(name.startswith("-") for name in flags) and (torchrun := later_torchrun()) is not None:
        known = parser(env, torchrun)
        flags, words = split(argv, known)
    settings = vars(known.parse_known_args([word for typed in flags.values() for word in typed])[0])
    for name, typed in flags.items():
        if name.startswith("-"):
            close = nearest(name, [spelling for action in known.actions for spelling in action.option_strings])
            hint = "`ddpkit launch --help` lists all flags; put the script's flags after the script"
            if close:
                hint = f"did you mean {close}? {hint}"
            raise UnknownFlagError(name, f"there is no flag {typed[0]!r}", hint)
    if not words and settings["print_completion"] is None:
        known.error("the following arguments are required: script.py")
    settings |= {"training_script": "".join(words[:1]), "training_script_args": words[1:]}
    return LaunchSpec(
        **{flag.dest: settings.pop(flag.dest) for flag in OWN_FLAGS},
        processes=settings.pop("nproc_per_node"),
        flags=MappingProxyType(flags),
        given=frozenset(flags) | {name for name in settings if FLAG_DEFAULT.format(name=name.upper()) in env},
        torchrun=MappingProxyType(settings),
    )


def parser(env: Mapping[str, str], later_torchrun: argparse.ArgumentParser | None = None) -> Parser:
    """The parser of `ddpkit launch`. `later_torchrun`: a parser of torchrun whose further flags are added."""
    known = Parser(
        prog="ddpkit launch",
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known.add_argument("training_script", metavar="script.py", nargs="?", help="the script, module or program to run")
    known.add_argument("training_script_args", metavar="...", nargs=argparse.REMAINDER, help="its arguments")
    own, torchruns = map(known.add_argument_group, ("ddpkit's own flags", "torchrun's flags"))
    for group, flags in ((own, OWN_FLAGS), (torchruns, TORCHRUN_FLAGS)):
        for flag in flags:
            flag.add_to(group, env)
    if later_torchrun is not None:
        listed = {spelling for action in known.actions for spelling in action.option_strings}
        for action in later_torchrun._actions:
            if action.option_strings and listed.isdisjoint(action.option_strings):
                torchruns._add_action(action)
    return known


def split(argv: Sequence[str], known: Parser) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Split `argv` into the launcher's flags, by the names of their settings, and the words from the script on.

    Flags are written out in full. An unknown or ambiguous flag has its own spelling as its name. argparse alone would
    parse `--local=3` after the script as an abbreviation of a launcher flag.
    """
    actions = {spelling: action for action in known.actions for spelling in action.option_strings}
    flags: dict[str, tuple[str, ...]] = {}
    words = deque(argv)
    while words and words[0].startswith("-") and words[0] not in ("-", "--"):
        for spelling, value in _flags_in(words.popleft(), actions):
            action = actions.get(spelling)
            typed = [spelling]
            if value is not None:
                equals = "=" * spelling.startswith("--")
                typed = [f"{spelling}{equals}{value}"]
            elif action is not None and action.nargs is None and words:
                typed.append(words.popleft())
            name = spelling if action is None else action.dest
            flags[name] = tuple(typed)
    rest = list(words)
    if "--" in rest[:2]:
        rest.remove("--")  # argparse and torchrun drop one, before the script or directly after it
    return flags, rest


def _flags_in(word: str, actions: Mapping[str, argparse.Action]) -> Iterator[tuple[str, str | None]]:
    """Each flag in a word, written out in full, with its value if the word contains it.

    `--nproc=2` is --nproc-per-node with the value 2, and `-mr3` is -m, and -r with the value 3.
    """
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        full = name.replace("_", "-")
        if full not in actions:
            matching = [spelling for spelling in actions if spelling.startswith(full)]
            full = matching[0] if len(matching) == 1 else name
        yield full, value if equals else None
        return
    letters = word[1:]
    while len(letters) > 1 and f"-{letters[0]}" in actions and actions[f"-{letters[0]}"].nargs == 0:
        yield f"-{letters[0]}", None
        letters = letters[1:]
    yield f"-{letters[0]}", letters[1:].removeprefix("=") if len(letters) > 1 else None


def rendezvous_settings(text: str) -> dict[str, str]:
    """Parse --rdzv-conf. Quotes that the shell has not removed are stripped from names and values."""
    pairs = [pair.partition("=") for pair in text.split(",")] if text.strip() else []
    for name, _, value in pairs:
        if not (name.strip() and value.strip()):
            raise UsageError(f"--rdzv-conf {text}: {name.strip()!r} has no value", "write NAME=VALUE,NAME=VALUE")
    return {name.strip(_BLANK): value.strip(_BLANK) for name, _, value in pairs}


# --- torchrun's command line ------------------------------------------------------------------------------------------


def torchrun_words(
    settings: Mapping[str, Any], defaults: Mapping[str, Any], read_by_torchrun: Collection[str]
) -> list[str]:
    """The command line of torchrun for these settings: its flags, the script and the arguments of the script.

    `defaults`: the settings that torchrun uses in this environment if no flag is given. They include the values of
    PET_ variables. Settings equal to these defaults, and flags that the installed torchrun lacks, are left out.
    `read_by_torchrun`: names of settings that torchrun reads from environment variables.
    """
    wanted = {name: value for name, value in settings.items() if name in defaults}
    if settings["standalone"]:  # with this flag, torchrun sets the rendezvous itself
        wanted = {name: value for name, value in wanted.items() if not name.startswith("rdzv_") or name == "rdzv_conf"}
    script = wanted.pop("training_script")
    arguments = [str(argument) for argument in wanted.pop("training_script_args")]
    flags = [
        _torchrun_flag(name, value)
        for name, value in wanted.items()
        if value is not None and value != defaults[name] and name not in read_by_torchrun
    ]
    # torchrun drops the first `--`, which must not be the script's own.
    if arguments[:1] == ["--"] or _taken_for_flags(arguments, wanted):
        flags.append("--")
    return [*flags, script, *arguments]


def _torchrun_flag(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return flag
    if isinstance(value, list):
        value = ",".join(str(item).replace(",", ",,") for item in value)
    return f"{flag}={value}"


def _taken_for_flags(arguments: Sequence[str], names: Mapping[str, Any]) -> bool:
    """Whether torchrun would parse an argument of the script as an abbreviation of a torchrun flag."""
    flags = [f"--{spelled}" for name in names for spelled in (name, name.replace("_", "-"))]
    flag_names = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    return any(flag.startswith(word) and flag != word for word in flag_names for flag in flags)


# --- Checks of the script ---------------------------------------------------------------------------------------------


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
    if path.suffix != ".py" or not path.is_file():
        return
    try:  # a syntax error is reported once, before any process starts; otherwise, each would print a traceback
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # these warnings are shown when the script runs
            compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        from traceback import format_exception_only  # slow to import

        problem = "".join(format_exception_only(error)).rstrip()
        raise UsageError(f"Python cannot parse {path}:\n{problem}", "fix this error; nothing was started") from None


def _nearest_script(missing: Path) -> str:
    scripts = {path.stem: path for path in sorted(missing.parent.glob("*.py"))}  # empty if the folder does not exist
    if not scripts:
        return "check the path"
    close = nearest(missing.stem, list(scripts))
    if close:
        return f"did you mean {scripts[close]}?"
    names = ", ".join(path.name for path in list(scripts.values())[:10])
    return f"the scripts in {missing.parent.resolve()} are: {names}"
