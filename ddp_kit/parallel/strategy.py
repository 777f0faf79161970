"""How the ranks are divided: replicate x shard x tensor x pipeline. Pure arithmetic."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ddp_kit.config.settings import ParallelConfig
from ddp_kit.distributed.world import World
from ddp_kit.errors import ConfigError
from ddp_kit.pieces import Piece
from ddp_kit.torch_internals import broadcast_coalesced, multiply_all

_WHOLE_GRADIENTS_SHARE = 8  # of a device's memory, whole gradients take one part at most


@dataclass(frozen=True)
class Sizes:
    """The sizes of the four dimensions; ranks are numbered with `tensor` as the fastest, then shard, replicate and
    pipeline: ranks of one tensor group are neighbours, mostly on one node."""

    replicate: int
    shard: int
    tensor: int
    pipeline: int

    @property
    def data(self) -> int:
        """Into how many parts a global batch is divided."""
        return self.replicate * self.shard

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """Where a rank is: in pipeline, replicate, shard and tensor."""
        rank, tensor = divmod(rank, self.tensor)
        rank, shard = divmod(rank, self.shard)
        pipeline, replicate = divmod(rank, self.replicate)
        return pipeline, replicate, shard, tensor

    def rank(self, pipeline: int, replicate: int, shard: int, tensor: int) -> int:
        """The rank at these coordinates."""
        return ((pipeline * self.replicate + replicate) * self.shard + shard) * self.tensor + tensor


def sizes_of(config: ParallelConfig, world_size: int) -> Sizes:
    """The sizes that a configuration means for so many ranks. Raises `ConfigError` where they do not fit."""
    fixed = {"tensor": config.tensor, "pipeline": config.pipeline}
    free = next((name for name in ("replicate", "shard") if getattr(config, name) == -1), None)
    fixed |= {name: getattr(config, name) for name in ("replicate", "shard") if name != free}
    product = math.prod(fixed.values())
    left, rest = divmod(world_size, product)
    if rest or left == 0 or (free is None and left != 1):
        shown = " x ".join(f"{name} {size}" for name, size in fixed.items() if size > 1) or "1"
        multiple = max(1, round(world_size / product)) * product if free is not None else product
        raise ConfigError(
            f"the sizes of parallel do not match the number of ranks: {shown} = {product}, but there "
            f"{'is 1 rank' if world_size == 1 else f'are {world_size} ranks'}",
            f"start {multiple} ranks, or change one of the sizes"
            + ("" if free is not None else ", or leave out replicate, which is then computed"),
        )
    if free is not None:
        fixed[free] = left
    return Sizes(**fixed)


def whole_gradients_fit(gradients: int, memory: int) -> bool:
    """Whether FSDP keeps whole gradients while they accumulate, so that it reduces once per step rather than once per
    pass. `gradients`, `memory`: bytes, of the whole model and of one device."""
    return gradients * _WHOLE_GRADIENTS_SHARE <= memory


# --- Shared by strategies that keep a whole model on every rank -------------------------------------------------------


_BROADCAST_BYTES = 250 * 1024 * 1024
# Types that gloo and NCCL support. Others are sent as integers of the same size.
_SENT = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.int8}
_SAME_SIZE = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor]) -> None:
    """Copy rank 0's values to all ranks, in place. Sparse tensors are left as they are. A collective."""
    sent: list[Tensor] = []
    received: list[tuple[Tensor, Tensor]] = []
    for each in tensors:
        if each.layout != torch.strided or not each.numel():
            continue
        if each.dtype in _SENT and each.is_contiguous():
            sent.append(each)
        else:
            memory = stored(each)
            copy = memory.clone(memory_format=torch.contiguous_format).reshape(-1)
            sent.append(copy.view(_SAME_SIZE[min(copy.element_size(), 8)]))
            received.append((memory, copy))
    if sent:
        # As DistributedDataParallel sends them: many in one piece.
        broadcast_coalesced(sent, _BROADCAST_BYTES)
    for memory, copy in received:
        memory.copy_(copy.view(memory.shape))


def stored(tensor: Tensor) -> Tensor:
    """The part of a tensor that is in memory: an expanded one repeats the first index of a dimension."""
    for dimension, stride in enumerate(tensor.stride() if tensor.layout == torch.strided else ()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


# --- The interface of a strategy: all that the trainer and the checkpoints know about how a model is distributed ------


T = TypeVar("T")

# Wrappers of a model by their names, which need not be imported to find them, and what to do instead.
_USE_ITS_MODULE = "pass the model itself, which is its .module: the Trainer spreads it over the ranks"
_WRAPPERS = {
    "DistributedDataParallel": _USE_ITS_MODULE,
    "DataParallel": f"{_USE_ITS_MODULE}, one process per GPU: `ddpkit launch --gpus all train.py`",
    "FullyShardedDataParallel": f'{_USE_ITS_MODULE}, with parallel="fsdp"',
    "FSDPModule": 'pass the model before fully_shard(model), and set parallel="fsdp": the Trainer shards it',
}

Parallelize = Callable[[nn.Module, DeviceMesh], None]
"""Spreads a model in place over a mesh with the dimensions replicate, shard and tensor."""


class PassedOn(BaseException):
    """Ends a call of the user's function on a rank where the model does not end: the next stage continues with
    `tensor`. No `Exception`, so that no code of the model takes it for an error."""

    def __init__(self, tensor: Tensor, items: int) -> None:
        super().__init__()
        self.tensor = tensor
        self.items = items
        """Of the tuple that the last block returned; -1: it returned the tensor itself."""


class Passes(Protocol):
    """This rank's forward passes of an optimizer step, as a strategy runs them."""

    count: int
    """0: this rank has no samples in the step. Where passes are equal, those with zero weight count too."""

    @property
    def most(self) -> int:
        """Those of the rank that has the most in the first step; known once the first pass was run forward."""

    def forward(self, number: int) -> Tensor:
        """The loss of pass `number`, a scalar. Passes begin in order, and each is called `calls_per_pass` times.

        Raises `PassedOn` on a rank where the model does not end.
        """

    def without_loss(self) -> None:
        """To be called on a rank that has passes but no losses, after its first pass of the first step: it takes part
        in what the ranks agree on. A collective."""

    def rehearsal(self) -> AbstractContextManager[Callable[[], Tensor]]:
        """Gives a function that returns the loss of pass 0 as often as it is called. What these passes change in
        buffers and random states is undone at the end, and `forward(0)` gets the same batch."""

    def before_reduction(self, loss: Tensor) -> None:
        """To be called once per step, by all ranks, just before the last backward pass whose gradients are reduced."""

    def after_backward(self) -> None:
        """To be called after each backward pass."""


class Strategy(ABC):
    """How one model is spread over the ranks.

    strategy.check(model); strategy.setup(model); strategy.setup_optimizer(optimizer)      # on all ranks
    for each optimizer step:
        strategy.begin_step()
        strategy.run_passes(passes)                      # afterwards the gradients are those of all ranks
        strategy.check_gradients()
        strategy.scale_gradients(...), grad_norm(), clip_grad_norm(...), clip_grad_value(...)
        optimizer.step()
        strategy.end_step()                              # gradients are None

    Methods are collectives unless they say otherwise: all ranks call them in the same order.
    """

    def __init__(self, world: World, config: ParallelConfig, *, recoverable: bool = False) -> None:
        self.world = world
        self.config = config
        self.recoverable = recoverable
        self.model: nn.Module
        """The user's own module, which loss functions get."""
        self.parameters: tuple[nn.Parameter, ...] = ()
        """Those that require a gradient."""
        self._trains: list[nn.Parameter] | None = None  # of several updates per step: what this one's gradients go to

    # --- which ranks share samples --------------------------------------------------------------------------------

    @property
    def data_ranks(self) -> int:
        """Into how many parts a global batch is divided."""
        return self.world.world_size

    @property
    def data_rank(self) -> int:
        """Which of these parts this rank trains on. Ranks that share one model share a part."""
        return self.world.rank

    @property
    def replicas(self) -> tuple[Sequence[int], ...]:
        """The ranks in groups: those of one group hold the same weights."""
        return (range(self.world.world_size),)

    @property
    def optimizer_replicas(self) -> tuple[Sequence[int], ...]:
        """The ranks in groups: those of one group hold the same optimizer state."""
        return self.replicas

    @property
    def divisor(self) -> int:
        """The number by which the reduction divides the sum of the ranks' gradients."""
        return 1

    @property
    def contributes(self) -> bool:
        """Whether this rank's losses, weights, metrics and predictions count: of ranks that share samples, one's do."""
        return True

    @property
    def calls_per_pass(self) -> int:
        """How often the strategy calls the loss function for a batch: once for each part of the model on this rank."""
        return 1

    equal_passes: bool = False
    """Whether each pass has collectives, so that all ranks run the same number: those that have fewer samples repeat
    a batch with zero weight."""
    shards: bool = False
    """Whether the optimizer of each rank holds a part of what is trained, rather than all of it."""
    divides_weights: bool = False
    """Whether each rank holds a part of the weights, so that `model_state` gives pieces."""
    replaces_parameters: bool = False
    """Whether `setup` puts other parameters into the model, so that the optimizer has to be made after it."""

    # --- set up ---------------------------------------------------------------------------------------------------

    def check(self, model: nn.Module) -> None:
        """Raise `ConfigError` for a model that cannot be spread this way. Not a collective."""
        for name, module in model.named_modules():
            wrapper = next((each.__name__ for each in type(module).__mro__ if each.__name__ in _WRAPPERS), None)
            if wrapper is not None:
                what = f"the module {name} of the model" if name else "the model"
                raise ConfigError(f"{what} is wrapped in {wrapper}", _WRAPPERS[wrapper])
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError(
                f"the model {type(model).__name__} has no parameter that requires grad: there is nothing to train",
                "set requires_grad=True on the parameters to train",
            )

    def check_recoverable(self) -> None:
        """Raise `ConfigError` where a step cannot be repeated after a rank ran out of memory. Not a collective."""
        if any(isinstance(module, nn.SyncBatchNorm) for module in self.model.modules()):
            raise ConfigError(
                "micro_batch_size='auto' is not supported with SyncBatchNorm, which runs a collective in every pass",
                "set micro_batch_size to a number",
            )

    def use(self, parallelize: Parallelize) -> None:  # noqa: ARG002
        """Let the user's own function spread the model in `setup`. Not a collective."""
        raise ConfigError(
            f"parallelize=... is for FSDP and tensor parallelism, but parallel.strategy is {self.config.strategy!r}",
            "set the sizes of the mesh that the function gets, such as parallel={'shard': 4, 'tensor': 2}",
        )

    def offload_parameters(self) -> None:
        """Before `setup`: weights that are sharded are to be in host memory between uses. Not a collective."""

    @property
    def parameters_on_host(self) -> bool:
        """Whether they are: known after `setup`."""
        return False

    def setup(self, model: nn.Module) -> None:
        """Move the model to its devices, with the same values on all ranks. Called again after `release`."""
        self.model = model
        self.parameters = tuple(parameter for parameter in model.parameters() if parameter.requires_grad)
        self.place(model)

    def place(self, model: nn.Module) -> None:
        """Move weights and buffers to their device. Parameters stay the same objects."""
        model.to(self.world.device)

    def release(self) -> None:
        """Undo what `setup` built around the model, after a failed step. Not a collective."""

    def setup_optimizer(self, optimizer: Optimizer) -> None:
        """Let the optimizer hold what this rank updates. After `setup`, before the optimizer has any state."""

    def divided(self, parameters: Sequence[Sequence[nn.Parameter]]) -> "list[Self]":  # noqa: ARG002
        """For several updates per step, with a loss each: one strategy per update, of the parameters that it trains.

        To be used instead of this one for the steps. After `setup`.
        """
        raise ConfigError(
            f"several updates per step are not supported with parallel.strategy={self.config.strategy!r}",
            "use parallel='ddp'",
        )

    def _of_update(self, parameters: Sequence[nn.Parameter]) -> "Self":
        own = copy(self)
        own.parameters = tuple(each for each in parameters if each.requires_grad)
        own._trains = list(own.parameters)
        return own

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss to those of the parameters. Not a collective."""
        loss.backward(inputs=self._trains)  # type: ignore[no-untyped-call]

    def local_parameters(self) -> list[Tensor]:
        """The memory of the parameters that this rank holds, trained or not, detached."""
        return [each.detach() for each in self.model.parameters()]

    # --- an optimizer step ----------------------------------------------------------------------------------------

    @abstractmethod
    def begin_step(self) -> None:
        """Before a step's first pass: buffers become the same on all ranks that hold them."""

    @abstractmethod
    def run_passes(self, passes: Passes) -> None:
        """Run this rank's passes and reduce the gradients over the ranks, once.

        Afterwards each `.grad` is the sum over all ranks' passes divided by `divisor`. A rank without passes takes
        part in the reductions with zeros; a parameter that no rank's passes used has no gradient.
        """

    def accumulate(self, passes: Passes, prepare: Callable[[Tensor], Tensor] | None = None) -> None:
        """Run this rank's passes, whose gradients add up on it. For `run_passes`. Not a collective.

        `prepare`: gets the last loss, and returns the one whose backward pass reduces the gradients, where it does.
        """
        for number in range(passes.count):
            loss = passes.forward(number)
            if number == passes.count - 1:
                loss = loss if prepare is None else prepare(loss)
                passes.before_reduction(loss)
            self.backward(loss)
            passes.after_backward()

    def finish_failed_passes(self) -> None:
        """After `run_passes` raised on this rank: take part, with zeros, in the reductions it did not come to.

        Called only where the strategy is `recoverable`; then the other ranks' `run_passes` returns, and all ranks
        repeat the step.
        """

    def check_gradients(self) -> None:
        """Raise `LossError` if a step did not use parameters that the strategy needs. Not a collective."""

    def end_step(self) -> None:
        """After the update; gradients are None. Raises `LossError` for what the reduction found out late."""

    def forward_context(self) -> AbstractContextManager[object]:
        """The context in which a compiled loss function runs. Not a collective."""
        return nullcontext()

    def call(self, function: Callable[[nn.Module, T], Any], batch: T) -> Any:
        """What a function of the model and a batch returns, such as the loss function.

        Raises `PassedOn` on a rank where the model does not end.
        """
        return function(self.model, batch)

    # --- gradients, once they are reduced ---------------------------------------------------------------------------

    @property
    def updated(self) -> Sequence[nn.Parameter]:
        """What the optimizer of this rank updates; the methods below are about the gradients of these."""
        return self.parameters

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply all gradients by a scalar on the device. Nothing waits for its value."""
        scale_gradients(self.updated, factor)

    def grad_norm(self) -> Tensor:
        """The 2-norm of all gradients together, the same scalar on all ranks."""
        norm = nn.utils.get_total_norm([_values(each.grad) for each in self.updated if each.grad is not None])
        return norm.to(self.world.device)  # it is where the first gradient is

    def clip_grad_norm(self, limit: float, norm: Tensor) -> None:
        """Scale the gradients down to the norm `limit`. `norm`: what `grad_norm` gave."""
        nn.utils.clip_grads_with_norm_(self.updated, limit, norm)

    def clip_grad_value(self, limit: float) -> None:
        """Limit each value of the gradients to -limit ... limit."""
        nn.utils.clip_grad_value_(self.updated, limit)

    # --- evaluation and prediction ----------------------------------------------------------------------------------

    @abstractmethod
    def sync_buffers(self) -> None:
        """Make buffers, such as BatchNorm's statistics, the same on all ranks that hold them."""

    def evaluation(self, batches: Iterable[tuple[int, T]], spare: Callable[[], T]) -> Iterator[tuple[int, T]]:  # noqa: ARG002
        """This rank's batches with the number of their samples, of which ranks may have different numbers.

        Each is followed by one forward pass. Where passes are equal, batches of 0 samples follow: their results do not
        count. `spare`: gives a batch for a rank that has none.
        """
        yield from batches

    # --- state ------------------------------------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        """The model's state_dict, with a `Piece` for each tensor of which this rank holds a part."""
        return self.model.state_dict()

    def load_model_state(self, state: dict[str, Any]) -> None:
        """Load what `model_state` gave, or whole tensors in place of pieces."""
        self.model.load_state_dict(state)

    def held_names(self) -> dict[int, str]:
        """The names of the parameters that the optimizer holds, by their id."""
        return {id(parameter): name for name, parameter in self.model.named_parameters()}

    def piece_of(self, parameter: Tensor) -> Piece | None:  # noqa: ARG002
        """Where a parameter that the optimizer holds belongs in the one of the model; None: it is the model's own."""
        return None

    def optimizer_form(self, optimizer: Optimizer) -> Any:  # noqa: ARG002
        """What other ranks have to know of this rank's part of an optimizer's state, to save theirs. JSON."""
        return None

    def optimizer_state(self, state: dict[int, Any], forms: Sequence[Any]) -> dict[int, Any]:  # noqa: ARG002
        """An optimizer's state with entries for what other ranks hold. `forms`: of all ranks."""
        return state

    def own_optimizer_state(self, state: dict[int, Any]) -> dict[int, Any]:
        """Those entries of a saved state that this rank needs."""
        return state

    def state_dict(self) -> dict[str, Any]:
        """State to save so that gradients are reduced the same way after a resume. JSON."""
        return {}

    def load_state_dict(self, state: dict[str, Any], steps: int) -> None:
        """Restore what `state_dict` gave. `steps`: optimizer steps done so far. Raises `ValueError`."""


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply the gradients by a scalar that is on the device, without waiting for its value."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), group in by_kind.items():
        # In at least float32: a factor rounded to bfloat16 would be off by the same 0.4 % in every gradient.
        multiply_all(group, factor.to(device, torch.promote_types(dtype, torch.float32)))


def _values(gradient: Tensor) -> Tensor:
    """What a norm is computed of: torch has none for sparse gradients, such as those of nn.Embedding(sparse=True)."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


# --- One rank: no communication ---------------------------------------------------------------------------------------


class SingleRank(Strategy):
    """The whole model on one device, in one process."""

    def divided(self, parameters: Sequence[Sequence[nn.Parameter]]) -> list[Self]:
        return [self._of_update(each) for each in parameters]

    def begin_step(self) -> None:
        pass

    def run_passes(self, passes: Passes) -> None:
        self.accumulate(passes)

    def sync_buffers(self) -> None:
        pass
