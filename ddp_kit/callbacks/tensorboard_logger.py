"""The logger for TensorBoard."""

from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import finalize

from ddp_kit.callbacks.rows import RowLogger, numbers, require
from ddp_kit.config.settings import absolute

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(RowLogger):
    """Writes train/loss, train/learning_rate, ..., eval/loss, ... as TensorBoard scalars, on the main rank.

    The x axis is the optimizer step. Evaluations after the end of `fit` are written to another file in the same folder.
    A run that resumes from a checkpoint sets `purge_step`, so that TensorBoard hides the earlier points of repeated
    steps. Needs `pip install tensorboard`.

    Args:
        dir: The folder of the event files, for `tensorboard --logdir dir`.

    Raises:
        ConfigError: If tensorboard is not installed.
    """

    def __init__(self, dir: str | Path) -> None:
        require("tensorboard", "TensorBoardLogger")
        self._dir = absolute(dir, "the folder of TensorBoardLogger")
        self._writer: SummaryWriter | None = None
        self._purge_step: int | None = None

    def write(self, trainer: Any, kind: str, step: int, values: dict[str, Any]) -> None:
        """Add a point to each curve."""
        writer = self._writer or self._open()
        for name, value in numbers(kind, values).items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def truncate_after(self, step: int) -> None:
        """Make TensorBoard hide the existing points of steps after `step`."""
        self.on_fit_end(None, None)
        self._purge_step = step + 1

    def on_fit_end(self, trainer: Any, result: Any) -> None:
        """Close the file."""
        if self._writer is not None:
            self._close()
            self._writer = None

    def _open(self) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter  # imported only on the main rank, because it takes a second

        writer = SummaryWriter(str(self._dir), purge_step=self._purge_step)
        self._purge_step = None
        self._close = finalize(self, writer.close)  # a loop over steps() does not call on_fit_end
        self._writer = writer
        return writer
