"""What will be done: a `Plan` for this node, made from the spec by a pure function."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ddp_kit import contract
from ddp_kit.errors import UsageError
from ddp_kit.launcher.devices import Gpu, visible
from ddp_kit.launcher.spec import LaunchSpec

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Place:
    """Where one process of this node runs."""

    gpu: Gpu | None = None
    """None: on no GPU, or on one that the machine does not tell of."""
    cpus: tuple[int, ...] = ()
    """The CPU cores it may use; empty: all that the launcher may."""


@dataclass(frozen=True)
class Plan:
    """What this node will start."""

    torchrun: Mapping[str, Any]
    """torchrun's settings, all choices made."""
    env: Mapping[str, str]
    """What the workers find in their environment beside the user's own variables and their ranks."""
    origin: Mapping[str, str]
    """Why each variable of `env` has its value, in a few words, such as `--gpus 2`."""
    places: tuple[Place, ...]
    """By local rank; empty where their number is left to torch (`--nproc-per-node auto`)."""
    says: tuple[str, ...]
    """What the user is told before the start."""


def make(spec: LaunchSpec, machine: tuple[Gpu, ...], env: Mapping[str, str], run_id: str) -> Plan:
    """Settle how many processes run on which GPUs, and where they meet.

    Raises `UsageError` where the GPUs asked for are not there.
    """
    seen = visible(machine, env)
    added: dict[str, str] = {}
    origin: dict[str, str] = {}
    says: tuple[str, ...] = ()
    processes = spec.processes
    if spec.gpus is not None:
        chosen = _choose(spec, machine, seen)
        if processes not in (None, str(len(chosen))):
            raise UsageError(
                f"--gpus {spec.gpus} means {len(chosen)} processes, one per GPU, but --nproc-per-node is {processes}",
                "leave one of the two out",
            )
        processes = str(len(chosen))
        seen = chosen
        added[contract.VISIBLE_GPUS] = ",".join(word for word, _ in chosen)
        origin[contract.VISIBLE_GPUS] = f"--gpus {spec.gpus}"
        if contract.VISIBLE_GPUS not in env:
            added[contract.GPU_ORDER] = "PCI_BUS_ID"  # numbers mean what NVML and nvidia-smi mean by them
            origin[contract.GPU_ORDER] = "so that GPU numbers are those of nvidia-smi"
        says = tuple(f"GPU {gpu}" for _, gpu in chosen)
    elif processes is None:
        processes = str(max(1, len(seen)))
    if processes.lstrip("-").isdecimal() and int(processes) < 1:
        raise UsageError(f"--nproc-per-node {processes} asks for no process", "type at least 1")
    if contract.THREADS not in env and processes.isdecimal() and int(processes) > 1:
        added[contract.THREADS] = "1"
        origin[contract.THREADS] = f"one of {processes} processes"
        says = (*says, f"{contract.THREADS}=1 for each of {processes} processes; set it yourself to change this")
    says += _overruled(spec.torchrun)
    settings = {**spec.torchrun, "nproc_per_node": processes, **_meeting_point(spec.torchrun, run_id)}
    count = int(processes) if processes.isdecimal() else 0
    return Plan(
        torchrun=MappingProxyType(settings),
        env=MappingProxyType(added),
        origin=MappingProxyType(origin),
        places=tuple(Place(gpu=seen[rank][1] if rank < len(seen) else None) for rank in range(count)),
        says=says,
    )


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


def _choose(
    spec: LaunchSpec, machine: tuple[Gpu, ...], seen: tuple[tuple[str, Gpu], ...]
) -> tuple[tuple[str, Gpu], ...]:
    asked = str(spec.gpus).strip()
    if asked == "all":
        wanted = len(seen)
    elif asked.isdecimal():
        wanted = int(asked)
    else:
        return _by_position(spec, machine, seen)
    if wanted == 0 and asked != "all":
        raise UsageError("--gpus 0 asks for no GPU", "type --gpus 0, (with a comma) for GPU 0 alone")
    if wanted > len(seen) or not seen:
        raise _too_few(spec, machine, seen)
    free_first = sorted(seen, key=lambda pair: (pair[1].processes, pair[1].memory_used))
    return tuple(pair for pair in seen if pair in free_first[:wanted])


def _by_position(
    spec: LaunchSpec, machine: tuple[Gpu, ...], seen: tuple[tuple[str, Gpu], ...]
) -> tuple[tuple[str, Gpu], ...]:
    words = [word.strip() for word in str(spec.gpus).split(",") if word.strip()]
    if not words or not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
        raise UsageError(
            f"--gpus {spec.gpus!r} is neither a number of GPUs, nor `all`, nor a list of different positions",
            "type for example --gpus 2, --gpus all or --gpus 0,2",
        )
    if any(int(word) >= len(seen) for word in words):
        raise _too_few(spec, machine, seen)
    return tuple(seen[int(word)] for word in words)


def _too_few(spec: LaunchSpec, machine: tuple[Gpu, ...], seen: tuple[tuple[str, Gpu], ...]) -> UsageError:
    if not machine:
        found = "this machine has no NVIDIA GPU, or no driver for one"
    else:
        limit = "" if len(seen) == len(machine) else f" (limited by {contract.VISIBLE_GPUS})"
        found = "\n".join([f"found {len(seen)}{limit}:", *(f"    {gpu}" for _, gpu in seen)])
    asked = str(spec.gpus).strip()
    processes = asked if asked.isdecimal() else "2"
    instead = f"--gpus {len(seen)}" if seen else f"--nproc-per-node {processes}"
    where = "for what there is" if seen else "for processes on the CPU"
    return UsageError(
        f"--gpus {spec.gpus} cannot be had: {found}", f"type `ddpkit launch {instead} {spec.script} ...` {where}"
    )
