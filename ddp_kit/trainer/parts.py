"""The objects that a Trainer trains with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_kit.config import TrainerConfig
from ddp_kit.metrics import Loss
from ddp_kit.parallel import Strategy
from ddp_kit.parallel.activations import Activations
from ddp_kit.precision import Precision
from ddp_kit.progress import Heartbeat
from ddp_kit.trainer.logged_values import LoggedValues
from ddp_kit.world import World

LossFunction = Callable[[Any, Any], "Tensor | Loss"]
"""Its first argument is the model; a function may ask for a class of its own there, which `nn.Module` would refuse."""
MetricFunction = Callable[[Any, Any], "Tensor | Loss"]


@dataclass(frozen=True)
class Parts:
    """The objects that a Trainer trains with, fixed when it is made."""

    model: nn.Module
    """The user's model."""
    strategy: Strategy
    optimizer: Optimizer
    """The user's. With `memory.offload_optimizer`, it holds copies of the weights on the host."""
    device_optimizer: Optimizer
    """Holds the parameters that get the gradients, in the same groups, and its `step` is the update: the same one, or
    an `OffloadedOptimizer`."""
    scheduler: LRScheduler | None
    loss_fn: LossFunction
    precision: Precision
    activations: Activations
    world: World
    config: TrainerConfig
    logged: LoggedValues
    heart: Heartbeat = field(default_factory=Heartbeat)
