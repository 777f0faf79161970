"""Log points and evaluations as rows of names and values: the base classes of loggers."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddp_kit.callbacks.callback import Callback
from ddp_kit.config import absolute
from ddp_kit.errors import ConfigError
from ddp_kit.log import logger
from ddp_kit.records import LogRow
from ddp_kit.state_values import whole_number


class RowLogger(Callback):
    """Calls `write` for each log point ("train") and each evaluation ("eval"), on the main rank only."""

    def write(self, trainer: Any, kind: str, step: int, values: dict[str, Any]) -> None:
        """Write a row. `values`: the other fields of `LogRow` for a log point, the metrics for an evaluation."""
        raise NotImplementedError

    _taken_up = False  # a checkpoint was loaded, and the rows of later steps are not removed yet

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Note that the rows of steps after the checkpoint's are to be removed: these steps are repeated."""
        self._taken_up = True

    def take_back(self, step: int) -> None:
        """Remove the rows of later steps, before the first row of a run that resumes after `step`."""

    def on_fit_start(self, trainer: Any) -> None:
        """Remove the rows after the checkpoint's step, if a checkpoint was loaded."""
        self._take_back(trainer, trainer.step)

    def on_step(self, trainer: Any) -> None:
        """The same, in a loop over steps()."""
        self._take_back(trainer, trainer.step - 1)

    def on_log(self, trainer: Any, row: LogRow) -> None:
        """A row for the log point."""
        if trainer.world.is_main:
            values = dict(_columns(row))
            self.write(trainer, "train", values.pop("step"), values)

    def on_evaluate(self, trainer: Any, metrics: dict[str, float]) -> None:
        """A row for the evaluation."""
        self._take_back(trainer, trainer.step)
        if trainer.world.is_main:
            self.write(trainer, "eval", trainer.step, dict(metrics))

    def _take_back(self, trainer: Any, step: int) -> None:
        if self._taken_up:
            self._taken_up = False
            if trainer.world.is_main:
                self.take_back(step)


class FileLogger(RowLogger):
    """A `RowLogger` with a text file, one row per line. Rows of earlier runs in the file are kept."""

    def __init__(self, path: str | Path) -> None:
        self._path = absolute(path)
        self._begins: int | None = None  # the first line of this run; None until the file is open

    def state_dict(self) -> dict[str, Any]:
        """The file, and the first line of this run in it."""
        return {"path": str(self._path.absolute()), "begins": self.begin()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the file, if it is the same one."""
        if state["path"] == str(self._path.absolute()):
            self._begins = whole_number(state["begins"], "begins")
            super().load_state_dict(state)

    def begin(self) -> int:
        """Prepare the file for rows, and return the number of lines in it from earlier runs."""
        if self._begins is None:
            self._begins = 0
            if self._path.exists():
                drop_torn_row(self._path)
                with self._path.open("rb") as file:
                    self._begins = sum(1 for _ in file)
        return self._begins

    def step_of(self, line: str) -> int:
        """The step of a row. Raises `ValueError`, `LookupError` or `TypeError` if the line is not a row."""
        raise NotImplementedError

    def take_back(self, step: int) -> None:
        """Remove this run's rows of later steps; the file is replaced atomically."""
        if not self._path.exists():
            return
        drop_torn_row(self._path)
        with self._path.open(encoding="utf-8", newline="") as file:
            lines = list(file)
        begins = self.begin()
        kept = [line for number, line in enumerate(lines) if number < begins or not self._is_later(line, step)]
        if len(kept) < len(lines):
            part = self._path.with_name(f"{self._path.name}.part")
            part.write_text("".join(kept), encoding="utf-8", newline="")
            part.replace(self._path)
            logger.info("removed {} rows after step {} from {}", len(lines) - len(kept), step, self._path)

    def _is_later(self, line: str, step: int) -> bool:
        try:
            return self.step_of(line) > step
        except (ValueError, LookupError, TypeError):
            return False


def file_row(kind: str, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a file with both kinds: metrics of evaluations have the prefix `eval_`, because both have a loss."""
    prefix = "eval_" if kind == "eval" else ""
    return {"event": kind, "step": step} | {f"{prefix}{name}": value for name, value in values.items()}


def numbers(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The values that can be drawn as curves, under names such as train/loss and eval/loss."""
    drawn = (int, float)
    return {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, drawn)}


def require(package: str, owner: str) -> None:
    """Raise `ConfigError` if a package is not installed, without importing it."""
    if find_spec(package) is None:
        raise ConfigError(f"{owner} needs the package {package}, which is not installed", f"pip install {package}")


def drop_torn_row(path: Path) -> None:
    """Remove an incomplete last line, left by a run that was killed while writing."""
    with path.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            logger.warning("{} ended with an incomplete row, which was removed", path)
            file.truncate(whole)


def _columns(row: LogRow) -> Iterator[tuple[str, Any]]:
    """The fields of a row, with a column per parameter group if there are several, and one per logged value."""
    fields = asdict(row)
    logged, rates = fields.pop("values", {}), fields.pop("learning_rates", ())
    yield from _flat(fields)
    if len(rates) > 1:
        yield from ((f"learning_rate.{number}", rate) for number, rate in enumerate(rates))
    yield from logged.items()


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
