"""This process's rank, device, process group and random generators, and all-gathers of small values."""

import atexit
import json
import random
import sys
import time
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from hashlib import blake2b
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_kit.env import GPUS_PER_PROCESS, VISIBLE_GPUS, WorkerEnv, from_env, plan_request, rank_for_messages
from ddp_kit.errors import WorldError
from ddp_kit.state_values import real_number
from ddp_kit.texts import plural
from ddp_kit.torch_internals import abort_process_groups, default_store, gather_ranges
from ddp_kit.uncaught import show_without_traceback

_TIMEOUT = timedelta(minutes=10)  # NCCL's default; gloo's is 30 minutes
_DRAIN_SECONDS = 0.05
_END_SECONDS = 5.0  # how long a rank that ends waits for the others to end too
_POLLS_PER_SECOND = 2000  # the maximum number of the polls in that wait, summed over all ranks


@dataclass(frozen=True)
class World:
    """This process's ranks and devices. Ranks count from 0."""

    rank: int
    """The rank of this process in the job."""
    world_size: int
    """The number of ranks."""
    local_rank: int
    """The rank among the processes of this node."""
    local_world_size: int
    """The number of ranks on this node."""
    node_rank: int
    """The index of this node."""
    device: torch.device
    """The device of the model and the batches."""
    gpus: tuple[torch.device, ...] = ()
    """All GPUs of this process, with consecutive indices; the first is `device`. Empty if only `device` is used."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which logs and writes for all ranks."""
        return self.rank == 0

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the rows of all ranks, with gradients: for losses that compare samples of all ranks. A collective.

        The backward pass is a collective as well. It sums the gradients of this rank's rows over the losses of all
        ranks; a sum of losses that the Trainer has weighted therefore has the gradient of the global batch. With
        tensor or pipeline parallelism, ranks that share a model replica return equal rows.

        Args:
            tensor: This rank's rows, of shape [rows, ...]. The number of rows may differ between ranks.

        Returns:
            The rows of all ranks in rank order, of shape [all rows, ...]; `tensor` itself if there is only one rank.

        Raises:
            WorldError: If shapes or dtypes differ between ranks in more than the number of rows.
        """
        if self.world_size == 1:
            return tensor
        if plan_request() is not None:  # there is only this process; the memory is that of the rows of all ranks
            return torch.cat([tensor] * self.world_size)
        shape = ["rows", *tensor.shape[1:]][: tensor.dim()]
        rows = sum(tensor.shape[:1])  # 0 for a scalar
        form = f"of {tensor.dtype} and shape [{', '.join(map(str, shape))}]"
        sizes = gathered(self, [rows, crc32(form.encode())], host_group(self))
        if not shape or len({of_form for _, of_form in sizes}) > 1:
            raise WorldError(
                f"world.all_gather got a tensor {form} on rank {self.rank}, which does not fit those of other ranks",
                "pass tensors of shape [rows, ...] that differ only in the number of rows",
            )
        gathered_rows: Tensor = _AllRows.apply(tensor, [count for count, _ in sizes], self.rank)  # type: ignore[no-untyped-call]
        return gathered_rows


class _AllRows(torch.autograd.Function):
    """The rows of all ranks in rank order. `counts`: the number of rows of each rank."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, counts: list[int], rank: int) -> Tensor:
        ctx.own = sum(counts[:rank]), len(tensor)
        padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        of_ranks = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(of_ranks, padded)
        return torch.cat([rows[:count] for rows, count in zip(of_ranks, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)  # not ours to change
        dist.all_reduce(total)  # other ranks have used this rank's rows in their losses
        return total.narrow(0, *ctx.own), None, None


def join(
    *,
    share_gpus: bool = False,
    starting: Callable[[int, int], AbstractContextManager[None]] = lambda _rank, _world_size: nullcontext(),
) -> World:
    """Read this process's ranks from its environment, choose its device, and initialise the process group.

    The group uses NCCL for GPU tensors and gloo for CPU tensors. A group that the script has initialised is used as it
    is; a single process needs no group.
    `share_gpus`: whether to allow fewer GPUs than processes on a node. All collectives then use gloo, because NCCL
    refuses a GPU that two ranks use.
    `starting`: a function that returns a context manager, which is active while a new group is initialised. The
    function's arguments are the rank and the world size.
    Raises `WorldError` if there is no GPU for this rank.
    """
    show_without_traceback(rank_for_messages())
    worker = from_env()
    if dist.is_initialized() and worker.world_size != dist.get_world_size():
        # The script started its processes itself and has set their devices.
        gpus: tuple[torch.device, ...] = ()
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        worker = worker._replace(rank=dist.get_rank(), world_size=dist.get_world_size(), local_rank=device.index or 0)
    else:
        gpus = _gpus(worker, share_gpus)
        device = next(iter(gpus), torch.device("cpu"))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if worker.world_size > 1 and not dist.is_initialized():
        with starting(worker.rank, worker.world_size):
            _start_group(worker, device, share_gpus, binds=len(gpus) <= 1)
        show_without_traceback(worker.rank)  # again, because init_process_group installs an excepthook
    return World(
        rank=worker.rank,
        world_size=worker.world_size,
        local_rank=worker.local_rank,
        local_world_size=worker.local_world_size,
        node_rank=worker.node_rank,
        device=device,
        gpus=gpus,
    )


def mixed_seed(*numbers: int) -> int:
    """A 32-bit hash of several numbers, for use as a seed; torch's CPU generator uses only 32 bits.

    The sum, which torch's DistributedSampler uses, would make epoch 1 of seed 0 the same as epoch 0 of seed 1.
    """
    return int.from_bytes(blake2b(repr(numbers).encode(), digest_size=4).digest())


def seed_everything(seed: int, rank: int) -> None:
    """Seed all random generators of this process, differently on each rank."""
    rank_seed = mixed_seed(seed, rank)
    torch.manual_seed(rank_seed)  # also seeds the GPUs
    seed_generators(rank_seed)


def seed_generators(seed: int) -> None:
    """Seed the CPU generators of Python, torch and numpy. `seed`: a number of at most 32 bits."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:  # otherwise nothing draws from it
        import numpy as np

        np.random.seed(seed)


def seed_pass(world: World, *numbers: int) -> None:
    """Seed the generators of this process and of its device with a hash of `numbers`. Does not wait for the device."""
    seed = mixed_seed(*numbers)
    seed_generators(seed)
    if world.device.type == "cuda":
        torch.cuda.manual_seed(seed)


@dataclass(frozen=True)
class RandomStates:
    """The states of this process's random generators."""

    python: Any
    torch: Tensor
    numpy: Any
    """The state of numpy's generator; None if numpy is not imported, because then nothing draws from it."""
    device: Tensor | None
    """The states of the generators of this process's GPUs, concatenated; None without GPUs, or if not requested."""


def random_states(world: World | None = None) -> RandomStates:
    """The states of the CPU generators; with `world`, also the states of the generators of this process's GPUs."""
    numpy = sys.modules.get("numpy")
    of_device = None
    if world is not None and world.device.type == "cuda":
        of_device = torch.cat([torch.cuda.get_rng_state(gpu) for gpu in world.gpus or (world.device,)])
    return RandomStates(
        random.getstate(),
        torch.default_generator.get_state(),
        None if numpy is None else numpy.random.get_state(),
        of_device,
    )


def set_random_states(states: RandomStates) -> None:
    """Restore the generators' states."""
    random.setstate(states.python)
    torch.default_generator.set_state(states.torch)
    if states.numpy is not None:
        sys.modules["numpy"].random.set_state(states.numpy)
    if states.device is not None:
        indices = range(torch.cuda.current_device(), torch.cuda.device_count())
        of_gpus = states.device.view(-1, len(torch.cuda.get_rng_state()))
        for index, state in zip(indices, of_gpus, strict=False):  # the process that saved them may have had more GPUs
            torch.cuda.set_rng_state(state, index)


@contextmanager
def random_states_kept(world: World | None = None) -> Iterator[None]:
    """Context manager that restores the states of the CPU generators on exit; with `world`, also those of its GPUs."""
    before = random_states(world)
    try:
        yield
    finally:
        set_random_states(before)


@cache
def host_group(world: World) -> dist.ProcessGroup | None:
    """A gloo group for collectives on host memory, which do not wait for the device.

    None if training runs on the CPU, where the default group already is a gloo group. The first call is a collective.
    """
    return None if world.device.type == "cpu" else dist.new_group(backend="gloo", timeout=_TIMEOUT)


def _gpus(worker: WorkerEnv, share_gpus: bool) -> tuple[torch.device, ...]:
    """The GPUs of this process; empty if torch sees none, and under `ddpkit plan`, which puts nothing on a GPU."""
    if plan_request() is not None or not torch.cuda.is_available():
        return ()
    visible = torch.cuda.device_count()
    if share_gpus:
        return (torch.device("cuda", worker.local_rank % visible),)
    count = worker.gpus_per_process or (visible if worker.world_size == 1 else 1)
    first = worker.local_rank * count
    if visible == count == 1:
        first = 0  # the GPU may be this rank's own: `srun --gpus-per-task` shows each process another one
    if first + count <= visible:
        return tuple(torch.device("cuda", index) for index in range(first, first + count))
    if count == 1:
        error = _no_gpu(worker)
    else:
        error = WorldError(
            f"rank {worker.rank} needs {count} GPUs, which are not available: {worker.local_world_size} processes on "
            f"this node; visible GPUs: {visible}",
            f"start at most {visible // count} processes, or lower {GPUS_PER_PROCESS} (currently {count})",
        )
    error.only_this_rank = worker.local_rank == visible // count  # the lowest one; higher ones have the same error
    raise error


def _no_gpu(worker: WorkerEnv) -> WorldError:
    visible = torch.cuda.device_count()
    return WorldError(
        f"rank {worker.rank} has no GPU: {worker.local_world_size} processes on this node; visible GPUs: {visible}",
        f"start at most one process per GPU: `ddpkit launch --gpus {visible} ...`; to share GPUs, which is slow, set "
        f"parallel={{\"share_gpus\": True}}; to train on the CPU, set {VISIBLE_GPUS}=''",
    )


def _start_group(worker: WorkerEnv, device: torch.device, share_gpus: bool, *, binds: bool) -> None:
    """Initialise the process group. `binds`: whether to bind NCCL to the device and initialise it eagerly.

    Raises `WorldError` if NCCL would use the same GPU on two ranks.
    """
    # Must not depend on this node's number of GPUs: all nodes need the same backend.
    nccl = device.type == "cuda" and dist.is_nccl_available() and not share_gpus
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    store, rank, world_size = next(dist.rendezvous("env://", timeout=_TIMEOUT))
    if nccl:
        key = f"ddpkit/gpu/{torch.cuda.get_device_properties(device).uuid}"
        if int(store.compare_set(key, "", str(rank))) != rank:
            raise _no_gpu(worker)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("default_pg", store),
        rank=rank,
        world_size=world_size,
        timeout=_TIMEOUT,
        device_id=device if nccl and binds else None,
    )
    atexit.register(_stop_group, nccl)


def _stop_group(nccl: bool) -> None:
    if not dist.is_initialized():
        return
    failed = getattr(sys, "last_value", None) is not None
    # NCCL sends what other nodes still need, and then waits for the other ranks of the node: a rank that works after
    # `fit`, or is in a collective, would keep it waiting.
    together = not nccl or (not failed and all_ranks_end(dist.get_world_size()))
    # gloo's threads release a collective's tensors shortly after it has returned, and need the GIL for that. A thread
    # that finds the interpreter shutting down aborts the process, in 1 of 4 runs at 3 ranks (torch 2.13,
    # pytorch/pytorch pull request 179291). Nothing signals when the threads are done, so give them a moment.
    time.sleep(_DRAIN_SECONDS)
    if failed:
        return  # other ranks may be in a collective, and torch aborts NCCL without waiting for them
    if together:
        dist.destroy_process_group()
    else:
        abort_process_groups()


def all_ranks_end(world_size: int, seconds: float = _END_SECONDS) -> bool:
    """Whether all ranks call this within about `seconds`. The result is the same on all ranks, however late they call.

    Uses only the store of the process group. False if the store has closed.
    """
    deadline = time.monotonic() + seconds
    pause = max(_DRAIN_SECONDS, world_size / _POLLS_PER_SECOND)
    try:
        store: Any = default_store()
        is_last = store.add("ddpkit/ending", 1) == world_size
        while not is_last and time.monotonic() < deadline and not store.check(["ddpkit/all-end"]):
            time.sleep(pause)
        return bool(store.compare_set("ddpkit/all-end", "", "yes" if is_last else "no") == b"yes")
    except RuntimeError:
        return False


# --- All-gathers of small values --------------------------------------------------------------------------------------


def rank_count(number: int) -> str:
    """The number of ranks as text, such as "1 rank" or "2 ranks"."""
    return plural(number, "rank")


def _device_for(world: World, hosts: dist.ProcessGroup | None) -> torch.device:
    """The device of tensors that are exchanged in the group `hosts`, or in the default group."""
    return world.device if hosts is None else torch.device("cpu")


def gathered(world: World, numbers: list[int], hosts: dist.ProcessGroup | None = None) -> list[list[int]]:
    """All ranks' numbers, in rank order. A collective; waits for the device unless `hosts` is given.

    `numbers`: must have the same length on each rank. `hosts`: a group for host memory, instead of the default group.
    """
    row = torch.tensor(numbers, dtype=torch.int64, device=_device_for(world, hosts))
    rows = row
    if world.world_size > 1:
        rows = row.new_empty(world.world_size * len(numbers))
        gather_ranges(rows, row, hosts)
    return rows.view(world.world_size, len(numbers)).tolist()


def largest(world: World, numbers: list[int], hosts: dist.ProcessGroup | None = None) -> list[int]:
    """The largest of all ranks' numbers at each position. A collective; the arguments are as for `gathered`."""
    row = torch.tensor(numbers, dtype=torch.int64, device=_device_for(world, hosts))
    if world.world_size > 1:
        dist.all_reduce(row, dist.ReduceOp.MAX, group=hosts)
    return row.tolist()


def gathered_bytes(content: bytes, world: World, hosts: dist.ProcessGroup | None = None) -> list[bytes]:
    """All ranks' bytes, in rank order; lengths may differ. `hosts`: as in `gathered`. A collective."""
    if world.world_size == 1:
        return [content]
    lengths = [length for (length,) in gathered(world, [len(content)], hosts)]
    device = _device_for(world, hosts)
    padded = torch.frombuffer(bytearray(content.ljust(max(1, *lengths), b"\0")), dtype=torch.uint8)
    rows = [torch.empty_like(padded, device=device) for _ in lengths]
    dist.all_gather(rows, padded.to(device), group=hosts)
    return [row[:length].cpu().numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]


def equal_on_all_ranks(content: bytes, world: World) -> bool:
    """Whether all ranks have the same bytes, as far as a hash of 56 bits tells. A collective, as `largest`."""
    number = int.from_bytes(blake2b(content, digest_size=7).digest())
    highest, negative = largest(world, [number, -number])
    return highest == -negative


def broadcast_bytes(content: bytes, world: World, source: int = 0) -> bytes:
    """The bytes of rank `source`, on all ranks. A collective."""
    if world.world_size == 1:
        return content
    (length,) = largest(world, [len(content) if world.rank == source else 0])
    row = torch.frombuffer(bytearray(content[:length].ljust(max(1, length), b"\0")), dtype=torch.uint8)
    row = row.to(world.device)
    dist.broadcast(row, source)
    return row[:length].cpu().numpy().tobytes()


_AT_ONCE = 64 << 20  # bytes that are broadcast at once, so that small tensors do not wait for each other


def broadcast_tensors(tensors: Sequence[Tensor], world: World, source: int = 0) -> None:
    """Fill contiguous tensors in host memory with the values of rank `source`. A collective."""
    bunch: list[Tensor] = []
    parts = [
        part
        for tensor in tensors
        for part in torch.split(tensor.reshape(-1).view(torch.uint8), _AT_ONCE)
        if part.numel()
    ]
    for number, part in enumerate(parts):
        bunch.append(part)
        size = sum(each.numel() for each in bunch)
        if number + 1 == len(parts) or size + parts[number + 1].numel() > _AT_ONCE:
            together = torch.cat(bunch).to(world.device)
            dist.broadcast(together, source)
            for target, values in zip(bunch, torch.split(together, [each.numel() for each in bunch]), strict=True):
                target.copy_(values)
            bunch = []


def sent_bytes(content: bytes, world: World, receiver: int) -> list[bytes]:
    """All ranks' bytes, in rank order, on the rank `receiver`; empty on all other ranks. A collective."""
    if world.world_size == 1:
        return [content]
    (longest,) = largest(world, [len(content)])
    if longest == 0:  # nothing to send, which is common
        return [b""] * world.world_size if world.rank == receiver else []
    row = torch.frombuffer(bytearray(len(content).to_bytes(8) + content.ljust(longest, b"\0")), dtype=torch.uint8)
    row = row.to(world.device)
    rows = None
    if world.rank == receiver:
        rows = [torch.empty_like(row) for _ in range(world.world_size)]
    dist.gather(row, rows, dst=receiver)
    received = [each.cpu().numpy().tobytes() for each in rows or ()]
    return [each[8 : 8 + int.from_bytes(each[:8])] for each in received]


# --- Serialization of random states -----------------------------------------------------------------------------------


_MT19937_NUMBERS = 624


def encoded(states: RandomStates) -> str:
    """Random states as text: a line of JSON, then one line of base64 per generator, which is fast to encode."""
    version, numbers, gauss = states.python
    blocks = {"python": array("I", numbers).tobytes(), "torch": states.torch.numpy().tobytes()}
    of_numpy = None
    if states.numpy is not None:
        kind, key, *rest = states.numpy
        of_numpy = [kind, *map(float, rest)]
        blocks["numpy"] = key.tobytes()
    if states.device is not None:
        blocks["device"] = states.device.numpy().tobytes()
    first = {"python": [version, gauss], "numpy": of_numpy, "lines": list(blocks)}
    return "\n".join([json.dumps(first), *(b64encode(block).decode() for block in blocks.values())])


def decoded(text: str) -> RandomStates:
    """The inverse of `encoded`. Raises `ValueError`, `KeyError` or `TypeError` for invalid text."""
    line, *lines = text.split("\n")
    first = json.loads(line)
    blocks = {name: bytearray(b64decode(block)) for name, block in zip(first["lines"], lines, strict=True)}
    version, gauss = first["python"]
    numpy = first["numpy"]
    if numpy is not None:
        import numpy as np

        key = np.frombuffer(blocks["numpy"], dtype=np.uint32)
        if numpy[0] != "MT19937" or len(key) != _MT19937_NUMBERS or not 0 <= numpy[1] <= len(key):
            raise ValueError("the state of numpy's generator is invalid")  # numpy would read out of bounds
        numpy = (numpy[0], key, int(numpy[1]), int(numpy[2]), numpy[3])
    if gauss is not None:
        gauss = real_number(gauss, "gauss_next of Python's generator")  # Python accepts any object here
    tensors = {name: torch.frombuffer(block, dtype=torch.uint8) for name, block in blocks.items()}
    python = tuple(array("I", bytes(blocks["python"])))
    return RandomStates((version, python, gauss), tensors["torch"], numpy, tensors.get("device"))
