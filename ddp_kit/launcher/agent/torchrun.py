"""What the launcher takes from torchrun: its settings, and its choice of log files.

All uses of torch APIs in the launcher that are private or differ between versions are here; check them when torch
changes. The code checks for features, not version numbers. It was checked against the sources of torch 2.10 to 2.15;
docs/versions.md lists the differences that users can see.
"""

import argparse
import inspect
import os
import socket
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from string import Template
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, Std
from torch.distributed.elastic.multiprocessing.tail_log import TailLog
from torch.numa import binding

from ddp_kit.env import OUTPUT_LOG
from ddp_kit.errors import LaunchError, UsageError, advice_for
from ddp_kit.launcher.output import Output, Route, Streams, private_files
from ddp_kit.launcher.plan import Logs, Plan

# --- Settings ---------------------------------------------------------------------------------------------------------


def torchrun_defaults() -> dict[str, Any]:
    """The default settings of the installed torchrun, for the flags that it has."""
    return vars(torchrun_parser().parse_args(["script.py"]))


def torchrun_parser() -> argparse.ArgumentParser:
    """The parser of the installed torchrun. Raises `UsageError` if it rejects the value of a PET_ variable."""
    try:
        return run.get_args_parser()
    except ValueError as error:
        raise UsageError(f"a PET_ variable has an invalid value: {error}", "boolean variables must be 0 or 1") from None


def local_world_size(nproc_per_node: str) -> int:
    """The number of processes for --nproc-per-node auto, cpu, gpu or xpu on this machine.

    Raises `ValueError` if torch does not know the word, or if this machine has no such device.
    """
    return int(run.determine_local_world_size(nproc_per_node))


def numa_cpus(local_rank: int, numa_binding: str) -> set[int]:
    """The logical CPUs that --numa-binding assigns to a local rank. Source: torch.numa.binding of torch 2.10 to 2.15.

    torch 2.14 renamed the argument `gpu_index` of its function to `device_index`.
    """
    find = binding._get_validated_logical_cpus_to_bind_to
    index = "device_index" if "device_index" in inspect.signature(find).parameters else "gpu_index"
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(numa_binding))
    return set(find(**{index: local_rank}, numa_options=options))


# --- Log files --------------------------------------------------------------------------------------------------------
# torch's log settings, or a plug-in's, choose the files of each worker. ddpkit's streams write to these files.


def logs_specs(logs: Logs, folder: str) -> LogsSpecs:
    """Create the `LogsSpecs` object, torch's or a plug-in's, that chooses the log files of a round's workers.

    Raises `UsageError` for settings that its class rejects.
    """
    try:
        with private_files():  # the constructor creates a folder
            return _logs_specs_class(logs.logs_specs)(
                log_dir=folder,
                redirects=Std.from_str(logs.redirects),
                tee=Std.from_str(logs.tee),
                local_ranks_filter=set(logs.local_ranks_filter) or None,
            )
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        raise UsageError(
            f"torch rejects this command line: {error}", advice_for(error, "see `ddpkit launch --help`")
        ) from None


def _logs_specs_class(name: str | None) -> type[LogsSpecs]:
    if name is None:
        return DefaultLogsSpecs
    for plugin in entry_points(group="torchrun.logs_specs", name=name):
        loaded: type[LogsSpecs] = plugin.load()
        return loaded
    raise ValueError(f"no installed package has the entry point torchrun.logs_specs[{name}]")


class RoundLogs:
    """The files and streams of one round's workers on this node."""

    def __init__(
        self,
        plan: Plan,
        specs: LogsSpecs,
        first_rank: int,
        envs: dict[int, dict[str, str]],
        is_ending: Callable[[int], bool],
    ) -> None:
        """Create the log files.

        `specs`: chooses the files, and adds the path of each worker's error file to its environment in `envs`.
        `is_ending`: a function that returns whether a local rank is known to be ending with an exception.

        Raises `LaunchError` if the folder cannot be used.
        """
        try:
            with private_files():
                dest = specs.reify(envs)
            self.error_files: dict[int, str] = dest.error_files
            direct = len(envs) == 1 and plan.rendezvous.limits.max_nodes == 1
            ranks = {local_rank: first_rank + local_rank for local_rank in envs}
            self.output = Output(streams(plan.logs, plan.role, dest, ranks), direct, plan.colour, is_ending)
            shown = (
                (dest.tee_stdouts, dest.filtered_stdout, plan.logs.duplicate_stdout_filters),
                (dest.tee_stderrs, dest.filtered_stderr, plan.logs.duplicate_stderr_filters),
            )
            self._filtered = [_Filtered(plan.role, files, path, words) for files, path, words in shown if words]
        except OSError as error:
            raise LaunchError(
                f"the log folder {specs.root_log_dir} cannot be used: {error.strerror or error}",
                advice_for(error, "choose another folder with --log-dir, or another TMPDIR"),
            ) from None

    def start(self) -> None:
        """Start reading the output. Call this only after every worker has inherited its streams."""
        self.output.start()
        for file in self._filtered:
            file.start()

    def end(self) -> None:
        """Stop collecting filtered lines. Call this only once the workers' files are complete."""
        for file in self._filtered:
            file.end()


class _Filtered:
    """A file that collects, from the files of all ranks, the lines that contain one of the given words."""

    def __init__(self, role: str, files: dict[int, str], path: str, words: Collection[str]) -> None:
        with private_files():
            self._file = Path(path).open("w", errors="replace", buffering=1)  # noqa: SIM115  # until `end`
        self._tail = TailLog(role, files, self._file, log_line_filter=lambda line: any(word in line for word in words))

    def start(self) -> None:
        self._tail.start()

    def end(self) -> None:
        self._tail.stop()
        self._file.close()


def streams(logs: Logs, role: str, dest: LogsDest, ranks: Mapping[int, int]) -> list[Streams]:
    """The streams of the workers, according to torch's log settings. `ranks`: local rank -> rank."""
    streams_of_workers = []
    for local_rank, rank in ranks.items():
        macros = {"role_name": role, "rank": rank, "local_rank": local_rank, "hostname": socket.gethostname()}
        template = logs.log_line_prefix_template
        label = None
        if template is not None:
            label = Template(template).safe_substitute(macros)
        copy = ""
        if logs.copy_console:
            copy = str(Path(dest.error_files[local_rank]).with_name(OUTPUT_LOG))
        torch_label = f"[{role}{local_rank}]:"
        out = _route(local_rank, dest.stdouts, dest.tee_stdouts, label, torch_label, copy)
        err = _route(local_rank, dest.stderrs, dest.tee_stderrs, label, torch_label, copy)
        streams_of_workers.append(Streams(local_rank, rank, out, err))
    return streams_of_workers


def _route(
    local_rank: int, files: dict[int, str], shown: dict[int, str], label: str | None, torch_label: str, copy: str
) -> Route:
    file = files[local_rank]
    if not file:
        return Route(True, copy, label)
    return Route(local_rank in shown and file != os.devnull, file, label or torch_label)
