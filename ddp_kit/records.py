"""Read-only records of a run: log rows, steps and results."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ddp_kit.texts import size_text

_MIN_SHOWN_WAIT = 0.05
"""The minimum share of a step's time at which waiting for other ranks is shown."""


@dataclass(frozen=True)
class LogRow:
    """One log point: statistics of the interval since the previous one."""

    step: int
    """Optimizer steps done."""
    epoch: int
    """The index of the epoch, from 0. `str(row)` shows it from 1."""
    loss: float
    """Mean loss over the interval and all ranks, weighted by samples or by the weights of `Loss`."""
    learning_rate: float
    """The learning rate of the optimizer's first parameter group in the row's last step."""
    grad_norm: float
    """Global norm of the gradient at the row's last step, before clipping; not finite if the step was skipped because
    of its gradient, and 0 if the norm was not measured."""
    samples_per_second: float
    """Training throughput of all ranks together."""
    step_seconds: float
    """Wall time per optimizer step, without evaluations."""
    times: "StepTimes"
    """The wall time of this rank, divided into phases."""
    slowest_rank: int
    """The rank with the largest `StepTimes.own`, for which the other ranks wait."""
    slowest_factor: float
    """The slowest rank's `StepTimes.own`, divided by the median `StepTimes.own` of the other ranks."""
    values: dict[str, float] = field(default_factory=dict)
    """The values passed to `trainer.log`, averaged over the interval and all ranks."""
    learning_rates: tuple[float, ...] = ()
    """The learning rate of each parameter group in the row's last step."""
    rank_seconds: tuple[float, ...] = ()
    """`StepTimes.own` of each rank: seconds per optimizer step without waiting for other ranks. Only on rank 0, and
    empty with more than 64 ranks."""
    rank_memory: tuple[int, ...] = ()
    """The peak number of bytes that torch has allocated on each rank's GPU so far; empty on a CPU. Only on rank 0, and
    empty with more than 64 ranks."""
    rank_seconds_summary: tuple[float, ...] = ()
    """With more than 64 ranks, on rank 0: the lowest, the median and the highest of what `rank_seconds` would have."""
    rank_memory_summary: tuple[int, ...] = ()
    """With more than 64 ranks, on rank 0: the lowest, the median and the highest of what `rank_memory` would have."""
    mfu: float | None = None
    """Model FLOPs utilisation over all ranks, from 0 to 1; None: not known, see `TrainerConfig.mfu`."""
    weights_checksum: str | None = None
    """A checksum of the model's parameters after the row's step; None with `verify_ranks="off"`, and with one rank
    that writes no run record."""

    @property
    def data_seconds(self) -> float:
        """Seconds per step that this rank spent waiting for batches."""
        return self.times.data

    def __str__(self) -> str:
        parts = [
            f"epoch {self.epoch + 1}",
            f"loss {self.loss:.4g}",
            *(f"{name} {value:.4g}" for name, value in self.values.items()),
            f"lr {self.learning_rate:.3g}",
            f"{self.samples_per_second:,.0f} samples/s",
        ]
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.1%}")
        parts.append(f"data {self.data_seconds / self.step_seconds:.0%}")
        waits = self.times.communication / self.step_seconds
        if waits >= _MIN_SHOWN_WAIT:
            parts.append(f"ranks {waits:.0%}")
        if memory := self.rank_memory or self.rank_memory_summary:
            parts.append(f"memory {size_text(max(memory))}")
        return "  ".join(parts)


@dataclass(frozen=True)
class StepTimes:
    """One rank's wall time by phase: seconds per optimizer step, averaged over an interval."""

    data: float
    """Time spent waiting for batches."""
    transfer: float
    """Time spent copying batches to the device."""
    forward: float
    backward: float
    """Time of the backward passes, without `communication`."""
    communication: float
    """Idle time in which the rank waits for other ranks or the network; overlapped communication does not count."""
    optimizer: float
    """Time of gradient clipping and the optimizer step."""
    other: float
    """The rest of the wall time, such as callbacks, logging and the loop itself."""

    @property
    def figures(self) -> tuple[float, ...]:
        """All fields in order, as a tuple; about 30 times as fast as `dataclasses.astuple`."""
        return (
            self.data,
            self.transfer,
            self.forward,
            self.backward,
            self.communication,
            self.optimizer,
            self.other,
        )

    @property
    def total(self) -> float:
        """The wall time of a step."""
        return self.own + self.communication

    @property
    def own(self) -> float:
        """The wall time of a step without `communication`. The other ranks wait for the rank with the largest value."""
        return self.data + self.transfer + self.forward + self.backward + self.optimizer + self.other


@dataclass(frozen=True)
class Step:
    """A completed optimizer step."""

    number: int
    """The number of the step in the whole run, from 1; equals `trainer.step`."""
    epoch: int
    """The index of the epoch, from 0."""
    samples: int
    """Samples in this step over all ranks."""
    ends_epoch: bool
    """Whether this is the last step of its epoch."""
    log: LogRow | None
    """The log row that became available at this step; None for most steps."""


@dataclass(frozen=True)
class FitResult:
    """The result of `Trainer.fit`, which is the same on every rank, except for measured times."""

    steps: int
    """Optimizer steps done."""
    samples: int
    """Number of samples that all ranks together have trained on; a sample is counted again in each epoch."""
    loss: float
    """The mean loss of the last log row, also if an earlier call or a resumed run has logged it; NaN without a row."""
    history: tuple[LogRow, ...]
    """One row per log point; if there are more than 10,000, the newest 10,000. Loggers write all of them."""
    skipped: int
    """Steps skipped because a gradient was not finite: by fp16 loss scaling, or by `non_finite_gradients="skip"`."""
    metrics: dict[str, float]
    """The loss and metrics of the last evaluation; empty if there was none."""

    def __repr__(self) -> str:
        return _short(self, history=f"{len(self.history)} rows")


@dataclass(frozen=True)
class LearningRateSearch:
    """The result of a learning-rate range test; the same on every rank."""

    rates: tuple[float, ...]
    """The learning rates that were tried for the optimizer's first parameter group, in ascending order."""
    losses: tuple[float, ...]
    """The smoothed loss at each rate."""
    suggestion: float | None
    """The rate at which the loss falls most steeply; None if it never fell."""

    def __repr__(self) -> str:
        return _short(self, rates=f"{len(self.rates)} rates", losses=f"{len(self.losses)} losses")


@dataclass(frozen=True)
class LoadedWeights:
    """The result of `load_model`: names of weights and buffers that were loaded, and of those that did not match."""

    path: Path | str
    """The checkpoint or the file that was loaded; a str if it is a URL."""
    step: int | None
    """The optimizer step of the checkpoint; None for a file."""
    loaded: tuple[str, ...]
    """The names that were loaded, as in the model's state_dict."""
    missing: tuple[str, ...] = ()
    """Names that only the model has; their values remain unchanged."""
    unexpected: tuple[str, ...] = ()
    """Names that only the checkpoint has."""
    mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Name -> (shape in the checkpoint, shape in the model) if these differ; the model keeps its own values."""

    @property
    def matches(self) -> bool:
        """Whether the checkpoint and the model have the same names and shapes."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        shapes = [f"{name} {[*saved]} -> {[*own]}" for name, (saved, own) in self.mismatched.items()]
        found = {"missing": self.missing, "unexpected": self.unexpected, "of another shape": shapes}
        lists = [f"{what}: {', '.join(names)}" for what, names in found.items() if names]
        return "; ".join([f"{len(self.loaded)} weights and buffers from {self.path}", *lists])


def _short(record: Any, **lengths: str) -> str:
    """The `repr` of a record, with a length in place of each long field."""
    values = {each.name: repr(getattr(record, each.name)) for each in fields(record)}
    values |= {name: f"<{length}>" for name, length in lengths.items()}
    return f"{type(record).__name__}({', '.join(f'{name}={value}' for name, value in values.items())})"
