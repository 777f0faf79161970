"""The optimizer and the schedulers of a Trainer."""

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ddp_kit.callbacks import Callback
from ddp_kit.errors import ConfigError
from ddp_kit.parallel.offload import OffloadedOptimizer
from ddp_kit.trainer.learning_rates import Plateau, scale_learning_rate, separate_rates, warmed_up
from ddp_kit.trainer.setup import (
    optimizer_for,
    scheduler_for,
)
from ddp_kit.trainer.stages import CheckedArguments, Optimizers, PlacedModel
from ddp_kit.trainer.updates import (
    JointOptimizer,
)


def make_optimizers(arguments: CheckedArguments, model: PlacedModel) -> Optimizers:
    """Return or create the optimizer and the schedulers, whose rates are first scaled with the batch size."""
    settings = model.placement.settings
    strategy = model.placement.strategy
    optimizer = arguments.optimizer
    if arguments.updates:
        optimizer = JointOptimizer({update.name: update.optimizer for update in arguments.updates})
    optimizer = stepped_optimizer = optimizer_for(model.module, optimizer, strategy)
    if settings.memory.offload is not None:
        stepped_optimizer = OffloadedOptimizer(optimizer, in_place=strategy.parameters_on_host)
    schedulers: dict[str, LRScheduler] = {}
    plateaus: list[Callback] = []
    intervals: list[tuple[LRScheduler | None, int]] = []
    rows = [
        (update.name, update.optimizer, update.scheduler, update.scheduler_every, update.every)
        for update in arguments.updates
    ]
    rows = rows or [("", optimizer, arguments.scheduler, arguments.scheduler_every, 1)]
    asked = [scheduler for _, _, scheduler, _, _ in rows]
    # For all updates together, whose optimizers may share a tensor as their rate.
    rule = settings.learning_rate_scaling
    reference = settings.reference_batch_size
    if rule is not None and reference:
        scale_learning_rate(optimizer, rule, model.placement.batch_plan.global_batch, reference, *asked)
    if any(asked) or settings.warmup_steps:
        separate_rates(optimizer)
    for name, scheduled, scheduler, interval, every in rows:
        made = scheduler_for(scheduled, scheduler, interval)
        if isinstance(made, ReduceLROnPlateau):
            plateau = Plateau(made, arguments.plateau_metric, settings.checkpoint, settings.warmup_steps)
            plateaus.insert(0, plateau)
            made = None
        made = warmed_up(scheduled, made, settings.warmup_steps, interval)
        intervals.append((made, every))
        if made is not None:
            schedulers[name] = made
    if arguments.plateau_metric is not None and not plateaus:
        raise ConfigError(
            f"plateau_metric is {arguments.plateau_metric!r}, but there is no ReduceLROnPlateau",
            "omit plateau_metric, or pass scheduler=lambda optimizer: ReduceLROnPlateau(optimizer, ...)",
        )
    by_update = {name: scheduled for name, scheduled, *_ in rows}
    return Optimizers(optimizer, stepped_optimizer, by_update, schedulers, intervals, tuple(plateaus))
