"""Saving: a copy of the state in host memory, and a process that writes it to the disk while training continues."""

import platform
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from ddp_kit import __version__
from ddp_kit.checkpoint.background import WriterProcess
from ddp_kit.checkpoint.buffer import SharedBuffer
from ddp_kit.checkpoint.copying import copy
from ddp_kit.checkpoint.repacking import Repacker
from ddp_kit.checkpoint.writing import Job, Region, make_folder, refused, write
from ddp_kit.errors import CheckpointError
from ddp_kit.manifest import STATE

_VERSIONS = {"ddpkit": __version__, "torch": torch.__version__, "python": platform.python_version()}


class Saver:
    """Writes checkpoints into `folder`; a context manager, which ends with `close`.

    `keep_last`: how many whole checkpoints are kept, the new one included; the best one is kept in addition.
    `background`: whether a process of its own writes, hashes and waits for the disk.

        saver.save(12, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": {"epoch": 3}})
        saver.check()    now and then: raises what went wrong
        saver.close()

    It holds host memory of the state's size from `reserve` or the first save on. Raises `CheckpointError` where the
    folder cannot be written to.
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
        self._writer: WriterProcess | None = None  # started by the first save
        self._repacker = Repacker()

    def save(self, step: int, state: Mapping[str, Any], *, best: bool = False) -> None:
        """Begin a checkpoint. When this returns, the whole state is copied and may change.

        One at a time: while the one before is still being written, this waits for it. Where that one has failed, its
        `CheckpointError` is raised here, unless `check` or `wait` has raised it before, and nothing is begun.
        `state`: part -> what `packing.pack` can store, on any device. `best`: whether it is the best so far.
        """
        prepared = self._repacker.prepare(state)
        layout, text = prepared.layout, prepared.text
        self.wait()
        self._open()
        tensors = [prepared.tensors[place.number] for place in layout.places]
        with _enough_memory(layout.bytes):
            self._buffer.prepare(layout, tensors, text)
        copy(zip(self._buffer.targets, tensors, strict=True))
        files = (*layout.files, Region(STATE, layout.bytes, len(text)))
        job = Job(str(self._folder), step, best, self._keep_last, _VERSIONS, files)
        if not self._background:
            with self._buffer.view as view:
                write(job, view)
            return
        assert self._writer is not None, "opened above"
        with self._replaced_if_gone():
            self._writer.start(job)

    def reserve(self, size: int) -> None:
        """Get host memory for a state of so many bytes ready in the background; else the first save does that."""
        self._open()
        with _enough_memory(size):
            self._buffer.reserve(size)

    def check(self) -> None:
        """Raise the `CheckpointError` of a save that has failed, once; does not wait."""
        self._finished(wait=False)

    def wait(self) -> None:
        """Return when the last checkpoint is whole; may be called again when interrupted. Raises its error."""
        self._finished(wait=True)

    def close(self) -> None:
        """Wait, then give everything back. Raises the last save's `CheckpointError`."""
        try:
            self.wait()
        finally:
            self.release()

    def release(self) -> None:
        """End the writing process and give the memory back; a later save gets both again.

        Only once `wait` has returned.
        """
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._release()

    def _open(self) -> None:
        """Get what a save needs, where it is not there."""
        if not self._release.alive:
            self._buffer = SharedBuffer()
            self._release = weakref.finalize(self, self._buffer.close)
        if self._background and self._writer is None:
            self._writer = WriterProcess(self._buffer.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _finished(self, *, wait: bool) -> None:
        if self._writer is not None:
            with self._replaced_if_gone():
                self._writer.finished(wait=wait)

    @contextmanager
    def _replaced_if_gone(self) -> Iterator[None]:
        """The next save starts another process where this one has ended."""
        try:
            yield
        except CheckpointError:
            if self._writer is not None and self._writer.gone:
                self._writer = None
            raise


@contextmanager
def _enough_memory(size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"there is no host memory for a copy of the state: {size:,} bytes are needed ({error})",
            "each process that saves needs as much as its state; ask for more memory",
        ) from None
