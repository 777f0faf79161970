"""The training loop."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ddp_kit import log
from ddp_kit.batch import BatchPlan, plan_batches
from ddp_kit.callbacks import Callback
from ddp_kit.callbacks.best_value import check_metric
from ddp_kit.callbacks.plateau import Plateau
from ddp_kit.compilation import compile_in_place
from ddp_kit.config import TrainerConfig, absolute
from ddp_kit.env import plan_request, rank_for_messages
from ddp_kit.errors import ConfigError
from ddp_kit.heartbeat import Phase
from ddp_kit.loader import Data
from ddp_kit.metric_objects import MetricObject
from ddp_kit.parallel import Parallelize, strategy_for
from ddp_kit.parallel.activations import Activations
from ddp_kit.parallel.memory import MemoryPlan, ModelMemory
from ddp_kit.parallel.mesh import sizes_of
from ddp_kit.parallel.offload import OffloadedOptimizer
from ddp_kit.precision import Precision
from ddp_kit.profile import Recorder
from ddp_kit.progress import ProgressReport
from ddp_kit.records import FitResult, LearningRateSearch, Step
from ddp_kit.timing import DATA, step_clock
from ddp_kit.trainer import agreement, barrier
from ddp_kit.trainer.checkpoints import Checkpoints
from ddp_kit.trainer.data import DataRoom, own_batch_size
from ddp_kit.trainer.evaluation import Evaluations, Evaluator, evaluation_due
from ddp_kit.trainer.events import Events, Subscriber
from ddp_kit.trainer.feed import Feed, Share
from ddp_kit.trainer.fingerprint import facts_of_model, facts_of_optimizer, facts_of_progress, facts_of_weights
from ddp_kit.trainer.joint_optimizer import JointOptimizer, joint_scheduler
from ddp_kit.trainer.log_points import LogPoints, announce
from ddp_kit.trainer.logged_values import Logged, LoggedValues
from ddp_kit.trainer.loop_exit import Loop, saved_when_left
from ddp_kit.trainer.micro_batch import (
    OutOfMemory,
    RescuedStep,
    largest_micro_batch,
    with_hint,
)
from ddp_kit.trainer.parts import LossFunction, MetricFunction, Parts
from ddp_kit.trainer.planning import (
    PlanPrinted,
    config_to_plan,
    described,
    device_memory,
    first_that_fits,
    measured,
    planned,
    refuse_model,
    refuse_start,
)
from ddp_kit.trainer.position import Position
from ddp_kit.trainer.prediction import PredictFunction, predict
from ddp_kit.trainer.preemption import Preemption
from ddp_kit.trainer.rate_finder import find, rates_between
from ddp_kit.trainer.rates import check_ticks, scale_learning_rate, warmed_up
from ddp_kit.trainer.run_state import RunState
from ddp_kit.trainer.same_data import SampleComparison, facts_of_data
from ddp_kit.trainer.setup import (
    check_main,
    checked_callbacks,
    checked_config,
    checked_loss,
    checked_metrics,
    checked_model,
    only_repeatable_algorithms,
    optimizer_for,
    scheduler_for,
)
from ddp_kit.trainer.step import OptimizerStep
from ddp_kit.trainer.subscribers import (
    CheckpointSchedule,
    ClockStart,
    GarbageCollection,
    HeartbeatMarks,
    LogSchedule,
    PeakMemory,
    PreemptionWatch,
    ProfilerSteps,
    StopTogether,
    UserCallbacks,
)
from ddp_kit.trainer.updates import Update, checked_updates, joined, loss_to_evaluate, step_of
from ddp_kit.uncaught import show_without_traceback
from ddp_kit.world import random_states_kept, seed_everything


class Trainer:
    """Trains a model on all ranks; the same script runs alone, under `ddpkit launch` and under torchrun.

        for each epoch, for each global batch:
            for each of this rank's micro-batches:               # gradients are reduced with the last one only
                loss_fn(model, batch).backward()                 # weighted by its share of the global batch
            clip the gradients, step the optimizer, tick the scheduler
            every log_every steps: reduce the loss, report       # on a GPU one interval late, so that nothing waits
        evaluate every eval_every steps, or after each epoch; and at the end

    `model`: any Module. `optimizer`: an Optimizer, or a callable `parameters -> Optimizer`.
    `loss_fn(model, batch)`: the mean over the batch's samples as a scalar tensor, or `Loss(sum, weight)`.
    `updates`: in place of `optimizer`, `loss_fn` and `scheduler`, several `Update`s with their own, such as a GAN's.
    `scheduler`: an LRScheduler or a callable `optimizer -> LRScheduler`; one tick per applied optimizer step, see
    `scheduler_steps`. A ReduceLROnPlateau ticks at each evaluation, with the loss or `checkpoint.keep_best`'s metric.
    `metrics`: name -> `fn(output, batch)`, where `output` is what the model last returned inside `loss_fn`; it
    returns what a loss function may return, and is exact over all ranks. Or name -> an object with update, compute
    and reset, such as torchmetrics' (it gets the output and the second part of the batch), or a pair of one and
    `fn(output, batch)` -> the arguments of its update.
    `parallelize(model, mesh)`: spreads the model in place of the strategy, with torch's own calls, over a DeviceMesh
    of the dimensions replicate, shard and tensor; the sizes are those of `config.parallel`.
    Creating a Trainer is a collective: all ranks do it.
    Raises `ConfigError`, `WorldError`, and later `DataError` and `LossError`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
        loss_fn: LossFunction | None = None,
        config: TrainerConfig | None = None,
        *,
        updates: Sequence[Update] = (),
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
        metrics: Mapping[str, MetricFunction | Any] | None = None,
        callbacks: Sequence[Callback] = (),
        parallelize: Parallelize | None = None,
    ) -> None:
        show_without_traceback(rank_for_messages())
        check_main()
        self.config = checked_config(config)
        checked_model(model)
        self._updates = checked_updates(model, updates, (optimizer, loss_fn, scheduler), self.config)
        self._metrics: dict[str, MetricFunction | MetricObject] = checked_metrics(metrics or {})
        self._callbacks = checked_callbacks(callbacks)
        if self.config.deterministic:
            only_repeatable_algorithms()
        self.world = barrier.joined("Trainer(...)", share_gpus=self.config.parallel.share_gpus)
        self._request = plan_request()
        settings = self.config if self._request is None else config_to_plan(self.config)
        micro_batch = None if settings.micro_batch_size == "auto" else settings.micro_batch_size
        settings = first_that_fits(settings, model, self.world)
        automatic = settings.micro_batch_size == "auto"
        strategy = strategy_for(settings.parallel, self.world, recoverable=automatic, parallelize=parallelize)
        data_ranks = strategy.data_ranks
        if self._request is not None:
            data_ranks = sizes_of(self.config.parallel, self._request.ranks).data
        self.batch_plan = plan_batches(settings.global_batch_size, micro_batch, settings.accumulation_steps, data_ranks)
        strategy.check(model)
        agreement.check_agreement(self.world, facts_of_model(model) | {"the setting parallel": repr(settings.parallel)})
        precision = Precision(
            settings.precision, self.world.device, sharded=strategy.shards, fp8_layers=settings.fp8_layers
        )
        self.model = model
        precision.prepare(model)
        if settings.compile is not None:
            compile_in_place(model, settings.compile)
        activations = Activations(model, settings.memory, compiled=settings.compile is not None)
        refuse_model(model, strategy)
        if settings.memory.offload_parameters:
            strategy.offload_parameters()
        strategy.setup(model)
        logged = LoggedValues(self.world.device)
        if self._updates:
            optimizer = JointOptimizer({update.name: update.optimizer for update in self._updates})
            loss_fn = loss_to_evaluate(self._updates, logged)
        self.optimizer = optimizer_for(model, optimizer, strategy)
        device_optimizer = self.optimizer
        if settings.memory.offload_optimizer or settings.memory.offload_parameters:
            device_optimizer = OffloadedOptimizer(self.optimizer, in_place=strategy.parameters_on_host)
        schedulers = self._schedulers(settings, scheduler)
        self.scheduler = joint_scheduler(schedulers) if self._updates else schedulers.get("")
        self._ticking = [(schedulers.get(each.name), each.every) for each in self._updates] or [(self.scheduler, 1)]
        self._parts = Parts(
            model,
            strategy,
            self.optimizer,
            device_optimizer,
            self.scheduler,
            checked_loss(loss_fn),
            precision,
            activations,
            self.world,
            settings,
            logged,
        )
        counted = refuse_start(self._parts)
        self._clock = step_clock(self.world.device)
        self._data = DataRoom(self._parts, self.batch_plan, self._clock)
        if self._updates:
            self._optimizer_step: OptimizerStep = joined(self._parts, self._clock, self._updates, schedulers)
        else:
            self._optimizer_step = step_of(self._parts, self._clock)
        self._log_points = LogPoints(self._parts, self._clock)
        self._position = Position()
        self._state = RunState()
        self._steps_per_epoch: int | None = None
        self._max_steps = math.inf if settings.max_steps is None else settings.max_steps
        self._max_epochs = math.inf if settings.last_epoch is None else settings.last_epoch
        self._heart = self._parts.heart
        self._checkpoints = Checkpoints(
            self._parts, self._position, self._optimizer_step, self._callbacks, self._log_points, self._state
        )
        self._evaluator = Evaluator(
            self._parts, self._metrics, self._checkpoints, self._position, self._state, self._tell
        )
        self._preemption = Preemption(self.world, self.config, self._checkpoints, self._position)
        self._samples = SampleComparison(self.world, settings.data, settings.seed)
        self._stops = StopTogether(self._state, self._complete, partial(self._wait_for_all, "stop()"))
        self._peak = PeakMemory(self.world, counted)
        self._log = LogSchedule(self._log_points, settings.log_every, self._finished, self._tell)
        self._events = Events(self._subscribers())
        barrier.watch(self.world, self._heart)
        self._checkpoints.resume()
        self._heart.stand(self.step)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._position.step

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return self._position.epoch

    @property
    def total_steps(self) -> int | None:
        """The optimizer step that ends the run. Without `max_steps`: None before `fit` or `steps`, and for a stream."""
        return self._position.last_step(self.config, self._steps_per_epoch)

    @property
    def data_rank(self) -> int:
        """The index of this rank's part of each global batch, below `data_ranks`; ranks that share one model share a
        part. Divide streams by it."""
        return self._parts.strategy.data_rank

    @property
    def data_ranks(self) -> int:
        """The number of parts that a global batch is divided into."""
        return self._parts.strategy.data_ranks

    def model_state(self) -> dict[str, Any]:
        """The model's state_dict as this rank holds it: its own tensors, and a `Piece` where it holds a part of one."""
        return self._parts.strategy.model_state()

    def load_model_state(self, state: dict[str, Any]) -> None:
        """Load what `model_state` returned, or whole tensors. Not a collective."""
        self._parts.strategy.load_model_state(state)

    def _schedulers(self, settings: TrainerConfig, scheduler: Any) -> dict[str, LRScheduler]:
        """Of each update by its name, or under "" that of the only optimizer; with warm-up, and rates scaled before."""
        found = {}
        given = [(update.name, update.optimizer, update.scheduler) for update in self._updates]
        for name, optimizer, own in given or [("", self.optimizer, scheduler)]:
            if (rule := settings.learning_rate_scaling) is not None and (reference := settings.reference_batch_size):
                scale_learning_rate(optimizer, rule, self.batch_plan.global_batch, reference, own)
            made = scheduler_for(optimizer, own)
            if isinstance(made, ReduceLROnPlateau):
                best, mode = settings.checkpoint.keep_best, settings.checkpoint.best_mode
                plateau = Plateau(made, best or "loss", mode if best else None, settings.warmup_steps)
                self._callbacks, made = (plateau, *self._callbacks), None
            made = warmed_up(optimizer, made, settings.warmup_steps)
            if made is not None:
                found[name] = made
        return found

    # --- what users call ----------------------------------------------------------------------------------------

    def fit(self, train_data: Data, eval_data: Data | None = None) -> FitResult:
        """Train until the configured end; continues where an earlier call stopped.

        `train_data`, `eval_data`: a Dataset with a length, an IterableDataset, or a DataLoader over one of these.
        Returns a `FitResult`. A collective: all ranks call it.
        """
        self._plan_only(train_data)
        self._agree("fit()", train_data=train_data, eval_data=eval_data)
        feed = self._feed(train_data)
        self._evaluator.watch(eval_data)
        evaluations = None
        if eval_data is not None:
            batches, stopping = self._data.evaluation(eval_data, "eval_data"), lambda: self._state.stopping
            evaluations = Evaluations(self._evaluator, self._position, batches, stopping, self._preemption.stops)
            if self.config.sanity == "auto" and self.step == 0 and batches.first is not None:
                self._check_metrics(self._evaluator.rehearse(batches))
        elif self.step == 0:
            self._warn_of_metrics()
        total = self.total_steps
        announce(self.world, self.batch_plan, self.config, self.step, total, feed.division)
        self._state.stopping = False
        self._tell("on_fit_start")
        with self._told_of_an_interrupt(), ProgressReport(total, self.world.is_main) as progress:
            for step in self._steps(train_data, feed, evaluations):
                progress.step(step.number)
                if step.log is not None:
                    progress.log(step.log.step, str(step.log))
                if evaluations is not None and (evaluation_due(self.config, step) or self._finished()):
                    evaluations.run()
        rows = self._log.rows  # before a callback may begin another call of `fit`
        if evaluations is not None and evaluations.step != self.step:
            evaluations.run(whole=True)
        result = FitResult(
            steps=self.step,
            samples=self._position.samples,
            loss=rows[-1].loss if rows else math.nan,
            history=tuple(rows),
            metrics=evaluations.metrics if evaluations is not None else {},
            skipped=self._optimizer_step.skipped,
        )
        self._tell("on_fit_end", result)
        self._checkpoints.finish()  # what the last evaluation or a callback has asked for
        return result

    def steps(self, train_data: Data) -> Iterator[Step]:
        """Iterate over optimizer steps: each iteration does one step and yields its `Step`.

        The loop may be left at any step, the same on all ranks; a later call continues from there. A save that is due
        after a step is done after the loop's body, even if the body leaves the loop.
        """
        self._plan_only(train_data)
        self._agree("steps()", train_data=train_data)
        self._state.stopping = False
        steps = self._steps(train_data, self._feed(train_data), None)
        return saved_when_left(steps, self.world, self._checkpoints, self._state)

    def save(self) -> None:
        """Write a checkpoint of this step into `checkpoint.dir`. A collective: all ranks call it.

        In a callback or an evaluation: once the step is done.
        """
        if self._request is not None:
            return
        self._wait_for_all("save()")
        self._checkpoints.save_or_postpone()

    def resume(self, path: str | Path) -> None:
        """Resume from a checkpoint: weights, optimizer, random states, position. A collective: all ranks call it."""
        if self._request is not None:
            return
        self._wait_for_all("resume()")
        self._checkpoints.load(absolute(path))
        self._heart.stand(self.step)
        self._state.resumed()

    def log(self, values: Mapping[str, Logged]) -> None:
        """Add values of your own, by name, to the next log row, or to the metrics of the evaluation that is running.

        `values`: numbers or tensors of one element; they are averaged over ranks, micro-batches and the steps since
        the last row. In the loss function each counts with the samples of its batch, or, as `Loss(sum, weight)`, with
        its own weight; elsewhere, such as in a callback, each call counts once. Nothing waits for the device, and
        the ranks communicate at log points alone. Ranks may log different names. Raises `ConfigError`.
        """
        self._parts.logged.add(values)

    def stop(self) -> None:
        """End the run after the current step. All ranks call it at the same step."""
        self._state.stopping = True

    def evaluate(self, data: Data, *, watched: bool | None = None) -> dict[str, float]:
        """The mean loss and all metrics over `data`, each sample counted once. A collective: all ranks call it.

        `watched`: whether callbacks (`BestModel`, `EarlyStopping`, loggers) and `checkpoint.keep_best` get the values.
        None: unless `fit` was given other eval_data, so that a test set does not decide which weights are the best.
        """
        if self._request is not None:  # before training: there are no values
            return dict.fromkeys(("loss", *self._metrics), math.nan)
        self._agree("evaluate()", eval_data=data)
        watched = self._evaluator.watches(data) if watched is None else watched
        return self._evaluator.run(self._data.evaluation(data, "eval_data"), watched=watched) or {}

    def predict(self, data: Data, predict_fn: PredictFunction | None = None) -> Any:
        """The model's output for every sample of `data`, in the dataset's order, on the CPU of every rank.

        `predict_fn(model, batch)`: tensors whose first dimension is the samples, in any nesting. Without it: the
        model's output if the batch is one tensor, else its last output inside the loss function.
        A collective: all ranks call it. Raises `LossError` for outputs that cannot be concatenated.
        """
        self._agree("predict()", data=data)
        self._parts.strategy.sync_buffers()
        with self._heart.during(Phase.EVALUATION):
            return predict(self._parts, predict_fn, self._data.evaluation(data, "the data"))

    def find_learning_rate(
        self, train_data: Data, *, start: float = 1e-7, end: float = 10.0, steps: int = 100
    ) -> LearningRateSearch:
        """Try `steps` learning rates from `start` to `end`, one optimizer step each, and roll everything back.

        Ends early if the loss diverges. Does not set the rate: give the suggestion to the optimizer of a new Trainer.
        Raises `ConfigError` for an invalid range. A collective: all ranks call it.
        """
        if self._updates:
            raise ConfigError(
                "find_learning_rate supports only one optimizer", "call it on a Trainer with a single update"
            )
        rates = rates_between(start, end, steps)
        self._plan_only(train_data)
        self._agree("find_learning_rate()", train_data=train_data)
        feed = self._feed(train_data)
        self._prepare(feed)
        while True:
            try:
                with self._heart.during(Phase.FORWARD):
                    return find(self._parts, self._optimizer_step, feed, self._clock, rates)
            except OutOfMemory as failed:
                feed, _ = self._halved(failed, train_data)

    def plan(self, data: Data) -> MemoryPlan:
        """The bytes per device that training on `data` needs, as configured, on this number of ranks.

        Allocates nothing on the device and changes nothing; reads one micro-batch. After the first steps on a GPU, a
        log line compares the measured peak. A collective: all ranks call it. Raises `ConfigError` if the strategy has
        already sharded the model: use `ddpkit plan` instead.
        """
        strategy = self._parts.strategy
        if strategy.shards:
            raise ConfigError(
                f"trainer.plan needs the whole model, and parallel={self.config.parallel.strategy!r} has sharded it",
                "run `ddpkit plan --gpus N script.py`, which needs no GPU; or call trainer.plan in one process",
            )
        config, ranks, memory = self._parts.config, self.world.world_size, device_memory(self.world.device)
        if self._request is not None:
            config, ranks, memory = self.config, self._request.ranks, self._request.memory
        model, _ = self._measured(data)
        plan = planned(model, config, ranks, memory)
        self._peak.compare_with(plan)
        return plan

    def _measured(self, data: Data) -> tuple[ModelMemory, int]:
        """The measurements for a plan, and the samples per micro-batch."""
        ranks = self._parts.strategy.data_ranks
        size = own_batch_size(data, self.config) or self.batch_plan.micro_batch
        room = DataRoom(self._parts, BatchPlan(size * ranks, size, 1, ranks), self._clock)
        with random_states_kept(), self._parts.logged.apart():
            feed = room.train(data, 0)
            feed.begin(self.epoch, 0)
            feed.next()
            batch = feed.batch()
            parallel = self._parts.config.parallel if self._request is None else self.config.parallel
            return measured(self._parts, batch, parallel, accumulates=self.batch_plan.accumulation > 1), size

    def _plan_only(self, train_data: Data) -> None:
        """Under `ddpkit plan`, print the plan instead of training, and end the script."""
        if self._request is not None:
            model, size = self._measured(train_data)
            sys.stdout.write(f"{described(model, self.config, self._request, size)}\n")
            raise PlanPrinted(0)

    def _metrics_needed(self) -> list[tuple[str, str]]:
        """Who needs which metric of an evaluation."""
        needed = [(type(each).__name__, name) for each in self._callbacks for name in each.metrics_needed]
        best = self.config.checkpoint.keep_best
        return needed if best is None else [*needed, ("checkpoint.keep_best", best)]

    def _check_metrics(self, metrics: Mapping[str, float]) -> None:
        for owner, name in self._metrics_needed():
            check_metric(owner, name, metrics)

    def _warn_of_metrics(self) -> None:
        if (needed := self._metrics_needed()) and self.world.is_main:
            owners = ", ".join(dict.fromkeys(owner for owner, _ in needed))
            log.logger.warning("fit has no eval_data: {} will act only on your own calls of trainer.evaluate", owners)

    @contextmanager
    def _told_of_an_interrupt(self) -> Iterator[None]:
        """Ctrl-C ends a run without checkpoints: note at which step, for the one line that is then printed."""
        try:
            yield
        except KeyboardInterrupt as interrupt:
            if self.config.checkpoint.dir is None:
                hint = 'nothing is saved; with checkpoint={"dir": "run"} Ctrl-C saves, and the same command resumes'
            else:
                hint = "by a second Ctrl-C: this step is not saved"
            interrupt.add_note(f"after step {self.step}; {hint}")
            raise

    # --- the loop -----------------------------------------------------------------------------------------------

    def _steps(self, train_data: Data, feed: Feed, evaluations: Evaluations | None) -> Loop:
        self._prepare(feed, ticks=True)
        loop = self._state.begin_loop()
        total = self.total_steps
        with self._events.loop():
            self._catch_up(evaluations)
            while not self._finished():
                share = self._first_share(feed)
                while share is not None and not self._finished():
                    number = self.step + 1
                    self._events.before_step(number)
                    logged = number % self.config.log_every == 0 or number == total
                    try:
                        self._optimizer_step.run(share, feed.batch, self._log_points.interval, measure_norm=logged)
                    except OutOfMemory as failed:
                        feed, share = self._halved(failed, train_data)  # retry the same step
                        continue
                    except (RuntimeError, MemoryError) as error:
                        with_hint(error, self._parts)
                        raise
                    samples, epoch = share.samples, self.epoch
                    self._heart.mark(Phase.DATA)
                    share = feed.next()
                    self._clock.mark(DATA)
                    self._position.advance(samples, feed.steps, feed.place, ends_epoch=share is None)
                    step = Step(number, epoch, samples, share is None, None)
                    self._events.after_update(step)
                    self._heart.mark(Phase.BETWEEN_STEPS)
                    yield step if self._log.row is None else replace(step, log=self._log.row)
                    self._state.check_current(loop)
                    self._events.after_step(step)
            self._stops.check()  # a callback of a log point or evaluation may have called stop
            self._log.end(self.step, self.epoch)
            with self._heart.during(Phase.CHECKPOINT):
                self._checkpoints.finish()

    def _subscribers(self) -> list[Subscriber]:
        """The subscribers in order; see the table in subscribers.py."""
        return [
            HeartbeatMarks(self._heart, self._position),
            ProfilerSteps(Recorder(self.config.profile, self.world.rank)),
            ClockStart(self._clock),
            UserCallbacks(self._tell),
            self._stops,
            GarbageCollection(),
            self._log,
            self._peak,
            CheckpointSchedule(self._checkpoints),
            PreemptionWatch(self._preemption, self._finished),
        ]

    def _first_share(self, feed: Feed) -> Share | None:
        """The first share of the rest of the epoch."""
        self._heart.mark(Phase.DATA)
        self._clock.skip()
        self._position.begin_epoch(feed.facts(self.epoch))
        feed.begin(self.epoch, self._position.steps_in_epoch, self._position.place)
        return feed.next()

    def _catch_up(self, evaluations: Evaluations | None) -> None:
        """Redo the evaluation during which the run was stopped, if any."""
        if evaluations is not None and self._position.owes_evaluation:
            evaluations.run()
            self._state.stopping |= self._position.ends_evaluated()
            self._checkpoints.save_again()
            self._preemption.after_step(self._finished())

    def _feed(self, train_data: Data) -> Feed:
        """Training data in micro-batches of the configured size, the DataLoader's, or the largest that fits."""
        config = self.config
        if (own := own_batch_size(train_data, config)) is not None:
            self._divide(None, own, config.accumulation_steps)
        if config.micro_batch_size == "auto":
            self._parts.strategy.check_recoverable()
            found = self._position.micro_batches.get(str(self.world.world_size))
            if found is None:
                found = largest_micro_batch(self._parts, partial(self._data.trial, train_data), self.batch_plan)
            self._divide(self.batch_plan.global_batch, found)
        feed = self._data.train(train_data, self.step)
        self._steps_per_epoch = feed.steps
        return feed

    def _divide(self, global_batch: int | None, micro_batch: int, accumulation: int | None = None) -> None:
        """Set the batch plan for the following steps."""
        self.batch_plan = plan_batches(global_batch, micro_batch, accumulation, self._parts.strategy.data_ranks)
        self._data = DataRoom(self._parts, self.batch_plan, self._clock)
        if self.config.micro_batch_size == "auto":
            self._position.micro_batches[str(self.world.world_size)] = micro_batch

    def _halved(self, failed: OutOfMemory, train_data: Data) -> tuple[Feed, Share | None]:
        """Halve the micro-batch, to retry the step that ran out of memory. A collective."""
        micro_batch = self.batch_plan.micro_batch
        if micro_batch == 1:
            raise failed.own_or_silent(self._parts) from None
        log.logger.warning("out of memory at step {}: micro-batch {} is halved", self.step + 1, micro_batch)
        assert isinstance(self._optimizer_step, RescuedStep), "nothing else raises it"
        self._optimizer_step.release()
        self._parts.strategy.setup(self.model)
        self._divide(self.batch_plan.global_batch, -(-micro_batch // 2))
        feed = self._data.train(train_data, self.step)
        return feed, self._first_share(feed)

    def _prepare(self, feed: Feed, *, ticks: bool = False) -> None:
        """Check and set what the first step of a call needs. `ticks`: whether the schedulers will tick."""
        self._position.check(feed.steps, feed.facts(self.epoch))
        self._optimizer_step.check_parameters()
        last = self._position.last_step(self.config, feed.steps)
        for scheduler, every in self._ticking if ticks else ():
            check_ticks(scheduler, None if last is None else last // every, self.step // every)
        if not self._state.seeded:  # once: a later call continues the random streams
            if not self._checkpoints.restore_random():
                seed_everything(self.config.seed, self._parts.strategy.data_rank)
            self._state.seeded = True
        if not self.model.training:
            self.model.train()
        self._optimizer_step.clear()  # gradients of an unfinished step, or from user code
        self._log.begin(self.step + 1)

    def _finished(self) -> bool:
        """Whether the run is over: `stop`, max_steps or the last epoch, whichever came first."""
        return self._state.stopping or self._complete()

    def _complete(self) -> bool:
        return self.step >= self._max_steps or self.epoch >= self._max_epochs

    def _tell(self, event: str, *values: Any) -> None:
        with self._state.in_callbacks():
            for callback in self._callbacks:
                getattr(callback, event)(self, *values)

    def _wait_for_all(self, call: str) -> None:
        """Wait, before collectives, until all ranks are at the same call."""
        barrier.wait_for_all(self.world, f"trainer.{call} after step {self.step}")

    def _agree(self, call: str, **data: object) -> None:
        """Raise an error if the ranks would diverge or wait for each other forever."""
        if self._request is not None:
            raise ConfigError(
                f"the script calls trainer.{call} before training, but under `ddpkit plan` the model has no weights",
                "skip that call: the plan is made when the script calls trainer.fit(...) or trainer.steps(...)",
            )
        if self.world.world_size == 1:
            return
        self._wait_for_all(call)
        facts = facts_of_data(data) | agreement.facts_of_run(self.config, self.optimizer, self._metrics)
        agreement.check_agreement(self.world, facts)
        if self.step == 0 or "train_data" in data:
            strategy = self._parts.strategy
            agreement.check_agreement(self.world, facts_of_weights(self._parts), strategy.replicas)
            agreement.check_agreement(self.world, facts_of_optimizer(self._parts), strategy.optimizer_replicas)
            agreement.check_agreement(self.world, facts_of_progress(self._parts))
        self._samples.compare(data)
