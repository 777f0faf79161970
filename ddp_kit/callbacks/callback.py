"""The events of a training run, and the base class of callbacks."""

from typing import Any

from ddp_kit.records import FitResult, LogRow


class Callback:
    """Override what is needed. Every rank calls every event, in the same order.

    `trainer` is the `Trainer` that calls; `trainer.stop()`, called on all ranks, ends the run after this step.

        on_fit_start -> (on_step -> [on_log] -> [on_evaluate_start -> on_evaluate -> on_evaluate_end])* -> on_fit_end
    """

    state_per_rank = False
    """Whether a checkpoint has the state of every rank; otherwise it has that of rank 0, which all ranks load."""

    metrics_needed: tuple[str, ...] = ()
    """The names of metrics that it reads from evaluations; `fit` checks before the first step that they exist."""

    def state_dict(self) -> dict[str, Any]:
        """State to save in a checkpoint: numbers, strings and tensors, nested in any way."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; called before the first step."""

    def on_fit_start(self, trainer: Any) -> None:
        """Before the first optimizer step."""

    def on_step(self, trainer: Any) -> None:
        """After each optimizer step. Reading a value from the device here makes the host wait."""

    def on_log(self, trainer: Any, row: LogRow) -> None:
        """At each log point, with its row of `FitResult.history`; on a GPU one interval late."""

    def on_evaluate_start(self, trainer: Any) -> None:
        """Before each evaluation; called again when a run resumes in an interrupted evaluation."""

    def on_evaluate(self, trainer: Any, metrics: dict[str, float]) -> None:
        """After each evaluation, with the mean loss and the metrics, the same on all ranks."""

    def on_evaluate_end(self, trainer: Any) -> None:
        """After every callback's `on_evaluate`: undo here what `on_evaluate_start` changed.

        Also called if the evaluation failed, possibly on this rank only: no collectives here.
        """

    def on_fit_end(self, trainer: Any, result: FitResult) -> None:
        """After the last step of a run that was not interrupted."""
