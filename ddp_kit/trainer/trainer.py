"""The training loop."""

import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_kit import log
from ddp_kit.callbacks import Callback
from ddp_kit.callbacks.callback import Gradients, check_metric
from ddp_kit.config.settings import TrainerConfig, absolute_location, named_arguments
from ddp_kit.data import Data
from ddp_kit.data.feed import Feed, Share, loader_batch_size
from ddp_kit.data.sampler import plan_batches
from ddp_kit.distributed import barrier
from ddp_kit.distributed.world import seed_everything
from ddp_kit.env import open_standard_streams, rank_for_messages
from ddp_kit.errors import ConfigError
from ddp_kit.heartbeat import Phase
from ddp_kit.memory.estimate import MemoryPlan
from ddp_kit.parallel import Parallelize
from ddp_kit.records import FitResult, LearningRateSearch, Step
from ddp_kit.trainer.build import build, changes_gradients, feed_builder
from ddp_kit.trainer.context import Logged, LossFunction, MetricFunction, SchedulerInterval
from ddp_kit.trainer.evaluation import FitEvaluations, evaluation_due
from ddp_kit.trainer.garbage import DeferredGarbageCollection
from ddp_kit.trainer.learning_rates import WarmUp, check_new_length, check_ticks
from ddp_kit.trainer.out_of_memory import OutOfMemory, largest_micro_batch, release_cached_memory, with_hint
from ddp_kit.trainer.position import Loop, save_when_left
from ddp_kit.trainer.prediction import PredictFunction, predict
from ddp_kit.trainer.progress import ProgressReport
from ddp_kit.trainer.rate_finder import find, rates_between
from ddp_kit.trainer.run_record import announce, conclude
from ddp_kit.trainer.setup import check_main, checked_config
from ddp_kit.trainer.stages import Arguments
from ddp_kit.trainer.step import StepResult, StepTask
from ddp_kit.trainer.timing import DATA
from ddp_kit.trainer.updates import Update
from ddp_kit.uncaught import show_without_traceback


class Trainer:
    """Trains a model on all ranks; the same script runs as a single process, under `ddpkit launch` and under torchrun.

        for each epoch, for each global batch:
            for each of this rank's micro-batches:               # gradients are reduced with the last one only
                loss_fn(model, batch).backward()                 # weighted by its share of the global batch
            clip the gradients, step the optimizer, step the scheduler
            every log_every_steps: reduce the loss, report       # on a GPU one interval late, without waiting
        evaluate every eval_every_steps, or after each epoch; and at the end

    Creating a Trainer is a collective: all ranks must create it. The new Trainer resumes from a checkpoint according to
    `config.checkpoint`.

    Args:
        model: Any Module. If it was returned by `torch.compile`, the original module is used, and compiled in place.
        optimizer: An Optimizer, or a callable `parameters -> Optimizer`, which is required if the strategy shards the
            weights. None: only with `updates`.
        loss_fn: A function `loss_fn(model, batch)` that returns the mean over the batch's samples as a scalar tensor,
            or `Loss(sum, weight)`. None: only with `updates`.
        config: The settings of the run. None: the defaults of `TrainerConfig`.
        updates: Several `Update`s, each with its own loss function, optimizer and scheduler, as for a GAN. They
            replace the arguments `optimizer`, `loss_fn` and `scheduler`.
        scheduler: An LRScheduler, or a callable `optimizer -> LRScheduler`. It is stepped after each optimizer step
            that is not skipped; see `scheduler_steps`. A ReduceLROnPlateau is stepped at each evaluation, with
            `plateau_metric`. None: the learning rates are constant after the warm-up.
        scheduler_every: When the scheduler is stepped: "step", after each optimizer step, or "epoch", at the end of
            each epoch.
        plateau_metric: The name of the metric, or "loss", that a ReduceLROnPlateau follows; its `mode` says whether
            lower or higher values are better. None: the loss, with mode="min".
        metrics: Name -> metric. None: no metrics. A metric is one of

            - a function `fn(output, batch)` that returns a mean as a scalar tensor, or a `Loss`, like a loss function;
              the values are averaged exactly over all ranks. `output` is the model's last output inside `loss_fn`
            - an object with the methods update, compute and reset, such as a metric of torchmetrics; update is called
              with the output and the second item of the batch
            - a pair of such an object and a function `fn(output, batch)` that returns the arguments of update
        callbacks: The `Callback`s. At each event, they are called in this order.
        parallelize: A function `parallelize(model, mesh)` that applies torch's own parallelism APIs to the model.
            `mesh` is a DeviceMesh with the dimensions replicate, shard and tensor, sized as in `config.parallel`.
            The function is not called if there is only one rank. None: `config.parallel.strategy` distributes the
            model.

    Attributes:
        config: The `TrainerConfig` that you passed.
        world: The rank and device of this process: a `World`.
        batch_plan: How a global batch is divided: a `BatchPlan`.
        model: Your own model, not a wrapper.
        optimizer: Your own optimizer; with `updates`, one that contains all of theirs.
        scheduler: Your own scheduler; with `warmup_steps` or `scheduler_every="epoch"`, it is `scheduler.scheduler`.

    Raises:
        ConfigError: If an argument or a combination of settings is invalid.
        WorldError: If the processes or devices are not as requested, or the ranks make different calls.
        DataError: If the ranks differ in the model or in `config.parallel`; while training, also for unusable data.
        CheckpointError: If the checkpoint folder cannot be used, or the checkpoint is damaged or from a different run.
        LossError: While training, for an unusable or non-finite loss.
    """

    @named_arguments
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
        loss_fn: LossFunction | None = None,
        config: TrainerConfig | None = None,
        *,
        updates: Sequence[Update] = (),
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
        scheduler_every: SchedulerInterval = "step",
        plateau_metric: str | None = None,
        metrics: Mapping[str, MetricFunction | Any] | None = None,
        callbacks: Sequence[Callback] = (),
        parallelize: Parallelize | None = None,
    ) -> None:
        open_standard_streams()
        show_without_traceback(rank_for_messages())
        check_main()
        config = checked_config(config)
        arguments = Arguments(
            model,
            optimizer,
            loss_fn,
            config,
            updates,
            scheduler,
            scheduler_every,
            plateau_metric,
            metrics or {},
            callbacks,
            parallelize,
        )
        run = build(arguments, weak_method(self._call_callbacks), weak_method(self._call_on_gradients))
        self._run = run
        self.config = config
        self.world = run.planner.world
        self.batch_plan = run.batch_plan
        self.model = run.model
        self.optimizer = run.optimizer
        self.scheduler = run.scheduler
        self._total_steps = run.config.max_steps
        self._feeds = feed_builder(run, run.clock, self.batch_plan)
        self._garbage = DeferredGarbageCollection()

    @property
    def step(self) -> int:
        """The number of optimizer steps done."""
        return self._run.position.step

    @property
    def epoch(self) -> int:
        """The number of epochs done."""
        return self._run.position.epoch

    @property
    def total_steps(self) -> int | None:
        """The number of optimizer steps in the whole run.

        Without `max_steps`, it is None before `fit`, and always None for a stream. If the length of an epoch could not
        be known in advance (see docs/data.md), the number changes when that epoch begins.
        """
        return self._total_steps

    @property
    def data_rank(self) -> int:
        """The index of this rank's part of each global batch, from 0 to `data_ranks` - 1. Use it to divide a stream.

        Ranks that hold parts of the same model replica have the same index.
        """
        return self._run.strategy.data_rank

    @property
    def data_ranks(self) -> int:
        """The number of parts into which each global batch is divided."""
        return self.batch_plan.data_ranks

    def model_state(self) -> dict[str, Any]:
        """The model's state_dict as this rank holds it: the model's own tensors, or a `Piece` of each sharded one."""
        return self._run.strategy.model_state()

    def load_model_state(self, state: dict[str, Any]) -> None:
        """Load what `model_state` returned, or whole tensors. Not a collective.

        Args:
            state: Name -> value, with all names of the model's state_dict. A whole tensor may replace a `Piece`.
        """
        self._run.strategy.load_model_state(state)

    # --- what users call ----------------------------------------------------------------------------------------

    @named_arguments
    def fit(self, train_data: Data, eval_data: Data | None = None) -> FitResult:
        """Train until the configured end of the run; continue where an earlier call stopped.

        A collective: all ranks call it.

        Args:
            train_data: A Dataset with a length, an IterableDataset, or a DataLoader over one of these.
            eval_data: The data for evaluations, of one of the same types. None: no evaluations.

        Returns:
            A `FitResult`, which is the same on every rank, except for times.

        Raises:
            DataError: For unusable data, and if the ranks differ in data, settings, weights or optimizer.
            LossError: For an unusable or non-finite loss.
            ConfigError: If the settings do not fit the data, if the scheduler does not fit the length of the run, if
                parameters were added, replaced or frozen, or if a metric to monitor is unknown.
            CheckpointError: If a save fails, unless the error is transient and a later save succeeds; and if another
                run writes to the checkpoint folder.
            WorldError: If another rank makes a different call, or none.
            SystemExit: With exit code 75, after a stop request (a signal or a time limit), once the run is saved in
                `checkpoint.dir`.
        """
        self._enter("fit()", train_data=train_data, eval_data=eval_data)
        with self._run.preemption.handling_signals():
            return self._fit(train_data, eval_data)

    def _fit(self, train_data: Data, eval_data: Data | None) -> FitResult:
        run = self._run
        feed = self._feed(train_data)
        run.evaluator.watch(eval_data)
        needed = [(type(callback).__name__, name) for callback in run.callbacks for name in callback.metrics_needed]
        if (best := self.config.checkpoint.best_metric) is not None:
            needed.append(("checkpoint.best_metric", best))
        evaluations = None
        if eval_data is not None:
            batches = self._feeds.evaluation_data(eval_data, "eval_data")
            evaluations = FitEvaluations(
                run.evaluator, run.position, run.state, batches, run.preemption.interrupts_evaluation
            )
            if self.config.sanity_check == "auto" and self.step == 0 and batches.first is not None:
                values = run.evaluator.rehearse(batches)
                for owner, name in needed:
                    check_metric(owner, name, values)
        elif self.step == 0 and needed and self.world.is_main:
            owners = ", ".join(dict.fromkeys(owner for owner, _ in needed))
            log.logger.warning("fit has no eval_data, so {} will act only when you call trainer.evaluate", owners)
        total = self.total_steps
        began = self.step
        began_at = time.perf_counter()
        planned_bytes = run.peak_memory.planned
        announce(
            self.world, self.batch_plan, run.config, began, total, feed.division, run.model_description, planned_bytes
        )
        run.state.stopping = False
        self._call_callbacks("on_fit_start")
        try:
            with ProgressReport(total, self.world.is_main, began) as progress:
                for step in self._steps(train_data, feed, evaluations):
                    progress.step(step.number, self.total_steps)
                    if step.log is not None:
                        progress.log(step.log.step, str(step.log))
                    if evaluations is not None and (evaluation_due(self.config, step) or self._is_finished()):
                        evaluations.run()
        except KeyboardInterrupt as interrupt:
            hint = "this step was not saved, because Ctrl-C was pressed twice"
            if self.config.checkpoint.dir is None:
                hint = 'nothing was saved; with checkpoint={"dir": "run"}, Ctrl-C saves, and the same command resumes'
            interrupt.add_note(f"after step {self.step}; {hint}")
            raise
        rows = run.log_points.rows  # before a callback may begin another call of `fit`
        if evaluations is not None and evaluations.step != self.step:
            evaluations.run(whole=True)
        result = FitResult(
            steps=self.step,
            samples=run.position.samples,
            loss=rows[-1].loss if rows else run.position.loss,
            history=tuple(rows),
            metrics=evaluations.metrics if evaluations is not None else {},
            skipped=run.optimizer_step.skipped_steps,
        )
        self._call_callbacks("on_fit_end", result)
        with self._run.heartbeat.during(Phase.CHECKPOINT):
            run.checkpoints.at_end()  # the last evaluation or a callback may have requested a save
        conclude(result, began, time.perf_counter() - began_at, run.checkpoints.best, run.checkpoints.newest)
        # The callbacks of other ranks may still be writing files.
        barrier.wait_for_all(self.world, f"the end of trainer.fit() after step {self.step}")
        return result

    @named_arguments
    def steps(self, train_data: Data) -> Iterator[Step]:
        """Iterate over optimizer steps: each iteration does one step and yields its `Step`.

        The loop may be left at any step, but all ranks must leave it at the same step. A later call continues
        from there. If a save is due after a step, it is done after the loop body, even if the body leaves the loop. A
        collective: all ranks call it.

        Args:
            train_data: The training data, as for `fit`.

        Returns:
            An iterator of `Step`.

        Raises:
            DdpKitError: The same errors as `fit`.
        """
        self._enter("steps()", train_data=train_data)
        self._run.state.stopping = False
        steps = self._steps(train_data, self._feed(train_data), None)
        return save_when_left(steps, self.world, self._run.checkpoints, self._run.state)

    def save(self) -> None:
        """Write a checkpoint of the current step into `checkpoint.dir`. A collective: all ranks call it.

        In a callback or during an evaluation, the save is postponed until the step is complete. A transient error, such
        as a full disk, is logged as a warning, and the next save tries again.

        Raises:
            CheckpointError: If `checkpoint.dir` is not set, another run writes to that folder, or a checkpoint cannot
                be written.
            LossError: If the losses or the weights are not finite, unless `non_finite_gradients="skip"`.
        """
        if self._enter("save()"):
            with self._run.heartbeat.during(Phase.CHECKPOINT):
                self._run.checkpoints.on_request()

    def resume(self, path: str | Path) -> None:
        """Load the whole state of a run from a checkpoint: weights, optimizer, random states, position, callbacks.

        A collective: all ranks call it.

        Args:
            path: The folder of one checkpoint, or its URL in object storage.

        Raises:
            CheckpointError: If the checkpoint is damaged or from a different run.
        """
        if self._enter("resume()"):
            self._run.checkpoints.load(absolute_location(path))
            self._run.heartbeat.set_step(self.step)
            self._run.state.resumed()

    def log(self, values: Mapping[str, Logged]) -> None:
        """Add your own values to the next log row or, during an evaluation, to the metrics of that evaluation.

        The values are averaged over ranks, micro-batches and the steps since the last row. A value logged in the loss
        function is weighted by the number of samples in its batch; a value logged elsewhere, such as in a callback, has
        weight 1; a `Loss` has its own weight. Does not wait for the device; the ranks communicate only at log points.
        Ranks may log different names.

        Args:
            values: Name -> number, tensor with one element, or `Loss(sum, weight)`.

        Raises:
            ConfigError: For values that are not numbers, and for names that are fields of `LogRow`.
        """
        self._run.logged.add(values)

    def stop(self) -> None:
        """End the run after the current step. All ranks must call it at the same step."""
        self._run.state.stopping = True

    @named_arguments
    def evaluate(
        self, data: Data, *, name: str = "evaluation", notify_callbacks: bool | None = None
    ) -> dict[str, float]:
        """Evaluate the model on `data`, where each sample counts exactly once. A collective: all ranks call it.

        Args:
            data: A Dataset with a length, an IterableDataset, or a DataLoader over one of these.
            name: The start of the log line, such as "test" for the line "test at step 300: loss 0.1".
            notify_callbacks: Whether to pass the values to callbacks (`EarlyStopping`, loggers) and use
                them for `checkpoint.best_metric`. None: yes, unless `fit` was given other eval_data, so that a test
                set does not determine which weights are best.

        Returns:
            The mean loss, the metrics and the values passed to `log` during the evaluation, by name; the same on every
            rank.

        Raises:
            DataError: For unusable data, and if the ranks differ in data or settings.
            LossError: For an unusable loss or metric.
        """
        evaluator = self._run.evaluator
        if not self._enter("evaluate()", eval_data=data):
            return dict.fromkeys(("loss", *evaluator.metrics), math.nan)
        if notify_callbacks is None:
            notify_callbacks = evaluator.watches(data)
        batches = self._feeds.evaluation_data(data, "eval_data")
        return evaluator.run(batches, notify_callbacks=notify_callbacks, name=name) or {}

    @named_arguments
    def predict(self, data: Data, predict_fn: PredictFunction | None = None) -> Any:
        """Return the model's outputs for all samples of `data`, in the dataset's order, on the CPU of every rank.

        A collective: all ranks call it.

        Args:
            data: A Dataset with a length, an IterableDataset, or a DataLoader over one of these.
            predict_fn: A function `predict_fn(model, batch)` that returns tensors in dicts, lists and tuples. The first
                dimension of each tensor has one entry per sample. None: use the model's output if the batch is a single
                tensor, and otherwise the model's last output inside the loss function.

        Returns:
            The dicts, lists and tuples that `predict_fn` or the model returns, with tensors of shape [samples, ...].

        Raises:
            DataError: For unusable data, and if the ranks differ in data or settings.
            LossError: For outputs that cannot be concatenated.
        """
        self._enter("predict()", data=data)
        self._run.strategy.sync_buffers()
        with self._run.heartbeat.during(Phase.EVALUATION):
            return predict(self._run, predict_fn, self._feeds.evaluation_data(data, "the data"))

    def find_learning_rate(
        self, train_data: Data, *, start: float = 1e-7, end: float = 10.0, steps: int = 100
    ) -> LearningRateSearch:
        """Run a learning-rate range test: do one optimizer step with each of `steps` rates, then restore the state.

        The rates are spaced geometrically. The test ends early if the loss diverges. It does not set the learning rate:
        create a new optimizer and Trainer with the suggestion. A collective: all ranks call it.

        Source: Smith 2015, "Cyclical Learning Rates for Training Neural Networks" (arXiv:1506.01186).

        Args:
            train_data: The training data, as for `fit`.
            start: The smallest rate, above 0.
            end: The largest rate.
            steps: The number of rates, at least 2.

        Returns:
            A `LearningRateSearch` with the rates, the smoothed losses and a suggestion.

        Raises:
            ConfigError: For an invalid range, and for a Trainer with `updates`.
            DataError: For unusable data, and if the ranks differ.
            LossError: For an unusable loss.
        """
        if self._run.updates:
            raise ConfigError(
                "find_learning_rate supports only one optimizer", "call it on a Trainer without updates=[...]"
            )
        rates = rates_between(start, end, steps)
        self._enter("find_learning_rate()", train_data=train_data)
        feed = self._feed(train_data)
        self._prepare(feed)
        while True:
            try:
                with self._run.heartbeat.during(Phase.FORWARD):
                    return find(self._run, self._run.optimizer_step, feed, self._run.clock, rates)
            except OutOfMemory as failed:
                feed, _ = self._halve_micro_batch(failed, train_data)

    def plan(self, data: Data) -> MemoryPlan:
        """Estimate the memory per device that training on `data` needs with this configuration and number of ranks.

        Reads one micro-batch; allocates nothing on the device, and changes nothing. After the first training steps on a
        GPU, a log line compares the plan with the measured peak. A collective: all ranks call it.

        Args:
            data: The training data, as for `fit`.

        Returns:
            A `MemoryPlan` with sizes in bytes. Printing it shows a table.

        Raises:
            ConfigError: If the strategy has already sharded the model. Use `ddpkit plan` instead.
            DataError: For unusable data.
        """
        return self._run.planner.plan(data, self.batch_plan, self._epoch_to_train)

    # --- the loop -----------------------------------------------------------------------------------------------

    def _steps(self, train_data: Data, feed: Feed, evaluations: FitEvaluations | None) -> Loop:
        run = self._run
        heartbeat = run.heartbeat
        self._prepare(feed, ticks=True)
        loop = run.state.begin_loop()
        with self._loop_contexts():
            run.record.begin(self.step, self.total_steps, run.peak_memory.planned, continues=run.checkpoints.continues)
            if evaluations is not None and run.position.evaluation_pending:  # a stop has interrupted it
                evaluations.repeat_interrupted()
                run.checkpoints.after_repeated_evaluation()
                run.preemption.after_step(self._is_finished())
            while not self._is_finished():
                share = self._begin_epoch(feed)
                while share is not None and not self._is_finished():
                    run.profiler.before_step(self.step + 1)
                    feed, done, result = self._run_step(feed, share, train_data)  # repeats it if memory runs out
                    heartbeat.enter(Phase.DATA)
                    run.record.note_samples(feed.samples_checksum)
                    share = feed.next()  # while the device is busy with the step
                    run.clock.end(DATA)
                    step = self._advance(feed, done.step_samples, ends_epoch=share is None)
                    run.profiler.after_step(step.number)
                    self._call_callbacks("on_step")
                    self._wait_at_a_stop()
                    self._garbage.collect_if_due()
                    row = run.log_points.after_step(step, result, last=self._is_finished())
                    if row is not None:
                        run.position.loss = row.loss
                    run.peak_memory.after_step()
                    heartbeat.enter(Phase.BETWEEN_STEPS)
                    yield step if row is None else replace(step, log=row)
                    run.state.check_current(loop)
                    run.log_points.exclude_time_since_step()  # evaluations and the user's code are not training
                    heartbeat.enter(Phase.CHECKPOINT)
                    run.checkpoints.after_step()
                    run.preemption.after_step(self._is_finished())
            self._wait_at_a_stop()  # a callback of a log point or evaluation may have called stop
            run.log_points.end(self.step, self.epoch)
            with heartbeat.during(Phase.CHECKPOINT):
                run.checkpoints.at_end()

    @contextmanager
    def _loop_contexts(self) -> Iterator[None]:
        """Context manager for the steps of a loop: starts the profiler, the handling of stop requests, and so on.

        On exit, it ends everything that it has started, even after an error.
        """
        run = self._run
        heartbeat = run.heartbeat
        with (
            heartbeat.follow(self.step, self.total_steps, on_disk=run.checkpoints.step_on_disk),
            heartbeat.during(Phase.DATA),
            run.profiler,
            self._garbage.deferred(),
            run.checkpoints.in_loop(),
            run.state.in_loop(),
            run.preemption,
            run.record.in_loop(lambda: self.step),
        ):
            yield

    def _begin_epoch(self, feed: Feed) -> Share | None:
        """Start or continue an epoch, and return this rank's share of the next step.

        If the epoch has an unexpected length, updates the run's number of steps, and checks that schedulers still fit.
        """
        run = self._run
        position = run.position
        self._run.heartbeat.enter(Phase.DATA)
        run.clock.skip()
        position.epoch_facts = feed.facts(self.epoch)
        feed.begin(self.epoch, position.steps_in_epoch, position.stream_position)
        total = position.last_step(self.config, feed.steps_in)
        before = self._total_steps
        if total is not None and before is not None and total != before:
            self._total_steps = total
            for scheduler, every in run.scheduler_intervals:
                check_new_length(scheduler, total // every, before // every, self.step // every, self.epoch)
        return feed.next()

    def _run_step(self, feed: Feed, share: Share, train_data: Data) -> tuple[Feed, Share, StepResult]:
        """Run an optimizer step. If it runs out of memory, repeat it with half the micro-batch.

        Returns the feed and the share of the step that succeeded, and its result.
        """
        run = self._run
        number = self.step + 1
        logged = number % self.config.log_every_steps == 0 or number == self.total_steps
        while True:
            run.clock.start()
            run.log_points.note_rates()
            task = StepTask(
                number, share, feed.batch, measure_norm=logged, find_cause=run.log_points.interval.wants_cause
            )
            try:
                with run.flops.counted(share.step_samples):
                    return feed, share, run.optimizer_step.run(task)
            except OutOfMemory as failed:
                feed, share = self._halve_micro_batch(failed, train_data)
            except (RuntimeError, MemoryError) as error:
                with_hint(error, run)
                raise

    def _advance(self, feed: Feed, samples: int, *, ends_epoch: bool) -> Step:
        """Record that a step is done. At the end of an epoch, step the schedulers with `scheduler_every="epoch"`."""
        run = self._run
        number = self.step + 1
        epoch = self.epoch
        run.position.advance(samples, feed.steps, feed.stream_position, ends_epoch=ends_epoch)
        if ends_epoch:
            run.optimizer_step.end_epoch(number)
        self._run.heartbeat.step(number)
        self._run.heartbeat.enter(Phase.CALLBACKS)
        return Step(number, epoch, samples, ends_epoch, None)

    def _wait_at_a_stop(self) -> None:
        """After `stop`, wait once per loop until all ranks have called it, because the run ends with collectives."""
        if self._run.state.stopping and not self._run.state.stop_agreed:
            self._run.state.stop_agreed = True
            if not self._is_complete():
                barrier.wait_for_all(self.world, f"trainer.stop() after step {self.step}")

    def _feed(self, train_data: Data) -> Feed:
        """Take the micro-batch size from the DataLoader, the settings or a search, and create the training feed."""
        config = self.config
        if (own := loader_batch_size(train_data, config)) is not None:
            self._set_batch_plan(None, own, config.accumulation_steps)
        if config.micro_batch_size == "auto":
            found = self._run.position.micro_batches.get(str(self.world.world_size))
            if found is None:
                found = largest_micro_batch(self._run, partial(self._feeds.trial_batches, train_data), self.batch_plan)
            self._set_batch_plan(self.batch_plan.global_batch, found)
        feed = self._feeds.train_feed(train_data, self.step, self._epoch_to_train)
        self._total_steps = self._run.position.last_step(config, feed.steps_in)
        return feed

    @property
    def _epoch_to_train(self) -> int:
        """The epoch of the next step; if the run is finished, its last epoch: samplers may not support later epochs."""
        last = self.config.last_epoch
        if last is None:
            return self.epoch
        return min(self.epoch, last - 1)

    def _set_batch_plan(self, global_batch: int | None, micro_batch: int, accumulation: int | None = None) -> None:
        """Set the batch plan of the following steps."""
        self.batch_plan = plan_batches(global_batch, micro_batch, accumulation, self._run.strategy.data_ranks)
        self._feeds = feed_builder(self._run, self._run.clock, self.batch_plan)
        if self.config.micro_batch_size == "auto":
            self._run.position.micro_batches[str(self.world.world_size)] = micro_batch

    def _halve_micro_batch(self, failed: OutOfMemory, train_data: Data) -> tuple[Feed, Share]:
        """Halve the micro-batch after a step ran out of memory. Returns the new feed and the new share of the step.

        A collective. Raises the out-of-memory error if the micro-batch is already 1.
        """
        micro_batch = self.batch_plan.micro_batch
        if micro_batch == 1:
            raise failed.error_to_raise(self._run) from None
        log.logger.warning("out of memory at step {}: the micro-batch of {} is halved", self.step + 1, micro_batch)
        release_cached_memory()
        self._run.strategy.setup(self.model)  # the failed step has left its reductions in an unknown state
        self._set_batch_plan(self.batch_plan.global_batch, -(-micro_batch // 2))
        feed = self._feeds.train_feed(train_data, self.step, self.epoch)
        share = self._begin_epoch(feed)
        assert share is not None, "the epoch had this step"
        return feed, share

    def _prepare(self, feed: Feed, *, ticks: bool = False) -> None:
        """Check the state of the run and prepare the first step. `ticks`: whether the schedulers will be stepped."""
        if self._run.position.steps_in_epoch:
            self._run.position.check_facts(feed.steps, feed.facts(self.epoch))
        self._run.optimizer_step.check_parameters()
        last = self.total_steps
        for scheduler, every in self._run.scheduler_intervals if ticks else ():
            warmup = scheduler.steps if isinstance(scheduler, WarmUp) else 0
            epochs = self._run.position.epochs_left(self.config, last, feed.steps, warmup)
            ticks_in_run = None if last is None else last // every
            check_ticks(scheduler, ticks_in_run, self.step // every, epochs)
        if not self._run.state.seeded:  # only once: a later call continues the random sequences
            if not self._run.checkpoints.restore_random():
                seed_everything(self.config.seed, self._run.strategy.data_rank)
            self._run.state.seeded = True
        if not self.model.training or all(module.training for module in self.model.modules()):
            self.model.train()  # as a loop by hand does: a model may override it. Not if modules were frozen by hand
        self._run.optimizer_step.clear()  # gradients of an unfinished step, or from user code
        self._run.log_points.begin(self.step + 1)

    def _is_finished(self) -> bool:
        """Whether the run is over, because of `stop`, max_steps or the last epoch."""
        return self._run.state.stopping or self._is_complete()

    def _is_complete(self) -> bool:
        config = self._run.config
        if config.max_steps is not None and self.step >= config.max_steps:
            return True
        return config.last_epoch is not None and self.epoch >= config.last_epoch

    def _call_callbacks(self, event: str, *values: Any) -> None:
        with self._run.state.callbacks:
            for callback in (*self._run.callbacks, self._run.record):
                getattr(callback, event)(self, *values)

    def _call_on_gradients(self, gradients: Gradients) -> None:
        with self._run.state.callbacks:
            for callback in filter(changes_gradients, self._run.callbacks):
                callback.on_gradients(self, gradients)

    def _enter(self, call: str, **data: Any) -> bool:
        """Before a call that all ranks make: check that they agree. Returns whether the call has an effect."""
        return self._run.entry.enter(call, data)


def weak_method(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a bound method, but does not keep its object alive.

    The parts of a Trainer call it with this: a reference to the Trainer itself would be a reference cycle, and its
    memory would be freed only by a full garbage collection.
    """
    reference = weakref.WeakMethod(method)

    def call(*values: Any) -> None:
        bound = reference()
        if bound is not None:
            bound(*values)

    return call
