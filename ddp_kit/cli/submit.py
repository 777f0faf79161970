"""`ddpkit submit`: submit a job to a cluster through one of the engines in `clusters/`."""

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from ddp_kit.arguments import Parser, count, duration, whole_number
from ddp_kit.clusters.engine import Engine
from ddp_kit.clusters.engines import ENGINES
from ddp_kit.clusters.request import Request, hosts_of, job_name, without_spares
from ddp_kit.errors import UsageError, nearest, printable
from ddp_kit.exit_codes import ExitCode
from ddp_kit.launcher import spec
from ddp_kit.launcher.spec import LaunchSpec
from ddp_kit.storage.command_line import check_on_disk
from ddp_kit.terminal import Terminal

_EPILOG = """\
everything after these flags is passed to `ddpkit launch` on every node: its flags, the script, the script's arguments

engines:
  {engines}

examples:
  {examples}

exit codes of the job, on every engine; docs/clusters.md lists the exceptions:
  75, 4            the workers saved, or a node was lost: the job is restarted any number of times
  3, 124, 129-255  the job did not start, hung, or was ended by a signal: it is restarted at most --retries times
  others           the job is not restarted: ddpkit has already restarted the workers, up to --max-restarts times
"""
_NOT_UTF8 = "".join(map(chr, range(0xDC80, 0xDD00)))  # how Python decodes bytes that are not UTF-8


def run(argv: Sequence[str], terminal: Terminal) -> int:
    """Submit a job to an engine, or only print the job file.

    Raises `UsageError` if the arguments are invalid, or if the engine cannot be used from this machine.
    """
    flag_parser = parser()
    submit_words, launch_words = _split(argv, flag_parser)
    flags = vars(flag_parser.parse_args(submit_words))
    flags["gpu_type"], flags["gpus"] = flags["gpus"] or (None, None)
    dry_run = flags.pop("dry_run")
    engine = _engine(flags.pop("on"))
    _check_flags(engine, flags, flag_parser)
    launch = None
    if launch_words:
        launch = _parse_launch(launch_words, flag_parser)
    elif engine.script_needed:
        raise UsageError("there is no script to run", "put the script and its arguments after all flags")
    request = _request(flags, launch, launch_words, argv)
    if launch is not None and not launch.torchrun["module"] and not launch.torchrun["no_python"]:
        _check_script(engine, request, launch.script)
    if engine.image_needed and request.image is None:
        raise UsageError(f"{engine.name} runs a job in a container, but --image is not given", "use --image IMAGE")
    engine.check(request)
    text = engine.text(request)
    if engine.suffix == ".yaml" and not {*_NOT_UTF8}.isdisjoint(text):
        raise UsageError(
            "a name or an argument of the job is not valid UTF-8, "
            f"and a job file for {engine.name} is written in UTF-8",
            "rename the script, its folder or the file that an argument names, using only valid UTF-8",
        )
    if dry_run:
        terminal.print_exactly(text.rstrip("\n"))
        return ExitCode.OK
    if shutil.which(engine.program) is None:
        raise UsageError(
            f"{engine.program} was not found, so no job can be submitted to {engine.name} from here",
            f"{engine.install}; or use --dry-run to print the job file",
        )
    return engine.submit(request, text, terminal.write_stderr)


def _engine(name: str | None) -> Engine:
    hint = f"use --on and one of: {', '.join(ENGINES)}"
    if name is None:
        raise UsageError("no engine is given", hint)
    if name not in ENGINES:
        close = nearest(name, list(ENGINES))
        if close:
            hint = f"use --on {close}"
        raise UsageError(f"there is no engine {name!r}; the engines are: {', '.join(ENGINES)}", hint)
    return ENGINES[name]


def parser() -> Parser:
    """Create the argument parser of `ddpkit submit`."""
    engines = ENGINES.values()
    examples = [f"--on {engine.name} {words}" for engine in engines for words in engine.examples]
    examples.append("--on ENGINE --nodes 2 --dry-run train.py    print the job file, submit nothing")
    flags = Parser(
        prog="ddpkit submit",
        usage="ddpkit submit --on ENGINE --nodes N [flags] [flags of launch] script.py [arguments of the script]",
        description="Run a script on several nodes through the engine of a cluster. Only the engine's own output is "
        "printed; --dry-run prints the job file.",
        epilog=_EPILOG.format(
            engines="\n  ".join(f"{engine.name:<10}  {engine.help}" for engine in engines),
            examples="\n  ".join(f"ddpkit submit {words}" for words in examples),
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def add(*names: str, help: str, **options: Any) -> None:
        supporting = [engine.name for engine in engines if names[0].strip("-") in engine.flags]
        if len(supporting) == 1:
            help = f"for {supporting[0]}: {help}"
        flags.add_argument(*names, help=help, **options)

    add("--on", metavar="ENGINE", help=f"the engine, one of: {', '.join(ENGINES)}")
    add("--nodes", metavar="N", type=count, help="the number of nodes; default with --hosts: all hosts")
    add("--gpus", metavar="[TYPE:]G", type=_gpus, help="GPUs per node, such as 8 or H100:8; default: none")
    add(
        "--cpus",
        metavar="C",
        type=count,
        help="number of CPU cores per node; default: 8 per GPU, which is more than some nodes have",
    )
    add("--time", metavar="TIME", type=_time_limit, help="the time limit, such as 90m, 12h, 2d or 1-12:00:00")
    add("--name", metavar="NAME", help="the job's name; default: the script's name")
    add("--image", metavar="IMAGE", help="the container image, which must contain ddpkit")
    add("--queue", "--partition", metavar="NAME", help="the queue or partition")
    add("--hosts", metavar="A,B|FILE", help="host names, or a file with one name per line")
    add("--array", metavar="0-9", help="the task indices of a job array")
    add("--requeue", action="store_true", help="requeue the job after a preemption")
    add(
        "--retries",
        metavar="N",
        type=whole_number,
        help="maximum number of restarts after the exit codes 3, 124 and 129-255; default: 3",
    )
    add(
        "--grace",
        metavar="SECONDS",
        type=count,
        help="seconds from SIGTERM to SIGKILL when the job is stopped; default: 120",
    )
    add("--dry-run", action="store_true", help="print the job file, and submit nothing")
    return flags


def _time_limit(text: str) -> int:
    if text.isdecimal():  # minutes for Slurm, seconds for others
        raise argparse.ArgumentTypeError(f"{text!r} has no unit: use such as 90m, 12h, 2d or 1-12:00:00")
    return int(duration(text))


def _gpus(text: str) -> tuple[str | None, int]:
    """Parse a value such as `8` or `H100:8`. Returns the GPU type (None if not given) and the number of GPUs."""
    kind, colon, number = text.rpartition(":")
    if not number.isdecimal() or int(number) < 1 or (colon and not kind):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of GPUs nor TYPE:NUMBER")
    return kind or None, int(number)


def _split(words: Sequence[str], flag_parser: Parser) -> tuple[list[str], list[str]]:
    """Split the command line into the flags of `ddpkit submit` and the arguments of `ddpkit launch`.

    The arguments begin at the first word that is neither a flag of `ddpkit submit` nor the value of such a flag.
    """
    actions = {flag: action for action in flag_parser.actions for flag in action.option_strings}
    position = 0
    while position < len(words) and (action := actions.get(words[position].partition("=")[0])) is not None:
        has_value = "=" not in words[position] and action.nargs != 0
        position += 1 + has_value
    return list(words[:position]), list(words[position:])


def _parse_launch(words: Sequence[str], flag_parser: Parser) -> LaunchSpec:
    """Parse the arguments of `ddpkit launch`. `flag_parser`: the parser of `ddpkit submit`. Raises `UsageError`."""
    try:
        launch = spec.parse(words, {})
    except spec.UnknownFlagError as error:
        if error.flag not in {flag for action in flag_parser.actions for flag in action.option_strings}:
            raise
        raise UsageError(
            f"{error.flag} is a flag of `ddpkit submit`, but follows {words[0]}, a flag of `ddpkit launch`",
            f"put it before {words[0]}",
        ) from None
    check_on_disk("--log-dir", launch.torchrun["log_dir"])
    if "nnodes" in launch.flags:
        raise UsageError("--nnodes is not allowed: `ddpkit submit` derives it from --nodes", "use --nodes N")
    return launch


def _check_flags(engine: Engine, flags: dict[str, Any], flag_parser: Parser) -> None:
    """Raise `UsageError` for a flag that the engine does not support, or a value that could add lines to a job file."""
    spelled = {action.dest: action.option_strings[0] for action in flag_parser.actions if action.option_strings}
    spelled["gpu_type"] = "a type in --gpus"
    for flag in flags.keys() - engine.flags - {"nodes", "gpus", "name"}:
        if flags[flag]:
            supported = ", ".join(sorted(spelled[name] for name in engine.flags))
            raise UsageError(
                f"{engine.name} does not support {spelled[flag]}", f"remove it; {engine.name} supports {supported}"
            )
    for flag, value in flags.items():
        if isinstance(value, str) and printable(value) != value:
            raise UsageError(
                f"{spelled[flag]}: the value {printable(value)!r} contains a control character, such as a line break",
                "remove the character",
            )


def _request(
    flags: dict[str, Any], launch: LaunchSpec | None, launch_words: Sequence[str], words: Sequence[str]
) -> Request:
    hosts = hosts_of(flags.pop("hosts"))
    nodes = flags.pop("nodes") or len(hosts)
    if not nodes:
        raise UsageError("the number of nodes is not given", "use --nodes N")
    if hosts and nodes > len(hosts):
        raise UsageError(
            f"--nodes is {nodes}, but --hosts names {len(hosts)} hosts", f"use --nodes {len(hosts)}, or add hosts"
        )
    spares = 0 if launch is None else launch.spares
    without_spares(nodes, spares)
    name = flags.pop("name")
    if name is None:
        script = "train"
        if launch is not None:
            script = PurePosixPath(launch.script).stem
        if launch is not None and launch.torchrun["module"]:
            script = launch.script.rpartition(".")[2]
        name = job_name(script)
    shown = ["ddpkit", "submit", *(word for word in words if word != "--dry-run")]
    return Request(
        nodes=nodes,
        words=tuple(launch_words),
        spares=spares,
        name=name,
        command="\n# ".join(printable(line, keep=_NOT_UTF8) for line in shlex.join(shown).splitlines()),  # a comment
        seconds=flags.pop("time"),
        hosts=hosts[:nodes],
        folder=PurePosixPath(Path.cwd()),
        programs=str(Path(sys.executable).parent),
        **{flag: value for flag, value in flags.items() if value is not None},
    )


def _check_script(engine: Engine, request: Request, script: str) -> None:
    """Raise `UsageError` if the script does not exist, or is not copied to the nodes."""
    path = Path(script)
    if request.image is None and not path.exists():  # with an image, it is in the image
        close = nearest(path.stem, [other.stem for other in path.parent.glob("*.py")])
        hint = f"did you mean {path.with_stem(close)}?" if close else "check the path"
        raise UsageError(f"there is no script {script!r} in {Path.cwd()}", hint)
    relative = Path(os.path.relpath(script))
    if engine.copies_folder and (".." in relative.parts or path.is_absolute()):
        hint = f"cd {path.parent}" if ".." in relative.parts else f"give {relative}"
        raise UsageError(
            f"{engine.name} copies the working folder to the nodes, but {script} is not a relative path inside it", hint
        )
