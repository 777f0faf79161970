"""Log points and evaluations as rows of names and values, for what writes them somewhere."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddp_kit.callbacks.callback import Callback
from ddp_kit.errors import ConfigError
from ddp_kit.log import logger
from ddp_kit.records import LogRow


class RowLogger(Callback):
    """Calls `write` for each log point ("train") and each evaluation ("eval"), on the main rank alone."""

    def write(self, trainer: Any, kind: str, step: int, values: dict[str, Any]) -> None:
        """Write a row. `values`: of a log point the other fields of `LogRow`, of an evaluation the metrics."""
        raise NotImplementedError

    def on_log(self, trainer: Any, row: LogRow) -> None:
        """A row for the log point."""
        if trainer.world.is_main:
            values = dict(_flat(asdict(row)))
            self.write(trainer, "train", values.pop("step"), values)

    def on_evaluate(self, trainer: Any, metrics: dict[str, float]) -> None:
        """A row for the evaluation."""
        if trainer.world.is_main:
            self.write(trainer, "eval", trainer.step, dict(metrics))


def file_row(kind: str, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a file that holds both kinds: metrics have `eval_` before their names, for both have a loss."""
    prefix = "eval_" if kind == "eval" else ""
    return {"event": kind, "step": step} | {f"{prefix}{name}": value for name, value in values.items()}


def numbers(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """What can be drawn as a curve, under names such as train/loss and eval/loss."""
    drawn = (int, float)
    return {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, drawn)}


def require(package: str, owner: str) -> None:
    """Raise `ConfigError` where a package is not installed; it is not imported here."""
    if find_spec(package) is None:
        raise ConfigError(f"{owner} needs the package {package}, which is not installed", f"pip install {package}")


def drop_torn_row(path: Path) -> None:
    """Take away a last line without its end: what a run was writing when it was killed."""
    with path.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            logger.warning("{} ends in the middle of a row, which is taken away", path)
            file.truncate(whole)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
