"""Finds placements that fit in memory for `parallel="auto"` and `ddpkit plan`, and rejects runs that cannot fit.

                       counted bytes                                         must fit in
"auto", OOM hints      all except activations: the batch is not known yet    a fixed share of the memory
`ddpkit plan`          all, including measured activations                   the whole memory
checks at the start    weights, gradients and optimizer state, all exact     the whole memory

`candidates` is the only list of placements; the first two rows choose from it.

A placement is a parallel strategy, its sizes, and the memory settings.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import psutil
import torch
from torch import nn
from torch.optim import Optimizer

from ddp_kit.config import combinations
from ddp_kit.config.settings import AUTO, MemoryConfig, ParallelConfig, TrainerConfig
from ddp_kit.distributed.world import World, gathered
from ddp_kit.errors import ConfigError
from ddp_kit.log import logger
from ddp_kit.memory.estimate import MemoryPlan, ModelMemory, plan_memory, tensor_size
from ddp_kit.memory.measure import measured_without_pass
from ddp_kit.texts import size_text

_WORTH_IT = 0.98  # advise only what needs at most this fraction of the bytes of the current or a cheaper placement
_RECOMPUTED = {"activation_checkpointing": "blocks"}


@cache  # so that it is known after an error, without querying the device
def device_memory(device: torch.device) -> int | None:
    """The memory of a GPU, in bytes; None for the CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def _memory_of_rank(world: World) -> int:
    """The memory of the rank's GPU, in bytes; on the CPU, the rank's share of the host's memory."""
    return device_memory(world.device) or int(psutil.virtual_memory().total) // world.local_world_size


# --- Candidates -------------------------------------------------------------------------------------------------------


COUNTED_SHARE = 0.7
"""The fraction of the memory for weights, gradients and optimizer state; the rest is for activations."""
COUNTED_SHARE_RECOMPUTED = 0.85
"""The same fraction if all blocks are recomputed, because they then keep little more than their inputs."""


@dataclass(frozen=True)
class Candidate:
    """A placement, and the memory that it needs on the rank that needs the most."""

    text: str
    """The configuration as it would be written in a script."""
    parallel: ParallelConfig
    memory: MemoryConfig
    plan: MemoryPlan
    device_memory: int
    note: str = ""
    """What else the placement costs."""
    automatic: bool = True
    """Whether "auto" may choose it."""

    @property
    def counted(self) -> int:
        """Bytes of weights, gradients, optimizer state and communication."""
        return self.plan.exact + self.plan.communication

    @property
    def available(self) -> int:
        """Bytes available for weights, gradients, optimizer state and communication."""
        recomputes = self.memory.activation_checkpointing == "blocks"
        share = COUNTED_SHARE_RECOMPUTED if recomputes else COUNTED_SHARE
        return int(share * self.device_memory)

    def __str__(self) -> str:
        return f"{self.text} needs {size_text(self.counted, 2)} of {size_text(self.available, 2)}"


def candidates(
    model: ModelMemory, parallel: ParallelConfig, memory: MemoryConfig, ranks: int, device_memory: int, per_node: int
) -> Iterator[Candidate]:
    """Yield all placements, starting with those that slow down training the least.

    `parallel`, `memory`: the user's settings, which are kept; only `strategy` and its sizes change.
    `device_memory`: bytes of the smallest device.
    `per_node`: the number of ranks on each node, or a common divisor if the nodes differ.
    """

    def placed(
        strategy: dict[str, Any],
        changes: dict[str, Any],
        note: str = "",
        of: ModelMemory = model,
        *,
        automatic: bool = True,
        **others: str,
    ) -> Candidate:
        implied = ParallelConfig.model_validate(strategy)
        sizes = {name: getattr(implied, name) for name in ("strategy", "replicate", "shard", "tensor")}
        used = memory.model_copy(update=changes)
        placement = parallel.model_copy(update=sizes)
        candidate = candidate_for(of, placement, used, ranks, device_memory, changes, **others)
        if candidate.plan.host:
            host = size_text(candidate.plan.host)
            note = f"the optimizer runs on the CPU; each rank needs {host} of host memory"
        return replace(candidate, note=note, automatic=automatic)

    recomputed: dict[str, Any] = {}
    if any(row.unit for row in model.rows) and "activation_checkpointing" not in memory.model_fields_set:
        recomputed = _RECOMPUTED
    offloads = "offload" not in memory.model_fields_set
    tensor = math.gcd(ranks, per_node)
    if model.splits_known:
        tensor = tensor_size(model.rows, tensor)
    ddp = {"strategy": "ddp"}
    fsdp = {"strategy": "fsdp"}

    yield placed(ddp, {})
    if model.copies_weights:
        fused = placed(ddp, {}, of=replace(model, copies_weights=False), automatic=False)
        yield replace(fused, text=f"{fused.text}, and fused=True for the optimizer")
    if ranks > 1:
        yield placed({"strategy": "zero1"}, {})
        yield placed(fsdp, {})
    # From here on, the optimizer's copies are no longer the reason why a model does not fit.
    most = fsdp if ranks > 1 else ddp
    if recomputed:
        yield placed(most, recomputed, "blocks are computed twice, which takes about a third more time")
        copied = "activations are copied to host memory and back"
        yield placed(most, recomputed | {"offload_activations": True}, copied, automatic=False)
    rounded = "weights are rounded to bfloat16 at each step, which affects training"
    yield placed(most, recomputed, rounded, model.in_half(), automatic=False, precision="bf16-true")
    if offloads:
        yield placed(most, recomputed | {"offload": "optimizer"})
    if tensor > 1:
        unknown = "" if model.splits_known else "an estimate; requires a tensor_plan"
        sizes = {"shard": ranks // tensor, "tensor": tensor}
        yield placed(sizes, recomputed, unknown, automatic=model.splits_known)
    if offloads and ranks > 1:
        yield placed(most, recomputed | {"offload": "all"}, automatic=False)


def candidate_for(
    model: ModelMemory,
    parallel: ParallelConfig,
    memory: MemoryConfig,
    ranks: int,
    device_memory: int,
    changes: Mapping[str, Any],
    **others: str,
) -> Candidate:
    """The candidate for a placement. `changes`: the settings of `memory` that differ from those of the user.

    `others`: other settings to show in `text`.
    """
    plan = plan_memory(
        model,
        parallel,
        ranks,
        device_memory=device_memory,
        # A measured pass already recomputes as the user has configured, so only a change has to be estimated.
        checkpointing=float("activation_checkpointing" in changes),
        offload_activations=memory.offload_activations,
        offload=memory.offload,
    )
    sizes = {name: getattr(parallel, name) for name in ("replicate", "shard", "tensor", "pipeline")}
    shown: Any = {name: size for name, size in sizes.items() if size not in (1, -1)} or parallel.strategy
    if ranks == 1 and (changes or others):  # a single rank has no choice
        shown = ""
    written = {"parallel": shown, "memory": dict(changes), **others}
    text = ", ".join(f"{name}={value!r}" for name, value in written.items() if value).replace("'", '"')
    return Candidate(text, parallel, memory, plan, device_memory)


def choose(tried: Iterable[Candidate]) -> tuple[Candidate | None, list[Candidate]]:
    """Return the first candidate that "auto" may choose and that fits, and those before it that it may choose.

    If none fits, returns None and all that it may choose.
    """
    refused: list[Candidate] = []
    for candidate in tried:
        if candidate.automatic and candidate.counted <= candidate.available:
            return candidate, refused
        if candidate.automatic:
            refused.append(candidate)
    return None, refused


def advice(
    model: ModelMemory, current: MemoryPlan, ranks: int, device_memory: int, per_node: int
) -> tuple[Candidate, ...]:
    """Candidates that fit with their activations, and need less than the current plan; the fastest first."""
    found: list[Candidate] = []
    least = current.total
    for candidate in candidates(model, ParallelConfig(), MemoryConfig(), ranks, device_memory, per_node):
        if candidate.plan.total <= min(device_memory, least * _WORTH_IT):
            least = candidate.plan.total
            found.append(candidate)
    return tuple(found)


# --- Automatic placement ----------------------------------------------------------------------------------------------


_COUNTED = "The numbers include weights, gradients and optimizer state; the rest of the memory is for activations"


def first_that_fits(config: TrainerConfig, model: nn.Module, world: World) -> TrainerConfig:
    """Replace ``parallel="auto"`` with the settings of the first candidate that fits. A collective.

    Other configurations are returned unchanged. Two values of optimizer state are counted for each weight, as in Adam.
    Raises `ConfigError` if none fits, or if the user's settings cannot be combined with the one that does.
    """
    if config.parallel.strategy != AUTO:
        return config
    everyone = gathered(world, [_memory_of_rank(world), world.local_world_size])
    least = min(memory for memory, _ in everyone)
    per_node = math.gcd(*(ranks for _, ranks in everyone))
    whole = measured_without_pass(model, config)
    chosen, refused = choose(candidates(whole, config.parallel, config.memory, world.world_size, least, per_node))
    if chosen is None:
        raise ConfigError(
            f"parallel='auto' found no placement that fits: {'; '.join(map(str, refused))}. {_COUNTED}",
            "use more ranks or precision='bf16-true', or configure `parallel` and `memory` yourself",
        )
    logger.info('parallel="auto": {}. {}', "; ".join(map(str, [chosen, *refused])), _COUNTED)
    placed = config.model_copy(update={"parallel": chosen.parallel, "memory": chosen.memory})
    for message, instead in combinations.problems(placed):
        raise ConfigError(message, instead)
    return placed


# --- After an out-of-memory error -------------------------------------------------------------------------------------


def out_of_memory_hint(model: nn.Module, optimizer: Optimizer, config: TrainerConfig, world: World) -> str:
    """Describe the settings to change after an out-of-memory error.

    Not a collective. Does not query the device, because the error may have left it in any state.
    """
    first = ""
    also = ""
    if not config.memory.activation_checkpointing:
        recompute = 'memory={"activation_checkpointing": "blocks"}'
        first = f"set {recompute} in the TrainerConfig, "
        also = f", or {recompute}"
    if config.micro_batch_size == "auto":
        hint = f"there is no smaller micro-batch: {first}use a lower precision, or an optimizer with less state"
    else:
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
    ranks = world.world_size
    memory = _memory_of_rank(world)
    whole = measured_without_pass(model, config, optimizer)
    now = candidate_for(whole, config.parallel, config.memory, ranks, memory, {})
    tried = candidates(whole, config.parallel, config.memory, ranks, memory, world.local_world_size)
    found, _ = choose(candidate for candidate in tried if candidate.counted < now.counted * _WORTH_IT)
    if found is None:
        return ""
    return (
        f"by calculation, {found.text} needs {size_text(found.counted, 2)} of {size_text(memory, 2)} on each rank for "
        f"weights, gradients and optimizer state, while {now.text} needs {size_text(now.counted, 2)}"
    )
