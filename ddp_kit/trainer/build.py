"""Makes what a Trainer uses. The types of the stages say what must come before what:

CheckedArguments  nothing is created yet
Placement         the ranks, the strategy, and the settings with "auto" resolved; the model is unchanged
PlacedModel       converted to its precision, compiled, and distributed over the ranks
Optimizers        of the placed parameters, with their schedulers
TrainerContext    what a step, an evaluation and a prediction use
Run               this, and what the loop calls
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ddp_kit.callbacks import Callback
from ddp_kit.callbacks.callback import Gradients
from ddp_kit.checkpoint.manager import Checkpoints
from ddp_kit.checkpoint.model_state import ModelPart, OptimizerPart
from ddp_kit.checkpoint.state import BestPart, CallbacksPart, ConfigPart, PrecisionPart, RandomPart, StrategyPart
from ddp_kit.data.feed import DataRank, FeedBuilder
from ddp_kit.data.sampler import BatchPlan, plan_batches
from ddp_kit.distributed import barrier, consistency
from ddp_kit.distributed.world import World
from ddp_kit.env import plan_request
from ddp_kit.heartbeat import Phase
from ddp_kit.memory.checks import check_fits, check_weights_fit
from ddp_kit.memory.choose import first_that_fits
from ddp_kit.memory.measure import PeakMemory, config_to_plan
from ddp_kit.model.activations import Activations
from ddp_kit.model.compilation import compile_in_place, without_wrappers
from ddp_kit.model.precision import Precision
from ddp_kit.model.tensor_cores import advise_on_sizes
from ddp_kit.parallel import Options, strategy_for
from ddp_kit.parallel.strategy import sizes_of
from ddp_kit.trainer.agreement import Entry, RankAgreement
from ddp_kit.trainer.context import LoggedValues, TrainerContext
from ddp_kit.trainer.evaluation import Evaluator
from ddp_kit.trainer.logging import LogPoints
from ddp_kit.trainer.loss_modules import ModulesPart, modules_beside, move_beside
from ddp_kit.trainer.model_flops import ModelFlops
from ddp_kit.trainer.optimizers import make_optimizers
from ddp_kit.trainer.planning import PlanInstead, Planner, RequestedPlanner
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
    use_deterministic_algorithms,
)
from ddp_kit.trainer.stages import Arguments, CheckedArguments, PlacedModel, Placement
from ddp_kit.trainer.step import StepRunner
from ddp_kit.trainer.timing import DATA, TRANSFER, StepClock, step_clock
from ddp_kit.trainer.updates import (
    JointScheduler,
    Update,
    checked_updates,
    joint_step,
    loss_to_evaluate,
    optimizer_kind,
    optimizer_step_for,
)


@dataclass(frozen=True, kw_only=True)
class Run(TrainerContext):
    """What a Trainer uses."""

    updates: Sequence[Update]
    batch_plan: BatchPlan
    model_description: str
    entry: Entry
    planner: Planner
    flops: ModelFlops
    callbacks: tuple[Callback, ...]
    position: Position
    state: RunState
    clock: StepClock
    optimizer_step: StepRunner
    scheduler_intervals: list[tuple[LRScheduler | None, int]]
    record: RunRecord
    log_points: LogPoints
    checkpoints: Checkpoints
    evaluator: Evaluator
    preemption: Preemption
    profiler: Recorder
    peak_memory: PeakMemory


def build(asked: Arguments, call_callbacks: Callable[..., None], call_on_gradients: Callable[[Gradients], None]) -> Run:
    """Make what a Trainer uses, and resume from a checkpoint according to `config.checkpoint`. A collective.

    `call_callbacks`: a function `(event, *values)` that calls the method `event` of every callback.
    `call_on_gradients`: a function that calls the `on_gradients` of the callbacks that override it.
    """
    arguments = checked(asked)
    config = arguments.config
    updates = arguments.updates
    if config.deterministic:
        use_deterministic_algorithms()
    world = barrier.join_world("Trainer(...)", share_gpus=config.parallel.share_gpus)
    placement = choose_placement(arguments, world)
    settings = placement.settings
    strategy = placement.strategy
    model = place_model(arguments.model, placement)
    optimizers = make_optimizers(arguments, model)
    optimizer = optimizers.optimizer
    schedulers = optimizers.schedulers
    callbacks = (*optimizers.plateaus, *arguments.callbacks)
    functions: dict[str, Any] = {"loss_fn": arguments.loss_fn}
    functions |= {f"loss_fn of update {update.name!r}": update.loss_fn for update in updates}
    functions |= {f"metric {name!r}": metric for name, metric in arguments.metrics.items()}
    loss_modules = modules_beside(model.module, functions)
    for module in loss_modules.values():
        move_beside(module, model.module, world.device)
    logged = LoggedValues(world.device)
    scheduler = schedulers.get("")
    loss_fn = arguments.loss_fn
    if updates:
        scheduler = JointScheduler(schedulers) if schedulers else None
        loss_fn = loss_to_evaluate(updates, logged)
    context = TrainerContext(
        model=model.module,
        strategy=strategy,
        optimizer=optimizer,
        stepped_optimizer=optimizers.stepped_optimizer,
        scheduler=scheduler,
        loss_fn=checked_loss(loss_fn),
        loss_modules=(*loss_modules.values(),),
        precision=model.precision,
        activations=model.activations,
        world=world,
        config=settings,
        logged=logged,
        on_gradients=call_on_gradients if any(map(changes_gradients, callbacks)) else None,
    )
    peak_memory = PeakMemory(world, check_fits(context.model, strategy, optimizer, context.stepped_optimizer))
    position = Position()
    state = RunState()
    clock = step_clock(world.device)
    step: StepRunner
    if updates:
        step = joint_step(context, clock, updates, schedulers)
    else:
        step = optimizer_step_for(context, clock)
    flops = ModelFlops(context, evaluates_once=step.evaluates_once)
    record = RunRecord(config, world, model.description, optimizer)
    log_points = LogPoints(context, clock, call_callbacks, record.advise, flops.utilisation, recorded=record.is_written)
    every = {update.name: update.every for update in updates}

    def steps_done(update: str) -> int:
        return position.step // every.get(update, 1) - step.skipped_steps

    random = RandomPart(world, settings.seed, strategy.data_rank, position, pieces=strategy.shards)
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
    checkpoints = Checkpoints(
        world,
        settings,
        strategy,
        optimizer,
        saved_parts,
        random,
        best,
        position,
        state,
        log_points.check_before_save,
    )
    to_plan = (context, config, updates, partial(feed_builder, context, clock, timed=False), peak_memory)
    planner = Planner(*to_plan)
    entry: Entry = RankAgreement(context, config, arguments.metrics, position)
    if arguments.plan_request is not None:
        planner = requested = RequestedPlanner(*to_plan, request=arguments.plan_request)
        entry = PlanInstead(requested, config, placement.batch_plan)
    run = Run(
        **vars(context),
        updates=updates,
        batch_plan=placement.batch_plan,
        model_description=model.description,
        entry=entry,
        planner=planner,
        flops=flops,
        callbacks=callbacks,
        position=position,
        state=state,
        clock=clock,
        optimizer_step=step,
        scheduler_intervals=optimizers.scheduler_intervals,
        record=record,
        log_points=log_points,
        checkpoints=checkpoints,
        evaluator=Evaluator(context, arguments.metrics, checkpoints, position, state, call_callbacks),
        preemption=Preemption(world, config, checkpoints, position),
        profiler=Recorder(config.profile, world.rank),
        peak_memory=peak_memory,
    )
    barrier.watch(world, context.heartbeat)
    checkpoints.resume()
    context.heartbeat.set_step(position.step)
    return run


def checked(arguments: Arguments) -> CheckedArguments:
    """Check the arguments of a Trainer, and unwrap the model. Raises `ConfigError`."""
    model = arguments.model
    request = plan_request()
    if isinstance(model, nn.Module):
        model = without_wrappers(model, compiled=request is None)
    checked_model(model)
    interval = None if arguments.scheduler_every == "step" else arguments.scheduler_every
    alone = (arguments.optimizer, arguments.loss_fn, arguments.scheduler, interval)
    return CheckedArguments(
        replace(
            arguments,
            model=model,
            updates=checked_updates(model, arguments.updates, alone, arguments.config),
            metrics=checked_metrics(arguments.metrics),
            callbacks=checked_callbacks(arguments.callbacks),
            plan_request=request,
        )
    )


def choose_placement(arguments: CheckedArguments, world: World) -> Placement:
    """Choose the strategy, resolve "auto", and check that the ranks agree. A collective."""
    model = arguments.model
    config = arguments.config
    request = arguments.plan_request
    settings = config if request is None else config_to_plan(config)
    micro_batch = settings.micro_batch_size
    if micro_batch == "auto":
        micro_batch = None
    settings = first_that_fits(settings, model, world)
    options = Options(
        recoverable=settings.micro_batch_size == "auto",
        parallelize=arguments.parallelize,
        parameters_on_host=settings.memory.offload == "all",
    )
    strategy = strategy_for(settings.parallel, world, options)
    data_ranks = strategy.data_ranks
    if request is not None:
        data_ranks = sizes_of(config.parallel, request.ranks).data
    batch_plan = plan_batches(settings.global_batch_size, micro_batch, settings.accumulation_steps, data_ranks)
    strategy.check(model)
    if request is None:  # otherwise the model may have no memory
        check_writable(model, world, settings.checkpoint)
    settings_of_ranks = consistency.facts_of_settings(config) | consistency.facts_of_settings(settings, "parallel")
    consistency.check_agreement(world, settings_of_ranks | consistency.facts_of_model(model))
    return Placement(world, settings, strategy, batch_plan)


def place_model(model: nn.Module, placement: Placement) -> PlacedModel:
    """Convert the model to its precision, compile it, and distribute it over the ranks. A collective."""
    world = placement.world
    settings = placement.settings
    strategy = placement.strategy
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
    advise_on_sizes(model, settings.precision, world.device)
    precision.prepare(model)
    if settings.compile is not None:
        compile_in_place(model, settings.compile)
    activations = Activations(model, settings.memory, compiled=settings.compile is not None)
    check_weights_fit(model, strategy)
    strategy.setup(model)
    return PlacedModel(model, placement, precision, activations, description)


def changes_gradients(callback: Callback) -> bool:
    """Whether a callback overrides `on_gradients`, in its class or on the object."""
    return getattr(callback.on_gradients, "__func__", None) is not Callback.on_gradients


def feed_builder(context: TrainerContext, clock: StepClock, plan: BatchPlan, *, timed: bool = True) -> FeedBuilder:
    """Create the object that opens data. `plan`: how each step is divided into micro-batches.

    `timed`: whether fetching and moving batches count as time of a step.
    """
    strategy = context.strategy

    def fetched() -> None:
        clock.end(DATA)
        context.heartbeat.enter(Phase.TRANSFER)

    return FeedBuilder(
        context.config,
        context.world,
        DataRank(strategy.data_rank, strategy.data_ranks, strategy.contributes, strategy.equal_passes),
        plan,
        context.precision.batch_dtype,
        context.precision.check_batch,
        needs_equal_samples=any(isinstance(module, nn.SyncBatchNorm) for module in context.model.modules()),
        fetched=fetched if timed else lambda: None,
        moved=partial(clock.end, TRANSFER) if timed else lambda: None,
    )
