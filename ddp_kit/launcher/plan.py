"""What will be done: a `Plan` for this node, made from the spec by a pure function."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ddp_kit.env import GPU_ORDER, GRACE_DEFAULT, PROCESSES_DEFAULT, THREADS, VISIBLE_GPUS
from ddp_kit.errors import UsageError
from ddp_kit.launcher.devices.choice import Chosen, choose
from ddp_kit.launcher.devices.cpus import Cpus, threads_each
from ddp_kit.launcher.devices.gpus import Gpu, visible
from ddp_kit.launcher.spec import LaunchSpec

GRACE_SECONDS = 25
"""From SIGTERM to SIGKILL. Kubernetes kills the launcher itself after 30 s, which it needs for verdict and clean-up."""
_LOOPBACK = "127.0.0.1"
_MOST_PROCESSES = 1 << 22  # PID_MAX_LIMIT


@dataclass(frozen=True)
class Place:
    """Where one process of this node runs."""

    gpu: Gpu | None = None
    """None: on no GPU, or on what its script takes."""
    cpus: tuple[int, ...] = ()
    """The CPU cores it may use; empty: all that the launcher may."""


@dataclass(frozen=True)
class Plan:
    """What this node will start."""

    torchrun: Mapping[str, Any]
    """torchrun's settings, all choices made."""
    env: Mapping[str, str]
    """What workers find in their environment besides the user's own variables and their ranks."""
    origin: Mapping[str, str]
    """Why each variable of `env` has its value, in a few words, such as `--gpus 2`."""
    places: tuple[Place, ...]
    """By local rank."""
    says: tuple[str, ...]
    """What the user is told before the start."""
    cold: bool = False
    """Whether every worker is started by python itself."""
    hang_timeout: float | None = None
    """Seconds; 0: no limit; None: `agent.watch.DEFAULT_SECONDS`."""
    flags: tuple[str, ...] = ()
    """The launcher's own flags as they were typed, for the commands that other nodes are told."""
    script_as_typed: str = ""
    """The script, `...` for its arguments."""


def make(
    spec: LaunchSpec,
    machine: tuple[Gpu, ...],
    env: Mapping[str, str],
    run_id: str,
    cpus: Cpus,
    held: Mapping[str, str],
) -> Plan:
    """Settle how many processes run on which GPUs and cores, and where they meet.

    `cpus`: those that the launcher may use. `held`: by UUID, the other launch that holds a GPU.
    Raises `UsageError` where the GPUs asked for are not available.
    """
    # A number of processes without a word on GPUs is torchrun's way: the script takes the GPUs it wants.
    by_gpu = spec.gpus is not None or spec.processes is None
    chosen = choose(spec.gpus, spec.command, machine, env, held) if by_gpu else ()
    processes = _processes(spec, len(chosen), env)
    places = _places(processes, chosen, cpus, bind=spec.torchrun.get("numa_binding") is None)
    variables = _gpu_variables(spec, chosen, env)
    # torch of a forked worker has counted the launcher's cores, not those that a single worker is bound to.
    bound = any(place.cpus and len(place.cpus) < len(cpus.core_of) for place in places)
    if (len(places) > 1 or bound) and THREADS not in env:
        threads = threads_each(cpus, [place.cpus for place in places])
        each = f"each of {len(places)} processes" if len(places) > 1 else "the process"
        variables[THREADS] = str(threads), f"the share of {each}"
    settings = {**spec.torchrun, "nproc_per_node": processes, **_meeting_point(spec.torchrun, run_id)}
    if "shutdown_timeout" in settings and settings["shutdown_timeout"] is None and GRACE_DEFAULT not in env:
        settings["shutdown_timeout"] = GRACE_SECONDS
    if len(chosen) > 1 and any(gpu.is_mig for _, gpu in chosen):
        settings["virtual_local_rank"] = True  # CUDA shows a process one MIG device at most
    return Plan(
        torchrun=MappingProxyType(settings),
        env=MappingProxyType({name: value for name, (value, _) in variables.items()}),
        origin=MappingProxyType({name: why for name, (_, why) in variables.items()}),
        places=places,
        says=(
            *_said_of_mask(machine, env),
            *_said_of_gpus(spec, chosen),
            *_said_of_threads(variables, processes),
            *_overruled(spec.torchrun),
        ),
        cold=spec.cold,
        hang_timeout=spec.hang_timeout,
        flags=spec.flags,
        script_as_typed=spec.script_as_typed,
    )


def _processes(spec: LaunchSpec, gpus: int, env: Mapping[str, str]) -> str:
    """How many processes: one per GPU, what --nproc-per-node says, or 1."""
    if spec.processes is None:
        return str(max(1, gpus))
    if spec.gpus is not None and spec.processes != str(gpus):
        first = f"unset {PROCESSES_DEFAULT}, or " if PROCESSES_DEFAULT in env else ""
        raise UsageError(
            f"--gpus {spec.gpus} means {gpus} processes, one per GPU, but --nproc-per-node is {spec.processes}",
            f"{first}leave one of the two out",
        )
    if spec.processes.lstrip("-").isdecimal() and not 1 <= int(spec.processes) <= _MOST_PROCESSES:
        how_many = "no process" if int(spec.processes) < 1 else "more processes than Linux can number"
        raise UsageError(f"--nproc-per-node {spec.processes} asks for {how_many}", "type at least 1")
    return spec.processes


def _places(processes: str, chosen: Chosen, cpus: Cpus, bind: bool) -> tuple[Place, ...]:
    if not chosen:
        return (Place(),) * (int(processes) if processes.isdecimal() else 0)
    return tuple(Place(gpu, tuple(cpu for cpu in gpu.near if cpu in cpus.core_of) if bind else ()) for _, gpu in chosen)


def _gpu_variables(spec: LaunchSpec, chosen: Chosen, env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Which GPUs the workers see, and why."""
    if not chosen:
        return {}
    why = "one process per visible GPU" if spec.gpus is None else f"--gpus {spec.gpus}"
    variables = {VISIBLE_GPUS: (",".join(word for word, _ in chosen), why)}
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


def _overruled(torchrun: Mapping[str, Any]) -> tuple[str, ...]:
    """Which of two flags wins where both cannot: as with torchrun, which does not say so."""
    if torchrun["standalone"]:
        winner = "--standalone"
        losers = {"rdzv_endpoint": "--rdzv-endpoint", "master_port": "--master-port"}
    elif torchrun["rdzv_backend"] != "static":
        winner = f"--rdzv-backend {torchrun['rdzv_backend']}"
        losers = {"node_rank": "--node-rank", "master_port": "--master-port"}
    else:
        winner = "--rdzv-endpoint"
        losers = {"master_port": "--master-port"} if torchrun["rdzv_endpoint"] else {}
    return tuple(
        f"{winner} wins over {flag} {torchrun[name]}, which is not used"
        for name, flag in losers.items()
        if torchrun[name]
    )


def _meeting_point(torchrun: Mapping[str, Any], run_id: str) -> dict[str, Any]:
    """A job on one node that names no place to meet gets a free port and an id of its own, as with torchrun.

    Its workers meet on the loopback address: the host's name need not resolve.
    """
    named = torchrun["rdzv_backend"] != "static" or torchrun["rdzv_endpoint"] or torchrun["master_port"] is not None
    several_nodes = str(torchrun["nnodes"]).split(":")[-1] != "1"
    if not torchrun["standalone"] and (named or several_nodes):
        return {}
    return {
        "standalone": False,  # done here
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "rdzv_id": run_id,
        "local_addr": torchrun["local_addr"] or _LOOPBACK,
    }
