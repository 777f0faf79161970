"""All uses of torch APIs in the launcher that are private or differ between versions. Check them when torch changes.

The code checks for features, not version numbers. It was checked against the sources of torch 2.10 to 2.15;
docs/versions.md lists the differences that users can see.
"""

import argparse
import inspect
from contextlib import suppress
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.argparse_util import env as env_or_default
from torch.distributed.launcher.api import LaunchConfig
from torch.numa import binding

from ddp_kit.env import GRACE_DEFAULT
from ddp_kit.errors import UsageError

_GRACE_SECONDS = 30  # torch's default

# Flags of later torch versions that ddpkit implements itself, so that they work with all supported versions.
_LATER_FLAGS: dict[str, dict[str, Any]] = {
    "shutdown_timeout": {
        "type": int,
        "help": "Time in seconds between SIGTERM and SIGKILL when workers are stopped. Defaults to"
        f" the value of {GRACE_DEFAULT}, or to {_GRACE_SECONDS} if that is not set.",
    },
    "log_line_prefix_template": {
        "default": "",
        "help": "Template for the prefix of each line that is shown and also redirected to a file (--tee)."
        " Macros: ${role_name}, ${local_rank}, ${rank}, ${hostname}.",
    },
}


def torchrun_parser() -> argparse.ArgumentParser:
    """torchrun's parser, with the flags of later versions that ddpkit implements.

    Raises `UsageError` if a PET_ variable is invalid.
    """
    parser = _torchrun_parser()
    for name, settings in _LATER_FLAGS.items():
        with suppress(argparse.ArgumentError):  # this version of torch already has the flag
            parser.add_argument(f"--{name.replace('_', '-')}", f"--{name}", action=env_or_default, **settings)
    return parser


def torchrun_defaults() -> dict[str, Any]:
    """The default settings of the installed torchrun, for the flags that it has."""
    return vars(_torchrun_parser().parse_args(["script.py"]))


def _torchrun_parser() -> argparse.ArgumentParser:
    try:
        return torchrun.get_args_parser()
    except ValueError as error:
        raise UsageError(f"a PET_ variable has an invalid value: {error}", "boolean variables must be 0 or 1") from None


def local_world_size(nproc_per_node: str) -> int:
    """The number of processes for --nproc-per-node auto, cpu, gpu or xpu on this machine.

    Raises `ValueError` if torch does not know the word, or if this machine has no such device.
    """
    return int(torchrun.determine_local_world_size(nproc_per_node))


def launch_config(settings: argparse.Namespace) -> LaunchConfig:
    """torchrun's own `LaunchConfig` for these settings. Invalid settings raise different types of exceptions."""
    config: LaunchConfig = torchrun.config_from_args(settings)[0]
    return config


def numa_cpus(local_rank: int, numa_binding: str) -> set[int]:
    """The logical CPUs that --numa-binding assigns to a local rank. Source: torch.numa.binding of torch 2.10 to 2.15.

    torch 2.14 renamed the argument `gpu_index` of its function to `device_index`.
    """
    find = binding._get_validated_logical_cpus_to_bind_to
    index = "device_index" if "device_index" in inspect.signature(find).parameters else "gpu_index"
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(numa_binding))
    return set(find(**{index: local_rank}, numa_options=options))
