"""The events of a training run, for code that watches or steers it from outside."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_kit.trainer import FitResult, LogRow, Trainer


class Callback:
    """Override what is needed; every rank calls every event, so a callback may use collectives.

    on_fit_start -> (on_step -> [on_log] -> [on_evaluate])* -> on_fit_end
    """

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Before the first optimizer step."""

    def on_step(self, trainer: "Trainer") -> None:
        """After each optimizer step. Reading a value from the device here makes the host wait."""

    def on_log(self, trainer: "Trainer", row: "LogRow") -> None:
        """At each log point, with its row of `FitResult.history`."""

    def on_evaluate(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        """After each evaluation."""

    def on_fit_end(self, trainer: "Trainer", result: "FitResult") -> None:
        """After the last step of a run that was not interrupted."""
