"""This process's rank and device, and the process group of the job."""

import atexit
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_kit.env import GPUS_PER_PROCESS, VISIBLE_GPUS, WorkerEnv, from_env, rank_for_messages
from ddp_kit.errors import WorldError
from ddp_kit.uncaught import show_without_traceback

# gloo would wait for 30 minutes by default; NCCL's own default is 10.
_TIMEOUT = timedelta(minutes=10)
_DRAIN_SECONDS = 0.05
_FAREWELL_SECONDS = 5.0


@dataclass(frozen=True)
class World:
    """One process's place in its job. Ranks count from 0; `device` is where its model and batches live."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    device: torch.device
    gpus: tuple[torch.device, ...] = ()
    """All that are this process's own, consecutive; the first is `device`. Empty: `device` alone."""

    @property
    def is_main(self) -> bool:
        """True on rank 0, which logs and writes for all ranks."""
        return self.rank == 0


def join(
    *, share_gpus: bool = False, starting: Callable[[int, int], AbstractContextManager[None]] | None = None
) -> World:
    """Read this process's place from its environment, choose its device and join the process group.

    The group is NCCL for GPU tensors and gloo for CPU tensors; one that the script made itself is used as it is,
    and one process alone needs none. Raises `WorldError` where there is no GPU for this rank.
    `share_gpus`: where this node has fewer GPUs than processes, they share them, and all ranks reduce over gloo: NCCL
    refuses a GPU that two ranks use. `starting`: gets rank and world size; entered while the ranks of a new group meet.
    """
    show_without_traceback(rank_for_messages())
    place = from_env()
    if dist.is_initialized() and place.world_size != dist.get_world_size():
        device = _current_device()  # the script started its processes itself, and chose their devices
        place = replace(place, rank=dist.get_rank(), world_size=dist.get_world_size(), local_rank=device.index or 0)
        gpus: tuple[torch.device, ...] = ()
    else:
        gpus = _gpus(place, share_gpus)
        device = gpus[0] if gpus else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if place.world_size > 1 and not dist.is_initialized():
        with starting(place.rank, place.world_size) if starting is not None else nullcontext():
            _start_group(device, share_gpus, binds=len(gpus) <= 1)
        show_without_traceback(place.rank)  # torch has put a hook in front that labels each line with the rank
    return World(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        node_rank=place.node_rank,
        device=device,
        gpus=gpus,
    )


def mixed_seed(*numbers: int) -> int:
    """One seed made of several numbers, 32 bits: torch's CPU generator uses no more of it.

    Not their sum, as in torch's DistributedSampler, where epoch 1 of seed 0 is epoch 0 of seed 1.
    """
    return int.from_bytes(blake2b(repr(numbers).encode(), digest_size=4).digest())


def seed_everything(seed: int, rank: int) -> None:
    """Set every random state of this process: the same in every run, different for every `rank`."""
    own = mixed_seed(seed, rank)
    torch.manual_seed(own)  # the GPU's state too
    seed_generators(own)


def seed_generators(seed: int) -> None:
    """Seed the generators that code on the CPU draws from: Python's, torch's and numpy's. `seed`: 32 bits."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:  # where it is not imported, nothing draws from it
        import numpy as np

        np.random.seed(seed)


@dataclass(frozen=True)
class RandomStates:
    """The states of this process's random generators."""

    python: Any
    torch: Tensor
    numpy: Any
    """None where numpy is not imported: then nothing draws from it."""
    device: Tensor | None
    """Of this process's GPUs, one after the other; None where they are not asked for."""


def random_states(world: World | None = None) -> RandomStates:
    """Where the generators are from which code on the CPU draws; with `world`, those of its GPUs too."""
    numpy = sys.modules.get("numpy")
    gpus = (world.gpus or (world.device,)) if world is not None and world.device.type == "cuda" else ()
    return RandomStates(
        random.getstate(),
        torch.default_generator.get_state(),
        None if numpy is None else numpy.random.get_state(),
        torch.cat([torch.cuda.get_rng_state(gpu) for gpu in gpus]) if gpus else None,
    )


def set_random_states(states: RandomStates) -> None:
    """Restore the generators' states."""
    random.setstate(states.python)
    torch.default_generator.set_state(states.torch)
    if states.numpy is not None:
        sys.modules["numpy"].random.set_state(states.numpy)
    if states.device is not None:
        first, size = torch.cuda.current_device(), len(torch.cuda.get_rng_state())
        for index, state in enumerate(states.device.view(-1, size), first):
            if index < torch.cuda.device_count():  # it may have been saved by a process with more
                torch.cuda.set_rng_state(state, index)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the states of the CPU generators afterwards, whatever is drawn or seeded inside."""
    before = random_states()
    try:
        yield
    finally:
        set_random_states(before)


@cache
def host_group(world: World) -> dist.ProcessGroup | None:
    """A group whose collectives work on host memory, so that no device is waited for. A collective when first asked."""
    return None if world.device.type == "cpu" else dist.new_group(backend="gloo", timeout=_TIMEOUT)


def _current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _gpus(place: WorkerEnv, share_gpus: bool) -> tuple[torch.device, ...]:
    """The GPUs of this process; empty if torch sees none."""
    if not torch.cuda.is_available():
        return ()
    there = torch.cuda.device_count()
    if share_gpus:
        return (torch.device("cuda", place.local_rank % there),)
    each = place.gpus_per_process or (there if place.world_size == 1 else 1)
    first = place.local_rank * each
    if first + each <= there:
        return tuple(torch.device("cuda", index) for index in range(first, first + each))
    processes = f"{place.local_world_size} processes on this node, {there} visible to them"
    if each == 1:
        error = WorldError(
            f"rank {place.rank} has no GPU: {processes}",
            f"start at most one process per GPU: `ddpkit launch --gpus {there} ...`; to share GPUs, which is slow, set "
            f"parallel={{\"share_gpus\": True}}; to train on the CPU, set {VISIBLE_GPUS}=''",
        )
    else:
        error = WorldError(
            f"rank {place.rank} needs {each} GPUs, which are not available: {processes}",
            f"start at most {there // each} processes, or lower {GPUS_PER_PROCESS} (now {each})",
        )
    error.only_this_rank = place.local_rank == there // each  # higher ranks would report the same
    raise error


def _start_group(device: torch.device, share_gpus: bool, *, binds: bool) -> None:
    """`binds`: NCCL knows this process's one GPU from the start; it refuses any other then."""
    # Not decided by what this node has: a group has one backend, and another node may have more GPUs.
    nccl = device.type == "cuda" and dist.is_nccl_available() and not share_gpus
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    dist.init_process_group(backend, timeout=_TIMEOUT, device_id=device if nccl and binds else None)
    atexit.register(_stop_group)


def _stop_group() -> None:
    if not dist.is_initialized():
        return
    # gloo's threads let go of a collective's tensors a moment after it has returned, and need the interpreter for
    # it; one that finds it shutting down aborts the process, in 1 of 4 runs at 3 ranks (torch 2.13, pytorch/pytorch
    # pull request 179291). Nothing tells when they are through, so the interpreter is left to them for a moment.
    time.sleep(_DRAIN_SECONDS)
    if getattr(sys, "last_value", None) is not None:
        return  # this rank failed: others may sit in a collective, and NCCL's teardown would wait for them
    farewell = threading.Thread(target=dist.destroy_process_group, daemon=True)
    farewell.start()
    farewell.join(_FAREWELL_SECONDS)
