"""The command `ddpkit`: parse, call, exit code. Importing this imports neither torch nor NVML."""

import argparse
import io
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
  devices       the GPUs, who uses them, and which are free
  checkpoints   those in a folder: whole or damaged, and what differs between two
  export        write the weights of a checkpoint to safetensors files
  doctor        check this machine for training, and say how to fix what is wrong

examples:
  ddpkit launch train.py                       one process per visible GPU (one process without any)
  ddpkit launch --gpus 4 train.py --lr 0.1     four GPUs; what follows the script is its own
  ddpkit launch --nproc-per-node 2 train.py    two processes, on the CPU too
  ddpkit devices                               which GPUs are free?
  ddpkit checkpoints runs/1 --verify           is every byte what was written?
  ddpkit export runs/1 model.safetensors       the newest checkpoint's weights, for other programs
  ddpkit doctor --dir /data/checkpoints        is this machine fit, and that folder?
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
    # Until the agent has handlers of its own; raised rather than fatal, so that what was made is cleaned up.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _StoppedError.handler)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # warnings to workers, of which there are none yet
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    try:
        command = parser.parse_args(words[:1]).command  # what follows belongs to the command
        return _command(command)(words[1:])
    except _StoppedError as stopped:
        _say(f"stopped by {stopped.by.name}")
        return ExitCode.of_signal(stopped.by)
    except UsageError as error:
        return _report(error, ExitCode.USAGE)
    except DdpKitError as error:
        return _report(error, ExitCode.LAUNCH_FAILED)


def entry() -> NoReturn:
    """The command as a process: end with the exit code as soon as all is said.

    Python's own way out would wait for torch's threads, or meet one that wakes up meanwhile: torch then aborts.
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
    """`ddpkit launch`: what was asked -> plan -> run -> verdict."""
    # Imported here: the agent imports torch, which only this command should pay for.
    from ddp_kit.launcher.warm.client import WarmServer

    _open_standard_streams()
    # First of all, so that it imports torch while this process does.
    defaults = allocator_defaults(os.environ)
    server_env = {**os.environ, **defaults}
    warm = WarmServer(words, server_env, _may_start_warm(words), _say) if sys.platform == "linux" else None
    try:
        with _import_quietly():
            from ddp_kit.launcher import agent
        if _StoppedError.latest is not None:
            raise _StoppedError.latest
        from ddp_kit.launcher import dry_run, plan, spec, verdict
        from ddp_kit.launcher.devices import cpus, gpus, reservations

        asked = spec.parse(words, agent.torchrun_parser(), os.environ)
        asked = replace(asked, processes=agent.count(asked.processes), ignored_signals=_ignored_signals())
        spec.check_script(asked, os.environ)
        machine, run_id = gpus.gpus(), str(uuid.uuid4())
        make = partial(plan.make, asked, machine, os.environ, run_id, cpus.here(), defaults=defaults)
        with reservations.reserved(make, hold=not asked.dry_run) as settled:
            for line in settled.says:
                _say(line)
            if asked.dry_run:
                told = dry_run.describe(settled, os.environ, socket.gethostname(), agent.torchrun_defaults())
                agent.check(settled)  # last: torch may add to the environment that was described
                _print(told)
                return ExitCode.OK
            ended = agent.run(settled, warm, _say)
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
    """`ddpkit devices`: the GPUs of this machine."""
    from ddp_kit.launcher.devices import listing

    parser = Parser(
        prog="ddpkit devices",
        description="The GPUs of this machine: memory, load, NUMA node, links, who uses them, and which are free.",
    )
    parser.parse_args(words)
    _print(listing.text(os.environ))
    return ExitCode.OK


def checkpoints(words: Sequence[str]) -> int:
    """`ddpkit checkpoints`: which there are in a folder, and whether they are whole."""
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
    """`ddpkit doctor`: what keeps this machine from training, or may."""
    from ddp_kit.launcher.doctor import run

    return run(words, os.environ)


def _open_standard_streams() -> None:
    """Whoever closed one wants to hear nothing; the next socket of this process shall not take its number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


def _may_start_warm(words: Sequence[str]) -> bool:
    """Whether a server is worth starting before the command line is understood."""
    cold_words = {"-h", "--help", "--cold", "--dry-run", "--no-python", "--no_python", "--run-path", "--run_path"}
    return not cold_words.intersection(_before_script(words)) and PYTHON not in os.environ


def _ignored_signals() -> frozenset[str]:
    return frozenset(number.name for number in signal.Signals if signal.getsignal(number) is signal.SIG_IGN)


def _before_script(words: Sequence[str]) -> Sequence[str]:
    """The launcher's own words, as well as can be told without torchrun's parser."""
    for position, word in enumerate(words):
        if word.endswith(".py") or word in ("-m", "--module", "--"):
            return words[:position]
    return words


@contextmanager
def _import_quietly() -> Iterator[None]:
    """Variables for this process's imports alone; the workers do not see them."""
    added = {name: value for name, value in QUIET_IMPORT.items() if name not in os.environ}
    os.environ.update(added)
    yield
    for name in added:
        del os.environ[name]


def _say(line: str) -> None:
    _write(f"ddpkit: {line}\n")


def _write(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # nobody reads it; that is no reason to end a job
        sys.stderr.write(masked(text, os.environ))


def _print(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        sys.stdout.write(f"{text}\n")


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "launch": launch,
    "devices": devices,
    "checkpoints": checkpoints,
    "export": export,
    "doctor": doctor,
}


def _command(name: str) -> Callable[[Sequence[str]], int]:
    if name in _COMMANDS:
        return _COMMANDS[name]
    close = nearest(name, list(_COMMANDS))
    instead = f"`ddpkit launch {name} ...`" if name.endswith(".py") else f"`ddpkit {close or 'launch'} ...`"
    raise UsageError(f"there is no command {name!r}; the commands are: {', '.join(_COMMANDS)}", f"type {instead}")


class _StoppedError(BaseException):
    """A signal came before the job was up."""

    latest: "_StoppedError | None" = None
    """Raised while torch imports NumPy, this would be taken for a failed import, and ignored."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(by)
        self.by = by

    @classmethod
    def handler(cls, number: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        cls.latest = cls(signal.Signals(number))
        raise cls.latest


def _report(error: DdpKitError, code: ExitCode) -> int:
    _say(f"error: {error}")
    return int(code)
