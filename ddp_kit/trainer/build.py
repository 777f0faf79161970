"""Makes what a Trainer uses. The types of the stages say what must come before what:

CheckedArguments  nothing is created yet
Placement         the ranks, the strategy, and the settings with "auto" resolved; the model is unchanged
PlacedModel       converted to its precision, compiled, and distributed over the ranks
Optimizers        of the placed parameters, with their schedulers
TrainerContext    what a step, an evaluation and a prediction use
Run               what the loop calls
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NewType

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ddp_kit.callbacks import Callback
from ddp_kit.callbacks.callback import Gradients
from ddp_kit.checkpoint.manager import Checkpoints
from ddp_kit.checkpoint.model_state import ModelPart, OptimizerPart
from ddp_kit.checkpoint.state import BestPart, CallbacksPart, ConfigPart, PrecisionPart, RandomPart, StrategyPart
from ddp_kit.config.settings import TrainerConfig
from ddp_kit.data.comparison import SampleComparison
from ddp_kit.data.feed import DataRank, FeedBuilder
from ddp_kit.data.sampler import BatchPlan, plan_batches
from ddp_kit.distributed import barrier, consistency
from ddp_kit.distributed.world import World
from ddp_kit.env import PlanRequest, plan_request
from ddp_kit.errors import ConfigError
from ddp_kit.heartbeat import Phase
from ddp_kit.memory.choose import check_fits, check_weights_fit, first_that_fits
from ddp_kit.memory.measure import PeakMemory, config_to_plan
from ddp_kit.model.activations import Activations
from ddp_kit.model.compilation import compile_in_place, without_wrappers
from ddp_kit.model.precision import Precision
from ddp_kit.model.tensor_cores import advise_on_sizes
from ddp_kit.parallel import Options, Parallelize, Strategy, strategy_for
from ddp_kit.parallel.offload import OffloadedOptimizer
from ddp_kit.parallel.strategy import sizes_of
from ddp_kit.trainer.context import LoggedValues, LossFunction, MetricFunction, SchedulerInterval, TrainerContext
from ddp_kit.trainer.evaluation import Evaluator
from ddp_kit.trainer.learning_rates import DecayWatch, Plateau, scale_learning_rate, separate_rates, warmed_up
from ddp_kit.trainer.logging import LogPoints
from ddp_kit.trainer.loss_modules import ModulesPart, modules_beside, move_beside
from ddp_kit.trainer.model_flops import ModelFlops
from ddp_kit.trainer.position import Position, RunState, StreamPart
from ddp_kit.trainer.preemption import Preemption
from ddp_kit.trainer.profile import Recorder
from ddp_kit.trainer.run_record import RunRecord, described_model
from ddp_kit.trainer.scheduler_state import SchedulerPart
from ddp_kit.trainer.setup import (
    check_writable,
    checked_callbacks,
    checked_loss,
    checked_metrics,
    checked_model,
    optimizer_for,
    scheduler_for,
    use_deterministic_algorithms,
)
from ddp_kit.trainer.step import OptimizerStep
from ddp_kit.trainer.timing import DATA, TRANSFER, StepClock, step_clock
from ddp_kit.trainer.updates import (
    JointOptimizer,
    JointScheduler,
    Update,
    checked_updates,
    joint_step,
    loss_to_evaluate,
    optimizer_kind,
    optimizer_step_for,
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
    flops: ModelFlops


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


@dataclass(frozen=True)
class Run:
    """What the loop of a Trainer calls."""

    context: TrainerContext
    arguments: CheckedArguments
    model: PlacedModel
    callbacks: tuple[Callback, ...]
    position: Position
    state: RunState
    clock: StepClock
    optimizer_step: OptimizerStep
    scheduler_intervals: list[tuple[LRScheduler | None, int]]
    decay_watch: DecayWatch
    record: RunRecord
    log_points: LogPoints
    checkpoints: Checkpoints
    evaluator: Evaluator
    preemption: Preemption
    sample_comparison: SampleComparison
    profiler: Recorder
    peak_memory: PeakMemory


def build(asked: Arguments, call_callbacks: Callable[..., None], call_on_gradients: Callable[[Gradients], None]) -> Run:
    """Make what a Trainer uses, and resume from a checkpoint according to `config.checkpoint`. A collective.

    `call_callbacks`: a function `(event, *values)` that calls the method `event` of every callback.
    `call_on_gradients`: a function that calls the `on_gradients` of the callbacks that override it.
    """
    arguments = checked(asked)
    config, updates = arguments.config, arguments.updates
    if config.deterministic:
        use_deterministic_algorithms()
    world = barrier.join_world("Trainer(...)", share_gpus=config.parallel.share_gpus)
    placement = choose_placement(arguments, world)
    settings, strategy = placement.settings, placement.strategy
    model = place_model(arguments.model, placement)
    optimizers = make_optimizers(arguments, model)
    optimizer, schedulers = optimizers.optimizer, optimizers.schedulers
    callbacks = (*optimizers.plateaus, *arguments.callbacks)
    functions: dict[str, Any] = {"loss_fn": arguments.loss_fn}
    functions |= {f"loss_fn of update {update.name!r}": update.loss_fn for update in updates}
    functions |= {f"metric {name!r}": metric for name, metric in arguments.metrics.items()}
    loss_modules = modules_beside(model.module, functions)
    for module in loss_modules.values():
        move_beside(module, model.module, world.device)
    logged = LoggedValues(world.device)
    context = TrainerContext(
        model=model.module,
        strategy=strategy,
        optimizer=optimizer,
        stepped_optimizer=optimizers.stepped_optimizer,
        scheduler=JointScheduler(schedulers) if updates and schedulers else schedulers.get(""),
        loss_fn=checked_loss(loss_to_evaluate(updates, logged) if updates else arguments.loss_fn),
        loss_modules=(*loss_modules.values(),),
        precision=model.precision,
        activations=model.activations,
        world=world,
        config=settings,
        logged=logged,
        on_gradients=call_on_gradients if any(map(changes_gradients, callbacks)) else None,
    )
    counted = check_fits(context.model, strategy, optimizer, context.stepped_optimizer)
    position, state, clock = Position(), RunState(), step_clock(world.device)
    step = joint_step(context, clock, updates, schedulers) if updates else optimizer_step_for(context, clock)
    record = RunRecord(config, world, model.description, optimizer)
    log_points = LogPoints(
        context, clock, call_callbacks, record.advise, model.flops.utilisation, recorded=record.is_written
    )
    every = {update.name: update.every for update in updates}

    def steps_done(update: str) -> int:
        return position.step // every.get(update, 1) - step.skipped_steps

    random = RandomPart(world, settings.seed, strategy.data_rank, position)
    best = BestPart(settings.checkpoint, position)
    saved_parts = (
        # First, so that nothing else is loaded if a callback rejects its state.
        CallbacksPart(world, callbacks, pieces=strategy.divides_weights),
        ModelPart(strategy, world, trainable_only=settings.checkpoint.trainable_only),
        OptimizerPart(strategy, optimizer, context.stepped_optimizer, optimizer_kind(optimizer)),
        ModulesPart(world, model.module, loss_modules),
        PrecisionPart(context.precision, step),
        position,
        SchedulerPart(context.scheduler, schedulers if updates else {}, optimizers.by_update, steps_done),
        StreamPart(world, position),
        random,
        best,
        ConfigPart(settings),
        StrategyPart(strategy),
    )
    check_before_save = log_points.check_before_save
    checkpoints = Checkpoints(
        world, settings, strategy, optimizer, saved_parts, random, best, position, state, check_before_save
    )
    run = Run(
        context=context,
        arguments=arguments,
        model=model,
        callbacks=callbacks,
        position=position,
        state=state,
        clock=clock,
        optimizer_step=step,
        scheduler_intervals=optimizers.scheduler_intervals,
        decay_watch=DecayWatch(schedulers),
        record=record,
        log_points=log_points,
        checkpoints=checkpoints,
        evaluator=Evaluator(context, arguments.metrics, checkpoints, position, state, call_callbacks),
        preemption=Preemption(world, config, checkpoints, position),
        sample_comparison=SampleComparison(world, settings.data, settings.seed),
        profiler=Recorder(config.profile, world.rank),
        peak_memory=PeakMemory(world, counted),
    )
    barrier.watch(world, context.heartbeat)
    checkpoints.resume()
    context.heartbeat.set_step(position.step)
    return run


def checked(arguments: Arguments) -> CheckedArguments:
    """Check the arguments of a Trainer, and unwrap the model. Raises `ConfigError`."""
    model, config, request = arguments.model, arguments.config, plan_request()
    if isinstance(model, nn.Module):
        model = without_wrappers(model, compiled=request is None)
    checked_model(model)
    interval = None if arguments.scheduler_every == "step" else arguments.scheduler_every
    alone = (arguments.optimizer, arguments.loss_fn, arguments.scheduler, interval)
    return CheckedArguments(
        replace(
            arguments,
            model=model,
            updates=checked_updates(model, arguments.updates, alone, config),
            metrics=checked_metrics(arguments.metrics),
            callbacks=checked_callbacks(arguments.callbacks),
            plan_request=request,
        )
    )


def choose_placement(arguments: CheckedArguments, world: World) -> Placement:
    """Choose the strategy, resolve "auto", and check that the ranks agree. A collective."""
    model, config, request = arguments.model, arguments.config, arguments.plan_request
    settings = config if request is None else config_to_plan(config)
    micro_batch = None if settings.micro_batch_size == "auto" else settings.micro_batch_size
    settings = first_that_fits(settings, model, world)
    options = Options(
        recoverable=settings.micro_batch_size == "auto",
        parallelize=arguments.parallelize,
        parameters_on_host=settings.memory.offload == "all",
    )
    strategy = strategy_for(settings.parallel, world, options)
    data_ranks = strategy.data_ranks if request is None else sizes_of(config.parallel, request.ranks).data
    batch_plan = plan_batches(settings.global_batch_size, micro_batch, settings.accumulation_steps, data_ranks)
    strategy.check(model)
    if request is None:  # otherwise the model may have no memory
        check_writable(model, world, settings.checkpoint)
    settings_of_ranks = consistency.facts_of_settings(config) | consistency.facts_of_settings(settings, "parallel")
    consistency.check_agreement(world, settings_of_ranks | consistency.facts_of_model(model))
    return Placement(world, settings, strategy, batch_plan)


def place_model(model: nn.Module, placement: Placement) -> PlacedModel:
    """Convert the model to its precision, compile it, and distribute it over the ranks. A collective."""
    world, settings, strategy = placement.world, placement.settings, placement.strategy
    precision = Precision(
        settings.precision,
        world.device,
        sharded=strategy.shards,
        gathered=strategy.divides_weights,
        fp8_layers=settings.fp8_layers,
        bf16_buffers=settings.bf16_buffers,
        bf16_inputs=settings.bf16_inputs,
    )
    description = described_model(model)
    flops = ModelFlops(model, settings, world, precision)  # copies the model as the user has created it
    advise_on_sizes(model, settings.precision, world.device)
    precision.prepare(model)
    if settings.compile is not None:
        compile_in_place(model, settings.compile)
    activations = Activations(model, settings.memory, compiled=settings.compile is not None)
    check_weights_fit(model, strategy)
    strategy.setup(model)
    return PlacedModel(model, placement, precision, activations, description, flops)


def make_optimizers(arguments: CheckedArguments, model: PlacedModel) -> Optimizers:
    """Return or create the optimizer and the schedulers, whose rates are first scaled with the batch size."""
    settings, strategy = model.placement.settings, model.placement.strategy
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
    if (rule := settings.learning_rate_scaling) is not None and (reference := settings.reference_batch_size):
        scale_learning_rate(optimizer, rule, model.placement.batch_plan.global_batch, reference, *asked)
    if any(asked) or settings.warmup_steps:
        separate_rates(optimizer)
    for name, scheduled, scheduler, interval, every in rows:
        made = scheduler_for(scheduled, scheduler, interval)
        if isinstance(made, ReduceLROnPlateau):
            plateau = Plateau(made, arguments.plateau_metric, settings.checkpoint, settings.warmup_steps)
            plateaus, made = [plateau, *plateaus], None
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


def changes_gradients(callback: Callback) -> bool:
    """Whether a callback overrides `on_gradients`, in its class or on the object."""
    return getattr(callback.on_gradients, "__func__", None) is not Callback.on_gradients


def feed_builder(context: TrainerContext, clock: StepClock, plan: BatchPlan, *, timed: bool = True) -> FeedBuilder:
    """Create the object that opens data. `plan`: how each step is divided into micro-batches.

    `timed`: whether fetching and moving batches count as time of a step.
    """
    strategy, precision = context.strategy, context.precision

    def fetched() -> None:
        clock.end(DATA)
        context.heartbeat.enter(Phase.TRANSFER)

    return FeedBuilder(
        context.config,
        context.world,
        DataRank(strategy.data_rank, strategy.data_ranks, strategy.contributes, strategy.equal_passes),
        plan,
        precision.batch_dtype,
        precision.check_batch,
        needs_equal_samples=any(isinstance(module, nn.SyncBatchNorm) for module in context.model.modules()),
        fetched=fetched if timed else lambda: None,
        moved=partial(clock.end, TRANSFER) if timed else lambda: None,
    )
