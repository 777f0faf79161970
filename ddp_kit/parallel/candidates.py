"""The placements that `parallel="auto"` tries, in the order of what they cost in time. Pure arithmetic.

    counted       weights, gradients and optimizer state, and the weights and gradients that FSDP gathers
    not counted   activations, which nobody knows before the first batch: a part of the memory is left to them

So a candidate fits if what is counted fits in the rest of the memory. `ddpkit plan` and `Trainer.plan` have a batch,
and count activations too.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ddp_kit.config import MemoryConfig, ParallelConfig, StrategyName
from ddp_kit.parallel.memory import ModelMemory, plan_memory, tensor_size
from ddp_kit.sizes import size_text

STEPS: tuple[tuple[StrategyName, dict[str, Any]], ...] = (
    ("ddp", {}),
    ("zero1", {}),
    ("fsdp", {}),
    ("fsdp", {"checkpointing": "blocks"}),
    ("fsdp", {"checkpointing": "blocks", "offload_optimizer": True}),
    ("tensor", {"checkpointing": "blocks"}),
)
"""The strategy, and changes to `memory`. What the user has set stays."""

COUNTED_SHARE = 0.7
"""Of the memory, what weights, gradients and optimizer state may take; the rest is for activations."""
COUNTED_SHARE_RECOMPUTED = 0.85
"""The same where all blocks are recomputed: they keep little more than their inputs."""


@dataclass(frozen=True)
class Candidate:
    """A placement, and the memory that it needs on the rank with the most."""

    text: str
    """As it is written in a script."""
    parallel: ParallelConfig
    memory: MemoryConfig
    needed: int
    """Bytes of what is counted."""
    available: int
    """Bytes that may be taken by it."""

    @property
    def fits(self) -> bool:
        """Whether it fits, as far as arithmetic can say."""
        return self.needed <= self.available

    def __str__(self) -> str:
        return f"{self.text} needs {size_text(self.needed, 2)} of {size_text(self.available, 2)}"


def candidates(
    model: ModelMemory,
    parallel: ParallelConfig,
    memory: MemoryConfig,
    ranks: int,
    device_memory: int,
    ranks_per_node: int,
) -> Iterator[Candidate]:
    """The placements for these settings in order, each once. `parallel`, `memory`: their other settings stay.

    `device_memory`: bytes of the smallest device.
    """
    has_blocks = any(row.unit for row in model.rows)
    tensor = tensor_size(model.rows, math.gcd(ranks, ranks_per_node))
    seen: list[tuple[StrategyName, dict[str, Any]]] = []
    for strategy, wanted in STEPS:
        changes = {
            name: value
            for name, value in wanted.items()
            if name not in memory.model_fields_set and (name != "checkpointing" or has_blocks)
        }
        placement: StrategyName = "ddp" if ranks == 1 else strategy
        step = placement, changes
        if step in seen or (strategy == "tensor" and tensor == 1):
            continue
        seen.append(step)
        placed = _placed(parallel, step[0], ranks, tensor)
        yield candidate_for(model, placed, memory.model_copy(update=changes), ranks, device_memory, changes)


def choose(tried: Iterable[Candidate]) -> tuple[Candidate | None, list[Candidate]]:
    """The first that fits, and those before it; None and all of them if none fits."""
    refused: list[Candidate] = []
    for each in tried:
        if each.fits:
            return each, refused
        refused.append(each)
    return None, refused


def candidate_for(
    model: ModelMemory,
    parallel: ParallelConfig,
    memory: MemoryConfig,
    ranks: int,
    device_memory: int,
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> Candidate:
    """What a placement needs. `changes`: what the text says of `memory`."""
    plan = plan_memory(
        model,
        parallel,
        ranks,
        device_memory=device_memory,
        offload_optimizer=memory.offload_optimizer,
        offload_parameters=memory.offload_parameters,
    )
    share = COUNTED_SHARE_RECOMPUTED if memory.checkpointing == "blocks" else COUNTED_SHARE
    text = f"parallel={_text(parallel)}" + (f", memory={_table(changes)}" if changes else "")
    return Candidate(text, parallel, memory, plan.exact + plan.communication, int(share * device_memory))


def _placed(parallel: ParallelConfig, strategy: StrategyName, ranks: int, tensor: int) -> ParallelConfig:
    """The settings of `parallel`, such as those of reductions, with a strategy and its sizes."""
    if strategy == "tensor":
        sizes = ParallelConfig(shard=ranks // tensor, tensor=tensor)
    else:
        sizes = ParallelConfig(strategy=strategy)
    fields = ("strategy", "replicate", "shard", "tensor", "optimizer")
    return parallel.model_copy(update={field: getattr(sizes, field) for field in fields})


def _text(parallel: ParallelConfig) -> str:
    named = {name: getattr(parallel, name) for name in ("replicate", "shard", "tensor", "pipeline")}
    given = {name: size for name, size in named.items() if size not in (1, -1)}
    return _table(given) if given else f'"{parallel.strategy}"'


def _table(values: Mapping[str, Any]) -> str:
    return str(dict(values)).replace("'", '"')
