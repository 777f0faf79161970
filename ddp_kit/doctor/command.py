"""`ddpkit doctor`: check whether this machine can run training.

Each check is a function that takes a `Machine` and returns a `CheckResult`.

    machine.py     the data that the checks use: the state of the driver, and the results of probe processes
    checks.py      the checks, and their results
    object_store.py    the checks of `--dir URL`

This process never imports torch, so that the checks also run if torch is broken.
"""

import argparse
import json
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path

from ddp_kit.arguments import Parser
from ddp_kit.doctor import checks
from ddp_kit.doctor.checks import CheckResult, Status, fail, warn
from ddp_kit.doctor.machine import Machine, detect, started
from ddp_kit.doctor.object_store import check_store
from ddp_kit.env import NO_COLOR
from ddp_kit.errors import printable
from ddp_kit.exit_codes import ExitCode
from ddp_kit.masking import masked
from ddp_kit.storage.command_line import place
from ddp_kit.storage.urls import Location, location
from ddp_kit.terminal import Terminal
from ddp_kit.texts import plural

Check = Callable[[Machine], CheckResult | None]
"""A check returns None if it does not apply to this machine."""

CHECKS: dict[str, Check] = {
    "python": checks.python,
    "memory": checks.memory,
    "cpu": checks.cpu,
    "open files": checks.open_files,
    "locked memory": checks.locked_memory,
    "shared memory": checks.shared_memory,
    "checkpoint folder": checks.checkpoints,
    "clock": checks.clock,
    "loopback": checks.loopback,
    "ports": checks.ports,
    "host name": checks.host_name,
    "kept processes": checks.kept_processes,
    "driver": checks.driver,
    "visible GPUs": checks.visible_gpus,
    "GPU processes": checks.orphaned_processes,
    "ECC": checks.ecc,
    # The following checks wait for processes that import torch.
    "torch": checks.torch,
    "torch and driver": checks.torch_and_driver,
    "torch and GPUs": checks.torch_and_gpus,
    "NCCL": checks.nccl,
    "all-reduce": checks.all_reduce,
    "all-reduce of GPUs": checks.all_reduce_of_gpus,
    "matrix product": checks.matrix_product,
}
"""All checks by name, in the order in which they run."""

_KEPT = "\n"  # of control characters
_COLOURS = {Status.OK: 32, Status.WARN: 33, Status.FAIL: 31}
_EPILOG = f"""\
exit codes:
  {ExitCode.OK:<2d} no check failed; there may be warnings
  {ExitCode.BROKEN:<2d} a check failed
"""


def parser() -> Parser:
    """Create the argument parser of `ddpkit doctor`."""
    flags = Parser(
        prog="ddpkit doctor",
        description="Check whether this machine can run training, and print how to fix each problem.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument(
        "--dir",
        type=partial(place, checked=location),
        default=Path(),
        help="the checkpoint folder, or its URL in object storage (default: the current folder)",
    )
    flags.add_argument("--json", action="store_true", help="print the results as one JSON document")
    return flags


def run(argv: Sequence[str], terminal: Terminal) -> int:
    """Check this machine, print each result as soon as it is known, and return the exit code."""
    args = parser().parse_args(argv)
    colour = not terminal.env.get(NO_COLOR) and sys.stdout is not None and sys.stdout.isatty()
    results = {}
    for name, result in run_checks(terminal.env, args.dir):
        results[name] = result
        if not args.json:
            status = f"{result.status:<4}"
            if colour:
                status = f"\033[{_COLOURS[result.status]}m{status}\033[0m"
            terminal.print_exactly(f"{status}  {printable(result.found, keep=_KEPT)}")
            if result.fix:
                terminal.print_exactly(f"      -> {printable(result.fix, keep=_KEPT)}")
    counts = {status: sum(result.status == status for result in results.values()) for status in Status}
    if args.json:
        listed = [{"name": name, **asdict(result)} for name, result in results.items()]
        terminal.print_exactly(json.dumps({"checks": listed, **counts}, indent=2))
    else:
        warnings = plural(counts[Status.WARN], "warning")
        terminal.print_text(f"{counts[Status.OK]} ok, {warnings}, {counts[Status.FAIL]} failed")
    if counts[Status.FAIL]:
        return ExitCode.BROKEN
    return ExitCode.OK


def run_checks(env: Mapping[str, str], checkpoints: Location) -> Iterator[tuple[str, CheckResult]]:
    """Run all checks, and yield each result with the name of its check as soon as it is known."""
    folder = checkpoints.absolute() if isinstance(checkpoints, Path) else None
    nvidia = detect()
    try:
        tempfile.TemporaryFile().close()
    except OSError as error:  # jobs need temporary files too
        yield "temporary files", fail(f"cannot create a temporary file: {error}", "export TMPDIR=FOLDER")
        return
    with started(env, socket.gethostname(), nvidia.visible(env)) as running:
        machine = Machine.current(env, folder, nvidia, running)
        results = check_all(machine)
        if isinstance(checkpoints, str):
            results = chain(results, check_store(checkpoints))
        for name, result in results:  # error messages of torch may contain secrets
            yield name, replace(result, found=masked(result.found, env), fix=masked(result.fix, env))


def check_all(machine: Machine) -> Iterator[tuple[str, CheckResult]]:
    """Run the checks that apply to a machine, and yield their names and results."""
    for name, check in CHECKS.items():
        try:
            result = check(machine)
        except Exception as error:  # the other checks still run
            result = warn(f"{name} could not be checked: {type(error).__name__}: {error}", "")
        if result is not None:
            yield name, result
