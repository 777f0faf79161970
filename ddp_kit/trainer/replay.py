"""Replayed passes, which find a device that computes wrong numbers: other ranks repeat a pass of each rank.

at a log point, at least `INTERVAL` steps after the last check:
    with replay.watching(share, batch) as batch:    # notes this rank's first pass, and its gradients
        ...                                         # the passes of the step
    replay.compare(step)                            # before the update: the weights are still those of the pass
        each rank sends its pass to the next rank, which repeats it and compares the gradients
        only if any of them differ: each pass is repeated by its own rank and the next two, and `faults` names the rank

Gradients are compared before they are reduced. Batches and random states are sent as tensors and JSON.
"""

import json
import math
import socket
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_kit.checkpoint.packing import pack
from ddp_kit.checkpoint.reader import unpack
from ddp_kit.data.collate import unpacked
from ddp_kit.data.feed import Share
from ddp_kit.distributed.consistency import bits
from ddp_kit.distributed.world import (
    World,
    decoded,
    encoded,
    gathered,
    gathered_bytes,
    host_group,
    random_states,
    set_random_states,
)
from ddp_kit.errors import CheckpointError, FaultyRankError
from ddp_kit.log import logger
from ddp_kit.metrics import Loss
from ddp_kit.structures import tensors_in, with_copied_containers
from ddp_kit.texts import some
from ddp_kit.trainer.context import TrainerContext
from ddp_kit.trainer.model_flops import device_name
from ddp_kit.trainer.repeated_pass import WEIGHTS, ComparedWeights, NotRepeatable, PassState, repeat

INTERVAL = 500
"""The least number of optimizer steps between two checks."""

# --- Gradients --------------------------------------------------------------------------------------------------------


Gradients = Sequence[Sequence[float]]
"""For each parameter, two numbers about its gradient: see `GradientSums`. Zeros for a parameter without a gradient."""

_COLUMNS = 4096  # the length of the vector of signs, which is repeated
# The largest difference between two computations of a gradient, as a share of its norm, by `precision`.
_TOLERANCE = {"fp32": 2e-5, "tf32": 1e-2, "bf16": 0.06, "bf16-true": 0.06, "fp16": 1e-2, "fp8": 0.2}
_FLOOR = 0.02  # of the norm of all gradients: the gradient of a bias before a BatchNorm consists of rounding errors


class GradientSums:
    """The gradients that backward passes compute for some parameters, as `Gradients`.

    `exact`: whether the two numbers are a checksum of all bits, or the sum of squares and a projection on a vector of
    signs. `discard`: whether `torch.autograd.grad` gets zeros without memory instead of the gradients.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, exact: bool, discard: bool = False) -> None:
        self._sums = [torch.zeros(2, dtype=torch.float64, device=parameter.device) for parameter in parameters]
        numbers = _checksum if exact else _squares_and_projection

        def hook(index: int, gradient: Tensor) -> Tensor | None:
            # Parts of a gradient: with reentrant checkpointing, a shared parameter gets several.
            self._sums[index] += numbers(gradient.detach())
            if discard and not gradient.is_sparse:
                return gradient.new_zeros(()).expand_as(gradient)
            return None

        # Hooks see a gradient before DDP's hooks do, and after the hooks that a script has registered.
        self._hooks = [
            parameter.register_hook(partial(hook, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
        ]

    def close(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()

    def values(self) -> Gradients:
        """The gradients so far. Waits for the device."""
        values: Gradients = torch.stack(self._sums).tolist()
        return values


def _checksum(gradient: Tensor) -> Tensor:
    return bits([gradient]).reshape(1).view(torch.int32)


def _squares_and_projection(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    flat = gradient.reshape(-1)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    squares = torch.linalg.vector_norm(flat).double().square()
    signs = _signs(flat.device, flat.dtype)
    while flat.numel() > 1:
        rest = flat.numel() % _COLUMNS
        head = flat[: flat.numel() - rest].view(-1, _COLUMNS)
        tail = flat[flat.numel() - rest :]
        flat = torch.cat((head @ signs, (tail @ signs[:rest]).reshape(1)))
    return torch.stack((squares, flat.double().sum()))


@cache
def _signs(device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(2, (_COLUMNS,), generator=generator) * 2 - 1).to(device, dtype)


def same_gradients(one: Gradients, other: Gradients, tolerance: float) -> bool:
    """Whether two computations of the same gradients differ only by rounding.

    `tolerance`: the largest difference that rounding causes, as a share of the norm of a parameter's gradient; 0 for
    exact `GradientSums`.
    """
    if not tolerance:
        return one == other
    floor = _FLOOR * math.sqrt(sum(squares for squares, _ in one))
    for (squares, projection), (other_squares, other_projection) in zip(one, other, strict=True):
        norm = math.sqrt(max(squares, other_squares))
        if not math.isfinite(norm + projection + other_projection):
            if repr((squares, projection)) != repr((other_squares, other_projection)):
                return False
        elif abs(projection - other_projection) > tolerance * max(norm, floor):
            return False
    return True


# --- Verdict ----------------------------------------------------------------------------------------------------------


class Repeats(NamedTuple):
    """What a rank has computed in a check. Each pass is thus repeated on three ranks."""

    noted: Gradients
    """Its own pass, in the step; empty if it had none."""
    own: Gradients
    """Its own pass, repeated with the same batch."""
    copied: Gradients
    """Its own pass, repeated with a copy of the batch, as on the other ranks."""
    previous: tuple[Gradients, Gradients]
    """The pass of the rank before it, repeated twice."""
    before_previous: Gradients
    """The pass of the rank before that one; empty with two ranks."""


def faults(of_ranks: Sequence[Repeats], distance: int, same: Callable[[Gradients, Gradients], bool]) -> dict[int, str]:
    """Rank -> how often it was wrong, for ranks that have computed other gradients than two ranks that agree.

    `distance`: from a rank to the next one, which repeats its pass. `same`: whether two computations of the same
    gradients agree. With two ranks, both are named if each always computes the same, but not what the other computes.
    Empty if nobody can be named.
    """
    size = len(of_ranks)
    found = dict[int, str]()
    answers: dict[int, list[bool]] = defaultdict(list)  # of each rank: whether it was right about a pass
    for rank, (noted, own, copied, _, _) in enumerate(of_ranks):
        if not noted:
            continue
        following = (rank + distance) % size
        first, again = of_ranks[following].previous
        repeated = {rank: copied, following: again}
        if size > 2:
            third = (rank + 2 * distance) % size
            repeated[third] = of_ranks[third].before_previous
        pairs = combinations(repeated.values(), 2)
        right = next((one for one, other in pairs if same(one, other)), None)
        if right is None:
            if size == 2 and same(noted, own) and same(first, again):
                return dict.fromkeys(repeated, ALWAYS)
            continue
        for other, one in repeated.items():
            answers[other].append(same(one, right))
        if same(again, right) and not same(first, right):
            found[following] = ONCE
        # If only the original batch always gives something else, its place in memory determines the order of sums.
        if not same(noted, right) and not same(noted, own):
            found[rank] = ONCE
    found |= {rank: ALWAYS for rank, is_right in answers.items() if not any(is_right)}
    return found if len(found) < max(2, size / 2) else {}


ALWAYS = "each time"
ONCE = "once"


def faulty_ranks(step: int, checked: int | None, found: Mapping[int, str], devices: Sequence[str]) -> FaultyRankError:
    """The error for the ranks that `faults` has found.

    `checked`: the step of the last check without a difference, if any. `devices`: the host and the device of each rank.
    """
    where = " and ".join(f"rank {rank} ({devices[rank]})" for rank in sorted(found))
    if len(found) == len(devices):  # one of two ranks
        ranks: tuple[int, ...] = ()
        what = (
            f"{where} compute different gradients from the same batch, each of them the same one each time, first seen "
            f"at step {step}: one device is wrong, or the loss function depends on the rank"
        )
    else:
        ranks = tuple(sorted(found))
        times = " and ".join(sorted({*found.values()}))
        what = (
            f"{where} computed wrong gradients {times} at step {step}: "
            "other ranks that repeated the same pass agree with each other"
        )
    since = "no earlier step was checked"
    if checked is not None:
        since = f"resume from a checkpoint of step {checked} or before"
    return FaultyRankError(
        what,
        f"the weights may be wrong since the last check: {since}; take the device out of the job and test it, such as "
        "with `dcgmi diag -r 3`",
        ranks,
    )


# --- Messages ---------------------------------------------------------------------------------------------------------


class _Pass(NamedTuple):
    """What is needed to repeat a pass."""

    batch: Any
    samples: int
    random: str
    """The random states before it, from `encoded`."""
    noted: Gradients
    """Its gradients in the step; empty during the pass."""


def _packed(noted: _Pass) -> dict[str, Tensor]:
    """The first three fields of a pass as tensors in host memory; the tensor "" contains JSON.

    Raises `CheckpointError` for a batch with objects other than containers, tensors, arrays, numbers and text.
    """
    batch = noted.batch
    if isinstance(batch, UserDict):  # such as Hugging Face's BatchEncoding
        batch = dict(batch)
    packed = pack({"pass": [batch, noted.samples, noted.random]})
    tensors = {f"{stored.part}/{stored.name}": stored.tensor.detach() for stored in packed.tensors}
    text = json.dumps([packed.text, {name: _memory_layout(tensor) for name, tensor in tensors.items()}])
    on_host = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    return on_host | {"": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}


def _unpacked(message: bytes, device: torch.device, kind: Any) -> _Pass:
    """The pass in a message, with its tensors on `device`. If `kind` is a `UserDict`, so is the batch."""
    tensors = safetensors.torch.load(message)
    noted = tensors.pop(_NOTED).tolist()
    text, layouts = json.loads(tensors.pop("").numpy().tobytes())

    def fetch(part: str, name: str, on_device: bool) -> Tensor:
        key = f"{part}/{name}"
        address, strides = layouts[key]
        return _with_layout(tensors[key], address, strides, device if on_device else torch.device("cpu"))

    batch, samples, random = unpack(text, fetch)["pass"]
    if isinstance(kind, UserDict) and isinstance(batch, dict):
        filled = copy(kind)
        filled.data = batch
        batch = filled
    return _Pass(batch, samples, random, noted)


_WRITTEN = -1  # in place of the size of a message: the pass has written weights that were not copied before
_MOST_LEARNED = 10
_NOTED = "noted"  # the tensor in a message with the gradients of the step
_ALIGNMENT = 64  # of the memory that torch allocates, in bytes


def _memory_layout(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    """The address of a tensor modulo the alignment, and its strides: they determine the order of sums in a kernel."""
    strides = tensor.stride()
    if strides != torch.empty_like(tensor, memory_format=torch.preserve_format).stride():  # not dense
        strides = tensor.contiguous().stride()
    return tensor.data_ptr() % _ALIGNMENT, strides


def _with_layout(values: Tensor, address: int, strides: Sequence[int], device: torch.device) -> Tensor:
    """A copy of `values` on a device, with the address and strides that `_memory_layout` has returned."""
    skipped = address // values.element_size()
    memory = torch.empty(skipped + values.numel(), dtype=values.dtype, device=device)
    return memory[skipped:].as_strided(values.shape, strides).copy_(values)


def _machine(world: World) -> str:
    """What determines the order of sums in a kernel: the device, the processor and the number of threads."""
    processor = ""
    with suppress(OSError):  # only Linux has this file
        lines = Path("/proc/cpuinfo").read_text().splitlines()[:30]
        processor = "".join(line for line in lines if line.startswith(("model name", "flags")))
    return f"{torch.__version__}, {device_name(world)}, {torch.get_num_threads()} threads, {processor}"


# --- Check ------------------------------------------------------------------------------------------------------------


class Replay:
    """Checks the ranks' gradients at log points; see the head of this file."""

    def __init__(self, context: TrainerContext, backpropagated: Callable[[Tensor | Loss, int], Tensor]) -> None:
        """`backpropagated`: a function that returns what a pass backpropagates, from its loss and number of samples."""
        self._context = context
        self._world = world = context.world
        self._backpropagated = backpropagated
        self._parameters = context.strategy.parameters
        config = context.config
        alike = len({*gathered_bytes(_machine(world).encode(), world)}) == 1
        exact = alike and (world.device.type == "cpu" or config.deterministic)
        self._tolerance = 0.0 if exact else _TOLERANCE[config.precision]
        # If possible, the three ranks that repeat a pass are on three nodes.
        self._distance = 1
        if world.world_size >= 3 * world.local_world_size:
            self._distance = world.local_world_size
        self._checked: int | None = None  # the step of the last check
        self._problem = ""  # why passes cannot be repeated
        self._off = False  # whether a rank has a problem
        self._pass: _Pass | None = None  # this rank's first pass in the step; None if it has none
        self._message: dict[str, Tensor] = {}
        self._batch_bits: Tensor  # of the batch before the pass
        self._sums: GradientSums
        self._before: PassState
        self._written = frozenset[str]()  # the names of weights and tensors that forward passes write
        self._learned = 0  # how often names were added to them
        self._weights: ComparedWeights = "together"  # "each": to find which weights are written

    @property
    def _hosts(self) -> dist.ProcessGroup | None:
        return host_group(self._world)

    def is_due(self, step: int) -> bool:
        """Whether to check the gradients of this step, which is a log point."""
        return not self._off and (self._checked is None or step >= self._checked + INTERVAL)

    @contextmanager
    def watching(self, share: Share, fetch: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
        """Context manager for the passes of a step, which notes the first one.

        Yields a function that returns the batch of the next pass, as `fetch` does.
        """
        self._pass = None
        self._before = PassState(
            self._context.model, self._written, beside=self._context.loss_modules, weights=self._weights, graphs=False
        )

        def batch() -> Any:
            value = fetch()
            if self._pass is None:
                self._note(*unpacked(share.passes[0], value))
            else:
                self._sums.close()
            return value

        try:
            yield batch
        finally:
            if self._pass is not None:
                self._sums.close()

    def _note(self, samples: int, batch: Any) -> None:
        self._pass = _Pass(with_copied_containers(batch), samples, encoded(random_states(self._world)), [])
        self._sums = GradientSums(self._parameters, exact=not self._tolerance)
        try:  # before the pass, because the loss function may write to its batch
            self._message = _packed(self._pass)
        except CheckpointError:
            self._problem = f"a batch of {type(batch).__name__} has objects that cannot be sent to another rank"
        else:
            self._batch_bits = bits(tensors_in(batch))

    def compare(self, step: int) -> None:
        """Compare the noted gradients with those of the next rank, which repeats the pass. A collective.

        Raises `FaultyRankError` on all ranks if a rank has computed wrong gradients. If a pass cannot be repeated, logs
        a warning, and checks nothing from then on.
        """
        message = b""
        written: list[str] = []
        if self._pass is not None and not self._problem:
            self._pass = self._pass._replace(noted=self._sums.values())
            noted = torch.tensor(self._pass.noted, dtype=torch.float64)
            message = safetensors.torch.save(self._message | {_NOTED: noted})
            if int(bits(tensors_in(self._pass.batch))) != int(self._batch_bits):  # the loss function has written to it
                self._pass = self._unpacked(message)
            written = self._before.changed()
            if self._checked is None and not written:
                self._repeat(self._pass, alone=True)
        sizes = self._of_ranks(_WRITTEN if written else len(message))
        if _WRITTEN in sizes:
            self._learn(written)
        elif sizes:
            received = self._from_previous_rank(message, sizes)
            previous = self._unpacked(received)
            first = self._repeat(previous)
            checked = self._checked
            self._checked = step
            if any(self._of_ranks(previous is not None and not self._same(previous.noted, first))):
                before_previous = b""
                if self._world.world_size > 2:
                    sizes = sizes[-self._distance :] + sizes[: -self._distance]
                    before_previous = self._from_previous_rank(received, sizes)
                self._name_faults(step, checked, (message, received, before_previous), first)
        self._pass = None  # frees the memory of the batch
        self._message = {}

    def _learn(self, written: Sequence[str]) -> None:
        """Note which weights the passes of this step have written, to copy them before the next check. A collective."""
        of_ranks = gathered_bytes(json.dumps(written).encode(), self._world, self._hosts)
        names = set[str]().union(*map(json.loads, of_ranks))
        self._weights = "each" if WEIGHTS in names else "together"
        self._written |= names - {WEIGHTS}
        self._learned += 1
        if self._learned > _MOST_LEARNED:
            self._problem = f"in each step, forward passes write to other tensors, now to {some(sorted(names))}"

    def _name_faults(
        self, step: int, checked: int | None, messages: tuple[bytes, bytes, bytes], first: Gradients
    ) -> None:
        """Repeat three passes on each rank, and raise `FaultyRankError` if that shows who is wrong. A collective.

        `checked`: the step of the last check. `messages`: the passes of this rank and of the two ranks before it.
        `first`: the gradients of the second pass, which this rank has already repeated once.
        """
        world = self._world
        message, received, before_previous = messages
        repeats = Repeats(
            noted=[] if self._pass is None else self._pass.noted,
            own=self._repeat(self._pass),
            copied=self._repeat(self._unpacked(message)),
            previous=(first, self._repeat(self._unpacked(received))),
            before_previous=self._repeat(self._unpacked(before_previous)),
        )
        if not self._of_ranks(0):
            return
        own = json.dumps([f"{socket.gethostname()}, {device_name(world)}", repeats]).encode()
        devices, of_ranks = zip(*map(json.loads, gathered_bytes(own, world, self._hosts)), strict=True)
        found = faults([Repeats(*of_rank) for of_rank in of_ranks], self._distance, self._same)
        if found:
            error = faulty_ranks(step, checked, found, devices)
            error.reported_elsewhere = world.rank != min(found)
            raise error
        self._problem = (
            "ranks that repeat the same pass get different gradients, so the loss function depends on more than its "
            "batch, the model and the random states of Python, NumPy and torch; repeating it has also changed what the "
            "loss function keeps outside of the model, such as a counter"
        )
        self._of_ranks(0)

    def _same(self, one: Gradients, other: Gradients) -> bool:
        return bool(self._problem) or same_gradients(one, other, self._tolerance)

    def _unpacked(self, message: bytes) -> _Pass | None:
        if not message:
            return None
        kind = None if self._pass is None else self._pass.batch
        return _unpacked(message, self._world.device, kind)

    def _repeat(self, noted: _Pass | None, *, alone: bool = False) -> Gradients:
        """The gradients of a repeated pass; empty without a pass, and if there is a problem.

        `alone`: whether the other ranks repeat no pass: then a collective is a problem.
        """
        if noted is None or self._problem:
            return []
        rank = self._world.rank
        sums = GradientSums(self._parameters, exact=not self._tolerance, discard=True)

        def gradients(loss: Tensor | Loss) -> Gradients:
            torch.autograd.grad(self._backpropagated(loss, noted.samples), self._parameters, allow_unused=True)
            return sums.values()

        try:
            repeated, changed = repeat(
                self._context,
                noted.batch,
                lambda: set_random_states(decoded(noted.random)),
                gradients,
                start=self._before,
                written=self._written,
                alone=alone,
            )
        except NotRepeatable as problem:
            self._problem = f"repeating a pass failed on rank {rank}: {problem}"
            repeated = []
            changed = problem.after.changed()
        finally:
            sums.close()
        if changed:
            self._problem = (
                f"repeating a pass on rank {rank} has changed {some(changed)}, which the pass of the step did not "
                "write, so the weights of this run are no longer those of a run without the check"
            )
        return repeated

    def _of_ranks(self, number: int) -> list[int]:
        """The number of each rank; empty if any rank has a problem: no pass is repeated from then on. A collective."""
        world = self._world
        numbers, problems = zip(*gathered(world, [number, bool(self._problem)], self._hosts), strict=True)
        if not any(problems):
            return [*numbers]
        self._off = True
        problem = next(filter(None, gathered_bytes(self._problem.encode(), world, self._hosts))).decode()
        if world.is_main:
            logger.warning('verify_ranks="replay" stops comparing gradients: {}', problem)
        return []

    def _from_previous_rank(self, message: bytes, sizes: Sequence[int]) -> bytes:
        """Send a message to the next rank, and return the one from the previous rank. A collective.

        `sizes`: the size of each rank's message.
        """
        world = self._world
        previous = (world.rank - self._distance) % world.world_size
        following = (world.rank + self._distance) % world.world_size
        received = torch.empty(sizes[previous], dtype=torch.uint8)
        sending = None
        if message:
            content = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            sending = dist.isend(content, following, group=self._hosts)
        if sizes[previous]:
            dist.recv(received, previous, group=self._hosts)
        if sending is not None:
            sending.wait()
        return received.numpy().tobytes()
