"""Rows of JSON, one object a line."""

import json
import math
from pathlib import Path
from typing import Any

from ddp_kit.callbacks.rows import FileLogger, file_row
from ddp_kit.errors import ConfigError


class JSONLinesLogger(FileLogger):
    """Adds one object per log point and one per evaluation to a file of JSON lines, on the main rank.

        {"event": "train", "step": 10, "epoch": 0, "loss": 0.7, ...}    the fields of `LogRow`
        {"event": "eval", "step": 10, "eval_loss": 0.6, ...}            the metrics

    NaN and infinity, which JSON does not have, are null. Each row is on disk at once; an existing file is continued,
    and a run that resumes from a checkpoint takes its rows of later steps out of it. Raises `ConfigError` for a
    file that does not hold JSON objects.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        if self._path.exists():
            with self._path.open("rb") as file:
                if file.read(1) not in (b"", b"{"):
                    raise ConfigError(
                        f"{self._path} is not a log of JSONLinesLogger: its first line is not a JSON object",
                        "use the path of a new file, or of a log to append to",
                    )

    def write(self, trainer: Any, kind: str, step: int, values: dict[str, Any]) -> None:
        """Add a line."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.begin()
        line = json.dumps(_finite(file_row(kind, step, values)), allow_nan=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def step_of(self, line: str) -> int:
        """Its field."""
        return int(json.loads(line)["step"])


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
