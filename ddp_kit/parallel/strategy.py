"""The interface of a strategy, the code that several strategies share, and the strategy for a single rank."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from ddp_kit.config.settings import ParallelConfig
from ddp_kit.distributed.barrier import wait_for_all
from ddp_kit.distributed.world import World
from ddp_kit.errors import ConfigError, LossError
from ddp_kit.parallel.writes import check_no_max_norm
from ddp_kit.state_values import Piece
from ddp_kit.texts import plural, some
from ddp_kit.torch_internals import broadcast_coalesced, multiply_all, persistent_buffers

_WHOLE_GRADIENTS_SHARE = 8  # whole gradients take at most 1/8 of a device's memory


@dataclass(frozen=True)
class Sizes:
    """The sizes of the mesh dimensions: replicate x shard x tensor x pipeline.

    Order of rank numbers, slowest first: pipeline, replicate, shard, tensor. The ranks of a tensor group are therefore
    adjacent, and usually on one node.
    """

    replicate: int
    shard: int
    tensor: int
    pipeline: int

    @property
    def data(self) -> int:
        """The number of parts that a global batch is divided into."""
        return self.replicate * self.shard

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """The coordinates of a rank in the dimensions pipeline, replicate, shard and tensor, in this order."""
        rank, tensor = divmod(rank, self.tensor)
        rank, shard = divmod(rank, self.shard)
        pipeline, replicate = divmod(rank, self.replicate)
        return pipeline, replicate, shard, tensor

    def rank(self, pipeline: int, replicate: int, shard: int, tensor: int) -> int:
        """The rank at these coordinates."""
        return ((pipeline * self.replicate + replicate) * self.shard + shard) * self.tensor + tensor

    def mesh(self, device_type: str, *dimensions: str) -> DeviceMesh:
        """A mesh of all ranks with these dimensions, slowest first. A collective."""
        sizes = tuple(getattr(self, dimension) for dimension in dimensions)
        return init_device_mesh(device_type, sizes, mesh_dim_names=dimensions)


def sizes_of(config: ParallelConfig, world_size: int) -> Sizes:
    """The sizes for `world_size` ranks. Raises `ConfigError` if the configuration does not match that number."""
    sizes = {name: getattr(config, name) for name in ("tensor", "pipeline", "replicate", "shard")}
    fixed = {name: size for name, size in sizes.items() if size != -1}
    free = [*(sizes.keys() - fixed.keys())]  # at most one of replicate and shard
    product = math.prod(fixed.values())
    left, rest = divmod(world_size, product)
    if rest or left == 0 or (not free and left != 1):
        factors = " x ".join(f"{name} {size}" for name, size in fixed.items() if size > 1) or "1"
        multiple = product
        other_fix = ""
        if free:
            multiple *= max(1, round(world_size / product))
        else:
            other_fix = ", or leave out replicate, which is then computed from the others"
        verb = "is" if world_size == 1 else "are"
        raise ConfigError(
            f"the parallel sizes do not match the number of ranks: {factors} = {product}, but there {verb} "
            f"{plural(world_size, 'rank')}",
            f"start {multiple} ranks, or change one of the sizes{other_fix}",
        )
    return Sizes(**fixed, **dict.fromkeys(free, left))


def whole_gradients_fit(gradients: int, memory: int) -> bool:
    """Whether unsharded gradients take at most a small share of a device's memory.

    If they do, FSDP accumulates them and reduces them once per step instead of once per pass.

    `gradients`: bytes of the whole model's gradients. `memory`: bytes of one device's memory.
    """
    return gradients * _WHOLE_GRADIENTS_SHARE <= memory


# --- Broadcast --------------------------------------------------------------------------------------------------------


_BROADCAST_BYTES = 250 * 1024 * 1024
# Dtypes that gloo and NCCL support. Others are sent as a supported dtype of the same size.
_SENT = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.int8}
_SAME_SIZE = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor]) -> None:
    """Copy rank 0's values to all ranks, in place. Sparse tensors are left as they are. A collective."""
    sent: list[Tensor] = []
    received: list[tuple[Tensor, Tensor]] = []
    for tensor in tensors:
        if tensor.layout != torch.strided or not tensor.numel():
            continue
        if tensor.dtype in _SENT and tensor.is_contiguous():
            sent.append(tensor)
        else:
            memory = stored(tensor)
            copy = memory.clone(memory_format=torch.contiguous_format).reshape(-1)
            sent.append(copy.view(_SAME_SIZE[min(copy.element_size(), 8)]))
            received.append((memory, copy))
    if sent:
        # Many tensors per message, as in DistributedDataParallel.
        broadcast_coalesced(sent, _BROADCAST_BYTES)
    for memory, copy in received:
        memory.copy_(copy.view(memory.shape))


def stored(tensor: Tensor) -> Tensor:
    """A view of a tensor without repeated values: expanded dimensions are reduced to their first index."""
    if tensor.layout != torch.strided:
        return tensor
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


@torch.no_grad()
def with_written_views(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """A state to load into the model, after writing the tensors that `Module.load_state_dict` cannot write.

    These were made by `expand`, so several of their values share memory. In the result, they are the model's own.
    """
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    loaded = copy(state)  # also its _metadata
    for name, tensor in own.items():
        memory = stored(tensor)
        value = state.get(name)
        if memory.shape == tensor.shape or not isinstance(value, Tensor) or value.shape != tensor.shape:
            continue
        values = value[tuple(slice(size) for size in memory.shape)]
        if not torch.equal(values.expand(value.shape), value):
            raise ValueError(f"{name} repeats its values in this run, because of expand(), but not in the saved state")
        memory.copy_(values)
        loaded[name] = tensor
    return loaded


# --- Buffers ----------------------------------------------------------------------------------------------------------
# Buffers that are in the state_dict are broadcast from rank 0 before each step. Other buffers are derived from
# something else, such as a table that grows with the longest sequence, and may differ between ranks.


BUFFERS_HINT = (
    "before each step, rank 0's buffers are broadcast, so they need the same shapes and dtypes on all ranks: register "
    "a buffer that is computed from a batch with register_buffer(..., persistent=False), which is not broadcast; or "
    "create it in its largest size"
)


def shared_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that the ranks share, by name."""
    shared = set(map(id, persistent_buffers(model)))
    return {name: buffer for name, buffer in model.named_buffers() if id(buffer) in shared}


class SharedBuffers:
    """The buffers of a model that the ranks share, with the shapes and dtypes that they have on all ranks.

    A broadcast of buffers with other shapes would hang, abort, or put numbers into the wrong buffers.
    `model`: the model on this rank; its buffers have the same shapes and dtypes on all ranks.
    """

    def __init__(self, world: World, model: nn.Module) -> None:
        self._world = world
        self._model = model
        self._kinds = [_shape_and_dtype(buffer) for buffer in persistent_buffers(model)]
        self._named = self._names()

    def checked(self) -> list[Tensor]:
        """The buffers to broadcast. Raises `WorldError` if their shapes or dtypes differ between ranks.

        All ranks call it in the same order. They communicate only if buffers have changed since the last call.
        """
        buffers = persistent_buffers(self._model)
        kinds = [_shape_and_dtype(buffer) for buffer in buffers]
        if kinds != self._kinds:
            named = self._names()
            both = {name: (self._named.get(name, "none"), named.get(name, "none")) for name in self._named | named}
            changes = [f"{name} from {before} to {now}" for name, (before, now) in both.items() if before != now]
            place = f"a comparison of buffers, because they changed: {some(changes)}"
            wait_for_all(self._world, place, hint=BUFFERS_HINT)
            self._kinds = kinds
            self._named = named
        return buffers

    def _names(self) -> dict[str, str]:
        """The shape and dtype of each buffer as text, by name."""
        return {
            name: f"{tuple(buffer.shape)} {str(buffer.dtype).removeprefix('torch.')}"
            for name, buffer in shared_buffers(self._model).items()
        }


def _shape_and_dtype(buffer: Tensor) -> tuple[torch.Size, torch.dtype]:
    return buffer.shape, buffer.dtype


# --- Parameters -------------------------------------------------------------------------------------------------------


def trained(parameters: Iterable[nn.Parameter]) -> tuple[nn.Parameter, ...]:
    """The parameters that require a gradient."""
    return tuple(parameter for parameter in parameters if parameter.requires_grad)


def total_norm(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """The 2-norm of all gradients of these parameters together, as a scalar on `device`; 0 without gradients."""
    gradients = [_values(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros((), device=device)
    return nn.utils.get_total_norm(gradients).to(device)  # torch returns it on the device of the first gradient


def state_with_pieces(model: nn.Module, piece_of: Callable[[str, Tensor], Piece | None]) -> dict[str, Any]:
    """The model's state_dict, with pieces in place of the tensors for which `piece_of(name, tensor)` returns one."""
    state = model.state_dict(keep_vars=True)
    pieces: dict[int, Piece | None] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            if pieces.get(id(value)) is None:  # tied weights are stored once
                pieces[id(value)] = piece_of(name, value)
            state[name] = pieces[id(value)] or value.detach()
    return state


# --- Strategy ---------------------------------------------------------------------------------------------------------


T = TypeVar("T")

# Model wrappers, by name so that they need not be imported, and what to do instead of using them.
_USE_ITS_MODULE = "pass the model inside the wrapper (its .module): the Trainer distributes it over the ranks"
_WRAPPERS = {
    "DistributedDataParallel": _USE_ITS_MODULE,
    "DataParallel": f"{_USE_ITS_MODULE}, one process per GPU: `ddpkit launch --gpus all train.py`",
    "FullyShardedDataParallel": f'{_USE_ITS_MODULE}, with parallel="fsdp"',
    "FSDPModule": 'do not call fully_shard(model): set parallel="fsdp", and the Trainer shards the model',
}

_USE_OR_FREEZE = "use these parameters in the loss, or freeze them (requires_grad=False) before creating the Trainer"

Parallelize = Callable[[nn.Module, DeviceMesh], None]
"""A function that distributes a model in place over a mesh with the dimensions replicate, shard and tensor."""


@dataclass(frozen=True)
class Options:
    """What a strategy must support, besides its settings."""

    recoverable: bool = False
    """Whether a step may be abandoned and repeated after a rank ran out of memory: `micro_batch_size="auto"`."""
    parallelize: Parallelize | None = None
    """The user's own function that distributes the model; None: the strategy distributes it."""
    parameters_on_host: bool = False
    """Whether to keep sharded weights in host memory while they are not in use: `memory.offload="all"`."""


NO_OPTIONS = Options()
_NO_CONTEXT = nullcontext()


class Strategy(ABC):
    """Distributes one model over the ranks.

    strategy.check(model); strategy.setup(model); strategy.setup_optimizer(optimizer)
    for each optimizer step:
        strategy.begin_step()
        for each pass of this rank:
            with strategy.accumulating(last=...):        # the last backward pass may also reduce the gradients
                strategy.backward(strategy.call(loss_fn, batch))
        strategy.finish_reduction()                      # gradients are now reduced over all ranks
        ...                                              # norms and clipping of the gradients of `updated_parameters`
        optimizer.step()
        strategy.end_step()                              # gradients are None here

    layout      data_ranks, data_rank, replicas, optimizer_replicas, contributes, divisor; equal_passes, shards,
                divides_weights, replaces_parameters, parameters_on_host
    setup       check, setup, setup_optimizer, divided, local_parameters
    step        begin_step, accumulating, backward, finish_reduction, abandon_step, end_step; updated_parameters,
                grad_norm, grad_norms
    evaluation  gather_weights, call, sync_buffers, evaluation
    state       model_state, load_model_state, parameter_names, piece_of, optimizer_form, optimizer_state,
                local_optimizer_state, state_dict, load_state_dict

    A strategy has to implement `sync_buffers` and the reduction of gradients: `finish_reduction` and `abandon_step`.
    Methods are collectives unless documented otherwise: all ranks call them in the same order.
    """

    # --- Layout -------------------------------------------------------------------------------------------------------

    equal_passes: bool = False
    """Whether all ranks run the same number of passes, because passes contain collectives.

    A rank with fewer samples repeats a batch with zero weight.
    """
    shards: bool = False
    """Whether each rank's optimizer holds only a part of the trained parameters."""
    divides_weights: bool = False
    """Whether each rank holds only a part of the weights: passes, also those of evaluations, contain collectives, and
    `model_state` returns pieces."""
    replaces_parameters: bool = False
    """Whether `setup` replaces the model's parameters, so that the optimizer must be created after it."""
    parameters_on_host: bool = False
    """Whether sharded weights are in host memory while they are not in use; known after `setup`."""

    _accepts_parallelize = False

    def __init__(self, world: World, config: ParallelConfig, options: Options = NO_OPTIONS) -> None:
        self.world = world
        self.config = config
        self.options = options
        self.data_ranks = world.world_size
        """The number of parts that a global batch is divided into."""
        self.data_rank = world.rank
        """The part of the global batch that this rank trains on. Ranks of one model replica train on the same part."""
        self.replicas: tuple[Sequence[int], ...] = (range(world.world_size),)
        """Groups of ranks that hold the same weights."""
        self.optimizer_replicas: tuple[Sequence[int], ...] = self.replicas
        """Groups of ranks that hold the same optimizer state."""
        self.contributes = True
        """Whether this rank's losses, weights, metrics and predictions count: of ranks with the same samples, one's."""
        self.divisor = 1
        """The number by which the reduction divides the sum of the ranks' gradients."""
        self.model: nn.Module
        """The user's own module, which is passed to loss functions."""
        self.parameters: tuple[nn.Parameter, ...] = ()
        """The parameters that require a gradient."""
        self._trained: list[nn.Parameter] | None = None  # with several updates per step: the parameters of this one

    # --- Setup --------------------------------------------------------------------------------------------------------

    def check(self, model: nn.Module) -> None:
        """Raise `ConfigError` for a model that the strategy cannot distribute. Not a collective."""
        for name, module in model.named_modules():
            for kind in type(module).__mro__:
                if kind.__name__ in _WRAPPERS:
                    what = f"the module {name} of the model" if name else "the model"
                    raise ConfigError(f"{what} is wrapped in {kind.__name__}", _WRAPPERS[kind.__name__])
        if not trained(model.parameters()):
            raise ConfigError(
                f"the model {type(model).__name__} has no parameter that requires grad: there is nothing to train",
                "set requires_grad=True on the parameters to train",
            )
        if self.options.parallelize is not None and not self._accepts_parallelize:
            raise ConfigError(
                "parallelize=... is for FSDP and tensor parallelism, but parallel.strategy is "
                f"{self.config.strategy!r}",
                "set the sizes of the mesh for your parallelize function, such as parallel={'shard': 4, 'tensor': 2}",
            )
        if self.world.world_size > 1:
            check_no_max_norm(model)
        if self.options.recoverable and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
            raise ConfigError(
                "micro_batch_size='auto' is not supported with SyncBatchNorm, which runs a collective in every pass",
                "set micro_batch_size to a number",
            )

    def _check_own_gpus(self, problem: str) -> None:
        """Raise `ConfigError` if several ranks share a GPU. `problem`: what cannot share GPUs, and why."""
        if self.config.share_gpus and self.world.device.type == "cuda":
            raise ConfigError(
                f"parallel.share_gpus is not supported with {problem}",
                "start as many ranks as there are GPUs, or run on the CPU with CUDA_VISIBLE_DEVICES=''",
            )

    def setup(self, model: nn.Module) -> None:
        """Move the model to its devices, with the same values on all ranks. Called again after `abandon_step`."""
        self.model = model
        self.parameters = trained(model.parameters())
        self._place(model)

    def _place(self, model: nn.Module) -> None:
        """Move weights and buffers to their device. Parameters stay the same objects."""
        model.to(self.world.device)

    def setup_optimizer(self, optimizer: Optimizer) -> None:
        """Make the optimizer hold the parameters that this rank updates. Called after `setup`."""

    def divided(self, parameters: Sequence[Sequence[nn.Parameter]]) -> "list[Self]":  # noqa: ARG002
        """Return one strategy per update, for steps with several updates that each have their own loss and parameters.

        Steps use the returned strategies instead of this one. Called after `setup`.
        """
        raise ConfigError(
            f"several updates per step are not supported with parallel.strategy={self.config.strategy!r}",
            "use parallel='ddp'",
        )

    def _of_update(self, parameters: Sequence[nn.Parameter]) -> "Self":
        strategy = copy(self)
        strategy.parameters = trained(parameters)
        strategy._trained = list(strategy.parameters)
        return strategy

    def local_parameters(self) -> list[Tensor]:
        """Detached tensors of all parameters that this rank holds, trained or not."""
        return [parameter.detach() for parameter in self.model.parameters()]

    # --- Step ---------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Synchronize buffers over the ranks that hold them, before the first pass of a step."""
        self.sync_buffers()

    def accumulating(self, *, last: bool) -> AbstractContextManager[object]:  # noqa: ARG002
        """The context of a forward and backward pass. `last`: whether it is this rank's last one in the step."""
        return _NO_CONTEXT

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss to the gradients of the parameters. May start to reduce them in the last pass."""
        loss.backward(inputs=self._trained)  # type: ignore[no-untyped-call]

    def finish_reduction(self) -> None:
        """Make `.grad` the reduced gradient. A rank without passes contributes zeros.

        DDP and FSDP have reduced during the last backward pass; this completes and checks. Afterwards, each `.grad` is
        the sum over all passes of all ranks, divided by `divisor`; a parameter that no pass on any rank used has no
        gradient. Raises `LossError` if the strategy needs gradients of such parameters.
        """

    def abandon_step(self) -> None:
        """After a pass failed on this rank, contribute zeros to what the rank has not reduced yet in this step.

        Takes the place of `finish_reduction`, which the other ranks call. Gradients are None. Called only with
        `Options.recoverable`; all ranks then call `setup` and repeat the step.
        """

    def end_step(self) -> None:
        """End a step, after the update and when gradients are None. Raises `LossError` if the reduction failed."""

    def _check_gradients(self, missing: Collection[Tensor], problem: str, hint: str = _USE_OR_FREEZE) -> None:
        """Raise `LossError` if parameters got no gradient. `problem`: the text after their names."""
        if missing:
            numbers = set(map(id, missing))
            names = [name for number, name in self.parameter_names().items() if number in numbers]
            raise LossError(f"{some(names)} {problem}", hint)

    @property
    def updated_parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that this rank's optimizer updates. Their gradients are this rank's part of the gradient."""
        return self.parameters

    def grad_norm(self) -> Tensor:
        """The 2-norm of all gradients together, the same scalar on all ranks."""
        return total_norm(self.updated_parameters, self.world.device)

    def grad_norms(self) -> Tensor:
        """The 2-norm of the whole gradient of each updated parameter, the same on all ranks; 0 for no gradient."""
        parameters = self.updated_parameters
        # Also on ranks that hold no float64 weights, because the ranks add up these tensors.
        exact = torch.float64 if any(parameter.dtype == torch.float64 for parameter in parameters) else torch.float32
        zero = torch.zeros((), dtype=exact, device=self.world.device)
        return torch.stack(
            [zero if parameter.grad is None else _norm(parameter.grad).to(zero) for parameter in parameters]
        )

    # --- Evaluation and prediction ------------------------------------------------------------------------------------

    def gather_weights(self) -> None:
        """Give all ranks the weights of the optimizers' shards, which user code may have changed outside of steps.

        `sync_buffers` does so before evaluations and predictions; the caller does so after callbacks of an evaluation.
        """

    def call(self, function: Callable[[nn.Module, T], Any], batch: T) -> Any:
        """Call `function(model, batch)`, for example the loss function, and return its value.

        Every forward pass of training, evaluation and prediction is such a call. Returns None in evaluations if the
        value is only known on another rank, which then `contributes` it.
        """
        return function(self.model, batch)

    @abstractmethod
    def sync_buffers(self) -> None:
        """Make buffers, such as BatchNorm's statistics, the same on all ranks that hold them."""

    def evaluation(
        self,
        batches: Iterable[tuple[int, T]],
        filler_batch: Callable[[], T],  # noqa: ARG002
    ) -> Iterator[tuple[int, T]]:
        """Yield (number of samples, batch) for each batch of this rank; ranks may have different numbers of batches.

        The caller runs one forward pass per batch. With `equal_passes`, a rank that has run out of batches yields
        further ones until all ranks have equally many; their number of samples is 0, and their results do not count.
        `filler_batch`: a function that returns a batch for a rank that has none of its own.
        """
        yield from batches

    # --- State --------------------------------------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        """The model's state_dict, with a `Piece` in place of each tensor of which this rank holds only a part."""
        return self.model.state_dict()

    def load_model_state(self, state: dict[str, Any]) -> None:
        """Load the result of `model_state`; whole tensors may replace pieces."""
        self.model.load_state_dict(with_written_views(self.model, state))

    def parameter_names(self) -> dict[int, str]:
        """Parameter names by id, for the parameters that the optimizer holds."""
        return {id(parameter): name for name, parameter in self.model.named_parameters()}

    def piece_of(self, parameter: Tensor) -> Piece | None:  # noqa: ARG002
        """The piece that `parameter` represents in an optimizer; None if it is the model's own parameter."""
        return None

    def optimizer_form(self, optimizer: Optimizer) -> Any:  # noqa: ARG002
        """A JSON description of this rank's part of an optimizer's state. Other ranks need it to save their parts."""
        return None

    def optimizer_state(self, state: dict[int, Any], forms: Sequence[Any]) -> dict[int, Any]:  # noqa: ARG002
        """Add entries to an optimizer's state for the parts on other ranks. `forms`: `optimizer_form` of each rank."""
        return state

    def local_optimizer_state(self, state: dict[int, Any]) -> dict[int, Any]:
        """The entries of a saved optimizer state that this rank needs."""
        return state

    def state_dict(self) -> dict[str, Any]:
        """JSON-serializable state that must be saved, so that gradients are reduced in the same way after a resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`. Raises `ValueError` if `state` is invalid."""


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply the gradients by a scalar that is on the device, without waiting for its value."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), group in by_kind.items():
        # In at least float32: a factor rounded to bfloat16 would be wrong by up to 0.4 %, equally in every gradient.
        multiply_all(group, factor.to(device, torch.promote_types(dtype, torch.float32)))


def clip_gradient_values(parameters: Iterable[nn.Parameter], largest: float) -> None:
    """Clip each value of the gradients to the range from -`largest` to `largest`."""
    dense = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()  # a value is the sum of all entries with the same index
            parameter.grad.values().clamp_(-largest, largest)
        else:
            dense.append(parameter)
    if dense:  # torch refuses an empty list
        nn.utils.clip_grad_value_(dense, largest)


def _norm(gradient: Tensor) -> Tensor:
    values = _values(gradient)
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))
    return norm


def _values(gradient: Tensor) -> Tensor:
    """A gradient's values, for norms: torch has no norm for the sparse gradients of nn.Embedding(sparse=True)."""
    if gradient.is_sparse:
        return gradient.coalesce().values()
    return gradient


# --- Single rank ------------------------------------------------------------------------------------------------------


class SingleRank(Strategy):
    """The whole model on one device, in one process."""

    def divided(self, parameters: Sequence[Sequence[nn.Parameter]]) -> list[Self]:
        return [self._of_update(of_update) for of_update in parameters]

    def sync_buffers(self) -> None:
        pass
