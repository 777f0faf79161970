"""The training loop."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ddp_kit import log
from ddp_kit.batch import MicroBatch, plan_batches
from ddp_kit.callbacks import Callback
from ddp_kit.config import TrainerConfig
from ddp_kit.errors import ConfigError, DataError, LossError
from ddp_kit.loader import Data, batching, build_loader, check_batch_size, on_device, open_data
from ddp_kit.metrics import Loss, Mean, checked, reduced
from ddp_kit.placement import place, send_buffers, without_reduction
from ddp_kit.precision import Precision, scale_gradients
from ddp_kit.progress import ProgressReport, StepNote
from ddp_kit.records import FitResult, LogRow, Step
from ddp_kit.sampler import EvalBatches, ExactDistributedSampler, TrainBatches
from ddp_kit.trainer.agreement import check_agreement, fact_of_weights, facts_of_data, facts_of_run
from ddp_kit.trainer.setup import (
    LossFunction,
    MetricFunction,
    check_sync_batch_norm,
    checked_callbacks,
    checked_config,
    checked_function,
    checked_metrics,
    evaluating,
    explained,
    only_repeatable_algorithms,
    optimizer_for,
    scheduler_for,
    trainable,
)
from ddp_kit.world import join, mixed_seed, seed_everything


@dataclass
class _Feed:
    """A loader and the batches it will give."""

    loader: DataLoader[Any]
    batches: TrainBatches


@dataclass
class _Interval:
    """What has gathered since the last log point."""

    loss: Mean
    started: float = field(default_factory=time.perf_counter)
    steps: int = 0
    samples: int = 0
    data_seconds: float = 0.0


class Trainer:
    """Trains a model on all ranks; the same script runs alone, under `ddpkit launch` and under torchrun.

    for each epoch, for each global batch:
        for each of this rank's micro-batches:               # gradients are reduced with the last one only
            loss_fn(model, batch).backward()                 # weighted by its share of the global batch
        clip the gradients, step the optimizer, tick the scheduler
        every log_every steps: reduce the loss, report       # here the host waits for the device (fp16: at every step)
    evaluate every eval_every steps, or after each epoch; and at the end

    `model`: any Module. `optimizer`: an Optimizer, or a callable `parameters -> Optimizer`.
    `loss_fn(model, batch)`: the mean over the batch's samples as a scalar tensor, or `Loss(sum, weight)`.
    `scheduler`: an LRScheduler or a callable `optimizer -> LRScheduler`; one tick per applied optimizer step.
    `metrics`: name -> `fn(output, batch)`, where `output` is what the model last returned inside `loss_fn`;
    it returns what a loss function may return, and is exact over all ranks.
    Creating a Trainer is a collective: all ranks do it.
    Raises `ConfigError`, `WorldError`, and later `DataError` and `LossError`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer],
        loss_fn: LossFunction,
        config: TrainerConfig | None = None,
        *,
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
        metrics: Mapping[str, MetricFunction] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.config = checked_config(config)
        self._loss_fn = checked_function(loss_fn, "loss_fn")
        self._metrics = checked_metrics(metrics or {})
        self._callbacks = checked_callbacks(callbacks)
        if self.config.deterministic:
            only_repeatable_algorithms()
        self.world = join()
        log.start(self.world.rank, self.world.world_size)
        self.batch_plan = plan_batches(
            self.config.global_batch_size,
            self.config.micro_batch_size,
            self.config.accumulation_steps,
            self.world.world_size,
        )
        self._precision = Precision(self.config.precision, self.world.device)
        self.model = model
        self._precision.prepare(model)
        self._placed = place(model, self.world, self.config.parallel)
        self._parameters = trainable(model)
        self.optimizer = optimizer_for(model, optimizer)
        self.scheduler = scheduler_for(self.optimizer, scheduler)
        self._seeded = False
        self._turn: object = None  # the loop over steps() that is going on
        self._model_called = self.world.world_size == 1  # else the first loss has to come through the DDP wrapper
        if not self._model_called:
            self._first_call = self._placed.register_forward_pre_hook(self._note_call)
        self._weighted: bool | None = None  # whether the loss function returns Loss; known from its first call
        self.step = 0
        """Optimizer steps done."""
        self.epoch = 0
        """Epochs done."""
        self._steps_in_epoch = 0
        self._epoch_length: int | None = None  # in steps, of an epoch that is begun and not done
        self._samples = 0
        self._note = StepNote()

    # --- what users call ----------------------------------------------------------------------------------------

    def fit(self, train_data: Data, eval_data: Data | None = None) -> FitResult:
        """Train to the end that the configuration sets; go on from where an earlier call stopped.

        `train_data`, `eval_data`: a Dataset with a length, or a DataLoader over one, whose batching is replaced.
        Returns a `FitResult`. A collective: all ranks call it.
        """
        self._agree(train_data=train_data, eval_data=eval_data)
        feed = self._train_feed(train_data)
        evaluation = None if eval_data is None else self._eval_feed(eval_data)
        metrics: dict[str, float] = {}
        history: list[LogRow] = []
        total = self._last_step(feed.batches.steps)
        self._announce(total)
        self._tell("on_fit_start")
        with ProgressReport(total, self.world.is_main) as progress:
            for step in self._steps(feed):
                progress.step(step.number)
                if step.log is not None:
                    history.append(step.log)
                    progress.log(step.number, str(step.log))
                if evaluation is not None and self._evaluation_due(step, total):
                    metrics = self._evaluate(*evaluation)
        if evaluation is not None and not history:
            metrics = self._evaluate(*evaluation)
        result = FitResult(
            steps=self.step,
            samples=self._samples,
            loss=history[-1].loss if history else math.nan,
            history=tuple(history),
            metrics=metrics,
        )
        self._tell("on_fit_end", result)
        return result

    def steps(self, train_data: Data) -> Iterator[Step]:
        """The loop in your hands: each iteration does one optimizer step and says what it was.

        Stop whenever you like, on all ranks at the same step; a later call goes on from there.
        """
        self._agree(train_data=train_data)
        return self._steps(self._train_feed(train_data))

    def evaluate(self, data: Data) -> dict[str, float]:
        """The mean loss and all metrics over `data`, each sample counted once. A collective: all ranks call it."""
        self._agree(eval_data=data)
        return self._evaluate(*self._eval_feed(data))

    # --- one optimizer step -------------------------------------------------------------------------------------

    def _steps(self, feed: _Feed) -> Iterator[Step]:
        self._prepare(feed)
        turn = self._turn = object()
        last_step = self._last_step(feed.batches.steps)
        interval = _Interval(Mean(self.world.device))
        while self.step < last_step:
            feed.batches.set_position(self.epoch, self._steps_in_epoch)
            batches = self._on_device(feed.loader)
            for number in range(self._steps_in_epoch, feed.batches.steps):
                samples = feed.batches.samples(number)
                self._run_step(batches, feed.batches.micro_batches(number), samples, interval)
                row = None
                epoch = self.epoch
                ends_epoch = self._advance(samples, feed.batches.steps)
                self._tell("on_step")
                if self.step % self.config.log_every == 0 or self.step == last_step:
                    row = self._log_row(interval, epoch)
                    interval = _Interval(Mean(self.world.device))
                    self._tell("on_log", row)
                left = time.perf_counter()
                yield Step(self.step, epoch, samples, ends_epoch, row)
                interval.started += time.perf_counter() - left  # evaluations and the like are not training
                if self._turn is not turn:
                    raise DataError(
                        "this loop over steps() was overtaken by a later one", "finish or leave one at a time"
                    )
                if self.step == last_step:
                    return

    def _prepare(self, feed: _Feed) -> None:
        """What has to hold before the first step of a call."""
        if self._epoch_length not in (None, feed.batches.steps):
            raise DataError(
                f"epoch {self.epoch} was left after {self._steps_in_epoch} of {self._epoch_length} steps, "
                f"but this data makes {feed.batches.steps} steps an epoch",
                "go on with the data that the epoch was begun with, or make a new Trainer",
            )
        if {id(parameter) for parameter in trainable(self.model)} != {id(parameter) for parameter in self._parameters}:
            raise ConfigError(
                "parameters were frozen or unfrozen (requires_grad) after the Trainer was made",
                "make a new Trainer after that: what is reduced over the ranks is settled when it is made",
            )
        if not self._seeded:  # once: a run that is left and taken up again goes on in its random streams
            seed_everything(self.config.seed, self.world)
            self._seeded = True
        if not self.model.training:
            self.model.train()
        self.model.zero_grad(set_to_none=True)  # of a step that was not finished, or of the user's own

    def _run_step(
        self, batches: Iterator[Any], passes: tuple[MicroBatch, ...], samples: int, interval: _Interval
    ) -> None:
        weight: Tensor | float = 0.0
        total_weight = None
        for number, micro_batch in enumerate(passes, 1):
            waited = time.perf_counter()
            batch = next(batches)
            interval.data_seconds += time.perf_counter() - waited
            last = number == len(passes)
            with nullcontext() if last else without_reduction(self._placed):
                with self._precision.forward():
                    value = self._loss(batch)
                if micro_batch.samples:
                    interval.loss.add(value, micro_batch.samples)
                if isinstance(value, Loss):
                    weight = weight + (value.weight if micro_batch.samples else 0.0)
                    if last:
                        total_weight = self._sum_over_ranks(weight)
                objective = self._objective(value, micro_batch, samples)
                self._precision.scaled(objective).backward()  # type: ignore[no-untyped-call]
        self._precision.unscale(self.optimizer)
        if total_weight is not None:
            scale_gradients(self._parameters, _ratio(samples, total_weight()))
        if self.config.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self.config.max_grad_norm)
        applied = self._precision.apply(self.optimizer)
        if applied and self.scheduler is not None:
            self.scheduler.step()
        self.model.zero_grad(set_to_none=True)
        interval.steps += 1
        interval.samples += samples

    def _loss(self, batch: Any) -> "Tensor | Loss":
        with explained():
            value = checked(self._loss_fn(self._placed, batch), "the loss function")
        if not self._model_called:
            raise LossError(
                "the loss function did not call the model that it was given, so the ranks would train apart",
                "use its first argument: def loss_fn(model, batch): ... model(inputs) ...",
            )
        weighted = isinstance(value, Loss)
        if self._weighted not in (None, weighted):
            raise LossError(
                "the loss function returned a plain tensor at some steps and a Loss at others",
                "return the same kind every time: the ranks agree on their reductions by it",
            )
        self._weighted = weighted
        return value

    def _note_call(self, _module: nn.Module, _inputs: Any) -> None:
        self._model_called = True
        self._first_call.remove()

    def _objective(self, value: "Tensor | Loss", micro_batch: MicroBatch, samples: int) -> Tensor:
        """What this pass adds to the loss of the global batch, times the ranks that DDP's mean divides by.

        A plain mean counts by its samples, so that its weight is known beforehand and nothing is exchanged. A
        Loss counts by the samples for now; `_run_step` puts the true weight in its place once all are known.
        """
        ranks = self.world.world_size
        if isinstance(value, Loss):
            return value.loss.reshape(()) * (ranks / samples if micro_batch.samples else 0.0)
        factor = micro_batch.samples * ranks / samples
        return value.reshape(()) if factor == 1.0 else value.reshape(()) * factor

    def _sum_over_ranks(self, weight: Tensor | float) -> Callable[[], Tensor]:
        """Start adding up the step's weight, beside the backward pass; the result is ready when called for."""
        own = torch.zeros((), dtype=torch.float64, device=self.world.device)
        own += weight.detach().sum() if isinstance(weight, Tensor) else weight  # filled in place: no copy from the host
        work = dist.all_reduce(own, async_op=True) if self.world.world_size > 1 else None

        def result() -> Tensor:
            if work is not None:
                work.wait()
            return own

        return result

    # --- between steps ------------------------------------------------------------------------------------------

    def _advance(self, samples: int, steps_per_epoch: int) -> bool:
        self.step += 1
        self._note.write(self.step)
        self._samples += samples
        self._steps_in_epoch += 1
        if self._steps_in_epoch < steps_per_epoch:
            self._epoch_length = steps_per_epoch
            return False
        self.epoch += 1
        self._steps_in_epoch = 0
        self._epoch_length = None
        return True

    def _last_step(self, steps_per_epoch: int) -> int:
        """The optimizer step that ends the run: by epochs or by max_steps, whichever comes first."""
        by_steps, epochs = self.config.max_steps, self.config.last_epoch
        left = None if epochs is None else (epochs - self.epoch) * steps_per_epoch - self._steps_in_epoch
        by_epochs = None if left is None else self.step + max(0, left)
        return min(end for end in (by_steps, by_epochs) if end is not None)

    def _log_row(self, interval: _Interval, epoch: int) -> LogRow:
        (loss,) = reduced([interval.loss])
        seconds = time.perf_counter() - interval.started
        return LogRow(
            step=self.step,
            epoch=epoch,
            loss=loss,
            learning_rate=float(self.optimizer.param_groups[0]["lr"]),
            samples_per_second=interval.samples / seconds,
            step_seconds=seconds / interval.steps,
            data_seconds=interval.data_seconds / interval.steps,
        )

    def _announce(self, total: int) -> None:
        if total == self.step:
            log.logger.warning("nothing left to train: all {} steps are done; raise epochs or max_steps", total)
            return
        plan, world = self.batch_plan, self.world
        log.logger.info(
            "{} {} on {}, {}: global batch {} = micro-batch {} x accumulation {} x {}{}; {}{} steps",
            world.world_size,
            "rank" if world.world_size == 1 else "ranks",
            world.device.type,
            self.config.precision,
            plan.global_batch,
            plan.micro_batch,
            plan.accumulation,
            world.world_size,
            "" if plan.micro_batch * plan.accumulation * world.world_size == plan.global_batch else ", at most",
            f"from step {self.step} to " if self.step else "",
            total,
        )

    def _tell(self, event: str, *values: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, event)(self, *values)

    # --- evaluation ---------------------------------------------------------------------------------------------

    def _evaluation_due(self, step: Step, last_step: int) -> bool:
        every = self.config.eval_every
        due = step.ends_epoch if every is None else step.number % every == 0
        return due or step.number == last_step

    @torch.no_grad()
    def _evaluate(self, loader: DataLoader[Any], batches: EvalBatches) -> dict[str, float]:
        send_buffers(self.model, self.world)
        means = {name: Mean(self.world.device) for name in ("loss", *self._metrics)}
        with evaluating(self.model) as outputs:
            for samples, batch in zip(batches.sizes(), self._on_device(loader), strict=True):
                with self._precision.forward():
                    value = checked(self._loss_fn(self.model, batch), "the loss function")
                means["loss"].add(value, samples)
                for name, function in self._metrics.items():
                    if not outputs:
                        raise LossError(
                            f"metric {name!r} needs the model's output, but the loss function did not call the model",
                            "call model(...) inside the loss function",
                        )
                    means[name].add(checked(function(outputs[0], batch), f"metric {name!r}"), samples)
                outputs.clear()
        values = dict(zip(means, reduced(list(means.values())), strict=True))
        log.logger.info("evaluation at step {}: {}", self.step, "  ".join(f"{k} {v:.4g}" for k, v in values.items()))
        self._tell("on_evaluate", values)
        return values

    # --- data ---------------------------------------------------------------------------------------------------

    def _train_feed(self, data: Data) -> _Feed:
        dataset, template = open_data(data, "train_data")
        own, settings = batching(template), self.config.data
        check_batch_size(own, self.batch_plan.micro_batch)
        sampler = self._sampler(dataset, shuffle=own.shuffle if own else settings.shuffle)
        drop_last = settings.drop_last or bool(own and own.drop_last)
        batches = TrainBatches(sampler, self.batch_plan, drop_last=drop_last)
        check_sync_batch_norm(self.model, batches, self.world.world_size)
        # Taken up again, the loader's processes draw other numbers than before.
        seed = mixed_seed(self.config.seed, self.step)
        return _Feed(build_loader(dataset, batches, settings, self.world, seed, template), batches)

    def _eval_feed(self, data: Data) -> tuple[DataLoader[Any], EvalBatches]:
        dataset, template = open_data(data, "eval_data")
        own = batching(template)
        size = own.size if own else self.batch_plan.micro_batch
        batches = EvalBatches(self._sampler(dataset, shuffle=False), size)
        return build_loader(dataset, batches, self.config.data, self.world, self.config.seed, template), batches

    def _agree(self, **data: object) -> None:
        """Refuse to go on where the ranks would go apart, or wait for each other."""
        if self.world.world_size == 1:
            return
        facts = facts_of_data(data) | facts_of_run(self.config, self.optimizer, self._metrics)
        if self.step == 0:
            facts |= fact_of_weights(self.model, self.world)
        check_agreement(self.world, facts)

    def _sampler(self, dataset: Any, *, shuffle: bool) -> ExactDistributedSampler:
        return ExactDistributedSampler(
            dataset, self.world.rank, self.world.world_size, shuffle=shuffle, seed=self.config.seed
        )

    def _on_device(self, loader: DataLoader[Any]) -> Iterator[Any]:
        return on_device(loader, self.world.device, self._precision.batch_dtype, self.config.data.prefetch_batches)


def _ratio(samples: int, weight: Tensor) -> Tensor:
    """samples / weight, and 0 where nothing had a weight; decided on the device."""
    return torch.where(weight > 0, samples / weight, torch.zeros_like(weight))
