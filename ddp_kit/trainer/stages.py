"""The stages in which a Trainer is made: each is a type that the next one takes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NewType

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_kit.callbacks import Callback
from ddp_kit.config.settings import TrainerConfig
from ddp_kit.data.sampler import BatchPlan
from ddp_kit.distributed.world import World
from ddp_kit.env import PlanRequest
from ddp_kit.model.activations import Activations
from ddp_kit.model.precision import Precision
from ddp_kit.parallel import Parallelize, Strategy
from ddp_kit.trainer.context import LossFunction, MetricFunction, SchedulerInterval
from ddp_kit.trainer.updates import (
    Update,
)


@dataclass(frozen=True)
class Arguments:
    """The arguments of a Trainer, and the request of `ddpkit plan`."""

    model: nn.Module
    optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer] | None
    loss_fn: LossFunction | None
    config: TrainerConfig
    updates: Sequence[Update]
    scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None
    scheduler_every: SchedulerInterval
    plateau_metric: str | None
    metrics: Mapping[str, MetricFunction | Any]
    callbacks: Sequence[Callback]
    parallelize: Parallelize | None
    plan_request: PlanRequest | None = None
    """The request of `ddpkit plan`, which runs the script in one process; None: train."""


CheckedArguments = NewType("CheckedArguments", Arguments)


@dataclass(frozen=True)
class Placement:
    """How the model will be distributed over the ranks, which agree on it."""

    world: World
    settings: TrainerConfig
    """The configuration with "auto" resolved; under `ddpkit plan`, that of the one process."""
    strategy: Strategy
    batch_plan: BatchPlan


@dataclass(frozen=True)
class PlacedModel:
    """A model that is converted to its precision, compiled, and distributed over the ranks."""

    module: nn.Module
    placement: Placement
    precision: Precision
    activations: Activations
    description: str
    """A line about the model before it was distributed."""


@dataclass(frozen=True)
class Optimizers:
    """The optimizer of a placed model, and its schedulers."""

    optimizer: Optimizer
    stepped_optimizer: Optimizer
    """See `TrainerContext.stepped_optimizer`."""
    by_update: dict[str, Optimizer]
    """The optimizer that each update steps, by update name; a single optimizer has the name ""."""
    schedulers: dict[str, LRScheduler]
    """By update name; the scheduler of a single optimizer has the name ""."""
    scheduler_intervals: list[tuple[LRScheduler | None, int]]
    """The scheduler of each update, or the only one, with the number of steps after which it is stepped."""
    plateaus: tuple[Callback, ...]
    """Callbacks that step the ReduceLROnPlateau schedulers."""
