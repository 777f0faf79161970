"""Curves for TensorBoard."""

from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import finalize

from ddp_kit.callbacks.rows import RowLogger, numbers, require
from ddp_kit.config import absolute

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(RowLogger):
    """Writes train/loss, train/learning_rate, ..., eval/loss, ... over the optimizer steps, on the main rank.

    `dir`: the folder of the event files: `tensorboard --logdir dir`. Needs `pip install tensorboard`, and raises
    `ConfigError` without it. What is logged after the end of `fit` goes to a further file in the same folder. A run
    that resumes from a checkpoint says there that earlier points of later steps do not count (`purge_step`).
    """

    def __init__(self, dir: str | Path) -> None:
        require("tensorboard", "TensorBoardLogger")
        self._dir = absolute(dir)
        self._writer: SummaryWriter | None = None
        self._purge_step: int | None = None

    def write(self, trainer: Any, kind: str, step: int, values: dict[str, Any]) -> None:
        """Add a point to each curve."""
        writer = self._writer or self._open()
        for name, value in numbers(kind, values).items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def take_back(self, step: int) -> None:
        """Let TensorBoard hide the points of later steps that are there."""
        self.on_fit_end(None, None)
        self._purge_step = step + 1

    def on_fit_end(self, trainer: Any, result: Any) -> None:
        """Close the file."""
        if self._writer is not None:
            self._close()
            self._writer = None

    def _open(self) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter  # takes a second; only the main rank needs it

        writer = SummaryWriter(str(self._dir), purge_step=self._purge_step)
        self._purge_step = None
        self._close = finalize(self, writer.close)  # at the latest with this object: a loop over steps() has no end
        self._writer = writer
        return writer
