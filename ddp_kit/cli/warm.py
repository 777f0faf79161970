"""`ddpkit warm`: list and stop the processes that `ddpkit launch --keep-warm` keeps."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from ddp_kit.arguments import Parser
from ddp_kit.exit_codes import ExitCode
from ddp_kit.launcher.warm.kept_client import kept_processes
from ddp_kit.terminal import Terminal
from ddp_kit.texts import clock, size_text

_EPILOG = """\
examples:
  ddpkit launch --keep-warm=30m --gpus 4 train.py   keep a process for the next launches of train.py
  ddpkit warm                                       list the kept processes of this user
  ddpkit warm stop                                  end them
"""


def parser() -> Parser:
    """Create the argument parser of `ddpkit warm`."""
    flags = Parser(
        prog="ddpkit warm",
        description="List the processes that `ddpkit launch --keep-warm` keeps for the next launches of a script.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument("action", nargs="?", choices=["stop"], help="end the kept processes; running jobs continue")
    return flags


def run(argv: Sequence[str], terminal: Terminal) -> int:
    """List or stop the kept processes, and return the exit code."""
    stops = parser().parse_args(argv).action == "stop"
    lines = []
    for kept in kept_processes("stop" if stops else "description"):
        age = clock(time.time() - kept["since"])
        imported = ", ".join(kept["imports"]) or "imports torch"
        lines.append(
            f"{kept['script']}: pid {kept['pid']}, {age} old, {size_text(_memory(kept['pid']))}, "
            f"{kept['launches']} launches; {imported}"
        )
    if lines and stops:
        lines.append("stopped")
    terminal.print_text("\n".join(lines or ["no process is kept"]))
    return ExitCode.OK


def _memory(pid: int) -> int:
    """The memory of a process in bytes, without what it shares with others."""
    try:
        fields = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    except OSError:  # it has just ended
        return 0
    return sum(int(field[1]) * 1024 for field in fields if field[0] == "Pss:")
