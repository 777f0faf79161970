"""What will be done: a `Plan` for this node, made from the spec by a pure function."""

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from string import Template
from types import MappingProxyType
from typing import Any

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
    VISIBLE_GPUS,
    WORLD_SIZE,
)
from ddp_kit.errors import UsageError
from ddp_kit.launcher import rendezvous
from ddp_kit.launcher.devices.choice import Chosen, choose
from ddp_kit.launcher.devices.cpus import Cpus, threads_each
from ddp_kit.launcher.devices.gpus import Gpu, visible
from ddp_kit.launcher.job import RankAssignment
from ddp_kit.launcher.rendezvous import Rendezvous
from ddp_kit.launcher.spec import LaunchSpec
from ddp_kit.launcher.warm.messages import Program

GRACE_SECONDS = 25
"""From SIGTERM to SIGKILL. Kubernetes kills the launcher itself after 30 s, which it needs for verdict and clean-up."""
_MOST_PROCESSES = 1 << 22  # PID_MAX_LIMIT
_RUN_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


@dataclass(frozen=True)
class Place:
    """Where one process of this node runs."""

    gpus: tuple[Gpu, ...] = ()
    """Empty: on no GPU, or on what its script takes."""
    cpus: tuple[int, ...] = ()
    """The CPU cores it may use; empty: all that the launcher may."""


@dataclass(frozen=True)
class Logs:
    """Where the workers' output goes: torchrun's flags by their own names."""

    log_dir: str | None
    redirects: str
    tee: str
    local_ranks_filter: frozenset[int]
    """Empty: all reach the console."""
    log_line_prefix_template: str
    duplicate_stdout_filters: tuple[str, ...]
    duplicate_stderr_filters: tuple[str, ...]
    logs_specs: str | None
    colour: bool

    @property
    def are_kept(self) -> bool:
        """Whether the folder outlives the job."""
        return self.log_dir is not None or self.redirects != "0"

    @property
    def copy_console(self) -> bool:
        """Whether what is shown is also kept, in one file per rank."""
        return self.log_dir is not None and self.redirects == self.tee == "0"


@dataclass(frozen=True)
class Plan:
    """What this node will do, complete and final: `--dry-run` prints it, `agent.run` does it."""

    command: tuple[str, ...]
    """What a worker executes, before `${local_rank}` is put in."""
    forked: Program | None
    """The same as what a fork of the warm server becomes; None: it has to be executed."""
    is_wrapped: bool
    """Whether a worker may be another program around the rank, such as a shell (--no-python)."""
    places: tuple[Place, ...]
    """By local rank."""
    env: Mapping[str, str]
    """What the launcher adds to the workers' environment, besides torchrun's contract."""
    origin: Mapping[str, str]
    """Why each variable of `env` has its value, in a few words, such as `--gpus 2`."""
    role: str
    rendezvous: Rendezvous
    signals_to_handle: tuple[str, ...]
    """Names of the signals that close the job."""
    shutdown_timeout: int
    """Seconds from SIGTERM to SIGKILL."""
    hang_timeout: float | None
    """Seconds; 0: no limit; None: `agent.watch.DEFAULT_SECONDS`."""
    uninterruptible_state_timeout: float
    """Seconds that a worker may be in the kernel's uninterruptible sleep; 0: no limit."""
    virtual_local_rank: bool
    gpus_per_process: int
    numa_binding: str | None
    logs: Logs
    event_log_handler: str
    torchrun: Mapping[str, Any]
    """The same in torchrun's own settings, for a rendezvous that torch's agent serves, and to be typed."""
    flags: tuple[str, ...]
    """The launcher's own flags as they were typed, for the commands that other nodes are told."""
    script_as_typed: str
    """The script, `...` for its arguments."""
    says: tuple[str, ...]
    """What the user is told before the start."""

    @property
    def script(self) -> str:
        """The script, module or program."""
        return str(self.torchrun["training_script"])

    def words(self, local_rank: int) -> tuple[str, ...]:
        """What a worker executes."""
        return self.command[0], *_put_in(local_rank, self.command[1:])

    def program(self, local_rank: int) -> Program | None:
        """What a fork becomes, if it can."""
        if self.forked is None:
            return None
        name, *arguments = _put_in(local_rank, (self.forked.name, *self.forked.arguments))
        return replace(self.forked, name=name, arguments=tuple(arguments))

    def environment(self, assignment: RankAssignment, local_rank: int, env: Mapping[str, str]) -> dict[str, str]:
        """All that a worker finds, but for its error file. `env`: the launcher's own.

        Source of the names: torch 2.13, `LocalElasticAgent._start_workers`.
        """
        found = {NCCL_ERROR_HANDLING: "1", **env, **self.env}
        virtual = {LOCAL_RANK: "0", VISIBLE_GPUS: _only_gpu(found, local_rank)} if self.virtual_local_rank else {}
        contract = {
            RANK: assignment.first_rank + local_rank,
            LOCAL_RANK: local_rank,
            WORLD_SIZE: assignment.world_size,
            LOCAL_WORLD_SIZE: len(self.places),
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
            USE_AGENT_STORE: self.rendezvous.agent_serves_store,
            SIGNALS: ",".join(self.signals_to_handle),
        }
        return found | {name: str(value) for name, value in contract.items()} | virtual


def make(
    spec: LaunchSpec,
    machine: tuple[Gpu, ...],
    env: Mapping[str, str],
    run_id: str,
    cpus: Cpus,
    held: Mapping[str, str],
    *,
    defaults: Mapping[str, str] = MappingProxyType({}),
) -> Plan:
    """Settle how many processes run on which GPUs and cores, where they meet, and all else that was asked for.

    `run_id`: for a job that is given none. `cpus`: those that the launcher may use. `held`: by UUID, the other launch
    that holds a GPU. `defaults`: variables for the workers that do not depend on the command line.
    Raises `UsageError` where the GPUs asked for are not available, and for settings that cannot be used.
    """
    each = spec.gpus_per_process or 1
    asked = _asked_gpus(spec)
    # A number of processes without a word on GPUs is torchrun's way: the script takes the GPUs it wants.
    by_gpu = asked is not None or spec.processes is None
    again = spec.command if spec.gpus_per_process is None else f"--gpus-per-process {each} {spec.command}"
    chosen = choose(asked, again, machine, env, held) if by_gpu else ()
    _check_groups(spec, chosen)
    processes = _processes(spec, len(chosen) // each, env)
    places = _places(processes, chosen, each, cpus, bind=spec.torchrun["numa_binding"] is None)
    variables = _gpu_variables(spec, chosen, env) | _thread_variables(places, cpus, env)
    variables |= {name: (value, "ddpkit's default") for name, value in defaults.items()}
    settings = {**spec.torchrun, "nproc_per_node": processes, **rendezvous.meeting_point(spec.torchrun, run_id)}
    if settings["shutdown_timeout"] is None and GRACE_DEFAULT not in env:
        settings["shutdown_timeout"] = GRACE_SECONDS
    if len(chosen) > 1 and any(gpu.is_mig for _, gpu in chosen):
        settings["virtual_local_rank"] = True  # CUDA shows a process one MIG device at most
    _check_monitor_interval(settings["monitor_interval"])
    plan = Plan(
        command=_command(settings, env),
        forked=None if spec.cold else _forked(settings, env),
        is_wrapped=settings["no_python"] or settings["run_path"],
        places=places,
        env=MappingProxyType({name: value for name, (value, _) in variables.items()}),
        origin=MappingProxyType({name: why for name, (_, why) in variables.items()}),
        role=settings["role"],
        rendezvous=rendezvous.read(settings, env),
        signals_to_handle=_signals(settings["signals_to_handle"], spec.ignored_signals),
        shutdown_timeout=_shutdown_timeout(settings["shutdown_timeout"], env),
        hang_timeout=spec.hang_timeout,
        uninterruptible_state_timeout=_uninterruptible_state_timeout(env),
        virtual_local_rank=settings["virtual_local_rank"],
        gpus_per_process=each,
        numa_binding=settings["numa_binding"],
        logs=_logs(settings, env),
        event_log_handler=settings["event_log_handler"],
        torchrun=MappingProxyType(settings),
        flags=spec.flags,
        script_as_typed=spec.script_as_typed,
        says=(
            *_said_of_mask(machine, env),
            *_said_of_gpus(spec, chosen),
            *_said_of_threads(variables, processes),
            *rendezvous.overruled(spec.torchrun),
        ),
    )
    if plan.virtual_local_rank:
        for local_rank in range(len(places)):
            _only_gpu({**env, **plan.env}, local_rank)
    return plan


def _asked_gpus(spec: LaunchSpec) -> str | None:
    """The words after --gpus; those that --gpus-per-process and a number of processes stand for without them."""
    if spec.gpus is None and spec.gpus_per_process is not None and spec.processes is not None:
        if not spec.processes.isdecimal():
            raise UsageError(
                f"--gpus-per-process {spec.gpus_per_process} with --nproc-per-node {spec.processes} does not say how "
                "many GPUs to use",
                "type --gpus and the number of all GPUs, and leave --nproc-per-node out",
            )
        return str(int(spec.processes) * spec.gpus_per_process)
    return spec.gpus


def _check_groups(spec: LaunchSpec, chosen: Chosen) -> None:
    """Raise `UsageError` where the GPUs cannot be given to the processes in equal groups."""
    each = spec.gpus_per_process
    if each is None:
        return
    if not chosen:
        raise UsageError(
            f"--gpus-per-process {each} is not available: this machine has no NVIDIA GPU, or no driver for one",
            f"type `ddpkit launch {spec.command}` for a process on the CPU, which needs no such number",
        )
    if len(chosen) % each:
        most = len(chosen) // each * each
        raise UsageError(
            f"--gpus-per-process {each} does not divide the {len(chosen)} GPU{'s' * (len(chosen) > 1)} of this launch",
            f"type `ddpkit launch --gpus {most} --gpus-per-process {each} {spec.command}`"
            if most
            else f"type --gpus-per-process {len(chosen)}, or use a machine with more GPUs",
        )
    if each > 1 and spec.torchrun["virtual_local_rank"]:
        raise UsageError(
            f"--gpus-per-process {each}: with --virtual-local-rank a process sees one GPU", "leave one of the two out"
        )
    if each > 1 and any(gpu.is_mig for _, gpu in chosen):
        raise UsageError(
            f"--gpus-per-process {each}: a process can use one MIG device at most",
            "leave it out, or name whole GPUs with --gpus",
        )


def _processes(spec: LaunchSpec, gpus: int, env: Mapping[str, str]) -> str:
    """How many processes: as many as `gpus`, the groups of GPUs, what --nproc-per-node says, or 1."""
    if spec.processes is None:
        return str(max(1, gpus))
    if spec.gpus is not None and spec.processes != str(gpus):
        first = f"unset {PROCESSES_DEFAULT}, or " if PROCESSES_DEFAULT in env else ""
        each = spec.gpus_per_process or 1
        group = "GPU" if each == 1 else f"{each} GPUs"
        raise UsageError(
            f"--gpus {spec.gpus} means {gpus} processes, one per {group}, but --nproc-per-node is {spec.processes}",
            f"{first}leave one of the two out",
        )
    if spec.processes.lstrip("-").isdecimal() and not 1 <= int(spec.processes) <= _MOST_PROCESSES:
        how_many = "no process" if int(spec.processes) < 1 else "more processes than Linux can number"
        raise UsageError(f"--nproc-per-node {spec.processes} asks for {how_many}", "type at least 1")
    return spec.processes


def _places(processes: str, chosen: Chosen, each: int, cpus: Cpus, bind: bool) -> tuple[Place, ...]:
    """`each`: GPUs of one process."""
    if not chosen:
        return (Place(),) * (int(processes) if processes.isdecimal() else 0)
    groups = [tuple(gpu for _, gpu in chosen[first : first + each]) for first in range(0, len(chosen), each)]
    return tuple(Place(group, _near(group, cpus) if bind else ()) for group in groups)


def _near(gpus: tuple[Gpu, ...], cpus: Cpus) -> tuple[int, ...]:
    """The usable cores near any of these GPUs; none where one of them does not tell."""
    if not all(gpu.near for gpu in gpus):
        return ()
    return tuple(sorted({cpu for gpu in gpus for cpu in gpu.near if cpu in cpus.core_of}))


def _gpu_variables(spec: LaunchSpec, chosen: Chosen, env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Which GPUs the workers see, and why."""
    if not chosen:
        return {}
    why = "one process per visible GPU" if spec.gpus is None else f"--gpus {spec.gpus}"
    each = spec.gpus_per_process
    if each is not None and spec.gpus is None:
        why = f"--gpus-per-process {each}"
    variables = {VISIBLE_GPUS: (",".join(word for word, _ in chosen), why)}
    if each is not None:
        variables[GPUS_PER_PROCESS] = str(each), f"--gpus-per-process {each}"
    if VISIBLE_GPUS not in env:  # numbers mean what NVML and nvidia-smi mean by them
        variables[GPU_ORDER] = "PCI_BUS_ID", "so that GPU numbers are those of nvidia-smi"
    return variables


def _said_of_mask(machine: tuple[Gpu, ...], env: Mapping[str, str]) -> Iterator[str]:
    words = [word for word in env.get(VISIBLE_GPUS, "").split(",") if word.strip() not in ("", "-1")]
    seen = len(visible(machine, env))
    if machine and seen < len(words):
        mask = f"{VISIBLE_GPUS}={env[VISIBLE_GPUS]}"
        yield f"{mask} shows {seen} of the {len(words)} GPUs it names: one is not there, or is named twice"


def _said_of_gpus(spec: LaunchSpec, chosen: Chosen) -> Iterator[str]:
    yield from (f"GPU {gpu.described()}" for _, gpu in chosen)
    busy = [gpu.label for _, gpu in chosen if gpu.busy]
    if busy and str(spec.gpus).strip().isdecimal():
        yield f"fewer than {spec.gpus} GPUs are free: this launch shares GPU {', '.join(busy)} with what runs there"


def _said_of_threads(variables: Mapping[str, tuple[str, str]], processes: str) -> Iterator[str]:
    if THREADS in variables:
        threads, _ = variables[THREADS]
        each = "the process" if processes == "1" else f"each of {processes} processes"
        yield f"{THREADS}={threads} for {each}; set it yourself to change this"


def _thread_variables(places: tuple[Place, ...], cpus: Cpus, env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """How many threads each worker has, and why."""
    # torch of a forked worker has counted the launcher's cores, not those that a single worker is bound to.
    bound = any(place.cpus and len(place.cpus) < len(cpus.core_of) for place in places)
    if THREADS in env or not (len(places) > 1 or bound):
        return {}
    threads = threads_each(cpus, [place.cpus for place in places])
    each = f"each of {len(places)} processes" if len(places) > 1 else "the process"
    return {THREADS: (str(threads), f"the share of {each}")}


def _only_gpu(env: Mapping[str, str], local_rank: int) -> str:
    """The one GPU that a rank sees with --virtual-local-rank. Source: LocalElasticAgent._set_local_rank_env."""
    words = env.get(VISIBLE_GPUS)
    if words is None:
        return str(local_rank)
    if local_rank >= len(words.split(",")):
        raise UsageError(
            f"--virtual-local-rank: there is no GPU for local rank {local_rank} in {VISIBLE_GPUS}={words}",
            "ask for no more processes than GPUs are visible",
        )
    return words.split(",")[local_rank].strip()


def _command(torchrun: Mapping[str, Any], env: Mapping[str, str]) -> tuple[str, ...]:
    """As torchrun puts it together."""
    words = [str(torchrun["training_script"]), *map(str, torchrun["training_script_args"])]
    if torchrun["run_path"]:
        return sys.executable, "-u", "-c", _RUN_PATH, *words
    if not torchrun["no_python"]:
        return env.get(PYTHON, sys.executable), "-u", *(["-m"] if torchrun["module"] else []), *words
    if torchrun["module"]:
        raise UsageError("--module and --no-python exclude each other", "leave one of them out")
    return tuple(words)


def _forked(torchrun: Mapping[str, Any], env: Mapping[str, str]) -> Program | None:
    if torchrun["no_python"] or torchrun["run_path"] or PYTHON in env:
        return None
    arguments = tuple(map(str, torchrun["training_script_args"]))
    return Program(sys.executable, str(torchrun["training_script"]), arguments, torchrun["module"])


def _put_in(local_rank: int, words: Iterable[str]) -> list[str]:
    return [Template(word).safe_substitute(local_rank=local_rank) for word in words]  # as torch does


def _check_monitor_interval(seconds: float) -> None:
    if not 0 < seconds < math.inf:
        raise UsageError(f"--monitor-interval {seconds} is not a time above 0", "type seconds, as 0.1")


def _signals(names: str, ignored: frozenset[str]) -> tuple[str, ...]:
    """The signals that close the job, without those that the launcher was started to ignore, as under nohup."""
    return tuple(name for name in names.split(",") if name.strip() not in ignored)


def _shutdown_timeout(given: int | None, env: Mapping[str, str]) -> int:
    name, value = ("--shutdown_timeout", given) if given is not None else (GRACE_DEFAULT, env[GRACE_DEFAULT])
    try:
        seconds = int(value)
    except ValueError:
        seconds = -1
    if seconds < 0:
        raise UsageError(f"{name} must be a number of at least 0, not {value!r}", "give it in seconds, as 30")
    return seconds


def _uninterruptible_state_timeout(env: Mapping[str, str]) -> float:
    """As torch reads it: what is no number means no limit."""
    try:
        return max(0.0, float(env.get(UNINTERRUPTIBLE_TIMEOUT, "")))
    except ValueError:
        return 0.0


def _logs(torchrun: Mapping[str, Any], env: Mapping[str, str]) -> Logs:
    words = torchrun["local_ranks_filter"]
    try:
        local_ranks_filter = frozenset(map(int, words.split(","))) if words else frozenset[int]()
    except ValueError:
        raise UsageError(f"--local_ranks_filter {words} is no list of numbers", "type it as 0,1,2") from None
    return Logs(
        log_dir=torchrun["log_dir"],
        redirects=torchrun["redirects"],
        tee=torchrun["tee"],
        local_ranks_filter=local_ranks_filter,
        log_line_prefix_template=torchrun["log_line_prefix_template"] or env.get(LINE_PREFIX_DEFAULT, ""),
        duplicate_stdout_filters=tuple(torchrun["duplicate_stdout_filters"]),
        duplicate_stderr_filters=tuple(torchrun["duplicate_stderr_filters"]),
        logs_specs=torchrun["logs_specs"],
        colour=not env.get(NO_COLOR),
    )
