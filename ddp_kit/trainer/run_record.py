"""Writes the record of a run, which `ddpkit report` reads: JSON Lines files. Their format is in docs/run-record.md.

    begin()          a line in attempts.jsonl: model, configuration and first step; removes rows of later steps
    on_log()         a line in rows.jsonl per log point; on_evaluate(): one per evaluation
    advise()         a line in attempts.jsonl per line of advice
    on_fit_end()     a line in attempts.jsonl with the result

The launcher adds how each attempt ended, and the machine's utilisation (launcher/record_keeper.py).
"""

import platform
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ddp_kit import __version__
from ddp_kit.callbacks.callback import Callback
from ddp_kit.callbacks.json_lines_logger import JSONLinesLogger
from ddp_kit.callbacks.rows import columns, file_row
from ddp_kit.config import TrainerConfig, absolute
from ddp_kit.env import (
    RECORD_ATTEMPTS,
    RECORD_FOLDER,
    RECORD_ROWS,
    attempt_id,
    note_record_folder,
    noted_record_folder,
    process_environment,
    reported_variables,
)
from ddp_kit.errors import ConfigError
from ddp_kit.log import logger
from ddp_kit.masking import masked_env, masked_words
from ddp_kit.records import FitResult, LogRow
from ddp_kit.torch_internals import compilations
from ddp_kit.world import World

FORMAT = 1
_PACKAGES = ("numpy", "triton", "torchao", "torchvision", "transformers", "datasets", "accelerate", "peft")
_GIT_SECONDS = 5.0


class RunRecord(Callback):
    """Writes the record on the main rank, into `record/` of the checkpoint folder or of the launcher's log folder.

    Without such a folder, nothing is written. If the record cannot be written, a warning is logged, and the run
    continues without it.
    """

    def __init__(self, config: TrainerConfig, world: World, model: str) -> None:
        """`model`: a description of the model."""
        self._config, self._world, self._model = config, world, model
        saved = config.checkpoint.dir
        self._folder = noted_record_folder() if saved is None else absolute(saved) / RECORD_FOLDER
        self._rows: _Rows | None = None
        self._attempts: _Rows | None = None
        self._advised: list[str] = []  # since the last log point
        self._began = time.monotonic()
        self._attempt = attempt_id() or f"{uuid.uuid4()}.0"
        if self._folder is not None and world.local_rank == 0:
            note_record_folder(self._folder)

    def begin(self, step: int, total: int | None, planned_memory: int | None) -> None:
        """Note that training begins or continues after `step`.

        `total`: the optimizer steps of the run, if known. `planned_memory`: bytes per device, if there is a plan.
        """
        if self._folder is None or not self._world.is_main:
            return
        first, folder = self._rows is None, self._folder
        self._write(lambda: self._open(folder, step))
        if first:
            self._began = time.monotonic()
            plan = {"total_steps": total, "planned_memory": planned_memory}
            self._add("begin", step, **plan, **self._facts())

    def on_log(self, trainer: Any, row: LogRow) -> None:  # noqa: ARG002
        for line in self._advised:
            self._add("advice", row.step, text=line)
        self._advised.clear()
        facts: dict[str, Any] = {"rank_seconds": row.rank_seconds}
        if row.rank_memory:
            facts["rank_memory"] = row.rank_memory
        if count := compilations():
            facts["compilations"] = count
        self._add_row("train", row.step, dict(columns(row)), facts)

    def on_evaluate(self, trainer: Any, metrics: dict[str, float]) -> None:
        self._add_row("eval", trainer.step, metrics, {})

    def advise(self, line: str) -> None:
        """Note a line of advice; it is written with the next row."""
        self._advised.append(line)

    def on_fit_end(self, trainer: Any, result: FitResult) -> None:  # noqa: ARG002
        self._add(
            "done", result.steps, seconds=time.monotonic() - self._began, loss=result.loss, metrics=result.metrics
        )

    def _open(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._rows, self._attempts = _Rows(folder / RECORD_ROWS), _Rows(folder / RECORD_ATTEMPTS)
        self._rows.take_back(step)

    def _facts(self) -> dict[str, Any]:
        device, env = self._world.device, process_environment()
        return {
            "format": FORMAT,
            "command": masked_words(sys.argv, env),
            "folder": str(Path.cwd()),
            "host": platform.node(),
            "nodes": self._world.world_size // self._world.local_world_size,
            "ranks": self._world.world_size,
            "devices": [torch.cuda.get_device_name(device) if device.type == "cuda" else device.type],
            "model": self._model,
            "config": self._config.model_dump(mode="json"),
            "versions": _versions(),
            "git": _git(Path(sys.argv[0]).absolute().parent),
            "environment": reported_variables(masked_env(env)),
        }

    def _add(self, event: str, step: int, **facts: Any) -> None:
        if (attempts := self._attempts) is not None:
            line = {"event": event, "attempt": self._attempt, "time": time.time(), "step": step, **facts}
            self._write(lambda: attempts.add(line))

    def _add_row(self, kind: str, step: int, values: dict[str, Any], facts: dict[str, Any]) -> None:
        if (rows := self._rows) is not None:
            values.pop("step", None)
            line = {**file_row(kind, step, values), **facts, "attempt": self._attempt, "time": time.time()}
            self._write(lambda: rows.add(line))

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, ConfigError) as error:  # ConfigError: the file is from another program
            logger.warning("no record of this run is kept in {}: {}", self._folder, error)
            self._folder = self._rows = self._attempts = None


class _Rows(JSONLinesLogger):
    """A JSON Lines file in which all rows are from this run, so that `take_back` may remove any of them."""

    def begin(self) -> int:
        return 0


def _versions() -> dict[str, str]:
    found = {"ddpkit": __version__, "Python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.version.cuda is not None:
        found["CUDA"] = torch.version.cuda
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _git(folder: Path) -> dict[str, Any] | None:
    """The commit of the repository that `folder` is in, and whether files differ from it; None: there is none."""
    commit, changed = _asked_git(folder, "rev-parse", "HEAD"), _asked_git(folder, "status", "--porcelain", "-uno")
    return None if commit is None else {"commit": commit, "changed": bool(changed)}


def _asked_git(folder: Path, *words: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
