"""Where the model lives: on this rank's device, in DistributedDataParallel where there are several ranks."""

from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_kit.config import ParallelConfig
from ddp_kit.errors import ConfigError
from ddp_kit.world import World

_BROADCAST_BYTES = 250 * 1024 * 1024


def place(model: nn.Module, world: World, config: ParallelConfig) -> nn.Module:
    """Move the model to this rank's device and make its replicas agree. A collective: all ranks call it.

    Returns what the loss function calls: the model itself where it is alone, else its DDP wrapper.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"the model {type(model).__name__} has no parameter that requires a gradient",
            "nothing could be trained; set requires_grad=True on what is to learn",
        )
    if isinstance(model, DistributedDataParallel):
        raise ConfigError(
            "the model is wrapped in DistributedDataParallel", "give the model itself; the Trainer wraps it"
        )
    model.to(world.device)
    if world.world_size == 1:
        return model
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        # Gradients are views into the buckets: no copy into them, and one gradient's worth of memory less.
        gradient_as_bucket_view=True,
        bucket_cap_mb=config.bucket_mb,
        find_unused_parameters=config.find_unused_parameters,
        # Buffers are sent from rank 0, torch's default: its BatchNorm statistics count. Without any, nothing is sent.
        # static_graph stays off: it fails under accumulation unless the first step reduces every micro-batch.
    )


def send_buffers(model: nn.Module, world: World) -> None:
    """Give all ranks rank 0's buffers, such as BatchNorm's statistics: one model is evaluated. A collective."""
    buffers = list(model.buffers())
    if world.world_size > 1 and buffers:
        # As DDP itself sends them: many in one piece.
        dist._broadcast_coalesced(dist.group.WORLD, buffers, _BROADCAST_BYTES, 0)  # type: ignore[arg-type]


def without_reduction(placed: nn.Module) -> AbstractContextManager[None]:
    """Gradients pile up on each rank alone: for every micro-batch of a step but its last."""
    return placed.no_sync() if isinstance(placed, DistributedDataParallel) else nullcontext()
