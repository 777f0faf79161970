"""The events of a training run, and the base class of callbacks."""

from typing import Any

from ddp_kit.records import FitResult, LogRow


class Callback:
    """The base class of callbacks: override the events that you need. Every rank calls all events, in the same order.

        on_fit_start -> (on_step -> [on_log] -> [on_evaluate_start -> on_evaluate -> on_evaluate_end])* -> on_fit_end

    `trainer` is the `Trainer` that calls the event. To end the run after the current step, call `trainer.stop()` on all
    ranks.
    """

    state_per_rank = False
    """Whether checkpoints hold the state of every rank. If False, they hold rank 0's, and all ranks load that."""

    metrics_needed: tuple[str, ...] = ()
    """The metrics that this callback reads from evaluations; `fit` checks that they exist before the first step."""

    def state_dict(self) -> dict[str, Any]:
        """The state to save in a checkpoint: numbers, strings and tensors, in any nested containers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned. Called when a checkpoint is loaded, before the next step."""

    def on_fit_start(self, trainer: Any) -> None:
        """Called before the first optimizer step."""

    def on_step(self, trainer: Any) -> None:
        """Called after each optimizer step. Reading a value from the device here makes the host wait for it."""

    def on_log(self, trainer: Any, row: LogRow) -> None:
        """Called at each log point. `row`: as in `FitResult.history`; on a GPU, that of the previous log point."""

    def on_evaluate_start(self, trainer: Any) -> None:
        """Called before each evaluation, and again when a resumed run repeats an interrupted evaluation."""

    def on_evaluate(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Called after each evaluation. `metrics`: the mean loss and all metrics, the same on all ranks."""

    def on_evaluate_end(self, trainer: Any) -> None:
        """Called after every callback's `on_evaluate`, to undo what `on_evaluate_start` changed.

        Also called if the evaluation failed, possibly on this rank only, so it must not run collectives.
        """

    def on_fit_end(self, trainer: Any, result: FitResult) -> None:
        """Called after the last step, unless the run was interrupted."""
