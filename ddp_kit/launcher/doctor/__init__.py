"""`ddpkit doctor`: check this machine for training. A tuple of checks, each a function `Machine -> CheckResult`.

    machine.py        the input of the checks; driver.py queries the driver, trials.py runs programs
    limits.py  system_checks.py  gpu_checks.py  torch_checks.py      the checks
    result.py         their results

Nothing here imports torch, because a broken torch must not break the doctor.
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
from ddp_kit.launcher.doctor import driver, gpu_checks, limits, system_checks, torch_checks, trials
from ddp_kit.launcher.doctor.machine import Machine
from ddp_kit.launcher.doctor.result import CheckResult, Status, fail, warn
from ddp_kit.launcher.masking import masked
from ddp_kit.launcher.parser import Parser

Check = Callable[[Machine], CheckResult | None]
"""Returns None if it does not apply to this machine."""

CHECKS: tuple[Check, ...] = (
    system_checks.python,
    limits.memory,
    limits.cpu,
    limits.open_files,
    limits.locked_memory,
    limits.shared_memory,
    system_checks.checkpoints,
    system_checks.clock,
    system_checks.loopback,
    system_checks.ports,
    system_checks.host_name,
    gpu_checks.driver,
    gpu_checks.visible_gpus,
    gpu_checks.left_over,
    gpu_checks.ecc,
    # These wait for processes that import torch.
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
  {ExitCode.OK:<2d} no check failed; there may be warnings
  {ExitCode.BROKEN:<2d} a check failed
"""


def run(words: Sequence[str], env: Mapping[str, str]) -> int:
    """Check this machine, print each result at once, and return the exit code."""
    parser = Parser(
        prog="ddpkit doctor",
        description="Check this machine for training, and print how to fix what is wrong.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="the folder for checkpoints (default: the current folder)"
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
    """Yield each result as soon as it is known."""
    nvidia = driver.ask()
    try:
        tempfile.TemporaryFile().close()
    except OSError as error:  # jobs need them too
        yield fail("temporary files", f"cannot create a temporary file: {error}", "export TMPDIR=FOLDER")
        return
    with trials.started(env, socket.gethostname(), nvidia.visible(env)) as asked:
        machine = Machine.this(env, checkpoints, nvidia, asked)
        for check in CHECKS:
            result = _checked(check, machine)
            if result is not None:  # error messages of torch may contain secrets
                yield replace(result, found=masked(result.found, env), fix=masked(result.fix, env))


def _checked(check: Check, machine: Machine) -> CheckResult | None:
    try:
        return check(machine)
    except Exception as error:  # the other checks still run
        name = check.__name__.replace("_", " ")
        return warn(name, f"{name} could not be checked: {type(error).__name__}: {error}", "")


def _line(result: CheckResult, colour: bool) -> str:
    status = f"{result.status:<4}"
    if colour:
        status = f"\033[{_COLOURS[result.status]}m{status}\033[0m"
    fix = f"\n      -> {result.fix}" if result.fix else ""
    return f"{status}  {result.found}{fix}"


def _print(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # stdout is closed; the exit code still counts
        print(text, flush=True)
