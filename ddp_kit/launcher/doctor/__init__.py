"""`ddpkit doctor`: is this machine fit for training? A tuple of checks, each `Machine -> CheckResult`.

    machine.py        what they look at; driver.py and trials.py find out what takes a driver or a process to know
    limits.py  surroundings.py  gpu_checks.py  torch_checks.py      the checks
    result.py         what they say

Nothing here imports torch, which may be what is broken.
"""

import argparse
import json
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from ddp_kit.env import NO_COLOR
from ddp_kit.exit_codes import ExitCode
from ddp_kit.launcher.doctor import driver, gpu_checks, limits, surroundings, torch_checks, trials
from ddp_kit.launcher.doctor.machine import Machine
from ddp_kit.launcher.doctor.result import CheckResult, Status, fail, warn
from ddp_kit.launcher.masking import masked
from ddp_kit.launcher.parser import Parser

Check = Callable[[Machine], CheckResult | None]
"""None: there is nothing to check on this machine."""

CHECKS: tuple[Check, ...] = (
    surroundings.python,
    limits.memory,
    limits.cpu,
    limits.open_files,
    limits.locked_memory,
    limits.shared_memory,
    surroundings.checkpoints,
    surroundings.clock,
    surroundings.loopback,
    surroundings.ports,
    surroundings.host_name,
    gpu_checks.driver,
    gpu_checks.visible_gpus,
    gpu_checks.left_over,
    gpu_checks.ecc,
    # These wait for torch.
    torch_checks.torch,
    torch_checks.torch_and_driver,
    torch_checks.torch_and_gpus,
    torch_checks.nccl,
    torch_checks.all_reduce,
    torch_checks.all_reduce_of_gpus,
    torch_checks.product,
)

_COLOURS = {Status.OK: 32, Status.WARN: 33, Status.FAIL: 31}
_EPILOG = f"""\
exit codes:
  {ExitCode.OK:<2d} nothing is broken; there may be warnings
  {ExitCode.BROKEN:<2d} something is
"""


def run(words: Sequence[str], env: Mapping[str, str]) -> int:
    """Check this machine, print each finding as soon as it is there, and return the exit code."""
    parser = Parser(
        prog="ddpkit doctor",
        description="Check this machine for training, and say how to fix what is wrong.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="the folder that checkpoints will be written to (default: this one)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    asked = parser.parse_args(words)
    colour = not env.get(NO_COLOR) and sys.stdout is not None and sys.stdout.isatty()
    results = []
    for result in examine(env, asked.dir.absolute()):
        results.append(result)
        if not asked.json:
            _print(_line(result, colour))
    counts = {status: sum(result.status == status for result in results) for status in Status}
    if asked.json:
        _print(json.dumps({"checks": [asdict(result) for result in results], **counts}, indent=2))
    else:
        plural = "" if counts[Status.WARN] == 1 else "s"
        _print(f"{counts[Status.OK]} ok, {counts[Status.WARN]} warning{plural}, {counts[Status.FAIL]} failed")
    return ExitCode.BROKEN if counts[Status.FAIL] else ExitCode.OK


def examine(env: Mapping[str, str], checkpoints: Path) -> Iterator[CheckResult]:
    """Every finding, as soon as it is there."""
    nvidia = driver.ask()
    try:
        tempfile.TemporaryFile().close()
    except OSError as error:  # jobs need one too
        yield fail("temporary files", f"no temporary file can be made: {error}", "export TMPDIR=FOLDER")
        return
    with trials.started(env, socket.gethostname(), nvidia.visible(env)) as asked:
        machine = Machine.this(env, checkpoints, nvidia, asked)
        for check in CHECKS:
            result = _checked(check, machine)
            if result is not None:  # what a broken torch says may quote anything
                yield replace(result, found=masked(result.found, env), fix=masked(result.fix, env))


def _checked(check: Check, machine: Machine) -> CheckResult | None:
    try:
        return check(machine)
    except Exception as error:  # a check that raises is a finding too; the others run
        name = check.__name__.replace("_", " ")
        return warn(name, f"{name} could not be checked: {type(error).__name__}: {error}", "")


def _line(result: CheckResult, colour: bool) -> str:
    status = f"{result.status:<4}"
    if colour:
        status = f"\033[{_COLOURS[result.status]}m{status}\033[0m"
    fix = f"\n      -> {result.fix}" if result.fix else ""
    return f"{status}  {result.found}{fix}"


def _print(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # nobody reads it; the exit code still counts
        print(text, flush=True)
