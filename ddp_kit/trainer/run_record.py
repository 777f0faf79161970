"""The log lines at the start and the end of a run, and the run record, which `ddpkit report` reads."""

import json
import platform
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ddp_kit import __version__
from ddp_kit.callbacks.callback import Callback
from ddp_kit.callbacks.json_lines_logger import JSONLinesLogger
from ddp_kit.callbacks.rows import columns, file_row
from ddp_kit.config.settings import TrainerConfig, absolute
from ddp_kit.data.sampler import BatchPlan
from ddp_kit.distributed.consistency import options_of, plain
from ddp_kit.distributed.world import World
from ddp_kit.env import (
    RECORD_ATTEMPTS,
    RECORD_FOLDER,
    RECORD_ROWS,
    attempt_id,
    default_record_folder,
    note_record_folders,
    process_environment,
    reported_variables,
)
from ddp_kit.errors import ConfigError
from ddp_kit.log import logger
from ddp_kit.masking import masked_env, masked_words
from ddp_kit.records import FitResult, LogRow
from ddp_kit.storage.urls import Location
from ddp_kit.texts import count_text, duration_text, plural, size_text
from ddp_kit.torch_internals import compilations
from ddp_kit.trainer.updates import optimizer_kind

# --- Log lines at the start and the end -------------------------------------------------------------------------------


_WORTH_SAYING = 0.05
"""Phases with a smaller share of the time are left out."""


def described_model(model: nn.Module) -> str:
    """A one-line description of a model that is not distributed yet: class, number of parameters, and size."""
    parameters = list(model.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() * parameter.requires_grad for parameter in parameters)
    kinds = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    text = f"{type(model).__name__}: {count_text(total)} parameters, "
    if trained != total:
        text += f"{count_text(trained)} of them trained ({100 * trained / total:.3g}%), "
    return f"{text}{size_text(size)} in {' and '.join(kinds)}"


def announce(
    world: World,
    plan: BatchPlan,
    config: TrainerConfig,
    done: int,
    total: int | None,
    division: str = "",
    model: str = "",
    planned: int | None = None,
) -> None:
    """Log what the run will train, from step `done` to step `total`. `total`: None if the data determines the end.

    `division`: the division of a step into batches; "" if `plan` describes it. `model`: see `described_model`.
    `planned`: bytes per device according to the memory plan; None if there is no plan.
    """
    if total is not None and total <= done:
        if config.max_steps is not None and config.max_steps < done:
            logger.warning(
                "nothing left to train: max_steps is {}, but the run is at step {} already; raise max_steps above it, "
                "or resume from an earlier checkpoint (checkpoint.resume)",
                config.max_steps,
                done,
            )
        else:
            logger.warning("nothing left to train: all {} steps are done; raise epochs or max_steps", total)
        return
    if model:
        sizes = {name: getattr(config.parallel, name) for name in ("shard", "tensor", "pipeline")}
        placement = ", ".join(f"{name} {size}" for name, size in sizes.items() if size != 1)
        if not placement:
            placement = "one device" if world.world_size == 1 else config.parallel.strategy
        folder = config.checkpoint.dir
        saves = "no checkpoints" if folder is None else f"checkpoints in {folder}"
        logger.info("{}; {}; {}", model, placement, saves)
    device = world.device.type
    if device == "cuda":
        device += f" ({torch.cuda.get_device_name(world.device)})"
    if not division:
        factors = f"micro-batch {plan.micro_batch} x accumulation {plan.accumulation} x {plan.data_ranks}"
        division = f"global batch {plan.global_batch} = {factors}"
        if plan.micro_batch * plan.accumulation * plan.data_ranks != plan.global_batch:
            division += ", at most"
    length = "to the end of the data" if total is None else f"{total} steps"
    if done:
        length = f"from step {done} to {length}"
    if config.last_epoch is not None:
        length += f", {plural(config.last_epoch, 'epoch')}"
    if planned is not None:
        length += f"; planned memory {size_text(planned)} per device"
    logger.info("{} on {}, {}: {}; {}", plural(world.world_size, "rank"), device, config.precision, division, length)


def conclude(
    result: FitResult,
    began: int,
    seconds: float,
    best: tuple[str, float] | None = None,
    saved: Location | None = None,
) -> None:
    """Log the duration of the run, this rank's time by phase, and the results.

    `began`: steps done before the run. `best`: a metric and its best value. `saved`: the newest checkpoint.
    """
    if result.steps == began:
        return
    rows = result.history
    trained = sum(steps * row.step_seconds for steps, row in _lengths(rows, began))
    parts = [f"{result.steps - began} steps in {duration_text(seconds)}"]
    shares = time_shares(rows, began)
    if shares:
        each = trained / (rows[-1].step - began)
        spent = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= _WORTH_SAYING)
        parts.append(f"{duration_text(each)} each: {spent}")
    known = [(row.mfu, steps * row.step_seconds) for steps, row in _lengths(rows, began) if row.mfu is not None]
    if known:
        parts.append(f"MFU {fmean(*zip(*known, strict=True)):.1%}")
    if seconds - trained > _WORTH_SAYING * seconds:
        parts.append(f"{duration_text(seconds - trained)} for evaluations, checkpoints and callbacks")
    values = {"loss": result.loss} | {f"eval {name}": value for name, value in result.metrics.items()}
    parts.append(", ".join(f"{name} {value:.4g}" for name, value in values.items()))
    if best is not None:
        parts.append("best {} {:.4g}".format(*best))
    if saved is not None:
        parts.append(f"saved in {saved}")
    logger.info("done: {}", "; ".join(parts))


def time_shares(rows: Sequence[LogRow], began: int) -> dict[str, float]:
    """The shares of a step's time by phase, the largest first; empty if there are no rows."""
    sums = dict.fromkeys(_PHASES, 0.0)
    for steps, row in _lengths(rows, began):
        for name, value in zip(_PHASES, row.times.figures, strict=True):
            sums[name] += steps * value
    total = sum(sums.values())
    if not total:
        return {}
    ordered = sorted(sums.items(), key=lambda pair: pair[1], reverse=True)
    return {name: value / total for name, value in ordered}


_PHASES = ("data", "transfer", "forward", "backward", "waiting for ranks", "optimizer", "other")


def _lengths(rows: Sequence[LogRow], began: int) -> list[tuple[int, LogRow]]:
    """Pairs of (number of steps since the previous row, row)."""
    ends = [began, *(row.step for row in rows)]
    return [(row.step - before, row) for before, row in zip(ends, rows, strict=False)]


# --- Run record -------------------------------------------------------------------------------------------------------
# JSON Lines files, whose format is in docs/run-record.md:
#
#     in_loop()        tells the launcher that this Trainer trains; a line in attempts.jsonl if it is stopped
#     begin()          a line in attempts.jsonl: model, configuration and first step; removes rows of later steps
#     note_samples()   the checksum of a step's samples, for the next line of a log point
#     on_log()         a line in rows.jsonl per log point; on_evaluate(): one per evaluation
#     advise()         a line in attempts.jsonl per line of advice
#     on_fit_end()     a line in attempts.jsonl with the result
#
# The launcher adds how each attempt ended, and samples of the machine's utilisation (launcher/record.py).


FORMAT = 1
_PACKAGES = ("numpy", "triton", "torchao", "torchvision", "transformers", "datasets", "accelerate", "peft")
_GIT_SECONDS = 5.0

# A process may have several Trainers: one after the other, or one in a callback of another one.
_begun: set[Path] = set()  # the records that Trainers of this process have begun
_in_loop: list[Path] = []  # the records of the Trainers that are training, the latest last
_numbers = count(1)  # numbers of the Trainers without a checkpoint folder, which are the same after a restart


class RunRecord(Callback):
    """Writes the run record on the main rank, into `record/` of the checkpoint folder or of the launcher's log folder.

    In the log folder, further Trainers of the process use `record-2/`, `record-3/`, ... A record of another run in the
    checkpoint folder is moved aside. If there is no such folder, nothing is written. If the record cannot be written, a
    warning is logged, and the run continues without a run record.
    """

    def __init__(self, config: TrainerConfig, world: World, model: str, optimizer: Optimizer) -> None:
        """`model`: a description of the model. `optimizer`: the optimizer, before a checkpoint is loaded."""
        self._config = config
        self._world = world
        self._model = model
        self._optimizer = described_optimizer(optimizer)
        saved = config.checkpoint.dir
        # In object storage, a row could not be appended to a file.
        self._on_disk = isinstance(saved, Path)
        self._folder = absolute(saved) / RECORD_FOLDER if isinstance(saved, Path) else default_record_folder()
        self._noted = Path()  # the folder that this process has added to `_in_loop`
        self._rows: _Rows | None = None
        self._attempts: _Rows | None = None
        self._has_begun = False
        self._advised: list[str] = []  # since the last log point
        self._samples: list[str | None] = []  # checksums of the steps that are in no row yet
        self._samples_after = 0  # the step before the first of them
        self._began = time.monotonic()
        self._attempt = attempt_id() or f"{uuid.uuid4()}.0"

    @property
    def is_written(self) -> bool:
        """Whether this rank writes the record."""
        return self._folder is not None and self._world.is_main

    def begin(self, step: int, total: int | None, planned_memory: int | None, *, continues: bool = False) -> None:
        """Record that training begins or continues after `step`. Call it in `in_loop`.

        `total`: the optimizer steps of the run, if known. `planned_memory`: bytes per device, if there is a plan.
        `continues`: whether the run has resumed from the newest checkpoint in its folder.
        """
        first = not self._has_begun
        self._has_begun = True
        self._samples = []
        self._samples_after = step
        if self._folder is None:
            return
        if first and not self._on_disk and (number := next(_numbers)) > 1:
            self._folder = self._folder.with_name(f"{RECORD_FOLDER}-{number}")
        folder = self._folder
        if self._world.is_main:
            keeps = first and not continues and not self._repeats(folder)
            self._write(lambda: self._open(folder, step, keeps_rows=keeps))
            if first:
                self._began = time.monotonic()
                plan = {"total_steps": total, "planned_memory": planned_memory}
                self._add("begin", step, **plan, **self._facts())
        # Not earlier: the launcher then adds to the record, which until here may be that of another, running job.
        if self._world.local_rank == 0 and self._folder is not None:
            self._noted = folder
            _in_loop.append(folder)
            note_record_folders(_in_loop)

    def note_samples(self, checksum: Callable[[], str | None]) -> None:
        """Record the samples of the step that has run. `checksum`: a function that returns their checksum, if known."""
        if self._rows is not None:
            self._samples.append(checksum())

    def on_log(self, trainer: Any, row: LogRow) -> None:  # noqa: ARG002
        for line in self._advised:
            self._add("advice", row.step, text=line)
        self._advised.clear()
        steps = row.step - self._samples_after
        facts = {
            "rank_seconds": row.rank_seconds,
            "rank_memory": row.rank_memory,
            "rank_seconds_summary": row.rank_seconds_summary,
            "rank_memory_summary": row.rank_memory_summary,
            "compilations": compilations(),
            "weights_checksum": row.weights_checksum,
            "samples_checksums": "".join(filter(None, self._samples[:steps])),  # None: the samples of a stream
        }
        self._samples = self._samples[steps:]
        self._samples_after = row.step
        known = {name: fact for name, fact in facts.items() if fact}
        self._add_row("train", row.step, dict(columns(row)), known)

    def on_evaluate(self, trainer: Any, metrics: dict[str, float]) -> None:
        self._add_row("eval", trainer.step, metrics, {})

    def advise(self, line: str) -> None:
        """Keep a line of advice until the next row is written."""
        self._advised.append(line)

    def on_fit_end(self, trainer: Any, result: FitResult) -> None:  # noqa: ARG002
        self._add(
            "done", result.steps, seconds=time.monotonic() - self._began, loss=result.loss, metrics=result.metrics
        )

    @contextmanager
    def in_loop(self, step: Callable[[], int]) -> Iterator[None]:
        """Context manager for a loop of steps. It records after which step a stop request, or the script, ends it."""
        try:
            yield
        except SystemExit:
            self._add("stop", step())
            raise
        finally:
            with suppress(ValueError):
                _in_loop.remove(self._noted)
            if _in_loop:  # otherwise the launcher still adds the end of the attempt to this record
                note_record_folders(_in_loop)

    def _open(self, folder: Path, step: int, *, keeps_rows: bool) -> None:
        rows = _Rows(folder / RECORD_ROWS)
        if keeps_rows and rows.has_rows_after(step):
            aside = folder.with_name(f"{folder.name}-set-aside-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}")
            if step == 0:
                folder.rename(aside)
            else:  # a branch: both runs have the earlier steps
                shutil.copytree(folder, aside)
            logger.info("the record of an earlier run in {} is kept in {}", folder, aside)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        rows.truncate_after(step)
        self._rows = rows
        self._attempts = _Rows(folder / RECORD_ATTEMPTS)
        _begun.add(folder)

    def _repeats(self, folder: Path) -> bool:
        """Whether this run repeats the steps of a record, because it is a later attempt of the job that wrote it."""
        if folder in _begun:
            return False
        job = ""
        with suppress(OSError):
            for line in (folder / RECORD_ATTEMPTS).read_text(errors="replace").splitlines():
                with suppress(ValueError, TypeError, LookupError, AttributeError):  # an incomplete line
                    event = json.loads(line)
                    if event["event"] == "begin":
                        job = event["attempt"].rpartition(".")[0]
        return job == self._attempt.rpartition(".")[0]

    def _facts(self) -> dict[str, Any]:
        device = self._world.device
        env = process_environment()
        return {
            "format": FORMAT,
            "command": masked_words(sys.argv, env),
            "folder": str(Path.cwd()),
            "host": platform.node(),
            "nodes": self._world.world_size // self._world.local_world_size,
            "ranks": self._world.world_size,
            "devices": [torch.cuda.get_device_name(device) if device.type == "cuda" else device.type],
            "model": self._model,
            "optimizer": self._optimizer,
            "config": self._config.model_dump(mode="json"),
            "versions": _versions(),
            "git": _commit(Path(sys.argv[0]).absolute().parent),
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
            logger.warning("cannot write the run record to {} ({}); the run continues without it", self._folder, error)
            self._folder = self._rows = self._attempts = None


def described_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """The class of an optimizer, and the options of its parameter groups as JSON values, by number if several.

    The learning rate is that from which a scheduler begins.
    """
    groups: dict[str, Any] = {}
    for number, options in enumerate(options_of(optimizer)):
        options["lr"] = options.pop("initial_lr", options.get("lr"))
        groups[str(number)] = {
            name: value if isinstance(value, bool | int | float | str | None) else plain(value)
            for name, value in options.items()
            if name != "param_names"
        }
    if len(groups) == 1:
        (groups,) = groups.values()
    return {"class": optimizer_kind(optimizer), **groups}


class _Rows(JSONLinesLogger):
    """A JSON Lines file whose rows all belong to this run: `truncate_after` may also remove those of other attempts."""

    def begin(self) -> int:
        return 0

    def has_rows_after(self, step: int) -> bool:
        """Whether `truncate_after` would remove rows."""
        return self._path.exists() and self._rows_after(step)[0] > 0


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


def _commit(folder: Path) -> dict[str, Any] | None:
    """The commit of the Git repository that contains `folder`, and whether its files have changed since."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "changed": bool(_git(folder, "status", "--porcelain", "-uno"))}


def _git(folder: Path, *words: str) -> str | None:
    """The output of a command about the Git repository that contains `folder`; None if it fails."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode:
        return None
    return done.stdout.strip()
