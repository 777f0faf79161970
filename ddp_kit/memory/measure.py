"""Measures a model, its optimizer and one pass without allocating memory, and the peak memory of a real run.

The parameters are fake tensors: in a copy of the model, or from the start, as in `ddp_kit.trainer.plan_script`. The
measurement runs:

    optimizer.step() once, with gradients of the weights' shapes      -> optimizer state of each parameter
    loss_fn(model, batch).backward() once, with a real first batch    -> activations, the peak, the share of each block
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_kit.config.settings import CheckpointConfig, ParallelConfig, TrainerConfig
from ddp_kit.distributed.world import World
from ddp_kit.errors import ConfigError
from ddp_kit.log import logger
from ddp_kit.memory.estimate import BlockMemory, MemoryPlan, ModelMemory, ParameterRow, PassMemory
from ddp_kit.memory.fake import FakeTensors, LiveBytes, is_fake
from ddp_kit.metrics import Loss, checked
from ddp_kit.model.activations import Activations
from ddp_kit.model.blocks import repeated_blocks
from ddp_kit.model.modes import in_mode, sparse_weights
from ddp_kit.model.precision import Precision
from ddp_kit.parallel.optimizer_trial import trial_of
from ddp_kit.parallel.pipeline.model import chain_of, holders_after_first_pass, sharded_parameters
from ddp_kit.structures import with_copied_containers
from ddp_kit.texts import first_line, size_text
from ddp_kit.torch_internals import pytree

# --- Measurement on fake tensors --------------------------------------------------------------------------------------


def config_to_plan(config: TrainerConfig) -> TrainerConfig:
    """Return the configuration of the same run in one process, without checkpoints, compilation or micro-batch search.

    fp8 becomes bf16 and tf32 becomes fp32, because these passes run without a GPU. The weights need the same memory:
    fp8 training keeps no 8-bit copies of them.
    """
    changes: dict[str, Any] = {
        "parallel": ParallelConfig(),
        "checkpoint": CheckpointConfig(),
        "compile": None,
        "mfu": False,
        "memory": config.memory.model_copy(update={"offload": None}),
        "data": config.data.model_copy(update={"num_workers": 0, "seed_samples": False, "compare_items": 0}),
    }
    if config.micro_batch_size == "auto":
        changes["micro_batch_size"] = 1
    if config.precision == "fp8":
        changes |= {"precision": "bf16", "fp8_layers": "auto"}
    if config.precision == "tf32":
        changes["precision"] = "fp32"
    return config.model_copy(update=changes)


@dataclass(frozen=True)
class TrainingPass:
    """A forward and backward pass of one micro-batch."""

    loss_fns: Sequence[Callable[[Any, Any], Tensor | Loss]]
    """The loss functions of an optimizer step; each has a forward and backward pass of its own."""
    batch: Any
    precision: Precision
    config: TrainerConfig
    """The configuration. Its `parallel` is the placement to plan for; the pass itself runs in one process."""
    device: torch.device
    prefetched: int = 0
    """The number of micro-batches that are on the device in advance."""
    problem: str = ""
    """Why there is no batch; "" if there is one."""


def measured(
    model: nn.Module, optimizers: Sequence[tuple[Optimizer, Optimizer]], training: TrainingPass, *, accumulates: bool
) -> ModelMemory:
    """Measure a model, its optimizers and a pass for a plan, without changing them or allocating much memory.

    `optimizers`: pairs of an optimizer, and the optimizer that holds the model's parameters; the same object, unless
    the first one holds copies on the host. `accumulates`: whether an optimizer step has several passes.
    """
    steps = [optimizer for optimizer, _ in optimizers]
    if not any(map(is_fake, model.parameters())):
        model, steps = _without_memory(model, optimizers)
    parallel = training.config.parallel
    blocks = repeated_blocks(model)
    problems: list[str] = []
    states: dict[nn.Parameter, tuple[int, int]] = {}
    stages: tuple[frozenset[str], ...] = ()
    passed = PassMemory()
    units = _units(blocks)
    for optimizer in steps:
        try:
            states |= _states(optimizer)
        except Exception as error:  # the user's own optimizer may raise any error
            name = type(optimizer).__name__
            problems.append(f"optimizer state: {name} cannot step on tensors without values: {first_line(error)}")
    if training.problem:
        problems.append(f"activations: {training.problem}")
    else:
        try:
            passes = [_pass(model, [*blocks.values()], training, loss_fn) for loss_fn in training.loss_fns]
            passed = max(passes, key=lambda one: one.peak)
        except Exception as error:  # the user's own model or loss function may raise any error
            problems.append(f"activations: the loss function cannot run on tensors without values: {first_line(error)}")
    splits, problem = _splits(model, parallel)
    if parallel.tensor > 1 and problem:
        problems.append(f"layers that tensor parallelism splits: {problem}")
    if parallel.pipeline > 1 and not training.problem:
        try:
            stages, units = _stages(model, training)
        except Exception as error:
            problems.append(f"weights of each pipeline stage: {first_line(error)}")
    return ModelMemory(
        rows=_rows(model, units, states, splits),
        buffers=sum(map(bytes_of, model.buffers())),
        passed=passed,
        # On a GPU, torch updates all parameters of a group in one foreach kernel, unless configured otherwise.
        copies_weights=any(
            group.get("foreach", False) is not False and not group.get("fused")
            for optimizer in steps
            for group in optimizer.param_groups
        ),
        accumulates=accumulates,
        stages=stages,
        problems=tuple(problems),
    )


def measured_without_pass(model: nn.Module, config: TrainerConfig, optimizer: Optimizer | None = None) -> ModelMemory:
    """The memory of a model without activations. Reads only shapes and dtypes, no values.

    The optimizer state is estimated: every weight is assumed to need as much state per value as the weight with the
    most state in `optimizer`. Before the first step, two state values per weight value are assumed, as in Adam.
    """
    ratios = []
    for parameter, state in () if optimizer is None else optimizer.state.items():
        if isinstance(state, dict):
            tensors = [value for value in state.values() if isinstance(value, Tensor)]
            same_shape = sum(bytes_of(tensor) for tensor in tensors if tensor.shape == parameter.shape)
            ratios.append(same_shape / max(1, bytes_of(parameter)))
    ratio = max(ratios, default=2.0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    states = {parameter: (round(ratio * parameter.element_size()), 0) for parameter in trained}
    splits, _ = _splits(model, config.parallel)
    rows = _rows(model, _units(repeated_blocks(model)), states, splits)
    whole = ModelMemory(rows, buffers=sum(map(bytes_of, model.buffers())))
    return whole.in_half() if config.precision == "bf16-true" else whole


def bytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's values."""
    return tensor.numel() * tensor.element_size()


def _without_memory(
    model: nn.Module, optimizers: Sequence[tuple[Optimizer, Optimizer]]
) -> tuple[nn.Module, list[Optimizer]]:
    """Copies of the model and the optimizers with fake parameters, and without optimizer state."""
    fakes = FakeTensors()
    # deepcopy takes these from the memo instead of copying.
    memo: dict[int, Any] = {id(parameter): fakes.like(parameter) for parameter in model.parameters()}
    for optimizer, stepped_optimizer in optimizers:
        for group, copies in zip(stepped_optimizer.param_groups, optimizer.param_groups, strict=True):
            memo |= {
                id(copy): memo[id(parameter)] for parameter, copy in zip(group["params"], copies["params"], strict=True)
            }
        memo[id(optimizer.state)] = defaultdict(dict)
    try:
        return copy.deepcopy(model, memo), [copy.deepcopy(optimizer, memo) for optimizer, _ in optimizers]
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"a memory plan needs a copy of the model, but {type(model).__name__} cannot be copied: {error}",
            "run `ddpkit plan` on the script, which creates the model without allocating its weights",
        ) from None


def _pass(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    training: TrainingPass,
    loss_fn: Callable[[Any, Any], Tensor | Loss],
) -> PassMemory:
    """Run the pass, and measure how many bytes of tensors are alive during it."""
    # Offloading has no effect on the CPU: `plan_memory` subtracts offloaded activations.
    activations = Activations(model, training.config.memory.model_copy(update={"offload_activations": False}))
    arrived = [leaf for leaf in pytree.tree_leaves(training.batch) if isinstance(leaf, Tensor)]
    live = LiveBytes([*model.parameters(), *model.buffers(), *arrived])
    began: dict[nn.Module, tuple[int, int]] = {}  # bytes before the block, and of its input
    block_memory: dict[nn.Module, BlockMemory] = {}

    def enter(block: nn.Module, inputs: tuple[Any, ...]) -> None:
        began[block] = live.now, sum(bytes_of(leaf) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))

    def leave(block: nn.Module, _inputs: Any, _output: Any) -> None:
        before, input_bytes = began[block]
        block_memory[block] = BlockMemory(max(0, live.now - before), input_bytes)

    def drop_gradient(parameter: Tensor) -> None:  # as soon as it is computed: gradients are counted elsewhere
        parameter.grad = None

    with _in_training_mode(model, training.device), ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_pre_hook(enter))
            hooks.enter_context(block.register_forward_hook(leave))
        for parameter in model.parameters():
            if parameter.requires_grad:
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(drop_gradient))  # type: ignore[no-untyped-call]
        with live:
            with training.precision.forward(), activations.forward_context():
                value = checked(loss_fn(model, with_copied_containers(training.batch)), "the loss function")
            total = value.loss if isinstance(value, Loss) else value
            activation_bytes = live.now
            total.sum().backward()  # type: ignore[no-untyped-call]
    casts = 0
    if training.config.precision in ("bf16", "fp16"):  # autocast makes 16-bit copies of matrices
        weights = {parameter for block in blocks for parameter in block.parameters()}
        casts = sum(2 * weight.numel() for weight in weights if weight.ndim > 1 and weight.dtype == torch.float32)
    return PassMemory(
        batch=sum(map(bytes_of, arrived)) * (1 + training.prefetched),
        activations=activation_bytes,
        peak=live.peak,
        blocks=tuple(block_memory[block] for block in blocks if block in block_memory),
        casts=casts,
    )


@contextmanager
def _in_training_mode(model: nn.Module, device: torch.device) -> Iterator[None]:
    """A context that sets the model to training mode, and restores random states and each module's mode on exit.

    `device`: the device on which, besides the CPU, random states are restored.
    """
    devices = [device] if device.type == "cuda" else []
    with in_mode(model, training=True), torch.enable_grad(), torch.random.fork_rng(devices):
        yield


def _states(optimizer: Optimizer) -> dict[nn.Parameter, tuple[int, int]]:
    """Measure each parameter's optimizer state by running a step: bytes per value of the parameter, and other bytes."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if isinstance(optimizer, torch.optim.LBFGS):  # which cannot step without values
        # Vectors of the size of all weights: the directions and changes of gradients of the last `history_size`
        # iterations, and the last direction and gradient.
        vectors = 2 * optimizer.param_groups[0]["history_size"] + 2
        return {parameter: (vectors * parameter.element_size(), 0) for parameter in trained}
    with _one_of_each_kind(optimizer) as kinds:
        for parameter, alike in kinds.items():
            with torch.no_grad():
                gradient = torch.ones_like(parameter)
            for each in alike:  # all, because an optimizer may have a list of its own
                each.grad = gradient
        optimizer.step()
    states: dict[nn.Parameter, tuple[int, int]] = {}
    for parameter, alike in kinds.items():
        for each in alike:
            each.grad = None
        state = [leaf for leaf in pytree.tree_leaves(optimizer.state.get(parameter, {})) if isinstance(leaf, Tensor)]
        per_value = sum(tensor.element_size() for tensor in state if tensor.shape == parameter.shape)
        other_bytes = sum(bytes_of(tensor) for tensor in state if tensor.shape != parameter.shape)
        states |= dict.fromkeys(alike, (per_value, other_bytes))
    return states


@contextmanager
def _one_of_each_kind(optimizer: Optimizer) -> Iterator[dict[nn.Parameter, list[nn.Parameter]]]:
    """A context in which each group of an optimizer has one trained parameter of each shape and dtype.

    A large model has thousands of parameters, but few shapes, and a step on fake tensors takes milliseconds for each.
    Yields these parameters, each with the parameters that it stands for.
    """
    kinds: dict[nn.Parameter, list[nn.Parameter]] = {}
    before = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        by_kind = defaultdict(list)
        for parameter in group["params"]:
            if parameter.requires_grad:
                by_kind[parameter.shape, parameter.dtype].append(parameter)
        group["params"] = [alike[0] for alike in by_kind.values()]
        kinds |= {alike[0]: alike for alike in by_kind.values()}
    try:
        yield kinds
    finally:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters


def state_to_come(optimizer: Optimizer) -> int:
    """Bytes of the state that a torch.optim optimizer will allocate; 0 for other optimizers, and for LBFGS.

    Measured in a step of a small optimizer of the same class on the CPU, which is fast enough to do at every start.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or issubclass(kind, torch.optim.LBFGS):
        return 0  # a short run never fills the history of LBFGS
    total = 0
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        for dtype in {parameter.dtype for parameter in trained}:
            values = sum(parameter.numel() for parameter in trained if parameter.dtype == dtype)
            with suppress(RuntimeError, TypeError, ValueError):  # this check must not end a run by its own error
                tried = nn.Parameter(torch.ones(8, dtype=dtype))
                per_value, _ = _states(trial_of(optimizer, group, [tried]))[tried]
                total += values * per_value
    return total


def _splits(model: nn.Module, parallel: ParallelConfig) -> tuple[dict[nn.Parameter, int], str]:
    """The dimension along which tensor parallelism splits each parameter, or the reason why it is unknown."""
    from ddp_kit.parallel.tensor import split_dimensions  # imported here, because it imports DTensors

    try:
        return split_dimensions(model, parallel), ""
    except ConfigError as error:
        return {}, error.message


def _stages(model: nn.Module, training: TrainingPass) -> tuple[tuple[frozenset[str], ...], dict[nn.Parameter, str]]:
    """Return which parameters each rank of the pipeline holds, by name, and to which block each one belongs.

    The blocks include only parameters that FSDP can shard.
    """
    parallel = training.config.parallel
    with _in_training_mode(model, training.device), training.precision.forward():
        holders = holders_after_first_pass(model, parallel, training.loss_fns[0], training.batch)
    names = tuple(
        frozenset(name for name, parameter in model.named_parameters() if stage in holders[parameter])
        for stage in range(parallel.pipeline)
    )
    return names, sharded_parameters(model, chain_of(model, parallel))


def _units(blocks: Mapping[str, nn.Module]) -> dict[nn.Parameter, str]:
    return {parameter: name for name, block in blocks.items() for parameter in block.parameters()}


def _rows(
    model: nn.Module,
    units: Mapping[nn.Parameter, str],
    states: Mapping[nn.Parameter, tuple[int, int]],
    splits: Mapping[nn.Parameter, int],
) -> tuple[ParameterRow, ...]:
    rows = []
    sparse = sparse_weights(model)
    for name, parameter in model.named_parameters():
        per_value, constant_bytes = states.get(parameter, (0, 0))
        rows.append(
            ParameterRow(
                name,
                tuple(parameter.shape),
                parameter.element_size(),
                parameter.requires_grad,
                units.get(parameter, ""),
                state_per_value=per_value,
                constant_state_bytes=constant_bytes,
                split=splits.get(parameter),
                has_sparse_gradient=parameter in sparse,
            )
        )
    return tuple(rows)


# --- Measured peak ----------------------------------------------------------------------------------------------------


_STEPS_TO_PEAK = 3
"""Steps until memory has peaked. The optimizer allocates its state in step 1, and DDP rebuilds buckets in step 2."""


class PeakMemory:
    """Logs the measured peak of GPU memory once, after the first steps, together with the planned bytes if known."""

    def __init__(self, world: World, counted: int | None) -> None:
        """`counted`: bytes of weights, gradients and optimizer state; None if unknown."""
        self._world = world
        self._counted = counted
        self._steps = 0
        self._predicted: MemoryPlan | None = None

    def compare_with(self, plan: MemoryPlan) -> None:
        """Compare the peak of the next steps with this plan."""
        self._predicted = plan
        self._steps = 0

    @property
    def planned(self) -> int | None:
        """Planned bytes per device; None without a plan."""
        return None if self._predicted is None else self._predicted.total

    def after_step(self) -> None:
        if self._world.device.type != "cuda" or self._steps == _STEPS_TO_PEAK:
            return
        self._steps += 1
        if self._steps < _STEPS_TO_PEAK:
            return
        peak = size_text(torch.cuda.max_memory_allocated(self._world.device))
        if self._predicted is not None:
            predicted = self._predicted.total - self._predicted.fixed  # torch's allocator does not count `fixed`
            logger.info("memory: planned {}, measured peak {}", size_text(predicted), peak)
        elif self._counted is not None:
            logger.info(
                "memory: calculated {} for weights, gradients and optimizer state; measured a peak of {}, "
                "including activations",
                size_text(self._counted),
                peak,
            )
