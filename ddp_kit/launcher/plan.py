"""The plan of a launch on this node. The pure function `make` turns a `LaunchSpec` into a `Plan`."""

import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from string import Template
from types import MappingProxyType
from typing import Any

from ddp_kit.devices.choice import Chosen, choose
from ddp_kit.devices.cpus import Cpus, threads_each
from ddp_kit.devices.gpus import Gpu, visible
from ddp_kit.env import (
    GPU_ORDER,
    GPUS_PER_PROCESS,
    GRACE_DEFAULT,
    GROUP_RANK,
    GROUP_WORLD_SIZE,
    LINE_PREFIX_DEFAULT,
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    MASTER_ADDR,
    MASTER_PORT,
    MAX_RESTARTS,
    NCCL_ERROR_HANDLING,
    NO_COLOR,
    NODE_CHANGES,
    PROCESSES_DEFAULT,
    PYTHON,
    RANK,
    RESTART_COUNT,
    ROLE_NAME,
    ROLE_RANK,
    ROLE_WORLD_SIZE,
    RUN_ID,
    SIGNALS,
    THREADS,
    UNINTERRUPTIBLE_TIMEOUT,
    USE_AGENT_STORE,
    VARIABLES_OF_ONE_WORKER,
    VISIBLE_GPUS,
    WORLD_SIZE,
    agent_serves_store,
    launcher_grace,
)
from ddp_kit.errors import UsageError
from ddp_kit.launcher import rendezvous
from ddp_kit.launcher.job import RankAssignment
from ddp_kit.launcher.program import Program
from ddp_kit.launcher.rendezvous import Rendezvous
from ddp_kit.launcher.spec import LaunchSpec
from ddp_kit.launcher.warm.messages import Import
from ddp_kit.texts import plural

GRACE_SECONDS = 25
"""Seconds from SIGTERM to SIGKILL. Kubernetes kills the launcher after 30 s; 5 s remain for the verdict and cleanup."""
_FOR_THE_VERDICT = 5
"""Seconds reserved for the verdict within the grace period that the cluster gives the launcher after SIGTERM."""
_MAX_PROCESSES = 1 << 22  # PID_MAX_LIMIT
_TORCHRUN_ONLY = "torchrun itself runs this job, because only torchrun supports {}; the exit code is torchrun's"
_RUN_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


@dataclass(frozen=True)
class WorkerResources:
    """The GPUs and cores of one worker of this node."""

    gpus: tuple[Gpu, ...] = ()
    """The worker's GPUs; empty: the worker has no GPU, or the script chooses one."""
    cpus: tuple[int, ...] = ()
    """The CPU cores that the worker may use; empty: all cores that the launcher may use."""


@dataclass(frozen=True)
class Logs:
    """Destinations of the workers' output; the fields are named after torchrun's flags."""

    log_dir: str | None
    redirects: str
    tee: str
    local_ranks_filter: frozenset[int]
    """The local ranks whose output is shown on the console; empty: all."""
    log_line_prefix_template: str | None
    """Template for the labels; None: not given; empty: torch's label, and only for output that also goes to a file."""
    duplicate_stdout_filters: tuple[str, ...]
    duplicate_stderr_filters: tuple[str, ...]
    logs_specs: str | None

    @property
    def are_kept(self) -> bool:
        """Whether the folder is kept after the job."""
        return self.log_dir is not None or self.redirects != "0"

    @property
    def copy_console(self) -> bool:
        """Whether console output is also written to one file per rank."""
        return self.log_dir is not None and self.redirects == self.tee == "0"


@dataclass(frozen=True)
class Plan:
    """Everything that this node will do: `--dry-run` prints it, `agent.run` executes it."""

    spec: LaunchSpec
    """The command line. Its torchrun settings are complete: the launcher has chosen those that were not given."""
    read_by_torchrun: frozenset[str]
    """Names of settings that need no flag in a torchrun command, because torchrun reads their environment variables."""
    python: str
    """The interpreter of the workers."""
    may_fork: bool
    """Whether the warm server may fork the workers."""
    torchrun_only: str
    """The setting for which torchrun itself has to run the job; empty: ddpkit runs it."""
    workers: tuple[WorkerResources, ...]
    """The resources of each worker, by local rank."""
    env: Mapping[str, str]
    """The variables that the launcher adds to the workers' environment, in addition to torchrun's variables."""
    origin: Mapping[str, str]
    """The source of each value in `env`, such as `--gpus 2`."""
    agent_serves_store: bool
    """Whether the launcher serves the workers' store; if not, the worker of rank 0 serves it."""
    uninterruptible_state_timeout: float
    """Seconds that a worker may spend in the kernel's uninterruptible sleep; 0: no limit."""
    colour: bool
    """Whether labels on a terminal may be coloured."""
    notices: tuple[str, ...]
    """Lines that are printed before the workers start."""

    @property
    def torchrun(self) -> Mapping[str, Any]:
        """torchrun's settings, by the names in its parser."""
        return self.spec.torchrun

    @property
    def held_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs to hold until the job ends; none if the plan is only printed."""
        return tuple(gpu for worker in self.workers for gpu in worker.gpus if not self.spec.dry_run)

    @property
    def script(self) -> str:
        """The script, module or program to run."""
        return self.spec.script

    @property
    def script_arguments(self) -> tuple[str, ...]:
        """The arguments of the script. They may contain `${local_rank}`, as may the path of the script."""
        return tuple(map(str, self.torchrun["training_script_args"]))

    @property
    def is_wrapped(self) -> bool:
        """Whether a worker may be a wrapper, such as a shell, that starts the rank itself (--no-python)."""
        return bool(self.torchrun["no_python"] or self.torchrun["run_path"])

    @property
    def role(self) -> str:
        """The value of --role."""
        return str(self.torchrun["role"])

    @property
    def virtual_local_rank(self) -> bool:
        """Whether --virtual-local-rank is set: each worker then sees a single GPU and has local rank 0."""
        return bool(self.torchrun["virtual_local_rank"])

    @property
    def numa_binding(self) -> str | None:
        """The value of --numa-binding; None: the workers use the cores given in `workers`."""
        binding: str | None = self.torchrun["numa_binding"]
        return binding

    @property
    def shutdown_timeout(self) -> int:
        """Seconds from SIGTERM to SIGKILL."""
        return int(self.torchrun["shutdown_timeout"])

    @property
    def signals_to_handle(self) -> tuple[str, ...]:
        """Names of the signals that stop the job."""
        names = self.torchrun["signals_to_handle"].split(",")
        return tuple(name for name in names if name.strip() not in self.spec.ignored_signals)

    @cached_property
    def rendezvous(self) -> Rendezvous:
        """The rendezvous, and the limits on nodes and restarts. Raises `UsageError` for invalid settings."""
        return rendezvous.read(self.torchrun, self.spec.place)

    @cached_property
    def logs(self) -> Logs:
        """The destinations of the workers' output. Raises `UsageError` for invalid settings."""
        settings = self.torchrun
        ranks = settings["local_ranks_filter"]
        try:
            local_ranks_filter = frozenset(int(rank) for rank in ranks.split(",") if ranks)
        except ValueError:
            raise UsageError(f"--local-ranks-filter {ranks} is not a list of numbers", "for example: 0,1,2") from None
        given = {field.name: settings[field.name] for field in fields(Logs)}
        given["local_ranks_filter"] = local_ranks_filter
        for name in ("duplicate_stdout_filters", "duplicate_stderr_filters"):
            given[name] = tuple(settings[name])
        return Logs(**given)

    @property
    def command(self) -> tuple[str, ...]:
        """The command line of a worker, as torchrun builds it; may contain `${local_rank}`."""
        words = (self.script, *self.script_arguments)
        if self.torchrun["run_path"]:
            return sys.executable, "-u", "-c", _RUN_PATH, *words
        if self.torchrun["no_python"]:
            return words
        return Program(self.python, self.script, self.script_arguments, self.torchrun["module"]).command_line

    def command_line(self, local_rank: int) -> tuple[str, ...]:
        """The command line of the worker with this local rank. `${local_rank}` is replaced by the number."""
        return self.command[0], *_fill_local_rank(local_rank, self.command[1:])

    def program(self, local_rank: int) -> Program | None:
        """The program that a forked worker runs, or None if the worker cannot be forked."""
        if not self.may_fork:
            return None
        name, *arguments = _fill_local_rank(local_rank, (self.script, *self.script_arguments))
        return Program(self.python, name, tuple(arguments), self.torchrun["module"])

    def shared_environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """The part of the workers' environment that is the same in all of them. `env`: the launcher's environment."""
        return {NCCL_ERROR_HANDLING: "1", **env, **self.env}

    def imports(self, env: Mapping[str, str], unfit: Collection[str]) -> Import | None:
        """The imports to make before the workers are forked, or None if the workers cannot be forked.

        `env`: the launcher's environment. `unfit`: packages that the workers have to import themselves.
        """
        program = self.program(0)
        if program is None:
            return None
        differing = (*VARIABLES_OF_ONE_WORKER, *[VISIBLE_GPUS] * self.virtual_local_rank)
        return Import(program, self.shared_environment(env), differing, self.spec.preloaded(), tuple(unfit))

    def environment(self, assignment: RankAssignment, local_rank: int, env: Mapping[str, str]) -> dict[str, str]:
        """A worker's environment, without the variable for its error file. `env`: the launcher's environment.

        Source of the names: torch 2.13, `LocalElasticAgent._start_workers`.
        """
        inherited = self.shared_environment(env)
        contract = {
            RANK: assignment.first_rank + local_rank,
            LOCAL_RANK: local_rank,
            WORLD_SIZE: assignment.world_size,
            LOCAL_WORLD_SIZE: len(self.workers),
            GROUP_RANK: assignment.group_rank,
            GROUP_WORLD_SIZE: assignment.group_world_size,
            ROLE_NAME: self.role,
            ROLE_RANK: assignment.first_role_rank + local_rank,
            ROLE_WORLD_SIZE: assignment.role_world_size,
            MASTER_ADDR: assignment.master_addr,
            MASTER_PORT: assignment.master_port,
            RESTART_COUNT: assignment.restarts,
            MAX_RESTARTS: self.rendezvous.limits.max_restarts,
            RUN_ID: self.rendezvous.run_id,
            USE_AGENT_STORE: self.agent_serves_store,
            SIGNALS: ",".join(self.signals_to_handle),
        }
        variables = inherited | {name: str(value) for name, value in contract.items()}
        if self.virtual_local_rank:
            variables |= {LOCAL_RANK: "0", VISIBLE_GPUS: _only_gpu(inherited, local_rank)}
        changes = assignment.round - assignment.restarts
        if changes:  # without a change of nodes, the environment is the same as under torchrun
            variables[NODE_CHANGES] = str(changes)
        return variables


def make(
    spec: LaunchSpec,
    machine: tuple[Gpu, ...],
    env: Mapping[str, str],
    run_id: str,
    cpus: Cpus,
    reserved: Mapping[str, str],
    *,
    defaults: Mapping[str, str] = MappingProxyType({}),
) -> Plan:
    """Decide how many processes run on which GPUs and cores, and all other settings, including the rendezvous.

    `run_id`: the default for --rdzv-id. `cpus`: the cores that the launcher may use. `reserved`: GPU UUID -> the
    other launch that reserved that GPU. `defaults`: ddpkit's default environment variables for the workers.
    Raises `UsageError` if the requested GPUs are not available, and for invalid settings.
    """
    requested = _requested_gpus(spec)
    chosen: Chosen = ()
    if requested is not None or spec.processes is None:  # if not, the script chooses its GPUs, as under torchrun
        typed = spec.command
        if spec.gpus_per_process is not None:
            typed = f"--gpus-per-process {spec.gpus_per_process} {typed}"
        chosen = choose(requested, typed, machine, env, reserved)
    _check_groups(spec, chosen)
    group_size = spec.gpus_per_process or 1
    processes = _processes(spec, len(chosen) // group_size, env)
    workers: tuple[WorkerResources, ...] = ()
    if chosen:
        gpus = [gpu for _, gpu in chosen]
        groups = [tuple(gpus[first : first + group_size]) for first in range(0, len(gpus), group_size)]
        workers = tuple(WorkerResources(group, _cores(group, cpus, spec)) for group in groups)
    elif processes.isdecimal():
        workers = (WorkerResources(),) * int(processes)
    variables = _gpu_variables(spec, chosen, env)
    # In a forked worker, torch counted the cores of the launcher, not those that the worker is bound to.
    bound = any(worker.cpus and len(worker.cpus) < len(cpus.core_of) for worker in workers)
    if THREADS not in env and (len(workers) > 1 or bound):
        threads = threads_each(cpus, [worker.cpus for worker in workers])
        variables[THREADS] = str(threads), "the cores divided among the processes of this node"
    variables |= {name: (value, "ddpkit's default") for name, value in defaults.items()}
    single_node = rendezvous.single_node_settings(spec.torchrun, run_id)
    settings = {**spec.torchrun, "nproc_per_node": processes, **single_node}
    if len(chosen) > 1 and any(gpu.is_mig for _, gpu in chosen):
        settings["virtual_local_rank"] = True  # CUDA shows a process at most one MIG device
    if not 0 < settings["monitor_interval"] < math.inf:
        problem = f"--monitor-interval must be greater than 0 seconds, not {settings['monitor_interval']}"
        raise UsageError(problem, "for example: --monitor-interval 0.1")
    if settings["module"] and settings["no_python"] and not settings["run_path"]:
        raise UsageError("--module and --no-python cannot be combined", "remove one of them")
    read_by_torchrun = _fill_from_environment(settings, spec.given, env)
    try:
        uninterruptible_state_timeout = max(0.0, float(env.get(UNINTERRUPTIBLE_TIMEOUT, "")))
    except ValueError:  # no limit, as in torch
        uninterruptible_state_timeout = 0.0
    notices = [*_gpu_notices(spec, chosen, machine, env)]
    if THREADS in variables:
        users = "the process" if processes == "1" else f"each of {processes} processes"
        notices.append(f"{THREADS}={variables[THREADS][0]} for {users}; set this variable to change the number")
    notices += [*rendezvous.overridden_flags(spec.torchrun), *rendezvous.ignored_settings(settings)]
    spec = spec._replace(torchrun=MappingProxyType(settings))
    torchrun_only = spec.torchrun_only(env)
    if torchrun_only:
        notices.append(_TORCHRUN_ONLY.format(torchrun_only))
    plan = Plan(
        spec=spec,
        read_by_torchrun=read_by_torchrun,
        python=env.get(PYTHON, sys.executable),
        may_fork=spec.may_fork(env),
        torchrun_only=torchrun_only,
        workers=workers,
        env=MappingProxyType({name: value for name, (value, _) in variables.items()}),
        origin=MappingProxyType({name: why for name, (_, why) in variables.items()}),
        agent_serves_store=settings["rdzv_backend"] == "static" or agent_serves_store(env),
        uninterruptible_state_timeout=uninterruptible_state_timeout,
        colour=not env.get(NO_COLOR),
        notices=tuple(notices),
    )
    _ = plan.rendezvous, plan.logs  # raise for invalid settings now
    if spec.spares and torchrun_only:
        raise UsageError(
            f"--spares {spec.spares} has no effect with {torchrun_only}, for which torchrun itself runs the job",
            "remove one of the two",
        )
    if spec.spares and plan.rendezvous.limits.max_nodes == 1:
        raise UsageError(
            f"--spares {spec.spares} needs a job of several nodes, but this job has one",
            "use --nnodes N, where N is the number of nodes that train, or remove --spares",
        )
    if plan.virtual_local_rank:
        for local_rank in range(len(workers)):
            _only_gpu({**env, **plan.env}, local_rank)
    return plan


def _requested_gpus(spec: LaunchSpec) -> str | None:
    """The requested GPUs; None: the flags do not say which GPUs or how many.

    This is the value of --gpus or, without it, the product of --gpus-per-process and --nproc-per-node.
    """
    if spec.gpus is None and spec.gpus_per_process is not None and spec.processes is not None:
        if not spec.processes.isdecimal():
            raise UsageError(
                f"--gpus-per-process {spec.gpus_per_process} with --nproc-per-node {spec.processes} does not specify "
                "how many GPUs to use",
                "set --gpus to the number of GPUs of this node, and remove --nproc-per-node",
            )
        return str(int(spec.processes) * spec.gpus_per_process)
    return spec.gpus


def _check_groups(spec: LaunchSpec, chosen: Chosen) -> None:
    """Raise `UsageError` if the GPUs cannot be divided into equal groups."""
    count = spec.gpus_per_process
    if count is None:
        return
    if not chosen:
        raise UsageError(
            f"--gpus-per-process {count} needs GPUs, but this machine has no NVIDIA GPU or no NVIDIA driver",
            f"run `ddpkit launch {spec.command}` to train in one process on the CPU",
        )
    if len(chosen) % count:
        most = len(chosen) // count * count
        hint = f"use --gpus-per-process {len(chosen)}, or use a machine with more GPUs"
        if most:
            hint = f"run `ddpkit launch --gpus {most} --gpus-per-process {count} {spec.command}`"
        gpus = plural(len(chosen), "GPU")
        raise UsageError(f"--gpus-per-process {count} does not evenly divide the {gpus} of this launch", hint)
    if count > 1 and spec.torchrun["virtual_local_rank"]:
        raise UsageError(
            f"--gpus-per-process {count} contradicts --virtual-local-rank, which gives each process a single GPU",
            "remove one of the two flags",
        )
    if count > 1 and any(gpu.is_mig for _, gpu in chosen):
        raise UsageError(
            f"--gpus-per-process {count}: a process can use at most one MIG device",
            "remove --gpus-per-process, or select whole GPUs with --gpus",
        )


def _processes(spec: LaunchSpec, groups: int, env: Mapping[str, str]) -> str:
    """The number of processes: --nproc-per-node if given, else the number of groups of GPUs, but at least 1."""
    if spec.processes is None:
        return str(max(1, groups))
    if spec.gpus is not None and spec.processes != str(groups):
        hint = "remove one of the two flags"
        if PROCESSES_DEFAULT in env:
            hint = f"unset {PROCESSES_DEFAULT}, or {hint}"
        count = spec.gpus_per_process or 1
        group = "GPU" if count == 1 else f"{count} GPUs"
        raise UsageError(
            f"--gpus {spec.gpus} means {groups} processes, one per {group}, but --nproc-per-node is {spec.processes}",
            hint,
        )
    if spec.processes.lstrip("-").isdecimal() and not 1 <= int(spec.processes) <= _MAX_PROCESSES:
        limit = "less than 1" if int(spec.processes) < 1 else f"more processes than Linux allows ({_MAX_PROCESSES})"
        raise UsageError(f"--nproc-per-node {spec.processes} is {limit}", "use a number of processes, or auto")
    return spec.processes


def _cores(gpus: tuple[Gpu, ...], cpus: Cpus, spec: LaunchSpec) -> tuple[int, ...]:
    """The usable cores near any of these GPUs; empty if they are unknown for a GPU, or if torch binds the workers."""
    if spec.torchrun["numa_binding"] is not None or not all(gpu.near for gpu in gpus):
        return ()
    return tuple(sorted({cpu for gpu in gpus for cpu in gpu.near if cpu in cpus.core_of}))


def _gpu_variables(spec: LaunchSpec, chosen: Chosen, env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The variables that select GPUs, each with its value and the reason for it."""
    if not chosen:
        return {}
    count = spec.gpus_per_process
    why = "one process per visible GPU"
    if spec.gpus is not None:
        why = f"--gpus {spec.gpus}"
    elif count is not None:
        why = f"--gpus-per-process {count}"
    variables = {VISIBLE_GPUS: (",".join(word for word, _ in chosen), why)}
    if count is not None:
        variables[GPUS_PER_PROCESS] = str(count), f"--gpus-per-process {count}"
    if VISIBLE_GPUS not in env:  # number GPUs as NVML and nvidia-smi do
        variables[GPU_ORDER] = "PCI_BUS_ID", "so that GPU numbers match those of nvidia-smi"
    return variables


def _gpu_notices(spec: LaunchSpec, chosen: Chosen, machine: tuple[Gpu, ...], env: Mapping[str, str]) -> Iterator[str]:
    """Lines about the GPUs that are used, and about what may be unexpected."""
    listed = [word for word in env.get(VISIBLE_GPUS, "").split(",") if word.strip() not in ("", "-1")]
    usable = len(visible(machine, env))
    if machine and usable < len(listed):
        mask = f"{VISIBLE_GPUS}={env[VISIBLE_GPUS]}"
        yield f"only {usable} of the {len(listed)} GPUs in {mask} can be used: a GPU does not exist or is listed twice"
    yield from (f"GPU {gpu.described()}" for _, gpu in chosen)
    parents = [gpu.index for _, gpu in chosen if gpu.mig is not None]
    for index in sorted({index for index in parents if parents.count(index) > 1}):
        yield (
            f"{parents.count(index)} processes use MIG devices of GPU {index}, which NCCL does not support: select one "
            'with --gpus UUID, or set parallel={"share_gpus": True} in a TrainerConfig'
        )
    busy = [gpu.label for _, gpu in chosen if gpu.busy]
    if busy and str(spec.gpus).strip().isdecimal():
        yield f"fewer than {spec.gpus} GPUs are free: this launch shares GPU {', '.join(busy)} with other processes"
    place = spec.place
    if place is not None and place.gpus and len(chosen) < place.gpus and spec.gpus is None and spec.processes is None:
        source = place.sources.get("GPUs", "it")
        visible_gpus = "1 is" if len(chosen) == 1 else f"{len(chosen) or 'none'} are"
        yield (
            f"{place.environment} assigned {plural(place.gpus, 'GPU')} to this node ({source}), "
            f"but {visible_gpus} visible; run `ddpkit doctor` on this node to see why"
        )


def _only_gpu(env: Mapping[str, str], local_rank: int) -> str:
    """The only GPU that a rank sees with --virtual-local-rank. Source: LocalElasticAgent._set_local_rank_env."""
    mask = env.get(VISIBLE_GPUS)
    if mask is None:
        return str(local_rank)
    if local_rank >= len(mask.split(",")):
        raise UsageError(
            f"--virtual-local-rank: there is no GPU for local rank {local_rank} in {VISIBLE_GPUS}={mask}",
            "start at most as many processes as there are visible GPUs",
        )
    return mask.split(",")[local_rank].strip()


def _fill_local_rank(local_rank: int, arguments: Iterable[str]) -> list[str]:
    return [Template(word).safe_substitute(local_rank=local_rank) for word in arguments]  # as torch does


def _fill_from_environment(settings: dict[str, Any], given: Collection[str], env: Mapping[str, str]) -> frozenset[str]:
    """Fill in the line prefix and the shutdown timeout from the environment if no flag set them.

    Return the names of the settings that come from environment variables. `given`: the names of the settings that flags
    or PET_ variables set. An empty prefix removes the labels, but only if it comes from a flag or a PET_ variable.
    Raises `UsageError` for a shutdown timeout that is not a number of seconds.
    """
    read = set[str]()
    if not settings["log_line_prefix_template"] and "log_line_prefix_template" not in given:
        settings["log_line_prefix_template"] = env.get(LINE_PREFIX_DEFAULT)
        read.add("log_line_prefix_template")
    source = "--shutdown-timeout"
    seconds = settings["shutdown_timeout"]
    if seconds is None and GRACE_DEFAULT in env:
        source = GRACE_DEFAULT
        seconds = env[GRACE_DEFAULT]
        read.add("shutdown_timeout")
    elif seconds is None:  # shorter than the cluster's grace period for this launcher, if that period is known
        known = launcher_grace(env)
        seconds = GRACE_SECONDS if known is None else max(1, known - _FOR_THE_VERDICT)
    try:
        settings["shutdown_timeout"] = int(seconds)
    except ValueError:
        settings["shutdown_timeout"] = -1
    if settings["shutdown_timeout"] < 0:
        raise UsageError(f"{source} must be a number of seconds, 0 or more, not {seconds!r}", "for example: 30")
    return frozenset(read)
