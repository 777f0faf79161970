"""All uses of torch APIs in the launcher that are private or differ between versions. Check them when torch changes.

The code checks for features, not version numbers. It was checked against the sources of torch 2.10 to 2.15;
docs/versions.md lists the differences that users can see.
"""

import argparse
import inspect
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.launcher.api import LaunchConfig
from torch.numa import binding

from ddp_kit.errors import UsageError


def torchrun_defaults() -> dict[str, Any]:
    """The default settings of the installed torchrun, for the flags that it has."""
    return vars(torchrun_parser().parse_args(["script.py"]))


def torchrun_parser() -> argparse.ArgumentParser:
    """The parser of the installed torchrun. Raises `UsageError` if it rejects the value of a PET_ variable."""
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
    """torchrun's own `LaunchConfig` for these settings. Invalid settings raise different types of exceptions.

    Settings that only a torch newer than ddpkit knows have their defaults.
    """
    complete = argparse.Namespace(**{**torchrun_defaults(), **vars(settings)})
    config: LaunchConfig = torchrun.config_from_args(complete)[0]
    return config


def numa_cpus(local_rank: int, numa_binding: str) -> set[int]:
    """The logical CPUs that --numa-binding assigns to a local rank. Source: torch.numa.binding of torch 2.10 to 2.15.

    torch 2.14 renamed the argument `gpu_index` of its function to `device_index`.
    """
    find = binding._get_validated_logical_cpus_to_bind_to
    index = "device_index" if "device_index" in inspect.signature(find).parameters else "gpu_index"
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(numa_binding))
    return set(find(**{index: local_rank}, numa_options=options))
