"""The events of a training run, for code that watches it from outside."""

from typing import Any

from ddp_kit.records import FitResult, LogRow


class Callback:
    """Override what is needed. Every rank calls every event, in the same order.

    `trainer` is the `Trainer` that tells.

    on_fit_start -> (on_step -> [on_log] -> [on_evaluate])* -> on_fit_end
    """

    def on_fit_start(self, trainer: Any) -> None:
        """Before the first optimizer step."""

    def on_step(self, trainer: Any) -> None:
        """After each optimizer step. Reading a value from the device here makes the host wait."""

    def on_log(self, trainer: Any, row: LogRow) -> None:
        """At each log point, with its row of `FitResult.history`."""

    def on_evaluate(self, trainer: Any, metrics: dict[str, float]) -> None:
        """After each evaluation."""

    def on_fit_end(self, trainer: Any, result: FitResult) -> None:
        """After the last step of a run that was not interrupted."""
