"""Finds placements that fit in memory for `parallel="auto"` and `ddpkit plan`, and rejects runs that cannot fit.

                       counted bytes                                         must fit in
"auto", OOM hints      all except activations: the batch is not known yet    a fixed share of the memory
`ddpkit plan`          all, including measured activations                   the whole memory
checks at the start    weights, gradients and optimizer state, all exact     the whole memory

A placement is a parallel strategy, its sizes, and the memory settings.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import psutil
import torch
from torch import nn
from torch.optim import Optimizer

from ddp_kit.config import combinations
from ddp_kit.config.settings import AUTO, MemoryConfig, ParallelConfig, StrategyName, TrainerConfig
from ddp_kit.distributed.world import World, gathered
from ddp_kit.env import PlanRequest
from ddp_kit.errors import ConfigError, distinct_sizes, size_text
from ddp_kit.log import logger
from ddp_kit.memory.estimate import MemoryPlan, ModelMemory, plan_memory, tensor_size
from ddp_kit.memory.measure import bytes_of, measured_without_pass, state_to_come
from ddp_kit.parallel import Strategy

_WORTH_IT = 0.98  # advise only what needs at most this fraction of the bytes of the current or a cheaper placement
_RECOMPUTED = {"activation_checkpointing": "blocks"}


@cache  # so that it is known after an error, without querying the device
def device_memory(device: torch.device) -> int | None:
    """The memory of a GPU, in bytes; None for the CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def _memory_of_rank(world: World) -> int:
    """The memory of the rank's GPU, in bytes; on the CPU, the rank's share of the host's memory."""
    return device_memory(world.device) or int(psutil.virtual_memory().total) // world.local_world_size


def _as_written(**settings: Any) -> str:
    """Settings as they would be written in a script, without settings that have empty values."""
    return ", ".join(f"{name}={value!r}" for name, value in settings.items() if value).replace("'", '"')


# --- Automatic placement ----------------------------------------------------------------------------------------------


STEPS: tuple[tuple[StrategyName, dict[str, Any]], ...] = (
    ("ddp", {}),
    ("zero1", {}),
    ("fsdp", {}),
    ("fsdp", _RECOMPUTED),
    ("fsdp", _RECOMPUTED | {"offload": "optimizer"}),
    ("tensor", _RECOMPUTED),
)
"""Strategies with changes to `memory`, ordered by how much they slow down training. The user's settings are kept."""

COUNTED_SHARE = 0.7
"""The fraction of the memory for weights, gradients and optimizer state; the rest is for activations."""
COUNTED_SHARE_RECOMPUTED = 0.85
"""The same fraction if all blocks are recomputed, because they then keep little more than their inputs."""
_COUNTED = "The numbers include weights, gradients and optimizer state; the rest of the memory is for activations"


@dataclass(frozen=True)
class Candidate:
    """A placement, and the memory that it needs on the rank that needs the most."""

    text: str
    """The configuration as it would be written in a script."""
    parallel: ParallelConfig
    memory: MemoryConfig
    needed: int
    """Bytes of weights, gradients, optimizer state and communication."""
    available: int
    """Bytes available for weights, gradients, optimizer state and communication."""

    @property
    def fits(self) -> bool:
        """Whether the needed bytes are available."""
        return self.needed <= self.available

    def __str__(self) -> str:
        return f"{self.text} needs {size_text(self.needed, 2)} of {size_text(self.available, 2)}"


def candidates(
    model: ModelMemory, parallel: ParallelConfig, memory: MemoryConfig, ranks: int, device_memory: int, per_node: int
) -> Iterator[Candidate]:
    """Yield the placements to try, each one once, starting with those that slow down training the least.

    `parallel`, `memory`: the user's settings; those that a placement does not set are kept.
    `device_memory`: bytes of the smallest device.
    `per_node`: the number of ranks on each node, or a common divisor if the nodes differ.
    """
    has_blocks = any(row.unit for row in model.rows)
    tensor = tensor_size(model.rows, math.gcd(ranks, per_node))
    seen: list[tuple[StrategyName, dict[str, Any]]] = []
    for strategy, wanted in STEPS:
        changes = {
            name: value
            for name, value in wanted.items()
            if name not in memory.model_fields_set and (name != "activation_checkpointing" or has_blocks)
        }
        placement: StrategyName = "ddp" if ranks == 1 else strategy
        if (placement, changes) in seen or (strategy == "tensor" and tensor == 1):
            continue
        seen.append((placement, changes))
        sizes = {"shard": ranks // tensor, "tensor": tensor} if placement == "tensor" else {"strategy": placement}
        implied = ParallelConfig.model_validate(sizes)
        fields = ("strategy", "replicate", "shard", "tensor")
        placed = parallel.model_copy(update={field: getattr(implied, field) for field in fields})
        yield candidate_for(model, placed, memory.model_copy(update=changes), ranks, device_memory, **changes)


def candidate_for(
    model: ModelMemory, parallel: ParallelConfig, memory: MemoryConfig, ranks: int, device_memory: int, **changes: Any
) -> Candidate:
    """The candidate for a placement. `changes`: the settings of `memory` to show in `text`."""
    plan = plan_memory(
        model,
        parallel,
        ranks,
        device_memory=device_memory,
        offload=memory.offload,
    )
    share = COUNTED_SHARE_RECOMPUTED if memory.activation_checkpointing == "blocks" else COUNTED_SHARE
    sizes = {name: getattr(parallel, name) for name in ("replicate", "shard", "tensor", "pipeline")}
    given = {name: size for name, size in sizes.items() if size not in (1, -1)}
    text = _as_written(parallel=given or parallel.strategy, memory=changes)
    return Candidate(text, parallel, memory, plan.exact + plan.communication, int(share * device_memory))


def choose(tried: Iterable[Candidate]) -> tuple[Candidate | None, list[Candidate]]:
    """Return the first candidate that fits, and the candidates before it; if none fits, None and all candidates."""
    refused: list[Candidate] = []
    for each in tried:
        if each.fits:
            return each, refused
        refused.append(each)
    return None, refused


def first_that_fits(config: TrainerConfig, model: nn.Module, world: World) -> TrainerConfig:
    """Replace ``parallel="auto"`` with the settings of the first candidate that fits. A collective.

    Other configurations are returned unchanged. Two values of optimizer state are counted for each weight, as in Adam.
    Raises `ConfigError` if none fits, or if the user's settings cannot be combined with the one that does.
    """
    if config.parallel.strategy != AUTO:
        return config
    everyone = gathered(world, [_memory_of_rank(world), world.local_world_size])
    least, per_node = min(memory for memory, _ in everyone), math.gcd(*(ranks for _, ranks in everyone))
    whole = measured_without_pass(model, config)
    chosen, refused = choose(candidates(whole, config.parallel, config.memory, world.world_size, least, per_node))
    if chosen is None:
        raise ConfigError(
            f"parallel='auto' found no placement that fits: {'; '.join(map(str, refused))}. {_COUNTED}",
            "use more ranks or precision='bf16-true', or configure `parallel` and `memory` yourself",
        )
    logger.info('parallel="auto": {}{}. {}', chosen, "".join(f"; {each}" for each in refused), _COUNTED)
    placed = config.model_copy(update={"parallel": chosen.parallel, "memory": chosen.memory})
    combinations.check(placed)
    return placed


# --- `ddpkit plan` ----------------------------------------------------------------------------------------------------


class PlanPrinted(SystemExit):  # a normal exit of the script, not an error
    """Raised to end the script after `ddpkit plan` has printed the plan."""


def described(model: ModelMemory, config: TrainerConfig, asked: PlanRequest, micro_batch: int) -> str:
    """The full output of `ddpkit plan`."""
    plan = planned(model, config, asked.ranks, asked.memory, asked.per_node)
    config, lines = _with_auto(model, config, asked.ranks, asked.memory, asked.per_node)
    values = sum(row.numel for row in model.rows)
    auto = ' (micro_batch_size="auto": planned for one sample)' if config.micro_batch_size == "auto" else ""
    title = (
        f"{values:,} parameters, parallel={config.parallel.strategy!r}, "
        f"precision={config.precision!r}, micro-batch {micro_batch}{auto}"
    )
    return "\n".join([*lines, report(model, plan, asked.ranks, asked.memory, asked.per_node, title=title)])


def planned(
    model: ModelMemory, config: TrainerConfig, ranks: int, device_memory: int | None, per_node: int
) -> MemoryPlan:
    """Calculate the memory plan of a configuration. `per_node`: the number of ranks on each node.

    For ``parallel="auto"``, this is the plan of the placement that "auto" chooses for `device_memory`.
    """
    chosen, _ = _with_auto(model, config, ranks, device_memory, per_node)
    plan = plan_memory(
        model,
        chosen.parallel,
        ranks,
        device_memory=device_memory,
        # The measured pass already recomputes as configured, so only a change by "auto" has to be estimated.
        checkpointing=float(chosen.memory.activation_checkpointing != config.memory.activation_checkpointing),
        offload_activations=chosen.memory.offload_activations,
        offload=chosen.memory.offload,
    )
    if config.parallel.strategy == "device_map":
        problem = "device_map: the plan is for the whole model on one device"
        return replace(plan, problems=(*plan.problems, problem))
    return plan


def _with_auto(
    model: ModelMemory, config: TrainerConfig, ranks: int, device_memory: int | None, per_node: int
) -> tuple[TrainerConfig, list[str]]:
    """Replace ``parallel="auto"`` with the candidate that it chooses, or with the last candidate if none fits.

    Returns the configuration, and lines that describe the choice. Other configurations are returned unchanged.
    """
    if config.parallel.strategy != AUTO or device_memory is None:
        return config, []
    # Count the optimizer state as in training, where "auto" chooses before the optimizer has any state.
    rows = (replace(row, state_per_value=2 * row.itemsize) if row.trained else row for row in model.rows)
    whole = ModelMemory(tuple(rows), model.buffers)
    chosen, refused = choose(candidates(whole, config.parallel, config.memory, ranks, device_memory, per_node))
    last = chosen or refused[-1]
    lines = [f"parallel='auto': {chosen or 'no placement fits'}", *(f"  does not fit: {each}" for each in refused)]
    return config.model_copy(update={"parallel": last.parallel, "memory": last.memory}), lines


def report(model: ModelMemory, plan: MemoryPlan, ranks: int, device_memory: int, per_node: int, title: str = "") -> str:
    """Describe a plan as text: a table, whether the plan fits in memory, and if not, what to change."""
    devices = "on 1 device:" if ranks == 1 else f"on each of {ranks} devices:"
    lines = [f"{title}; {devices}" if title else devices, str(plan)]
    lines += [f"  not known: {problem}" for problem in plan.problems]
    least = "at least " if plan.problems else ""
    needed, has = distinct_sizes(plan.total, device_memory)
    needs = f"{least}{needed}"
    if plan.total <= device_memory:
        lines.append(f"fits: {needs} of {has}" + (", as far as is known" if plan.problems else ""))
        return "\n".join(lines)
    lines.append(f"does not fit: needs {needs}, but a device has {has}")
    if found := advice(model, plan, ranks, device_memory, per_node):
        lines += ["settings that fit, cheapest first:", *map(str, found)]
    else:
        smallest = min(settings(model, ranks, device_memory, per_node), key=lambda each: each.plan.total)
        least_needed = f"{size_text(smallest.plan.total)} with {smallest.text}"
        lines.append(f"no setting of ddpkit makes it fit; the smallest total is {least_needed}")
        lines.append("use more devices, a smaller micro_batch_size, or a smaller model")
    return "\n".join(lines)


@dataclass(frozen=True)
class Setting:
    """A possible configuration, and its memory plan."""

    text: str
    """The configuration as it would be written in a script."""
    plan: MemoryPlan
    fits: bool
    note: str = ""

    def __str__(self) -> str:
        return f"  {self.text}: {size_text(self.plan.total)}" + (f" ({self.note})" if self.note else "")


def advice(
    model: ModelMemory, current: MemoryPlan, ranks: int, device_memory: int, per_node: int
) -> tuple[Setting, ...]:
    """Settings that fit and need less memory than the current plan, starting with the fastest."""
    found: list[Setting] = []
    least = current.total
    for setting in settings(model, ranks, device_memory, per_node):
        if setting.fits and setting.plan.total < least * _WORTH_IT:
            least = setting.plan.total
            found.append(setting)
    return tuple(found)


def settings(model: ModelMemory, ranks: int, device_memory: int, per_node: int) -> Iterator[Setting]:
    """Yield possible settings with their memory plans, starting with those that slow down training the least.

    `per_node`: the number of ranks on each node.
    """

    def setting(
        parallel: str | dict[str, int], memory: dict[str, Any], note: str = "", used: ModelMemory = model, **more: str
    ) -> Setting:
        plan = plan_memory(
            used,
            ParallelConfig.model_validate({"strategy": parallel} if isinstance(parallel, str) else parallel),
            ranks,
            device_memory=device_memory,
            checkpointing=float("activation_checkpointing" in memory),
            **{name: value for name, value in memory.items() if name != "activation_checkpointing"},
        )
        if plan.host:
            note = f"the optimizer runs on the CPU; each rank needs {size_text(plan.host)} of host memory"
        shown = "" if ranks == 1 and (memory or more) else parallel  # a single rank has no choice
        text = _as_written(parallel=shown, memory=memory, **more)
        return Setting(text, plan, plan.total <= device_memory, note)

    yield setting("ddp", {})
    if model.copies_weights:
        fused = setting("ddp", {}, used=replace(model, copies_weights=False))
        yield replace(fused, text=f"{fused.text}, and fused=True for the optimizer")
    if ranks > 1:
        yield setting("zero1", {})
        yield setting("fsdp", {})
    # From here on, the optimizer's copies are no longer the reason why a model does not fit.
    most, recomputed = "fsdp" if ranks > 1 else "ddp", _RECOMPUTED if model.passed.blocks else {}
    if recomputed:
        yield setting(most, recomputed, "blocks are computed twice, which takes about a third more time")
        offloaded = recomputed | {"offload_activations": True}
        yield setting(most, offloaded, "activations are copied to host memory and back")
    rounded = "weights are rounded to bfloat16 at each step, which affects training"
    yield setting(most, recomputed, rounded, model.in_half(), precision="bf16-true")
    in_node = math.gcd(ranks, per_node)
    tensor = tensor_size(model.rows, in_node) if model.splits_known else in_node
    if tensor > 1:
        unknown = "" if model.splits_known else "an estimate; requires a tensor_plan"
        yield setting({"shard": ranks // tensor, "tensor": tensor}, recomputed, unknown)
    for offload in ("optimizer", "all") if ranks > 1 else ("optimizer",):
        yield setting(most, recomputed | {"offload": offload})


# --- Checks at the start ----------------------------------------------------------------------------------------------


_EXACT = ("ddp", "zero1", "fsdp", "tensor")  # for other strategies the memory per device is not known in advance


def check_weights_fit(model: nn.Module, strategy: Strategy) -> None:
    """Raise `ConfigError` if weights and gradients exceed the memory of the GPU that the model will be moved to."""
    memory = _memory_to_fit(strategy)
    if memory is not None and not strategy.replaces_parameters:
        trained = sum(bytes_of(each) for each in model.parameters() if each.requires_grad)
        refuse(MemoryPlan(sum(map(bytes_of, model.parameters())), trained, 0), memory)


def check_fits(model: nn.Module, strategy: Strategy, optimizer: Optimizer, device_optimizer: Optimizer) -> int | None:
    """Raise `ConfigError` if weights, gradients and optimizer state alone exceed the memory of this rank's GPU.

    Called after `strategy.setup`. `device_optimizer`: the optimizer that holds the model's parameters; the same object
    as `optimizer`, unless `optimizer` holds copies on the host. Returns the sum of these bytes on this rank; None on
    the CPU, or if unknown.
    """
    memory = _memory_to_fit(strategy)
    if memory is None:
        return None
    held = [each for group in device_optimizer.param_groups for each in group["params"] if each.requires_grad]
    trained = held if strategy.replaces_parameters else strategy.parameters
    weights, gradients = (sum(map(bytes_of, each)) for each in (strategy.local_parameters(), trained))
    if strategy.parameters_on_host:
        weights = gradients = 0
    weights += sum(map(bytes_of, model.buffers()))
    plan = MemoryPlan(weights, gradients, state_to_come(optimizer) if optimizer is device_optimizer else 0)
    refuse(plan, memory)
    return plan.exact


def _memory_to_fit(strategy: Strategy) -> int | None:
    return device_memory(strategy.world.device) if strategy.config.strategy in _EXACT else None


def refuse(plan: MemoryPlan, device_memory: int) -> None:
    """Raise `ConfigError` if weights, gradients and optimizer state alone do not fit.

    The estimated parts of the plan, such as activations, are ignored.
    """
    if plan.exact <= device_memory:
        return
    parts = {"weights": plan.weights, "gradients": plan.gradients, "optimizer state": plan.optimizer_state}
    shown = ", ".join(f"{name} {size_text(size)}" for name, size in parts.items())
    needed, has = distinct_sizes(plan.exact, device_memory)
    raise ConfigError(
        f"the run cannot fit in memory: {shown} per device, in total {needed}, but a device has {has}",
        '`ddpkit plan` shows which settings fit; parallel="fsdp" divides weights, gradients and optimizer state by the '
        "number of ranks",
    )


# --- After an out-of-memory error -------------------------------------------------------------------------------------


def out_of_memory_hint(model: nn.Module, optimizer: Optimizer, config: TrainerConfig, world: World) -> str:
    """Describe the settings to change after an out-of-memory error.

    Not a collective. Does not query the device, because the error may have left it in any state.
    """
    recompute = "" if config.memory.activation_checkpointing else _as_written(memory=_RECOMPUTED)
    if config.micro_batch_size == "auto":
        first = f"set {recompute} in the TrainerConfig, " if recompute else ""
        hint = f"there is no smaller micro-batch: {first}use a lower precision, or an optimizer with less state"
    else:
        also = f", or {recompute}" if recompute else ""
        hint = (
            f'set micro_batch_size="auto" in the TrainerConfig, or a smaller number{also}; the global batch size does '
            "not change"
        )
    with suppress(Exception):  # planning may fail too, for example for lack of host memory
        if placement := _smaller_placement(model, optimizer, config, world):
            hint = f"{hint}; {placement}"
    return hint


def _smaller_placement(model: nn.Module, optimizer: Optimizer, config: TrainerConfig, world: World) -> str:
    """Describe a placement that, by calculation, fits and needs less memory than the current one; "" if none does."""
    if config.parallel.strategy == "device_map" or world.world_size == 1:
        return ""
    ranks, memory = world.world_size, _memory_of_rank(world)
    whole = measured_without_pass(model, config, optimizer)
    now = candidate_for(whole, config.parallel, config.memory, ranks, memory)
    tried = candidates(whole, config.parallel, config.memory, ranks, memory, world.local_world_size)
    found, _ = choose(each for each in tried if each.needed < now.needed * _WORTH_IT)
    if found is None:
        return ""
    return (
        f"by calculation, {found.text} needs {size_text(found.needed, 2)} of {size_text(memory, 2)} on each rank for "
        f"weights, gradients and optimizer state, while {now.text} needs {size_text(now.needed, 2)}"
    )
