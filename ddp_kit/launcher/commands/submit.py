"""`ddpkit submit`: submit a job to a cluster through an engine such as Slurm, Kubernetes or ssh."""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from ddp_kit.errors import UsageError, nearest, printable
from ddp_kit.launcher.clusters.engines import ENGINES, Engine
from ddp_kit.launcher.clusters.request import Request, hosts_of, seconds_of
from ddp_kit.launcher.commands import Parser

_EXAMPLES = """\
everything after these flags is passed to `ddpkit launch` on every node: its flags, the script, the script's arguments

examples:
  ddpkit submit --on slurm --nodes 4 --gpus 8 --time 24h --requeue train.py --lr 0.1
  ddpkit submit --on slurm --nodes 2 --gpus 8 --array 0-9 sweep.py
  ddpkit submit --on kubernetes --nodes 4 --gpus 8 --image registry.example.com/me/train:1 train.py
  ddpkit submit --on ssh --hosts gpu1,gpu2 --gpus 8 train.py
  ddpkit submit --on slurm --nodes 4 --gpus 8 --dry-run train.py    print the job file, submit nothing

exit codes of the job, on every engine; docs/clusters.md lists the exceptions of SkyPilot and ssh:
  75, 4            the workers saved, or a node was lost: the job is restarted any number of times
  3, 124, 129-255  the job did not start, hung, or was ended by a signal: it is restarted at most --retries times
  others           the job is not restarted: ddpkit has already restarted the workers, up to --max-restarts times
"""
_COPY_THE_FOLDER = ("skypilot", "ray")
_NOT_UTF8 = "".join(map(chr, range(0xDC80, 0xDD00)))  # how Python decodes bytes that are not UTF-8
_NAME_LENGTH = 40  # Kubernetes appends a suffix, and allows 63 characters in total
_DNS_LABEL = rf"[a-z](?:[a-z0-9-]{{0,{_NAME_LENGTH - 2}}}[a-z0-9])?"


def run(words: Sequence[str], write: Callable[[str], None], print_text: Callable[[str], None]) -> int:
    """Submit a job to an engine (Slurm, Kubernetes, ...), or only print the job file.

    `write`: a function that writes a line to standard error. Raises `UsageError` if the arguments are invalid, or if
    the engine cannot be used from this machine.
    """
    known = parser()
    own, launch = _split(words, known)
    flags = vars(known.parse_args(own))
    flags["gpu_type"], flags["gpus"] = flags["gpus"] or (None, None)
    name = flags.pop("on")
    if name is None:
        raise UsageError("no engine is given", f"use --on and one of: {', '.join(ENGINES)}")
    if name not in ENGINES:
        close = nearest(name, list(ENGINES))
        raise UsageError(
            f"there is no engine {name!r}; the engines are: {', '.join(ENGINES)}", f"use --on {close or 'slurm'}"
        )
    engine, dry_run = ENGINES[name], flags.pop("dry_run")
    _check_flags(name, engine, flags, known)
    request = _request(flags, launch, words)
    _check(name, engine, request)
    text = engine.job_file(request)
    if engine.suffix == ".yaml" and not {*_NOT_UTF8}.isdisjoint(text):
        raise UsageError(
            f"a name or an argument of the job is not valid UTF-8, and a job file for {name} is written in UTF-8",
            "rename the script, its folder or the file that an argument names, using only valid UTF-8",
        )
    if dry_run:
        print_text(text.rstrip("\n"))
        return 0
    return _submit(name, engine, request, text, write)


def parser() -> Parser:
    """Create the argument parser of `ddpkit submit`."""
    flags = Parser(
        prog="ddpkit submit",
        usage="ddpkit submit --on ENGINE --nodes N [flags] [flags of launch] script.py [arguments of the script]",
        description="Run a script on several nodes through the engine of a cluster. Only the engine's own output is "
        "printed; --dry-run prints the job file.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument("--on", metavar="ENGINE", help=f"the engine, one of: {', '.join(ENGINES)}")
    flags.add_argument("--nodes", metavar="N", type=_count, help="the number of nodes; default with --hosts: all hosts")
    flags.add_argument(
        "--gpus", metavar="[TYPE:]G", type=_gpus, help="GPUs per node, such as 8 or H100:8; default: none"
    )
    flags.add_argument(
        "--cpus",
        metavar="C",
        type=_count,
        help="number of CPU cores per node; default: 8 per GPU, which is more than some nodes have",
    )
    flags.add_argument("--time", metavar="TIME", help="the time limit, such as 90m, 12h, 2d or 1-12:00:00")
    flags.add_argument("--name", metavar="NAME", help="the job's name; default: the script's name")
    flags.add_argument("--image", metavar="IMAGE", help="the container image, which must contain ddpkit")
    flags.add_argument("--queue", "--partition", metavar="NAME", dest="queue", help="the queue, or Slurm's partition")
    flags.add_argument("--hosts", metavar="A,B|FILE", help="for ssh: host names, or a file with one name per line")
    flags.add_argument("--array", metavar="0-9", help="for Slurm: the task indices of a job array")
    flags.add_argument("--requeue", action="store_true", help="for Slurm: requeue the job after a preemption")
    flags.add_argument(
        "--retries",
        metavar="N",
        type=_number,
        help="maximum number of restarts after the exit codes 3, 124 and 129-255; default: 3",
    )
    flags.add_argument(
        "--grace",
        metavar="SECONDS",
        type=_count,
        help="seconds from SIGTERM to SIGKILL when the job is stopped; default: 120",
    )
    flags.add_argument("--dry-run", action="store_true", help="print the job file, and submit nothing")
    return flags


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _gpus(text: str) -> tuple[str | None, int]:
    """Parse a value such as `8` or `H100:8`. Returns the GPU type (None if not given) and the number of GPUs."""
    kind, colon, number = text.rpartition(":")
    if not number.isdecimal() or int(number) < 1 or (colon and not kind):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of GPUs nor TYPE:NUMBER")
    return kind or None, int(number)


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return int(text)


def _split(words: Sequence[str], known: Parser) -> tuple[list[str], list[str]]:
    """Split the command line into the flags of `ddpkit submit` and the arguments of `ddpkit launch`.

    The arguments begin at the first word that is neither a flag of `ddpkit submit` nor the value of such a flag.
    """
    actions = {flag: action for action in known.actions for flag in action.option_strings}
    position = 0
    while position < len(words) and (action := actions.get(words[position].partition("=")[0])) is not None:
        position += 1 if "=" in words[position] or action.nargs == 0 else 2
    rest = list(words[position:])
    before_script = rest[: next((n for n, word in enumerate(rest) if word.endswith(".py") or word == "-m"), len(rest))]
    for word in before_script:
        if word.partition("=")[0] in actions.keys() - {"--gpus", "--dry-run"}:
            raise UsageError(
                f"{word} is a flag of `ddpkit submit`, but follows {rest[0]}, a flag of `ddpkit launch`",
                f"put it before {rest[0]}",
            )
    if rest and rest[0].partition("=")[0] == "--nnodes":
        raise UsageError("--nnodes is not allowed: `ddpkit submit` derives it from --nodes", "use --nodes N")
    return list(words[:position]), rest


def _check_flags(name: str, engine: Engine, flags: dict[str, Any], known: Parser) -> None:
    """Raise `UsageError` for a flag that the engine does not support, or a value that could add lines to a job file."""
    spelled = {action.dest: action.option_strings[0] for action in known.actions if action.option_strings}
    spelled["gpu_type"] = "a type in --gpus"
    for flag in flags.keys() - engine.flags - {"nodes", "gpus", "name"}:
        if flags[flag]:
            takes = ", ".join(sorted(spelled[each] for each in engine.flags))
            raise UsageError(f"{name} does not support {spelled[flag]}", f"remove it; {name} supports {takes}")
    for flag, value in flags.items():
        if isinstance(value, str) and printable(value) != value:
            raise UsageError(
                f"{spelled[flag]}: the value {printable(value)!r} contains a control character, such as a line break",
                "remove the character",
            )


def _request(flags: dict[str, Any], launch: Sequence[str], words: Sequence[str]) -> Request:
    hosts = hosts_of(flags.pop("hosts"))
    nodes = flags.pop("nodes") or len(hosts)
    if not nodes:
        raise UsageError("the number of nodes is not given", "use --nodes N")
    if hosts and nodes > len(hosts):
        raise UsageError(
            f"--nodes is {nodes}, but --hosts names {len(hosts)} hosts", f"use --nodes {len(hosts)}, or add hosts"
        )
    time, name = flags.pop("time"), flags.pop("name")
    given = {flag: value for flag, value in flags.items() if value is not None}
    shown = ["ddpkit", "submit", *(word for word in words if word != "--dry-run")]
    return Request(
        nodes=nodes,
        words=tuple(launch),
        name=name or _job_name(launch),
        command="\n# ".join(printable(line, keep=_NOT_UTF8) for line in shlex.join(shown).splitlines()),  # a comment
        seconds=None if time is None else seconds_of(time),
        hosts=hosts[:nodes],
        folder=PurePosixPath(Path.cwd()),
        programs=str(Path(sys.executable).parent),
        **given,
    )


def _job_name(launch: Sequence[str]) -> str:
    """A job name derived from the script's name: lower-case letters, digits and dashes."""
    module = [after.rpartition(".")[2] for word, after in pairwise(launch) if word == "-m"]
    words = [PurePosixPath(word).stem for word in launch if word.endswith(".py")] or module
    stem = words[0] if words else "train"
    name = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in stem.lower()).strip("-")
    name = name if name[:1].isalpha() else f"train-{name}"  # Kubernetes requires a letter first
    return name[:_NAME_LENGTH].strip("-")


def _check(name: str, engine: Engine, request: Request) -> None:
    """Raise `UsageError` if the request is incomplete or invalid for the engine."""
    if not request.words and engine.script_needed:
        raise UsageError("there is no script to run", "put the script and its arguments after all flags")
    script = next((word for word in request.words if word.endswith(".py")), None)
    if script is not None and request.image is None and not Path(script).exists():  # with an image, it is in the image
        path = Path(script)
        close = nearest(path.stem, [each.stem for each in path.parent.glob("*.py")])
        raise UsageError(
            f"there is no script {script!r} in {Path.cwd()}",
            f"did you mean {path.with_stem(close)}?" if close else "check the path",
        )
    if script is not None and name in _COPY_THE_FOLDER:
        path = Path(os.path.relpath(script))
        if ".." in path.parts or Path(script).is_absolute():
            raise UsageError(
                f"{name} copies the working folder to the nodes, but {script} is not a relative path inside it",
                f"cd {Path(script).parent}" if ".." in path.parts else f"give {path}",
            )
    if engine.image_needed and not re.fullmatch(_DNS_LABEL, request.name):
        raise UsageError(
            f"--name {request.name} is not a valid job name in Kubernetes: use at most {_NAME_LENGTH} lower-case "
            "letters, digits and dashes",
            f"use --name {_job_name([f'{request.name}.py'])}",
        )
    if engine.image_needed and request.image is None:
        raise UsageError(f"{name} runs a job in a container, but --image is not given", "use --image IMAGE")
    if name == "skypilot" and request.gpus is not None and request.gpu_type is None:
        raise UsageError("SkyPilot needs the type of the GPUs", f"use --gpus H100:{request.gpus}, or another type")
    if name == "ssh" and not request.hosts:
        raise UsageError(
            "ssh needs the names of the hosts",
            "use --hosts gpu1,gpu2 or --hosts FILE, where FILE has one host per line",
        )


def _submit(name: str, engine: Engine, request: Request, text: str, write: Callable[[str], None]) -> int:
    program = engine.submission(request, "")[0]
    if shutil.which(program) is None:
        raise UsageError(
            f"{program} was not found, so no job can be submitted to {name} from here",
            f"{engine.install}; or use --dry-run to print the job file",
        )
    if engine.run is not None:
        return engine.run(request, write)
    with tempfile.TemporaryDirectory(prefix="ddpkit-submit-") as folder:
        path = Path(folder) / f"job{engine.suffix}"  # without the name, which may contain slashes
        path.write_bytes(os.fsencode(text))
        return subprocess.run(engine.submission(request, str(path)), check=False).returncode
