"""The logger that writes a CSV file."""

import csv
from pathlib import Path
from typing import Any

from ddp_kit.callbacks.callback import creation_error
from ddp_kit.callbacks.rows import FileLogger, file_row

_FIRST = ["event", "step"]


class CSVLogger(FileLogger):
    """Appends one row per log point and one per evaluation to a CSV file, on the main rank.

        event             train (a log point) or eval (an evaluation)
        step              optimizer steps done
        epoch, loss, ...  the fields of `LogRow`, empty in rows of evaluations
        eval_loss, ...    the metrics, empty in rows of log points

    The file is closed after each row. New columns are added on the right: the file is replaced atomically by one
    with a longer header. When a run resumes from a checkpoint, its rows for steps after the checkpoint are removed.

    Args:
        path: The path of the file. If the file exists, rows are appended to it.

    Raises:
        ConfigError: If the file was not written by a CSVLogger.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._columns: list[str] | None = None
        _read_columns(self._path)

    def write(self, trainer: Any, kind: str, step: int, values: dict[str, Any]) -> None:
        """Append a row, after adding any new columns."""
        row = file_row(kind, step, values)
        if self._columns is None or not self._path.exists():
            self._columns = self._open()
        columns = [*self._columns, *(name for name in row if name not in self._columns)]
        if columns != self._columns:
            self._rewrite(columns)
            self._columns = columns
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow([row.get(name) for name in columns])

    def step_of(self, line: str) -> int:
        """The step of a row: its second column."""
        return int(line.split(",", 2)[1])

    def _open(self) -> list[str]:
        """Create the folder, remove an incomplete last row, and return the columns of the file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.begin()
        return _read_columns(self._path)

    def _rewrite(self, columns: list[str]) -> None:
        """Atomically replace the file with one that has the same rows and a longer header."""
        rows: list[list[str]] = []
        if self._path.exists():
            with self._path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.reader(file))[1:]
        part = self._path.with_name(f"{self._path.name}.part")
        with part.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows([*row, *[""] * (len(columns) - len(row))] for row in rows)
        part.replace(self._path)


def _read_columns(path: Path) -> list[str]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        columns = next(csv.reader(file), [])
    if columns and columns[: len(_FIRST)] != _FIRST:
        raise creation_error(
            f"{path} was not written by CSVLogger: its first columns are {', '.join(columns[:3])}",
            "use the path of a new file, or of a log that CSVLogger wrote",
        )
    return columns
