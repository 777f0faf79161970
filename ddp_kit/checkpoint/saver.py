"""Saving without standing still: a copy of the state in host memory, and a process that writes it out."""

import platform
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from ddp_kit import __version__
from ddp_kit.checkpoint.background import WriterProcess
from ddp_kit.checkpoint.buffer import SharedBuffer
from ddp_kit.checkpoint.repacking import Prepared, Repacker
from ddp_kit.checkpoint.writing import Job, Region, make_folder, refused, write
from ddp_kit.errors import CheckpointError
from ddp_kit.manifest import STATE

_VERSIONS = {"ddpkit": __version__, "torch": torch.__version__, "python": platform.python_version()}


@dataclass(frozen=True)
class Check:
    """What has to hold of some tensors of a state before it is written."""

    tensors: Sequence[Tensor]
    refuse: Callable[[Sequence[Tensor]], None]
    """Called with copies of them, in a thread beside the caller where a process writes. What it raises comes out of the
    next call of `Saver`, and nothing is written."""


class Saver:
    """Writes checkpoints into `folder`; a context manager, which ends with `close`.

    `keep_last`: how many whole checkpoints are kept, the new one included; the best one is kept beside them.
    `background`: whether a process of its own writes, hashes and waits for the disk.

        saver.save(12, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": {"epoch": 3}})
        saver.check()    now and then: raises what went wrong
        saver.close()

    It holds host memory of the state's size from the first save on. Raises `CheckpointError` where the folder cannot
    be written to.
    """

    def __init__(self, folder: Path | str, *, keep_last: int, background: bool = True) -> None:
        self._folder = Path(folder).absolute()
        self._keep_last = keep_last
        try:
            make_folder(self._folder)
        except OSError as error:
            raise refused(error, self._folder) from None
        self._buffer = SharedBuffer()
        self._release = weakref.finalize(self, self._buffer.close)
        self._background = background
        self._writer = WriterProcess(self._buffer.descriptor) if background else None
        self._busy = False
        self._looking: _Looking | None = None
        self._repacker = Repacker()

    def save(self, step: int, state: Mapping[str, Any], *, best: bool = False, check: Check | None = None) -> None:
        """Begin a checkpoint: on return the state is copied, and may change again.

        One at a time: while the one before is still being written, this waits for it. Where that one has failed, its
        `CheckpointError` is raised here, unless `check` or `wait` has raised it before, and nothing is begun.
        `state`: part -> what `packing.pack` can store, on any device. `best`: whether it is the best so far.
        """
        prepared = self._repacker.prepare(state)
        layout, text = prepared.layout, prepared.text
        self.wait()
        try:
            self._buffer.fill(layout, prepared.tensors, text)
        except OSError as error:
            raise CheckpointError(
                f"there is no host memory for a copy of the state: {layout.bytes:,} bytes are needed ({error})",
                "each process that saves needs as much as its state; ask for more memory",
            ) from None
        files = (*layout.files, Region(STATE, layout.bytes, len(text)))
        job = Job(str(self._folder), step, best, self._keep_last, _VERSIONS, files)
        look = None if check is None else partial(check.refuse, self._copies(check.tensors, prepared))
        if self._background:
            self._start(job, look)
            return
        if look is not None:
            look()
        with self._buffer.view as view:
            write(job, view)

    def check(self) -> None:
        """Raise the `CheckpointError` of a save that has failed, once; does not wait."""
        if self._busy:
            self._finished(wait=False)

    def wait(self) -> None:
        """Return when the last checkpoint is whole. Raises its `CheckpointError`."""
        if self._busy:
            self._finished(wait=True)

    def close(self) -> None:
        """Wait, then end the writing process and give the memory back. Raises the last save's `CheckpointError`."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _copies(self, tensors: Sequence[Tensor], prepared: Prepared) -> list[Tensor]:
        addresses = {tensor.data_ptr() for tensor in tensors}
        pairs = zip(prepared.layout.places, self._buffer.targets, strict=True)
        return [copied for place, copied in pairs if prepared.tensors[place.number].data_ptr() in addresses]

    def _start(self, job: Job, look: Callable[[], None] | None) -> None:
        if self._writer is None:  # the one before is gone, which has been said
            self._writer = WriterProcess(self._buffer.descriptor)
        self._busy = True
        start = partial(self._writer.start, job)
        if look is not None:
            self._looking = _Looking(look, start)
            self._looking.start()
            return
        try:
            start()
        except CheckpointError:
            self._writer, self._busy = None, False
            raise

    def _finished(self, *, wait: bool) -> None:
        assert self._writer is not None
        try:
            if self._looking is not None:
                if self._looking.is_alive() and not wait:
                    return
                looking, self._looking = self._looking, None
                looking.settle()
            self._busy = not self._writer.finished(wait=wait)
        except BaseException:
            self._busy = False
            if self._writer.gone:
                self._writer = None
            raise


class _Looking(Thread):
    """Looks at what is to be written, and has it written; beside its caller."""

    def __init__(self, look: Callable[[], None], start: Callable[[], None]) -> None:
        super().__init__(name="checkpoint")
        self._look = look
        self._start_writing = start
        self._error: Exception | None = None

    def run(self) -> None:
        """In the thread."""
        try:
            self._look()
            self._start_writing()
        except Exception as error:
            self._error = error

    def settle(self) -> None:
        """Return when it has done so. Raises what was in the way."""
        self.join()
        if self._error is not None:
            raise self._error
