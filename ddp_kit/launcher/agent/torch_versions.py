"""What differs between the torch versions that ddpkit supports, as far as the launcher is concerned.

Everything here is chosen by feature, never by version number. Read in the sources of torch 2.10, 2.11, 2.12, 2.13, 2.14
and 2.15; docs/versions.md has the differences that a user sees.
"""

import argparse
import inspect
from collections.abc import Mapping
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.argparse_util import env as env_or_default
from torch.distributed.launcher.api import LaunchConfig
from torch.numa import binding

from ddp_kit.env import GRACE_DEFAULT
from ddp_kit.errors import UsageError

_GRACE_SECONDS = 30  # torch's default

# Flags of later torch versions that ddpkit acts on itself, so that they work with every version.
_LATER_FLAGS: dict[str, dict[str, Any]] = {
    "shutdown_timeout": {
        "type": int,
        "help": "Time in seconds between SIGTERM and SIGKILL when workers are stopped. Defaults to"
        f" {GRACE_DEFAULT}, or to {_GRACE_SECONDS}.",
    },
    "log_line_prefix_template": {
        "default": "",
        "help": "Template for the prefix of each line that is shown and also redirected to a file (--tee)."
        " Macros: ${role_name}, ${local_rank}, ${rank}, ${hostname}.",
    },
}


def torchrun_parser() -> argparse.ArgumentParser:
    """torchrun's own parser, with the flags of later versions that ddpkit implements.

    Raises `UsageError` where a PET_ variable is invalid.
    """
    parser = _torchrun_parser()
    known = {action.dest for action in parser._actions}
    for name, settings in _LATER_FLAGS.items():
        if name not in known:
            parser.add_argument(f"--{name.replace('_', '-')}", f"--{name}", action=env_or_default, **settings)
    return parser


def torchrun_defaults() -> dict[str, Any]:
    """The settings of the installed torchrun without any flag; a flag that it lacks is not among them."""
    return vars(_torchrun_parser().parse_args(["script.py"]))


def _torchrun_parser() -> argparse.ArgumentParser:
    try:
        return torchrun.get_args_parser()
    except ValueError as error:
        raise UsageError(f"a PET_ variable has a value that cannot be used: {error}", "booleans are 0 or 1") from None


def shutdown_timeout(config: LaunchConfig, settings: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Seconds between SIGTERM and SIGKILL. Without `LaunchConfig.shutdown_timeout`: as later versions compute it.

    Raises `UsageError` for a value that is not a number of at least 0.
    """
    if hasattr(config, "shutdown_timeout"):  # torch computes and checks it
        return int(config.shutdown_timeout or 0)
    given = settings.shutdown_timeout
    name, value = ("shutdown_timeout", given) if given is not None else (GRACE_DEFAULT, env.get(GRACE_DEFAULT))
    try:
        seconds = _GRACE_SECONDS if value is None else int(value)
    except ValueError:
        seconds = -1
    if seconds < 0:
        raise UsageError(f"{name} must be a number of at least 0, not {value!r}", "give it in seconds, as 30")
    return seconds


def log_line_prefix(config: LaunchConfig, settings: argparse.Namespace) -> str:
    """The template of --log-line-prefix-template, else of its environment variable, which every torch reads."""
    return settings.log_line_prefix_template or config.log_line_prefix_template or ""


def numa_cpus(local_rank: int, numa_options: Any) -> set[int]:
    """The logical CPUs that --numa-binding gives a local rank. The argument `gpu_index` is now `device_index`."""
    find = binding._get_validated_logical_cpus_to_bind_to
    index = "device_index" if "device_index" in inspect.signature(find).parameters else "gpu_index"
    return set(find(**{index: local_rank}, numa_options=numa_options))
