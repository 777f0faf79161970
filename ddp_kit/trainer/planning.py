"""Measures the memory of a run without allocating it, for `ddp_kit.parallel.memory`.

The model is copied to fake tensors, or was built from them: see `plan_script.py`. Then

    optimizer.step() once, with gradients of the weights' shapes      -> optimizer state of each parameter
    loss_fn(model, batch).backward() once, with a real first batch    -> activations, the peak, the share of each block
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_kit.blocks import repeated_blocks
from ddp_kit.config import AUTO, CheckpointConfig, ParallelConfig, StrategyName, TrainerConfig
from ddp_kit.env import PlanRequest
from ddp_kit.errors import ConfigError, DdpKitError
from ddp_kit.log import logger
from ddp_kit.metrics import Loss, checked
from ddp_kit.parallel import Strategy
from ddp_kit.parallel.activations import Activations
from ddp_kit.parallel.memory import (
    GIB,
    BlockMemory,
    MemoryPlan,
    ModelMemory,
    ParameterRow,
    PassMemory,
    plan_memory,
    refuse,
    report,
)
from ddp_kit.parallel.shards import settings_of
from ddp_kit.torch_internals import FakeTensors, LiveBytes, is_fake, pytree
from ddp_kit.trainer.exchange import gathered
from ddp_kit.trainer.parts import Parts
from ddp_kit.world import World

_TRIED_VALUES = 8
_FOR_STATE = 0.7  # of a device's memory; the rest is for activations
# For other strategies the memory per device is not known in advance.
_EXACT: tuple[StrategyName, ...] = ("ddp", "zero1", "fsdp")


class PlanPrinted(SystemExit):  # a normal exit of the script, not an error
    """Ends the script after `ddpkit plan` has printed the plan."""


def config_to_plan(config: TrainerConfig) -> TrainerConfig:
    """The same run in one process, without checkpoints, compilation, or a search for the micro-batch size.

    fp8 is planned as bf16, which needs no GPU: weights are the same, and there are no copies in 8 bits.
    """
    alone: dict[str, Any] = {"parallel": ParallelConfig(), "checkpoint": CheckpointConfig(), "compile": None}
    if config.micro_batch_size == "auto":
        alone["micro_batch_size"] = 1
    if config.precision == "fp8":
        alone |= {"precision": "bf16", "fp8_layers": "auto"}
    alone["memory"] = config.memory.model_copy(update={"offload_optimizer": False, "offload_parameters": False})
    data = config.data.model_copy(update={"num_workers": 0, "seed_samples": False, "compare_items": 0})
    return config.model_copy(update={**alone, "data": data})


def named(parallel: ParallelConfig, name: StrategyName) -> ParallelConfig:
    """The same settings for the strategy `name`, with its mesh sizes."""
    sizes = ParallelConfig(strategy=name)
    fields = ("strategy", "replicate", "shard", "optimizer")
    return parallel.model_copy(update={field: getattr(sizes, field) for field in fields})


def first_that_fits(
    parallel: ParallelConfig, model: nn.Module, world: World, *, offload_optimizer: bool = False
) -> ParallelConfig:
    """The configuration; for "auto" that of the first of ddp, zero1 and fsdp that fits. A collective.

    Counts weights, gradients and two values of state per weight, as in Adam, which are none of the device's with
    `offload_optimizer`; activations are unknown before the first
    batch, so part of the memory is reserved for them. Raises `ConfigError` if none fits.
    """
    if parallel.strategy != AUTO:
        return parallel
    memory = device_memory(world.device) or psutil.virtual_memory().total // world.local_world_size
    least = min(memory for (memory,) in gathered(world, [memory]))
    rows = [
        replace(row, state_per_value=2 * row.itemsize) if row.trained else row
        for row in _rows(model, repeated_blocks(model), {})
    ]
    whole = ModelMemory(tuple(rows), sum(map(_bytes, model.buffers())), PassMemory(0, 0, 0), False, False)
    refused: list[str] = []
    for name in _EXACT:
        found = named(parallel, name)
        need = plan_memory(whole, found, world.world_size, offload_optimizer=offload_optimizer).exact / GIB
        if need <= least / GIB * _FOR_STATE:
            logger.info(
                'parallel="auto": {}, with {:.2f} GiB of weights, gradients and optimizer state on each rank{}',
                name,
                need,
                "".join(f"; {each}" for each in refused),
            )
            return found
        refused.append(f"{name} needs {need:.1f} GiB")
    raise ConfigError(
        f"parallel='auto' found nothing that fits: {'; '.join(refused)}; of the {least / GIB:.1f} GiB of a rank, "
        f"{_FOR_STATE:.0%} are for weights, gradients and optimizer state",
        "use more ranks, precision='bf16-true', or split layers with parallel.tensor",
    )


def measured(parts: Parts, batch: Any, *, accumulates: bool) -> ModelMemory:
    """Measure this model, optimizer and micro-batch for a plan. Changes nothing, and allocates little."""
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
        problems.append(f"activations: the loss function cannot run without values: {_first_line(error)}")
    return ModelMemory(
        rows=tuple(_rows(model, blocks, states)),
        buffers=sum(map(_bytes, model.buffers())),
        passed=passed,
        copies_weights=any(_is_foreach(group) for group in optimizer.param_groups),
        accumulates=accumulates,
        problems=tuple(problems),
    )


def planned(model: ModelMemory, config: TrainerConfig, ranks: int, device_memory: int | None) -> MemoryPlan:
    """The plan of a configuration; for "auto", of the first strategy that fits."""
    memory = config.memory

    def plan_of(parallel: ParallelConfig) -> MemoryPlan:
        return plan_memory(
            model,
            parallel,
            ranks,
            device_memory=device_memory,
            offload=memory.offload_activations,
            offload_optimizer=memory.offload_optimizer,
            offload_parameters=memory.offload_parameters,
        )

    if config.parallel.strategy == AUTO:
        plans = [plan_of(named(config.parallel, name)) for name in _EXACT]
        return next((plan for plan in plans if device_memory is None or plan.total <= device_memory), plans[-1])
    plan = plan_of(config.parallel)
    if config.parallel.strategy == "device_map":
        problem = "device_map: the plan is for the whole model on one device"
        return replace(plan, problems=(*plan.problems, problem))
    return plan


def described(model: ModelMemory, config: TrainerConfig, asked: PlanRequest, micro_batch: int) -> str:
    """The full output of `ddpkit plan`."""
    plan = planned(model, config, asked.ranks, asked.memory)
    values = sum(row.numel for row in model.rows)
    auto = ' (micro_batch_size="auto": planned for one sample)' if config.micro_batch_size == "auto" else ""
    title = (
        f"{values:,} parameters, parallel={config.parallel.strategy!r}, "
        f"precision={config.precision!r}, micro-batch {micro_batch}{auto}"
    )
    return report(model, plan, asked.ranks, asked.memory, title=title)


def refuse_start(parts: Parts) -> None:
    """Raise `ConfigError` if this rank's weights, gradients and optimizer state alone exceed its GPU's memory."""
    memory = device_memory(parts.world.device)
    if memory is None or parts.config.parallel.strategy not in _EXACT:
        return
    strategy, optimizer = parts.strategy, parts.optimizer
    held = [each for group in parts.device_optimizer.param_groups for each in group["params"] if each.requires_grad]
    trained = held if strategy.replaces_parameters else strategy.parameters
    weights, gradients = (sum(map(_bytes, each)) for each in (strategy.local_parameters(), trained))
    if strategy.parameters_on_host:
        weights = gradients = 0
    weights += sum(map(_bytes, parts.model.buffers()))
    state = _state_to_come(optimizer) if optimizer is parts.device_optimizer else 0  # else it is on the host
    refuse(MemoryPlan(weights, gradients, state, 0, 0, 0, 0, 0), memory)


def refuse_model(model: nn.Module, strategy: Strategy) -> None:
    """Before a whole model is moved to a GPU, raise `ConfigError` if weights and gradients exceed its memory."""
    memory = device_memory(strategy.world.device)
    if memory is not None and strategy.config.strategy in _EXACT and not strategy.replaces_parameters:
        trained = [each for each in model.parameters() if each.requires_grad]
        refuse(MemoryPlan(sum(map(_bytes, model.parameters())), sum(map(_bytes, trained)), 0, 0, 0, 0, 0, 0), memory)


def device_memory(device: torch.device) -> int | None:
    """Bytes of a GPU; None for the CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def _state_to_come(optimizer: Optimizer) -> int:
    """Bytes of the state that a torch.optim optimizer will have; 0 for others. Fast: runs at every start."""
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


# --- measuring ------------------------------------------------------------------------------------------------------


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


def _rows(
    model: nn.Module, blocks: dict[str, nn.Module], states: dict[nn.Parameter, tuple[int, int]]
) -> Iterator[ParameterRow]:
    units = {parameter: name for name, block in blocks.items() for parameter in block.parameters()}
    for name, each in model.named_parameters():
        per_value, besides = states.get(each, (0, 0))
        unit = units.get(each, "")
        yield ParameterRow(name, tuple(each.shape), each.element_size(), each.requires_grad, unit, per_value, besides)


def _is_foreach(group: dict[str, Any]) -> bool:
    """Whether torch updates all parameters of a group in one kernel on a GPU, which is its default there."""
    return "foreach" in group and group["foreach"] is not False and not group.get("fused")


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
