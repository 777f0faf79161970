"""What a run reports: log points, steps, the result. Read-only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class LogRow:
    """One log point: what happened since the one before."""

    step: int
    """Optimizer steps done."""
    epoch: int
    """Counted from 0; `str` counts it from 1."""
    loss: float
    """Mean over the interval's samples (or weights) on all ranks."""
    learning_rate: float
    """Of the optimizer's first parameter group, for the step to come."""
    grad_norm: float
    """Of the gradient at the row's last step, over all parameters, before clipping; 0 where it was not measured."""
    samples_per_second: float
    """Over all ranks."""
    step_seconds: float
    """Wall time per optimizer step, without evaluations."""
    times: "StepTimes"
    """Where the wall time of this rank went."""
    slowest_rank: int
    """The one that needed the most time for itself; the others wait for it."""
    slowest_factor: float
    """How many times the median of the others that is."""
    values: dict[str, float] = field(default_factory=dict)
    """What was given to `trainer.log`: means over the interval on all ranks."""
    learning_rates: tuple[float, ...] = ()
    """Of all parameter groups."""

    @property
    def data_seconds(self) -> float:
        """The part of `step_seconds` in which this rank waited for a batch."""
        return self.times.data

    def __str__(self) -> str:
        own = "".join(f"  {name} {value:.4g}" for name, value in self.values.items())
        return (
            f"epoch {self.epoch + 1}  loss {self.loss:.4g}{own}  lr {self.learning_rate:.3g}  "
            f"{self.samples_per_second:,.0f} samples/s  data {self.data_seconds / self.step_seconds:.0%}"
        )


@dataclass(frozen=True)
class StepTimes:
    """Where one rank's time went: seconds per optimizer step, as means over an interval."""

    data: float
    """Waiting for batches."""
    transfer: float
    """Batches on their way to the device."""
    forward: float
    backward: float
    """Computing gradients, of all passes; without `communication`."""
    communication: float
    """Waiting for the other ranks and the network with nothing else to do; what the backward pass hides is free."""
    optimizer: float
    """Clipping, the optimizer's step, and what goes with them."""
    other: float
    """The rest of the wall time: callbacks, logging, the loop itself."""

    @property
    def figures(self) -> tuple[float, ...]:
        """All of them, in their order; dataclasses.astuple takes thirty times as long."""
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
        """What the rank needed for itself: the others wait for the one with the most."""
        return self.data + self.transfer + self.forward + self.backward + self.optimizer + self.other


@dataclass(frozen=True)
class Step:
    """One optimizer step that was just done."""

    number: int
    """Counted from 1 over the whole run: `trainer.step`."""
    epoch: int
    """Counted from 0."""
    samples: int
    """Samples in this step over all ranks."""
    ends_epoch: bool
    log: LogRow | None
    """The interval's figures at a log point, else None."""


@dataclass(frozen=True)
class FitResult:
    """The result of a run; the same on every rank, apart from times."""

    steps: int
    """Optimizer steps done."""
    samples: int
    """Samples trained on over all ranks, counted once per epoch."""
    loss: float
    """The mean over the last logged interval."""
    history: tuple[LogRow, ...]
    """One row per log point."""
    skipped: int
    """Steps skipped because a gradient was not finite: by fp16's scaling, or by `non_finite="skip"`."""
    metrics: dict[str, float]
    """Of the last evaluation; empty without one."""


@dataclass(frozen=True)
class LearningRateSearch:
    """What a learning-rate range test found; the same on every rank."""

    rates: tuple[float, ...]
    """Those tried, rising, of the optimizer's first parameter group."""
    losses: tuple[float, ...]
    """The smoothed loss at each."""
    suggestion: float | None
    """Where the loss falls most steeply; None where it never fell."""


@dataclass(frozen=True)
class LoadedWeights:
    """What `load_model` loaded, and what of the checkpoint and of the model did not match."""

    path: Path
    """The checkpoint, or the file."""
    step: int | None
    """Optimizer steps that had been done; None for a file."""
    loaded: tuple[str, ...]
    """Names in the model's state_dict."""
    missing: tuple[str, ...] = ()
    """In the model only: they keep their values."""
    unexpected: tuple[str, ...] = ()
    """In the checkpoint only."""
    mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Of another shape in the checkpoint (first) than in the model (second): they keep their values."""

    @property
    def matches(self) -> bool:
        """Whether the checkpoint and the model have the same names and shapes."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        shapes = [f"{name} {[*saved]} -> {[*own]}" for name, (saved, own) in self.mismatched.items()]
        found = {"missing": self.missing, "unexpected": self.unexpected, "of another shape": shapes}
        lists = [f"{what}: {', '.join(names)}" for what, names in found.items() if names]
        return "; ".join([f"{len(self.loaded)} weights and buffers from {self.path}", *lists])
