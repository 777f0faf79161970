"""The base classes of loggers. A logger writes a row of names and values at each log point and each evaluation."""

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from ddp_kit.callbacks.callback import Callback, creation_error
from ddp_kit.config.settings import absolute
from ddp_kit.log import logger
from ddp_kit.records import LogRow
from ddp_kit.state_values import whole_number

_ORDERED = 100
"""The number of rows of earlier steps after which all rows before them are also of earlier steps. A GPU's log points
are written one log point late, so one row may come after those of evaluations at later steps."""
_BLOCK = 1 << 16


class RowLogger(Callback):
    """The base class of loggers. It calls `write` at each log point and each evaluation, on the main rank only."""

    def write(self, trainer: Any, kind: str, step: int, values: dict[str, Any]) -> None:
        """Write a row.

        Args:
            trainer: The `Trainer` that logs.
            kind: "train" for a log point, "eval" for an evaluation.
            step: Optimizer steps done.
            values: Name -> value: at a log point, the fields of `LogRow` except `step`; at an evaluation, the metrics.
        """
        raise NotImplementedError

    _resumed = False  # whether a checkpoint was loaded and rows of later steps are still to be removed

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Record that rows after the checkpoint's step must be removed, because the run repeats these steps."""
        self._resumed = True

    def truncate_after(self, step: int) -> None:
        """Remove the rows of steps after `step`. Called before the first row of a run that resumes after `step`.

        Args:
            step: The last optimizer step whose rows are kept.
        """

    def on_fit_start(self, trainer: Any) -> None:
        """Remove the rows after the checkpoint's step, if a checkpoint was loaded."""
        self._truncate_once(trainer, trainer.step)

    def on_step(self, trainer: Any) -> None:
        """Do the work of `on_fit_start` in a loop over `steps()`, which does not call `on_fit_start`."""
        self._truncate_once(trainer, trainer.step - 1)

    def on_log(self, trainer: Any, row: LogRow) -> None:
        """Write a row for the log point."""
        if trainer.world.is_main:
            values = dict(columns(row))
            self.write(trainer, "train", values.pop("step"), values)

    def on_evaluate(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Write a row for the evaluation."""
        self._truncate_once(trainer, trainer.step)
        if trainer.world.is_main:
            self.write(trainer, "eval", trainer.step, dict(metrics))

    def _truncate_once(self, trainer: Any, step: int) -> None:
        if self._resumed:
            self._resumed = False
            if trainer.world.is_main:
                self.truncate_after(step)


class RunLogger(RowLogger):
    """The base class of loggers that log runs to a service, on the main rank only.

    `fit` starts and finishes a run. Later evaluations, and a Trainer that resumes from a checkpoint, continue
    the same run.
    """

    id_field = "id"
    """The name of a run's identifier, both as an attribute of the run and as an argument for starting the run."""

    def __init__(self, **init: Any) -> None:
        """`init`: the user's arguments for starting a run."""
        self._init = init
        self._run: Any = None
        self._continued: str | None = None  # the run that the next one continues

    def arguments(self, trainer: Any, continued: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the service's `init`: the user's own, the TrainerConfig, and the run to continue."""
        config = {**trainer.config.model_dump(mode="json"), **self._init.get("config", {})}
        if continued:
            continued = {**continued, "resume": "allow"}
        return {**continued, **self._init, "config": config}

    def start(self, trainer: Any, continued: dict[str, Any]) -> Any:
        """Start or continue a run.

        Args:
            trainer: The `Trainer` that logs.
            continued: `{id_field: id}` of the run to continue; an empty dict to start a new run.

        Returns:
            The run, which is passed to `log` and `finish`.
        """
        raise NotImplementedError

    def log(self, run: Any, step: int, values: dict[str, float]) -> None:
        """Log a row.

        Args:
            run: The run that `start` returned.
            step: Optimizer steps done.
            values: The numbers by name, such as train/loss.
        """
        raise NotImplementedError

    def finish(self, run: Any) -> None:
        """Finish a run.

        Args:
            run: The run that `start` returned.
        """
        run.finish()

    def state_dict(self) -> dict[str, Any]:
        """The id of the current run, or of the run to continue; None if there is neither."""
        return {"id": self._continued if self._run is None else getattr(self._run, self.id_field)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the checkpoint's run, unless this process has already started one."""
        if self._run is None and self._continued is None:
            self._continued = state.get("id")

    def on_fit_start(self, trainer: Any) -> None:
        """Start the run before the first step, so that the service records system metrics from the beginning."""
        if trainer.world.is_main:
            self._open(trainer)

    def write(self, trainer: Any, kind: str, step: int, values: dict[str, Any]) -> None:
        """Log the row."""
        self.log(self._open(trainer), step, numbers(kind, values))

    def on_fit_end(self, trainer: Any, result: Any) -> None:
        """Finish the run."""
        if self._run is not None:
            self._continued = getattr(self._run, self.id_field)
            self.finish(self._run)
            self._run = None

    def _open(self, trainer: Any) -> Any:
        if self._run is None:
            continued = {}
            if self._continued is not None:
                continued[self.id_field] = self._continued
            self._run = self.start(trainer, continued)
        return self._run


class FileLogger(RowLogger):
    """A `RowLogger` that writes a text file with one row per line. Rows of earlier runs in the file are kept."""

    def __init__(self, path: str | Path) -> None:
        self._path = absolute(path, f"the file of {type(self).__name__}")
        self._begins: int | None = None  # the index of this run's first line; None until the file is open

    def state_dict(self) -> dict[str, Any]:
        """The path of the file, and the index of this run's first line in it."""
        return {"path": str(self._path.absolute()), "begins": self.begin()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """If the checkpoint's run wrote to the same file, continue its rows; otherwise do nothing."""
        if state["path"] == str(self._path.absolute()):
            self._begins = whole_number(state["begins"], "begins")
            super().load_state_dict(state)

    def begin(self) -> int:
        """Remove an incomplete last row of the file, and return the number of lines that earlier runs have written."""
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

    def truncate_after(self, step: int) -> None:
        """Remove the rows that this run wrote for steps after `step`. The file is never without the rows that stay."""
        if not self._path.exists():
            return
        drop_torn_row(self._path)
        removed, first, behind = self._rows_after(step)
        if removed == 0:
            return
        if behind:
            part = self._path.with_name(f"{self._path.name}.part")
            shutil.copyfile(self._path, part)
            with part.open("r+b") as file:
                file.truncate(first)
                file.seek(first)
                file.writelines(behind)
            part.replace(self._path)
        else:
            os.truncate(self._path, first)
        logger.info("removed {} rows after step {} from {}", removed, step, self._path)

    def _rows_after(self, step: int) -> tuple[int, int, list[bytes]]:
        """The rows of this run after `step`: their number, the position of the first, and other rows behind it.

        Reads from the end of the file, as far as its rows may be out of order.
        """
        removed = 0
        first = 0
        behind: list[bytes] = []
        others: list[bytes] = []  # since the last row after `step`
        for position, line in lines_backwards(self._path, _position_of_line(self._path, self.begin())):
            if self._is_later(line.decode(errors="replace"), step):
                removed += 1
                first = position
                behind += others
                others = []
            else:
                others.append(line)
                if len(others) == _ORDERED:
                    break
        return removed, first, behind[::-1]

    def _is_later(self, line: str, step: int) -> bool:
        try:
            return self.step_of(line) > step
        except (ValueError, LookupError, TypeError):
            return False


def file_row(kind: str, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """A row for a file that contains both log points and evaluations.

    Names of metrics get the prefix `eval_`, to distinguish their columns from those of log points, such as `loss`.
    """
    if kind == "eval":
        values = {f"eval_{name}": value for name, value in values.items()}
    return {"event": kind, "step": step, **values}


def numbers(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The values that are numbers, with `kind` as the prefix of their names, as in train/loss and eval/loss."""
    return {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)}


def require(package: str, owner: str) -> None:
    """Raise `ConfigError` if a package is not installed. The package is not imported."""
    spec = find_spec(package)
    # A folder without __init__.py has a spec without an origin. wandb creates a folder `wandb` for its runs.
    if spec is None or spec.origin is None:
        raise creation_error(f"{owner} needs the package {package}, which is not installed", f"pip install {package}")


def drop_torn_row(path: Path) -> None:
    """Remove an incomplete last line, left by a run that was killed while writing."""
    position, line = next(lines_backwards(path), (0, b"\n"))
    if not line.endswith(b"\n"):
        logger.warning("{} ended with an incomplete row, which was removed", path)
        os.truncate(path, position)


def lines_backwards(path: Path, begin: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield (position, line) for each line of a file, from the last one to the one at the position `begin`."""
    with path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        torn = b""  # the end of a line that begins before `position`
        while position > begin:
            size = min(_BLOCK, position - begin)
            position -= size
            file.seek(position)
            content = file.read(size) + torn
            lines = content.splitlines(keepends=True)
            torn = lines.pop(0) if position > begin else b""
            end = position + len(content)
            for line in reversed(lines):
                end -= len(line)
                yield end, line


def _position_of_line(path: Path, number: int) -> int:
    with path.open("rb") as file:
        return sum(map(len, islice(file, number)))


_RECORDED = ("rank_seconds", "rank_memory", "rank_seconds_summary", "rank_memory_summary", "weights_checksum")


def columns(row: LogRow) -> Iterator[tuple[str, Any]]:
    """Pairs of (name, value) for a row's columns: fields, learning rates if there are several, and logged values.

    Fields about each rank and the checksum are left out: only the run record has them. `mfu` is left out if it is
    unknown.
    """
    fields = dict(vars(row))  # dataclasses.asdict takes five times as long
    for name in _RECORDED:
        fields.pop(name, None)
    if fields.get("mfu") is None:
        fields.pop("mfu", None)
    logged = fields.pop("values", {})
    rates = fields.pop("learning_rates", ())
    yield from flat(fields)
    if len(rates) > 1:
        yield from ((f"learning_rate.{number}", rate) for number, rate in enumerate(rates))
    yield from logged.items()


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Pairs of (name, value) for nested values, with names such as data.num_workers."""
    for name, value in values.items():
        if is_dataclass(value):
            value = vars(value)
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
