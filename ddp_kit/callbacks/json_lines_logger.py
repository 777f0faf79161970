"""The logger that writes JSON Lines."""

import json
import math
from pathlib import Path
from typing import Any

from ddp_kit.callbacks.callback import creation_error
from ddp_kit.callbacks.rows import FileLogger, file_row


class JSONLinesLogger(FileLogger):
    """Appends a line with a JSON object to a file at each log point and each evaluation, on the main rank.

        {"event": "train", "step": 10, "epoch": 0, "loss": 0.7, ...}    the fields of `LogRow`
        {"event": "eval", "step": 10, "eval_loss": 0.6, ...}            the metrics

    NaN and infinity are written as null, because JSON has no such values. The file is closed after each row. When a
    run resumes from a checkpoint, its rows for steps after the checkpoint are removed.

    Args:
        path: The path of the file. If the file exists, rows are appended to it.

    Raises:
        ConfigError: If the file does not begin with a JSON object.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        if self._path.exists():
            with self._path.open("rb") as file:
                if file.read(1) not in (b"", b"{"):
                    raise creation_error(
                        f"{self._path} was not written by JSONLinesLogger: its first line is not a JSON object",
                        "use the path of a new file, or of a log that JSONLinesLogger wrote",
                    )

    def write(self, trainer: Any, kind: str, step: int, values: dict[str, Any]) -> None:
        """Append a row as one line of JSON."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.begin()
        self.add(file_row(kind, step, values))

    def add(self, row: dict[str, Any]) -> None:
        """Append any JSON object as a line.

        Args:
            row: Name -> JSON value; NaN and infinity become null.
        """
        line = json.dumps(_finite(row), allow_nan=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def step_of(self, line: str) -> int:
        """The step of a row: the field `step`."""
        return int(json.loads(line)["step"])


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
