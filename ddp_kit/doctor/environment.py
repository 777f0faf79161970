"""`ddpkit env`: print versions, hardware and environment variables for a bug report."""

import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import psutil

import ddp_kit
from ddp_kit.arguments import Parser
from ddp_kit.clusters import engines
from ddp_kit.control_groups import cpu_quota, memory_limit
from ddp_kit.devices.cpus import usable_cpus
from ddp_kit.doctor import machine
from ddp_kit.env import reported_variables
from ddp_kit.errors import DdpKitError
from ddp_kit.exit_codes import ExitCode
from ddp_kit.masking import masked_env
from ddp_kit.terminal import Terminal
from ddp_kit.texts import size_text

_FURTHER_PACKAGES = (
    "triton", "torchvision", "torchao", "torchdata", "transformers", "accelerate", "lightning", "datasets",
)  # fmt: skip


def parser() -> Parser:
    """Create the argument parser of `ddpkit env`."""
    flags = Parser(
        prog="ddpkit env",
        description="Print versions, hardware and environment variables for a bug report. Values that look secret are "
        "masked; check the output before you share it.",
    )
    flags.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    return flags


def run(argv: Sequence[str], terminal: Terminal) -> int:
    """Print versions, hardware and environment variables, with secrets masked, and return the exit code."""
    args = parser().parse_args(argv)
    report = facts(terminal.env)
    if args.json:
        terminal.print_text(json.dumps(report, indent=1))
    else:
        terminal.print_text("\n".join(_report_lines(report)))
    return ExitCode.OK


def facts(env: Mapping[str, str]) -> dict[str, Any]:
    """Collect versions, hardware and environment variables. Values are strings, or lists or dicts of strings."""
    torch = machine.torch_facts(env)
    about = torch.facts
    nvidia = machine.detect()
    driver = nvidia.version
    if nvidia.cuda is not None:
        driver += f", CUDA up to {nvidia.cuda[0]}.{nvidia.cuda[1]}"
    if nvidia.error:
        driver = "none" if nvidia.absent else nvidia.error
    distribution = "unknown distribution"
    with suppress(OSError, KeyError):
        distribution = platform.freedesktop_os_release()["PRETTY_NAME"]
    processors = f"{len(usable_cpus())} of {os.cpu_count()} {platform.machine()}"
    quota = cpu_quota()
    if quota is not None:
        processors += f", limited to {quota:g}"
    return {
        "ddpkit": f"{ddp_kit.__version__}, {Path(ddp_kit.__file__).parent}",
        "Python": f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}",
        "torch": torch.error or f"{about['version']}, CUDA {about['cuda']}, NCCL {about['nccl']}",
        "system": f"{platform.platform()}, {distribution}",
        "processors": processors,
        "memory": _memory_text(),
        "driver": driver,
        "GPUs": [f"{card.gpu.label}: {card.gpu.name}, {size_text(card.gpu.memory_total)}" for card in nvidia.cards],
        "cluster": _cluster(env),
        "packages": _packages(),
        "variables": reported_variables(masked_env(env)),
    }


def _memory_text() -> str:
    total = psutil.virtual_memory().total
    limit = memory_limit() or total
    if limit < total:
        return f"{size_text(total)}, limited to {size_text(limit)}"
    return size_text(total)


def _cluster(env: Mapping[str, str]) -> str:
    try:
        place = engines.recognise(env)
    except DdpKitError as error:
        return error.message
    except SystemExit:  # only process 0 reports an error in the cluster's variables
        return "the cluster's variables cannot be used; run `ddpkit env` in process 0 to see why"
    if place is None:
        return "none recognised"
    return place.environment


def _packages() -> dict[str, str]:
    """Versions of the dependencies of ddpkit, and of other packages that training scripts often use."""
    needed = [line.split(";")[0] for line in requires("ddpkit") or () if "extra ==" not in line]
    names = [line.split("[")[0].split(">")[0].split("=")[0].split("<")[0].strip() for line in needed]
    versions = {}
    for name in sorted({*names, *_FURTHER_PACKAGES} - {"torch"}):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _report_lines(report: Mapping[str, Any]) -> Iterator[str]:
    for name, value in report.items():
        if name == "packages":
            value = ", ".join(f"{key} {of}" for key, of in value.items())
        elif isinstance(value, dict):
            value = [f"{key}={of}" for key, of in value.items()]
        if isinstance(value, str):
            yield f"{name + ':':<12} {value}"
        elif value:
            yield f"{name}:"
            yield from (f"  {line}" for line in value)
        else:
            yield f"{name + ':':<12} none"
