"""The command line of `ddpkit`: parse the arguments, run the command and return its exit code.

Importing this module imports neither torch nor NVML.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from ddp_kit import __version__
from ddp_kit.arguments import Parser
from ddp_kit.cli.commands import COMMANDS, overview
from ddp_kit.cli.stopped import StoppedError
from ddp_kit.env import open_standard_streams
from ddp_kit.errors import CheckpointError, DdpKitError, UsageError, nearest
from ddp_kit.exit_codes import ExitCode
from ddp_kit.terminal import Terminal

if TYPE_CHECKING:
    from ddp_kit.launcher.warm.client import WarmServer

_COMPLETION = "--print-completion"


def main(
    argv: Sequence[str] | None = None, warm: "WarmServer | None" = None, blocked: Sequence[int] | None = None
) -> int:
    """Run the command in `argv` (default: `sys.argv[1:]`) and return its exit code; for --help, argparse exits.

    `warm`: a running warm server for `launch` to use; None: `launch` starts one. `blocked`: the signals to block, once
    the others are handled; None: those that are blocked now.
    """
    open_standard_streams()
    terminal = Terminal(os.environ)
    parser = Parser(
        prog="ddpkit",
        description="Run PyTorch training on several GPUs or nodes with one command.",
        epilog=overview(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="ddpkit [-h] [--version] [--print-completion SHELL] COMMAND ...",
    )
    parser.add_argument("--version", action="version", version=f"ddpkit {__version__}")
    parser.add_argument(_COMPLETION, metavar="SHELL", help="print the completion script for bash, zsh, fish or tcsh")
    parser.add_argument("command", metavar="COMMAND", help="one of the commands listed below")
    argv = sys.argv[1:] if argv is None else list(argv)
    StoppedError.raise_on_signals()
    try:
        try:
            StoppedError.may_be_raised = True
            if blocked is not None:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            if argv and argv[0].partition("=")[0] == _COMPLETION:
                from ddp_kit.cli import completion

                return completion.run(argv, terminal)
            name = parser.parse_args(argv[:1]).command  # the command parses the rest
            if name == "launch":
                from ddp_kit.cli import launch

                return launch.run(argv[1:], terminal, warm)
            if name not in COMMANDS:
                raise _unknown(name)
            return COMMANDS[name].load().run(argv[1:], terminal)
        finally:
            StoppedError.may_be_raised = False
    except StoppedError as stopped:
        terminal.print_message(f"stopped by {stopped.by.name}")
        return ExitCode.of_signal(stopped.by)
    except UsageError as error:
        terminal.print_message(f"error: {error}")
        return ExitCode.USAGE
    except CheckpointError as error:
        terminal.print_message(f"error: {error}")
        return ExitCode.BROKEN
    except DdpKitError as error:
        terminal.print_message(f"error: {error}")
        return ExitCode.LAUNCH_FAILED


def _unknown(name: str) -> UsageError:
    close = nearest(name, list(COMMANDS)) or "launch"
    if name.endswith(".py"):
        close = f"launch {name}"
    return UsageError(
        f"there is no command {name!r}; the commands are: {', '.join(COMMANDS)}", f"run `ddpkit {close} ...`"
    )


def entry(
    argv: Sequence[str] | None = None,
    warm: "WarmServer | None" = None,
    blocked: Sequence[int] | None = None,
    at_exit: Callable[[int], None] = lambda _: None,
) -> NoReturn:
    """Run the command like `main`, then flush all output and exit with `os._exit`.

    A normal interpreter shutdown would wait for torch's threads, and could abort if one of them woke up meanwhile.
    """
    code = main(argv, warm, blocked)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if "logging" in sys.modules:  # not imported for this: it is slow to import
        sys.modules["logging"].shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    at_exit(code)
    os._exit(code)
