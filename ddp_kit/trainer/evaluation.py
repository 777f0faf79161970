"""Evaluation of a model: each sample counts exactly once, for any number of ranks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ddp_kit.checkpoint.manager import Checkpoints
from ddp_kit.config.settings import TrainerConfig
from ddp_kit.data.feed import EvaluationData
from ddp_kit.distributed.world import gathered, random_states, set_random_states
from ddp_kit.errors import DdpKitError, LossError
from ddp_kit.heartbeat import Phase
from ddp_kit.log import logger
from ddp_kit.metrics import Mean, MetricObject, checked, reduced
from ddp_kit.model.modes import in_mode
from ddp_kit.records import Step
from ddp_kit.torch_internals import collectives_of_all_groups
from ddp_kit.trainer.context import MetricFunction, TrainerContext, as_table, over_all_ranks
from ddp_kit.trainer.position import Position, RunState
from ddp_kit.trainer.progress import with_bar
from ddp_kit.trainer.step_loss import backward_called

_SHOWN = 32


def evaluation_due(config: TrainerConfig, step: Step) -> bool:
    """Whether `fit` evaluates after this step."""
    if config.eval_every_steps is not None:
        return step.number % config.eval_every_steps == 0
    return step.ends_epoch and (step.epoch + 1) % config.eval_every_epochs == 0


class Evaluator:
    """Runs the evaluations of a Trainer.

    `call_callbacks`: a function `(event, *values)` that calls the method `event` of every callback with `values`.
    """

    def __init__(
        self,
        context: TrainerContext,
        metrics: Mapping[str, MetricFunction | MetricObject],
        checkpoints: Checkpoints,
        position: Position,
        run_state: RunState,
        call_callbacks: Callable[..., None],
    ) -> None:
        self._position = position
        self._watched_data: object = None  # the eval_data of fit
        self._context = context
        self.metrics = metrics
        """The metrics, by name."""
        self._checkpoints = checkpoints
        self._run_state = run_state
        self._call_callbacks = call_callbacks

    def watch(self, eval_data: object) -> None:
        """Record the eval_data of `fit`. From then on, only metrics on this data determine which weights are best."""
        if eval_data is not None:
            self._watched_data = _dataset(eval_data)

    def watches(self, data: object) -> bool:
        """Whether callbacks and `checkpoint.best_metric` use the metrics of an evaluation on `data`."""
        return self._watched_data is None or _dataset(data) is self._watched_data

    def rehearse(self, data: EvaluationData) -> dict[str, float]:
        """Evaluate one batch before training, so that mistakes in the loss or metrics are found at once.

        Returns the metrics. Calls no callbacks, and restores the random states afterwards. A collective.
        """
        context = self._context
        first = data.first
        assert first is not None, "only datasets with a length are rehearsed"
        before = random_states(context.world)
        try:
            with context.heartbeat.during(Phase.EVALUATION):
                return evaluate(context, self.metrics, EvaluationData(first, data.filler_batch)) or {}
        except RuntimeError as error:
            if "does not have a grad_fn" not in str(error):  # raised by backward() under no_grad
                raise
            raise backward_called() from None
        except DdpKitError as error:
            error.add_note(
                "the check before training, which evaluates one batch of eval_data, raised this error; "
                'sanity_check="off" skips the check'
            )
            raise
        finally:
            set_random_states(before)

    def run(
        self,
        data: EvaluationData,
        stops: Callable[[], bool] | None = None,
        *,
        notify_callbacks: bool = True,
        name: str = "evaluation",
    ) -> dict[str, float] | None:
        """Evaluate, call the callbacks, and return all metrics, or None if the evaluation is interrupted. A collective.

        `stops`: a function that returns whether to interrupt the evaluation. After an interruption, the random states
        are restored. `notify_callbacks`: whether to pass the metrics to callbacks and use them for
        `checkpoint.best_metric`. `name`: the text at the start of the log line.
        """
        context = self._context
        step = self._position.step
        random = random_states(context.world) if stops is not None else None
        with self._run_state.callbacks:
            self._checkpoints.wait_for_copy()  # callbacks may change the weights, as EMA does
            try:
                self._call_callbacks("on_evaluate_start")
                with context.heartbeat.during(Phase.EVALUATION):
                    context.strategy.sync_buffers()
                    values = evaluate(context, self.metrics, data, stops, name)
                if values is not None:
                    texts = [f"{metric} {value:.4g}" for metric, value in islice(values.items(), _SHOWN)]
                    if len(values) > _SHOWN:  # a metric may return many values
                        texts.append(f"and {len(values) - _SHOWN} more")
                    logger.info("{} at step {}: {}", name, step, "  ".join(texts))
                    if notify_callbacks:
                        self._call_callbacks("on_evaluate", values)
            finally:  # also after an error: callbacks undo what they changed for the evaluation
                self._call_callbacks("on_evaluate_end")
            context.strategy.gather_weights()
        if values is not None:
            if notify_callbacks:
                self._checkpoints.after_evaluation(values)
        elif random is not None:
            set_random_states(random)
        return values


class FitEvaluations:
    """The evaluations of one call of `fit`.

    `data`: the batches to evaluate. `stops`: a function that returns whether to interrupt a running evaluation.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        position: Position,
        state: RunState,
        data: EvaluationData,
        stops: Callable[[], bool],
    ) -> None:
        self._evaluator = evaluator
        self._position = position
        self._state = state
        self._data = data
        self._stops = stops
        self.metrics: dict[str, float] = {}
        """The metrics of the last evaluation."""
        self.step = -1
        """The step of the last evaluation."""

    def run(self, *, whole: bool = False) -> None:
        """Evaluate after the current step. `whole`: do not interrupt the evaluation, even if a stop is requested.

        If this step was already evaluated before a restart, the metrics are computed again, but callbacks do not get
        them a second time.
        """
        position = self._position
        already_notified = position.evaluated == position.step
        stops = None if whole else self._stops
        found = self._evaluator.run(self._data, stops, notify_callbacks=not already_notified)
        position.evaluation_pending = found is None
        if found is None:
            position.was_stopping = position.was_stopping or self._state.stopping
        else:
            position.evaluated = position.step
        self.metrics = found or {}
        self.step = position.step

    def repeat_interrupted(self) -> None:
        """Repeat the evaluation that a stop request interrupted. If it belongs to the run's last step, end the run."""
        self.run()
        if not self._position.evaluation_pending:  # not interrupted again
            self._state.stopping |= self._position.was_stopping
            self._position.was_stopping = False


def _dataset(data: object) -> object:
    return data.dataset if isinstance(data, DataLoader) else data


@torch.no_grad()
def evaluate(
    context: TrainerContext,
    metrics: Mapping[str, MetricFunction | MetricObject],
    data: EvaluationData,
    stops: Callable[[], bool] | None = None,
    label: str = "evaluation",
) -> dict[str, float] | None:
    """Compute the mean loss, the metrics and the values that user code logs, over the samples of all ranks.

    A collective. Returns the results by name; None if the evaluation was interrupted on any rank. `stops`: a function
    that is called between batches and returns whether to interrupt the evaluation. `label`: the label of the progress
    bar.
    """
    device = context.world.device
    means = {name: Mean(device) for name in ("loss", *metrics) if not isinstance(metrics.get(name), MetricObject)}
    objects = {name: metric for name, metric in metrics.items() if isinstance(metric, MetricObject)}
    for counting in objects.values():
        counting.start(device)
    alone = not context.strategy.divides_weights
    stopped = False
    begun = collectives_of_all_groups()
    with evaluating(context.model, *context.loss_modules) as outputs, context.logged.set_aside():
        batches = context.strategy.evaluation(data.batches(), data.filler_batch)
        for number, (samples, batch) in enumerate(with_bar(batches, label, data.count, context.world.is_main)):
            # Ranks may stop after different batches, so an evaluation whose batches run collectives is not interrupted:
            # those of the strategy, or those of the loss function or a metric, which only their number can show.
            stopped = number > 0 and stops is not None and stops() and alone and collectives_of_all_groups() == begun
            if stopped:
                break
            context.heartbeat.enter(Phase.EVALUATION)
            counted = samples if context.strategy.contributes else 0
            with context.precision.forward(), context.logged.batch(counted):
                loss = context.strategy.call(context.loss_fn, batch)
            if not counted:
                outputs.clear()
                continue
            means["loss"].add(checked(loss, "the loss function"), samples)
            for name, metric in metrics.items():
                if not outputs:
                    raise LossError(
                        f"metric {name!r} needs the model's output, but the loss function did not call the model",
                        "call model(...) inside the loss function",
                    )
                if isinstance(metric, MetricObject):
                    metric.add(outputs[0], batch)
                else:
                    means[name].add(checked(metric(outputs[0], batch), f"metric {name!r}"), samples)
            outputs.clear()
            context.logged.end_step()
        logged = context.logged.take()
    if stops is not None and any(each for (each,) in gathered(context.world, [stopped])):
        return None
    anything = Mean(device)  # not 0 if any rank has logged values
    anything.add(torch.tensor(float(bool(logged))), 1)
    *averages, any_logged = reduced([*means.values(), anything])
    found = dict(zip(means, averages, strict=True))
    values: dict[str, float] = {}
    for name in ("loss", *metrics):
        values |= objects[name].values() if name in objects else {name: found[name]}
    if any_logged:
        of_all = over_all_ranks(context.world, [*logged], as_table(logged, device).cpu())
        values |= {name: value for name, value in of_all.items() if name not in values}
    return values


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[list[Any]]:
    """Context manager that sets modules to evaluation mode, the model first.

    Yields a list that holds the model's latest output.
    """
    outputs: list[Any] = []

    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        outputs[:] = [output]

    with ExitStack() as stack:
        stack.callback(modules[0].register_forward_hook(note).remove)
        for module in modules:
            stack.enter_context(in_mode(module, training=False))
        yield outputs
