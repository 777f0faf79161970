"""Memory planning: measures the memory of a run without allocating it, checks that it fits, and logs the actual peak.

The arithmetic is in `ddp_kit.parallel.memory`. The model is copied to fake tensors, or was built from them: see
`plan_script.py`. Then

    optimizer.step() once, with gradients of the weights' shapes      -> optimizer state of each parameter
    loss_fn(model, batch).backward() once, with a real first batch    -> activations, the peak, the share of each block
"""

import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_kit.config.settings import AUTO, CheckpointConfig, ParallelConfig, TrainerConfig
from ddp_kit.distributed.world import World, gathered
from ddp_kit.env import PlanRequest
from ddp_kit.errors import ConfigError, DdpKitError, first_line, size_text
from ddp_kit.log import logger
from ddp_kit.metrics import Loss, checked
from ddp_kit.parallel import Strategy
from ddp_kit.parallel.activations import Activations
from ddp_kit.parallel.memory import (
    BlockMemory,
    Candidate,
    MemoryPlan,
    ModelMemory,
    ParameterRow,
    PassMemory,
    candidate_for,
    candidates,
    choose,
    in_half,
    plan_memory,
    refuse,
    report,
)
from ddp_kit.parallel.shards import settings_of
from ddp_kit.parallel.tensor_plan import split_dimensions
from ddp_kit.structures import repeated_blocks
from ddp_kit.torch_internals import FakeTensors, LiveBytes, is_fake, pytree
from ddp_kit.trainer.parts import Parts

_TRIED_VALUES = 8
# A suggested placement needs at most this share of the bytes of the one that ran out of memory.
_WORTH_IT = 0.98
_EXACT = ("ddp", "zero1", "fsdp", "tensor")  # for other strategies the memory per device is not known in advance
_RANKS_PER_NODE = 8  # assumed, because `ddpkit plan` does not know it
_COUNTED = "Counted are weights, gradients and optimizer state; the rest of the memory is for activations"

# --- Plans and checks -------------------------------------------------------------------------------------------------


class PlanPrinted(SystemExit):  # a normal exit of the script, not an error
    """Ends the script after `ddpkit plan` has printed the plan."""


def config_to_plan(config: TrainerConfig) -> TrainerConfig:
    """Return the configuration of the same run in one process, without checkpoints, compilation or micro-batch search.

    fp8 is planned as bf16, which needs no GPU: weights are the same, and there are no copies in 8 bits.
    """
    alone: dict[str, Any] = {"parallel": ParallelConfig(), "checkpoint": CheckpointConfig(), "compile": None}
    alone["mfu"] = False
    if config.micro_batch_size == "auto":
        alone["micro_batch_size"] = 1
    if config.precision == "fp8":
        alone |= {"precision": "bf16", "fp8_layers": "auto"}
    alone["memory"] = config.memory.model_copy(update={"offload_optimizer": False, "offload_parameters": False})
    data = config.data.model_copy(update={"num_workers": 0, "seed_samples": False, "compare_items": 0})
    return config.model_copy(update={**alone, "data": data})


def first_that_fits(config: TrainerConfig, model: nn.Module, world: World) -> TrainerConfig:
    """Replace ``parallel="auto"`` with the settings of the first candidate that fits. A collective.

    Other configurations are returned unchanged. For the candidates, see `ddp_kit.parallel.memory`. Two values of
    optimizer state are counted for each weight, as in Adam. Raises `ConfigError` if none fits.
    """
    if config.parallel.strategy != AUTO:
        return config
    everyone = gathered(world, [_memory_of_rank(world), world.local_world_size])
    least, per_node = min(memory for memory, _ in everyone), math.gcd(*(ranks for _, ranks in everyone))
    chosen, refused = _chosen(_whole(model, config), config, world.world_size, least, per_node)
    if chosen is None:
        raise ConfigError(
            f"parallel='auto' found nothing that fits: {'; '.join(map(str, refused))}. {_COUNTED}",
            "use more ranks or precision='bf16-true', or set the settings of `parallel` and `memory` yourself",
        )
    logger.info('parallel="auto": {}{}. {}', chosen, "".join(f"; {each}" for each in refused), _COUNTED)
    return config.model_copy(update={"parallel": chosen.parallel, "memory": chosen.memory})


def _chosen(
    model: ModelMemory, config: TrainerConfig, ranks: int, memory: int, per_node: int
) -> tuple[Candidate | None, list[Candidate]]:
    return choose(candidates(model, config.parallel, config.memory, ranks, memory, per_node))


def _whole(model: nn.Module, config: TrainerConfig, optimizer: Optimizer | None = None) -> ModelMemory:
    """Memory of the whole model without activations, for `auto` and for the hint of an out-of-memory error.

    `optimizer`: its state is counted if it has any; otherwise two values for each weight, as in Adam.
    """
    kept = 2.0 if optimizer is None else _values_kept(optimizer)
    splits, _ = _splits(model, config.parallel)
    whole = _counted(_rows(model, _units(repeated_blocks(model)), {}, splits), sum(map(_bytes, model.buffers())), kept)
    return in_half(whole) if config.precision == "bf16-true" else whole


def _counted(rows: Iterable[ParameterRow], buffers: int, kept: float = 2.0) -> ModelMemory:
    """Memory of parameters with `kept` values of optimizer state for each of their values, without activations."""
    counted = (replace(row, state_per_value=round(kept * row.itemsize)) if row.trained else row for row in rows)
    return ModelMemory(tuple(counted), buffers, PassMemory(0, 0, 0), copies_weights=False, accumulates=False)


def _values_kept(optimizer: Optimizer) -> float:
    """Largest ratio of state values to parameter values of any parameter; 2 before the first step."""
    found = [
        sum(_bytes(each) for each in state.values() if isinstance(each, Tensor) and each.shape == parameter.shape)
        / max(1, _bytes(parameter))
        for parameter, state in optimizer.state.items()
        if isinstance(state, dict)
    ]
    return max(found, default=2.0)


def measured(parts: Parts, batch: Any, parallel: ParallelConfig, *, accumulates: bool) -> ModelMemory:
    """Measure this model, optimizer and micro-batch for a plan. Changes nothing, and allocates little.

    `parallel`: the settings to plan for, which may differ from those of `parts`.
    """
    model, optimizer = parts.model, parts.optimizer
    if not any(is_fake(each) for each in model.parameters()):
        fakes = FakeTensors()
        # deepcopy takes these from the memo instead of copying: fake parameters, and empty optimizer state.
        memo: dict[int, Any] = {id(each): fakes.parameter(each) for each in model.parameters()}
        for held, copies in zip(parts.device_optimizer.param_groups, optimizer.param_groups, strict=True):
            memo |= {id(copy): memo[id(each)] for each, copy in zip(held["params"], copies["params"], strict=True)}
        memo[id(optimizer.state)] = defaultdict(dict)
        try:
            model, optimizer = copy.deepcopy(model, memo), copy.deepcopy(optimizer, memo)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the model {type(model).__name__} cannot be copied, which a plan needs: {error}",
                "run `ddpkit plan` on the script: it makes the model without memory from the beginning",
            ) from None
    blocks = repeated_blocks(model)
    problems: list[str] = []
    try:
        states = _states(optimizer)
    except (RuntimeError, TypeError, ValueError) as error:
        states, problem = {}, f"optimizer state: {type(optimizer).__name__} cannot step without values: {error}"
        problems.append(problem)
    try:
        # Offloading has no effect on the CPU: `plan_memory` subtracts offloaded activations.
        memory = parts.config.memory.model_copy(update={"offload_activations": False})
        copied = replace(parts, model=model, activations=Activations(model, memory))
        passed = _pass(copied, list(blocks.values()), batch)
    except (RuntimeError, TypeError, ValueError, DdpKitError) as error:
        passed = PassMemory(0, 0, 0)
        problems.append(f"activations: the loss function cannot run without values: {first_line(error)}")
    splits, problem = _splits(model, parallel)
    if parallel.tensor > 1 and problem:
        problems.append(f"which layers are split: {problem}")
    stages: tuple[frozenset[str], ...] = ()
    units = _units(blocks)
    if parallel.pipeline > 1:
        try:
            stages, units = _stages(replace(parts, model=model), parallel, batch)
        except (RuntimeError, TypeError, ValueError, DdpKitError) as error:
            problems.append(f"what each stage holds: {first_line(error)}")
    return ModelMemory(
        rows=tuple(_rows(model, units, states, splits)),
        buffers=sum(map(_bytes, model.buffers())),
        passed=passed,
        copies_weights=any(_is_foreach(group) for group in optimizer.param_groups),
        accumulates=accumulates,
        stages=stages,
        problems=tuple(problems),
    )


def planned(model: ModelMemory, config: TrainerConfig, ranks: int, device_memory: int | None) -> MemoryPlan:
    """Plan a configuration. For ``parallel="auto"``, plan the choice that it makes, which needs `device_memory`."""
    checkpointing = 0.0  # share of the blocks to recompute that the measured pass did not recompute
    if config.parallel.strategy == AUTO and device_memory is not None:
        before = config.memory.activation_checkpointing
        config, _ = _with_auto(model, config, ranks, device_memory)
        checkpointing = float(config.memory.activation_checkpointing != before)
    plan = plan_memory(
        model,
        config.parallel,
        ranks,
        device_memory=device_memory,
        checkpointing=checkpointing,
        offload=config.memory.offload_activations,
        offload_optimizer=config.memory.offload_optimizer,
        offload_parameters=config.memory.offload_parameters,
    )
    if config.parallel.strategy == "device_map":
        problem = "device_map: the plan is for the whole model on one device"
        return replace(plan, problems=(*plan.problems, problem))
    return plan


def _with_auto(
    model: ModelMemory, config: TrainerConfig, ranks: int, device_memory: int
) -> tuple[TrainerConfig, list[str]]:
    """Return the choice of ``parallel="auto"``, or its last candidate if none fits; and lines about the choice."""
    counted = _counted(model.rows, model.buffers)
    chosen, refused = _chosen(counted, config, ranks, device_memory, _RANKS_PER_NODE)
    last = chosen or refused[-1]
    lines = [f"parallel='auto': {chosen or 'nothing fits'}", *(f"  refused: {each}" for each in refused)]
    return config.model_copy(update={"parallel": last.parallel, "memory": last.memory}), lines


def described(model: ModelMemory, config: TrainerConfig, asked: PlanRequest, micro_batch: int) -> str:
    """The full output of `ddpkit plan`."""
    plan = planned(model, config, asked.ranks, asked.memory)
    lines: list[str] = []
    if config.parallel.strategy == AUTO:
        config, lines = _with_auto(model, config, asked.ranks, asked.memory)
    values = sum(row.numel for row in model.rows)
    auto = ' (micro_batch_size="auto": planned for one sample)' if config.micro_batch_size == "auto" else ""
    title = (
        f"{values:,} parameters, parallel={config.parallel.strategy!r}, "
        f"precision={config.precision!r}, micro-batch {micro_batch}{auto}"
    )
    return "\n".join([*lines, report(model, plan, asked.ranks, asked.memory, title=title)])


def check_fits(parts: Parts) -> int | None:
    """Raise `ConfigError` if weights, gradients and optimizer state alone exceed the memory of this rank's GPU.

    Returns their bytes on this rank; None on the CPU, and if they are not known.
    """
    memory = device_memory(parts.world.device)
    if memory is None or parts.config.parallel.strategy not in _EXACT:
        return None
    strategy, optimizer = parts.strategy, parts.optimizer
    held = [each for group in parts.device_optimizer.param_groups for each in group["params"] if each.requires_grad]
    trained = held if strategy.replaces_parameters else strategy.parameters
    weights, gradients = (sum(map(_bytes, each)) for each in (strategy.local_parameters(), trained))
    if strategy.parameters_on_host:
        weights = gradients = 0
    weights += sum(map(_bytes, parts.model.buffers()))
    state = _state_to_come(optimizer) if optimizer is parts.device_optimizer else 0  # else it is on the host
    plan = MemoryPlan(weights, gradients, state, 0, 0, 0, 0, 0)
    refuse(plan, memory)
    return plan.exact


def check_weights_fit(model: nn.Module, strategy: Strategy) -> None:
    """Raise `ConfigError` if weights and gradients exceed the memory of the GPU to which the model is to be moved."""
    memory = device_memory(strategy.world.device)
    if memory is not None and strategy.config.strategy in _EXACT and not strategy.replaces_parameters:
        trained = [each for each in model.parameters() if each.requires_grad]
        refuse(MemoryPlan(sum(map(_bytes, model.parameters())), sum(map(_bytes, trained)), 0, 0, 0, 0, 0, 0), memory)


def what_fits(parts: Parts) -> str:
    """Describe a placement that, by arithmetic, needs less memory and fits, after an out-of-memory error; "" if none.

    Not a collective. Does not query the device, because the error may have left it in any state.
    """
    config, world = parts.config, parts.world
    if config.parallel.strategy == "device_map" or world.world_size == 1:
        return ""
    memory, whole = _memory_of_rank(world), _whole(parts.model, config, parts.optimizer)
    now = candidate_for(whole, config.parallel, config.memory, world.world_size, memory)
    tried = candidates(whole, config.parallel, config.memory, world.world_size, memory, world.local_world_size)
    found, _ = choose(each for each in tried if each.needed < now.needed * _WORTH_IT)
    if found is None:
        return ""
    return (
        f"by arithmetic, {found.text} needs {size_text(found.needed, 2)} of {size_text(memory, 2)} on each rank for "
        f"weights, gradients and optimizer state, and {now.text} needs {size_text(now.needed, 2)}"
    )


def _memory_of_rank(world: World) -> int:
    """Bytes of memory of the rank's GPU; on the CPU, its share of the host's memory."""
    return device_memory(world.device) or int(psutil.virtual_memory().total) // world.local_world_size


@cache  # so that it is known after an error, without querying the device
def device_memory(device: torch.device) -> int | None:
    """Bytes of memory of a GPU; None for the CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def _state_to_come(optimizer: Optimizer) -> int:
    """Bytes of the state that a torch.optim optimizer will allocate; 0 for others. Fast: runs at every start."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return 0
    total = 0
    for group in optimizer.param_groups:
        trained = [each for each in group["params"] if each.requires_grad]
        for dtype in {each.dtype for each in trained}:
            values = sum(each.numel() for each in trained if each.dtype == dtype)
            with suppress(RuntimeError, TypeError, ValueError):  # this check must not end a run by its own error
                total += values * _state_per_value(type(optimizer), group, dtype)
    return total


def _state_per_value(kind: Any, group: dict[str, Any], dtype: torch.dtype) -> int:
    """Bytes of state per value, measured by a step of the same optimizer on the CPU with a few values."""
    parameter = nn.Parameter(torch.ones(_TRIED_VALUES, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    trial: Optimizer = kind([parameter], **settings_of(kind, group))
    trial.step()
    state = [leaf for leaf in pytree.tree_leaves(trial.state[parameter]) if isinstance(leaf, Tensor)]
    return sum(each.element_size() for each in state if each.shape == parameter.shape)


# --- Measurement on fake tensors --------------------------------------------------------------------------------------


@dataclass
class _Seen:
    """Bytes alive before and after a block's forward pass, and bytes of its input."""

    before: int = 0
    after: int = 0
    input: int = 0


def _pass(parts: Parts, blocks: Sequence[nn.Module], batch: Any) -> PassMemory:
    model = parts.model
    arrived = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    ahead = parts.config.data.prefetch_batches if parts.world.device.type == "cuda" else 0
    live = LiveBytes([*model.parameters(), *model.buffers(), *arrived])
    with _left_as_it_was(model), _watched(blocks, live) as seen, _no_gradients(model), live:
        with parts.precision.forward(), parts.activations.forward_context():
            value = checked(parts.loss_fn(model, batch), "the loss function")
        total = value.loss if isinstance(value, Loss) else value
        kept = live.now
        total.sum().backward()  # type: ignore[no-untyped-call]
    passed = [each for each in seen.values() if each.after]
    return PassMemory(
        batch=sum(map(_bytes, arrived)) * (1 + ahead),
        kept=kept,
        peak=live.peak,
        blocks=tuple(BlockMemory(max(0, each.after - each.before), each.input) for each in passed),
        casts=_casts(blocks) if parts.config.precision in ("bf16", "fp16") else 0,
    )


def _casts(blocks: Sequence[nn.Module]) -> int:
    """Bytes of the 16-bit copies of matrices that autocast makes."""
    found = {each for block in blocks for each in block.parameters() if each.ndim > 1 and each.dtype == torch.float32}
    return sum(2 * each.numel() for each in found)


@contextmanager
def _watched(blocks: Sequence[nn.Module], live: LiveBytes) -> Iterator[dict[nn.Module, _Seen]]:
    """Record the live bytes before and after the forward pass of each block."""
    seen = {block: _Seen() for block in blocks}

    def before(block: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen[block].before = live.now
        seen[block].input = sum(_bytes(leaf) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))

    def after(block: nn.Module, _inputs: Any, _output: Any) -> None:
        seen[block].after = live.now

    handles = [block.register_forward_pre_hook(before) for block in blocks]
    handles += [block.register_forward_hook(after) for block in blocks]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _no_gradients(model: nn.Module) -> Iterator[None]:
    """Drop gradients as they are computed: they are counted elsewhere."""

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    trained = [each for each in model.parameters() if each.requires_grad]
    handles = [each.register_post_accumulate_grad_hook(drop) for each in trained]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Set training mode; restore random states and each module's mode on exit."""
    modes = {module: module.training for module in model.modules()}
    model.train()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _states(optimizer: Optimizer) -> dict[nn.Parameter, tuple[int, int]]:
    """Optimizer state of each parameter, measured by a step on fake tensors: bytes per value, and other bytes."""
    held = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    for parameter in held:
        with torch.no_grad():
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    found = {}
    for parameter in held:
        parameter.grad = None
        state = [leaf for leaf in pytree.tree_leaves(optimizer.state.get(parameter, {})) if isinstance(leaf, Tensor)]
        alike = [each.shape == parameter.shape for each in state]
        per_value = sum(each.element_size() for each, same in zip(state, alike, strict=True) if same)
        found[parameter] = per_value, sum(_bytes(each) for each, same in zip(state, alike, strict=True) if not same)
    return found


def _splits(model: nn.Module, parallel: ParallelConfig) -> tuple[dict[nn.Parameter, int], str]:
    """Dimension along which tensor parallelism splits each parameter, and the reason if it is not known."""
    try:
        return split_dimensions(model, parallel), ""
    except ConfigError as error:
        return {}, error.message


def _stages(
    parts: Parts, parallel: ParallelConfig, batch: Any
) -> tuple[tuple[frozenset[str], ...], dict[nn.Parameter, str]]:
    """Names of the parameters on each rank of the pipeline, and the block of each parameter that can be sharded."""
    # A local import, because the module imports torch.distributed.pipelining.
    from ddp_kit.parallel.stages import chain_of, holders_after_first_pass, sharded_parameters

    model = parts.model
    with _left_as_it_was(model), parts.precision.forward():
        holders = holders_after_first_pass(model, parallel, parts.loss_fn, batch)
    names = tuple(
        frozenset(name for name, each in model.named_parameters() if place in holders[each])
        for place in range(parallel.pipeline)
    )
    return names, sharded_parameters(model, chain_of(model, parallel))


def _units(blocks: dict[str, nn.Module]) -> dict[nn.Parameter, str]:
    return {parameter: name for name, block in blocks.items() for parameter in block.parameters()}


def _rows(
    model: nn.Module,
    units: dict[nn.Parameter, str],
    states: dict[nn.Parameter, tuple[int, int]],
    splits: dict[nn.Parameter, int],
) -> Iterator[ParameterRow]:
    for name, each in model.named_parameters():
        per_value, extra = states.get(each, (0, 0))
        yield ParameterRow(
            name,
            tuple(each.shape),
            each.element_size(),
            each.requires_grad,
            units.get(each, ""),
            per_value,
            extra,
            splits.get(each),
        )


def _is_foreach(group: dict[str, Any]) -> bool:
    """Whether torch updates all parameters of a group in one kernel on a GPU, which is its default there."""
    return "foreach" in group and group["foreach"] is not False and not group.get("fused")


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# --- Measured peak ----------------------------------------------------------------------------------------------------


_STEPS_TO_PEAK = 3
"""Steps until memory has peaked: the optimizer allocates its state in the first, DDP rebuilds buckets in the second."""


class PeakMemory:
    """Logs the measured peak of GPU memory once, after the first steps, next to the plan if there is one."""

    def __init__(self, world: World, counted: int | None) -> None:
        """`counted`: bytes of weights, gradients and optimizer state; None: unknown."""
        self._world = world
        self._counted = counted
        self._steps = 0
        self._predicted: MemoryPlan | None = None

    def compare_with(self, plan: MemoryPlan) -> None:
        """Compare the peak of the next steps with this plan."""
        self._predicted, self._steps = plan, 0

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
        peak = torch.cuda.max_memory_allocated(self._world.device)
        if self._predicted is not None:
            predicted = self._predicted.total - self._predicted.fixed  # torch's allocator does not count `fixed`
            logger.info("memory: planned {}, measured peak {}", size_text(predicted), size_text(peak))
        elif self._counted is not None:
            logger.info(
                "memory: {} calculated for weights, gradients and optimizer state, measured peak {} with activations",
                size_text(self._counted),
                size_text(peak),
            )
