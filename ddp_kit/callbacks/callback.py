"""The base class of callbacks with all events, the gradients of a step, and helpers to track the best metric value."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Literal

from torch import Tensor, nn

from ddp_kit.env import rank_for_messages
from ddp_kit.errors import ConfigError, nearest
from ddp_kit.log import logger
from ddp_kit.records import FitResult, LogRow
from ddp_kit.state_values import real_number
from ddp_kit.uncaught import show_without_traceback


class Gradients(MutableMapping[str, Tensor]):
    """The gradients that an optimizer step is about to use, by parameter name: the argument of `Callback.on_gradients`.

        gradients["head.weight"].clamp_(-1.0, 1.0)      # a change in place
        gradients["head.weight"] = other                # another tensor of the same shape
        gradients["head.weight"] = None                 # the optimizer skips the parameter in this step
        for name, norm in gradients.norms().items(): ...

    Only parameters that have a gradient in this step are included. Each value is the part of the gradient that this
    rank's optimizer uses:

    - one rank, ddp, device_map: the whole gradient, the same on all ranks
    - zero1: this rank's range of the flattened gradient, possibly empty; gradients of scalars are whole
    - fsdp, tensor: a plain tensor with this rank's part, possibly empty, of the DTensor in the model parameter's `grad`
    - pipeline: as with fsdp, but only of the weights that this rank holds, so names differ between ranks

    With `memory.offload="optimizer"` the gradients are still on the device, and with `"all"` in host memory. Apply the
    same change on all ranks. Changes to single values are then exact at every placement; for a value computed from a
    whole gradient, such as a norm, use `norms`.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], norms: Callable[[], dict[str, Tensor]]) -> None:
        """`parameters`: the parameters that the optimizer updates, by name. `norms`: computes the result of `norms`."""
        self._parameters = parameters
        self._norms = norms

    def __getitem__(self, name: str) -> Tensor:
        gradient = self._parameters[name].grad
        if gradient is None:
            raise KeyError(name)
        return gradient

    def __setitem__(self, name: str, gradient: Tensor | None) -> None:
        self._parameters[name].grad = gradient

    def __delitem__(self, name: str) -> None:
        self._parameters[name].grad = None

    def __iter__(self) -> Iterator[str]:
        return (name for name, parameter in self._parameters.items() if parameter.grad is not None)

    def __len__(self) -> int:
        return sum(parameter.grad is not None for parameter in self._parameters.values())

    def norms(self) -> dict[str, Tensor]:
        """Compute the 2-norm of each whole gradient. A collective with strategies that shard: all ranks call it.

        Returns:
            Name -> a scalar on the device, for the same parameters as this mapping. The host does not wait for it.
        """
        return {name: norm for name, norm in self._norms().items() if name in self}


class Callback:
    """The base class of callbacks: override the events that you need. Every rank calls all events, in the same order.

        on_fit_start
        -> (on_gradients -> on_step -> [on_log] -> [on_evaluate_start -> on_evaluate -> on_evaluate_end])*
        -> on_fit_end

    `trainer` is the `Trainer` that calls the event. To end the run after the current step, call `trainer.stop()` on all
    ranks.
    """

    state_per_rank = False
    """Whether checkpoints hold the state of every rank. If False, they hold rank 0's state, and all ranks load it."""

    metrics_needed: tuple[str, ...] = ()
    """The metrics that this callback reads from evaluations. The sanity check of `fit` fails if any is missing."""

    def state_dict(self) -> dict[str, Any]:
        """The state to save in a checkpoint: numbers, text, arrays and tensors, in nested dicts, lists and tuples."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict()` returned. Called when a checkpoint is loaded, before the next step.

        Args:
            state: The state from the checkpoint.
        """

    def on_fit_start(self, trainer: Any) -> None:
        """Called by `fit` before the first optimizer step; a loop over `steps` does not call it."""

    def on_gradients(self, trainer: Any, gradients: Gradients) -> None:
        """Called in each optimizer step, between the last backward pass and the update; may change the gradients.

        The gradients are reduced over all ranks and passes, divided by the weights of `Loss` and by the loss scale of
        fp16, and not yet clipped by `max_grad_norm` and `max_grad_value`. They may be non-finite if the step will be
        skipped. `trainer.step` is still the number of the previous step. With several `updates`, it is called once for
        each of them, with the gradients of its parameters; with a closure, such as LBFGS uses, for each of its calls.
        Trial steps of `find_learning_rate` call it too.

        Changes take effect at every placement. To change weights after the update, use `on_step`.

        Args:
            gradients: Name -> this rank's part of the gradient; see `Gradients`.
        """

    def on_step(self, trainer: Any) -> None:
        """Called after each optimizer step. Reading a value from the device here makes the host wait."""

    def on_log(self, trainer: Any, row: LogRow) -> None:
        """Called at each log point.

        Args:
            row: The row, as in `FitResult.history`. On a GPU, this is the row of the previous log point.
        """

    def on_evaluate_start(self, trainer: Any) -> None:
        """Called before each evaluation, and again when a resumed run repeats an interrupted evaluation."""

    def on_evaluate(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Called after each evaluation.

        Args:
            metrics: The mean loss and all metrics by name, the same on all ranks.
        """

    def on_evaluate_end(self, trainer: Any) -> None:
        """Called after `on_evaluate` has run in all callbacks, to undo what `on_evaluate_start` changed.

        Also called if the evaluation failed. It may have failed on this rank only, so do not run collectives here."""

    def on_fit_end(self, trainer: Any, result: FitResult) -> None:
        """Called by `fit` after the last step, unless the run was interrupted.

        Args:
            result: The `FitResult` that `fit` will return.
        """


def creation_error(message: str, hint: str) -> ConfigError:
    """The error of a callback that cannot be created. Scripts create callbacks before the Trainer installs its hook."""
    show_without_traceback(rank_for_messages())
    return ConfigError(message, hint)


# --- Best value of a metric -------------------------------------------------------------------------------------------


def check_metric(owner: str, metric: str, metrics: Iterable[str]) -> None:
    """Raise `ConfigError` if `metric` is not among the `metrics` of an evaluation.

    `owner`: the name of the callback or setting that monitors the metric.
    """
    names = list(metrics)
    if metric not in names:
        hint = "use one of these, or add the metric to the Trainer's metrics"
        if (likely := nearest(metric, names)) is not None:
            hint = f"did you mean {likely!r}?"
        raise ConfigError(f"{owner} monitors {metric!r}, but evaluations return {', '.join(names)}", hint)


class BestValue:
    """The best value so far of one metric.

    `owner`: the name of the callback that monitors the metric. `min_delta`: an improvement must be larger than this, in
    the metric's unit.
    """

    def __init__(self, owner: str, metric: str, mode: Literal["min", "max"], min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise creation_error(
                f"{owner} got an invalid argument: mode={mode!r}",
                "use 'min' if lower is better, 'max' if higher is better",
            )
        if not min_delta >= 0:
            raise creation_error(
                f"{owner} got an invalid argument: min_delta={min_delta!r}", "use a number that is at least 0"
            )
        self.metric = metric
        self.mode = mode
        self.best: float | None = None
        self._owner = owner
        self._sign = 1.0 if mode == "min" else -1.0
        self._min_delta = min_delta

    def improved(self, metrics: dict[str, float]) -> bool:
        """Return whether the metric is better than the best value so far, and if so, record it. NaN is never better.

        Raises `ConfigError` if the metric is unknown.
        """
        check_metric(self._owner, self.metric, metrics)
        value = metrics[self.metric]
        if math.isnan(value):
            return False
        if self.best is not None and not self._sign * (self.best - value) > self._min_delta:
            return False
        self.best = value
        return True

    def state_dict(self) -> dict[str, Any]:
        """The metric, its mode and the best value."""
        return {"metric": self.metric, "mode": self.mode, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Load the best value and return True. If it belongs to another metric or mode, warn and return False."""
        own = (self.metric, self.mode)
        saved = (state["metric"], state["mode"])
        if saved != own:
            logger.warning(
                "{} starts without a best value: it monitors {!r} ({}), but the best value in the checkpoint is for "
                "{!r} ({})",
                self._owner,
                *own,
                *saved,
            )
            return False
        self.best = state["best"]
        if self.best is not None:
            self.best = real_number(self.best, f"the best {self.metric}")
        return True
