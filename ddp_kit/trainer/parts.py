"""The objects that a Trainer trains with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

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
"""(model, batch) -> loss. The model's type is Any, so that a function may be annotated with its own model class."""
MetricFunction = Callable[[Any, Any], "Tensor | Loss"]
SchedulerInterval = Literal["step", "epoch"]
"""After what a scheduler is stepped."""


@dataclass(frozen=True)
class Parts:
    """The objects that a Trainer trains with, fixed when it is created."""

    model: nn.Module
    """The user's model."""
    strategy: Strategy
    optimizer: Optimizer
    """The user's optimizer. With `memory.offload_optimizer`, its parameters are copies of the weights on the host."""
    device_optimizer: Optimizer
    """The optimizer whose parameters are the model's, and whose `step` does the update: the same one, or an
    `OffloadedOptimizer` around it."""
    scheduler: LRScheduler | None
    loss_fn: LossFunction
    precision: Precision
    activations: Activations
    world: World
    config: TrainerConfig
    logged: LoggedValues
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
