"""The command `ddpkit`: parse, call, exit code. Importing this module imports neither torch nor NVML."""

import argparse
import io
import json
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import NoReturn

from ddp_kit import __version__
from ddp_kit.env import PYTHON, QUIET_IMPORT, allocator_defaults
from ddp_kit.errors import CheckpointError, DdpKitError, UsageError, nearest
from ddp_kit.exit_codes import ExitCode
from ddp_kit.launcher.masking import masked
from ddp_kit.launcher.parser import Parser

_HELP = """\
commands:
  launch        start one process per GPU and give each its rank: `ddpkit launch --help`
  devices       list the GPUs, the processes on them, and which are free
  plan          memory per device before the start: does it fit, and what to change if not
  checkpoints   list the checkpoints in a folder, verify them, compare two of them
  export        write the weights of a checkpoint to safetensors files
  doctor        check this machine for training, and say how to fix what is wrong
  schema        print the JSON schema of TrainerConfig, with which editors check YAML files

examples:
  ddpkit launch train.py                       one process per visible GPU (one process without any)
  ddpkit launch --gpus 4 train.py --lr 0.1     four GPUs; arguments after the script go to the script
  ddpkit launch --nproc-per-node 2 train.py    two processes, with or without GPUs
  ddpkit devices                               show which GPUs are free
  ddpkit plan --gpus 8 --memory 80GiB train.py   does it fit? needs no GPU
  ddpkit checkpoints runs/1 --verify           read every byte and compare hashes
  ddpkit export runs/1 model.safetensors       write the newest checkpoint's weights for other programs
  ddpkit doctor --dir /data/checkpoints        check this machine and that folder
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return its exit code; argparse exits for --help."""
    parser = Parser(
        prog="ddpkit",
        description="Training on several GPUs as one command.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="ddpkit [-h] [--version] COMMAND ...",
    )
    parser.add_argument("--version", action="version", version=f"ddpkit {__version__}")
    parser.add_argument("command", metavar="COMMAND", help="what to do; see below")
    words = list(sys.argv[1:] if argv is None else argv)
    # Until the agent installs its own handlers. The handler raises, so that cleanup code runs.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _StoppedError.handler)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # meant for the workers, and none runs yet
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    try:
        command = parser.parse_args(words[:1]).command  # the command parses the rest
        return _command(command)(words[1:])
    except _StoppedError as stopped:
        _say(f"stopped by {stopped.by.name}")
        return ExitCode.of_signal(stopped.by)
    except UsageError as error:
        return _report(error, ExitCode.USAGE)
    except DdpKitError as error:
        return _report(error, ExitCode.LAUNCH_FAILED)


def entry() -> NoReturn:
    """Run the command, flush all output and exit with `os._exit`.

    A normal interpreter shutdown would wait for torch's threads, or abort if one of them wakes up during it.
    """
    code = main()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def launch(words: Sequence[str]) -> int:
    """`ddpkit launch`: command line -> plan -> run -> verdict."""
    # Imported here because the agent imports torch, which the other commands do not need.
    from ddp_kit.launcher.warm.client import WarmServer

    _open_standard_streams()
    defaults = allocator_defaults(os.environ)
    server_env = {**os.environ, **defaults}
    # Started first, so that the server and this process import torch at the same time.
    warm = WarmServer(words, server_env, _may_start_warm(words), _say) if sys.platform == "linux" else None
    try:
        with _import_quietly():
            from ddp_kit.launcher import agent
        if _StoppedError.latest is not None:
            raise _StoppedError.latest
        from ddp_kit.launcher import dry_run, plan, spec, verdict
        from ddp_kit.launcher.devices import cpus, gpus, reservations

        launch_spec = spec.parse(words, agent.torchrun_parser(), os.environ)
        ignored = (number.name for number in signal.Signals if signal.getsignal(number) is signal.SIG_IGN)
        processes = agent.count(launch_spec.processes)
        launch_spec = replace(launch_spec, processes=processes, ignored_signals=frozenset(ignored))
        spec.check_script(launch_spec, os.environ)
        machine, run_id = gpus.gpus(), str(uuid.uuid4())
        make = partial(plan.make, launch_spec, machine, os.environ, run_id, cpus.here(), defaults=defaults)
        with reservations.reserved(make, hold=not launch_spec.dry_run) as job_plan:
            for line in job_plan.notices:
                _say(line)
            if launch_spec.dry_run:
                description = dry_run.describe(job_plan, os.environ, socket.gethostname(), agent.torchrun_defaults())
                agent.check(job_plan)  # last: torch may add variables to the environment just described
                _print(description)
                return ExitCode.OK
            ended = agent.run(job_plan, warm, _say)
    finally:
        if warm is not None:
            warm.close()
    judgement = verdict.judge(ended.outcome, ended.shown)
    if judgement.trace:
        _write(f"{judgement.trace}\n")
    if judgement.text:
        _say(judgement.text)
    if judgement.text and ended.folder:
        _say(f"logs and verdict in {ended.folder}")
    return judgement.exit_code


def devices(words: Sequence[str]) -> int:
    """`ddpkit devices`: list the GPUs of this machine."""
    from ddp_kit.launcher.devices import listing

    parser = Parser(
        prog="ddpkit devices",
        description="The GPUs of this machine: memory, load, NUMA node, links, processes, and which are free.",
    )
    parser.parse_args(words)
    _print(listing.text(os.environ))
    return ExitCode.OK


def plan(words: Sequence[str]) -> int:
    """`ddpkit plan`: the memory that a script will need on each device."""
    from ddp_kit.launcher.plan_command import run

    return run(words, os.environ)


def checkpoints(words: Sequence[str]) -> int:
    """`ddpkit checkpoints`: list the checkpoints in a folder and say which are damaged."""
    from ddp_kit.launcher.checkpoint_command import run

    return run(words, _print)


def export(words: Sequence[str]) -> int:
    """`ddpkit export`: the weights of a checkpoint as safetensors files."""
    from ddp_kit.launcher.export_command import run

    try:
        return run(words, _print)
    except CheckpointError as error:
        return _report(error, ExitCode.BROKEN)


def doctor(words: Sequence[str]) -> int:
    """`ddpkit doctor`: find what prevents this machine from training, or may."""
    from ddp_kit.launcher.doctor import run

    return run(words, os.environ)


def schema(words: Sequence[str]) -> int:
    """`ddpkit schema`: the JSON schema of TrainerConfig."""
    from ddp_kit.config import TrainerConfig

    parser = Parser(
        prog="ddpkit schema",
        description="The JSON schema of TrainerConfig, with which editors complete and check YAML files: save it, and "
        "begin such a file with `# yaml-language-server: $schema=trainer-config.schema.json`.",
    )
    parser.parse_args(words)
    _print(json.dumps(TrainerConfig.model_json_schema(), indent=2))
    return ExitCode.OK


def _open_standard_streams() -> None:
    """Open closed standard streams on /dev/null, so that no socket gets descriptor 0, 1 or 2."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # returns the lowest free number, which is this one


def _may_start_warm(words: Sequence[str]) -> bool:
    """Guess whether the launch uses the warm server, before the command line is parsed."""
    cold_words = {"-h", "--help", "--cold", "--dry-run", "--no-python", "--no_python", "--run-path", "--run_path"}
    return not cold_words.intersection(_before_script(words)) and PYTHON not in os.environ


def _before_script(words: Sequence[str]) -> Sequence[str]:
    """The words before the script, as far as they can be recognised without torchrun's parser."""
    for position, word in enumerate(words):
        if word.endswith(".py") or word in ("-m", "--module", "--"):
            return words[:position]
    return words


@contextmanager
def _import_quietly() -> Iterator[None]:
    """Set QUIET_IMPORT for the imports of this process; the workers do not see these variables."""
    added = {name: value for name, value in QUIET_IMPORT.items() if name not in os.environ}
    os.environ.update(added)
    yield
    for name in added:
        del os.environ[name]


def _say(line: str) -> None:
    _write(f"ddpkit: {line}\n")


def _write(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # a closed stderr must not end the job
        sys.stderr.write(masked(text, os.environ))


def _print(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        sys.stdout.write(f"{text}\n")


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "launch": launch,
    "devices": devices,
    "plan": plan,
    "checkpoints": checkpoints,
    "export": export,
    "doctor": doctor,
    "schema": schema,
}


def _command(name: str) -> Callable[[Sequence[str]], int]:
    if name in _COMMANDS:
        return _COMMANDS[name]
    close = nearest(name, list(_COMMANDS))
    instead = f"`ddpkit launch {name} ...`" if name.endswith(".py") else f"`ddpkit {close or 'launch'} ...`"
    raise UsageError(f"there is no command {name!r}; the commands are: {', '.join(_COMMANDS)}", f"type {instead}")


class _StoppedError(BaseException):
    """A signal arrived before the job was running."""

    latest: "_StoppedError | None" = None
    """Kept because torch treats any exception while it imports NumPy as a failed import and ignores it."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(by)
        self.by = by

    @classmethod
    def handler(cls, number: int, _frame: FrameType | None) -> None:
        """Remember the signal and raise."""
        cls.latest = cls(signal.Signals(number))
        raise cls.latest


def _report(error: DdpKitError, code: ExitCode) -> int:
    _say(f"error: {error}")
    return int(code)
