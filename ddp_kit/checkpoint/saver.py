"""Saves a state: copies it to host memory, from where a separate process writes it to disk while training continues."""

import json
import platform
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from ddp_kit import __version__
from ddp_kit.checkpoint.background import WriterProcess
from ddp_kit.checkpoint.buffer import SharedBuffer
from ddp_kit.checkpoint.copying import begin_copy, copy
from ddp_kit.checkpoint.division import Division, Replicated, active_writers
from ddp_kit.checkpoint.files import Job, Region
from ddp_kit.checkpoint.layout import Stored
from ddp_kit.checkpoint.packing import pack
from ddp_kit.checkpoint.writing import cannot_write, make_folder, write
from ddp_kit.errors import CheckpointError
from ddp_kit.manifest import STATE
from ddp_kit.torch_internals import version_of

_VERSIONS = {"ddpkit": __version__, "torch": torch.__version__, "python": platform.python_version()}
_SHOWN = 3
_dumps = json.JSONEncoder(separators=(",", ":")).encode


def _nothing(part: str, name: str) -> bool:  # noqa: ARG001
    return False


class Saver:
    """Writes checkpoints into a folder. A context manager that calls `close` on exit.

        saver.save(12, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": {"epoch": 3}})
        saver.check()    # now and then: raises the error of a failed save
        saver.close()

    `keep_last`: the number of complete checkpoints to keep, including the new one; the best one is kept in addition.
    `background`: write and hash in a separate process; if False, `save` returns when the checkpoint is on disk.
    `writer`, `writers`: the index of this Saver, and the number of Savers that write each checkpoint together, one per
    process.
    From the first save or `reserve` on, it holds as much host memory as it writes. Raises `CheckpointError` if the
    folder cannot be written to.
    """

    def __init__(
        self, folder: Path | str, *, keep_last: int, background: bool = True, writer: int = 0, writers: int = 1
    ) -> None:
        self._folder = Path(folder).absolute()
        self._keep_last = keep_last
        self._writer, self._writers = writer, writers
        try:
            make_folder(self._folder)
        except OSError as error:
            raise cannot_write(error, self._folder) from None
        self._buffer = SharedBuffer()
        self._release = weakref.finalize(self, self._buffer.close)
        self._background = background
        self._process: WriterProcess | None = None  # started by the first save
        self._division: Division | None = None  # of the previous save
        self._copying: _Copying | None = None

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        best: bool = False,
        token: str = "",
        replicated: Replicated = _nothing,
        overlap: bool = False,
    ) -> None:
        """Start a save. When this returns, the state has been copied and may change.

        Waits until the previous save is finished. If that one failed, its `CheckpointError` is raised here, unless
        `check` or `wait` has raised it already, and no save is started.
        `state`: part -> values that `packing.pack` can store, with tensors on any device. `best`: mark the checkpoint
        as the best so far.

        If there are several writers, all of them call this. `token`: equal on all writers, and different in each save.
        `replicated`: which tensors are identical on all writers, so that they can be divided among them. Of the states
        of writers other than 0, only replicated tensors and pieces are used.

        `overlap`: return while a thread is still copying replicated tensors; call `finish_copy` before they change.
        """
        packed = pack(state)
        self.wait()
        if self._division is None or not self._division.fits(packed):
            self._division = Division(packed, replicated, self._writer, self._writers)
        division = self._division
        if self._writer >= division.writers:
            return
        self._open()
        text = _dumps(packed.text).encode() if self._writer == 0 else b""
        tensors = [packed.tensors[number] for number in division.numbers]
        with _enough_memory(division.layout.bytes):
            self._buffer.prepare(division.layout, [each.tensor for each in tensors], text)
        now: list[tuple[Tensor, Stored]] = []
        later: list[tuple[Tensor, Stored]] = []
        for target, stored, is_replicated in zip(self._buffer.targets, tensors, division.replicated, strict=True):
            (later if overlap and is_replicated else now).append((target, stored))
        copy((target, stored.tensor) for target, stored in now)
        files = division.layout.files
        if self._writer == 0:
            files = (*files, Region(STATE, division.layout.bytes, len(text)))
        job = Job(
            str(self._folder), step, best, self._keep_last, _VERSIONS, files,
            token, self._writer, division.writers, division.bytes + len(text), division.tensors,
        )  # fmt: skip
        if overlap:
            self._copying = _Copying(later, job)
        else:
            self._begin(job)

    def finish_copy(self) -> None:
        """Wait until the whole state is copied. Raises `CheckpointError` if it changed during the copy."""
        if self._copying is None:
            return
        self._copying.done.result()
        copying, self._copying = self._copying, None
        copying.check()
        self._begin(copying.job)

    def _begin(self, job: Job) -> None:
        """Write the copied state, or let the writer process do it."""
        if not self._background:
            with self._buffer.view as view:
                write(job, view)
            return
        assert self._process is not None, "`save` has started it"
        with self._replaced_if_gone():
            self._process.start(job)

    def reserve(self, size: int) -> None:
        """Allocate host memory in the background, so that the first save does not have to.

        `size`: the bytes of the state, which the writers will divide among them.
        """
        active = active_writers(size, self._writers)
        if self._writer < active:
            self._open()
            with _enough_memory(size // active):
                self._buffer.reserve(size // active)

    def check(self) -> bool:
        """Whether no save is in progress. Does not wait. Raises the `CheckpointError` of a failed save, once."""
        return self._finished(wait=False)

    def wait(self) -> None:
        """Wait until the last save is finished. May be called again after an interrupt. Raises its error."""
        self._finished(wait=True)

    def close(self) -> None:
        """Wait until the last save is finished, then release all resources. Raises its `CheckpointError`."""
        try:
            self.wait()
        finally:
            self.release()

    def release(self) -> None:
        """Stop the writer process and free the memory; a later save recreates both. Call `wait` before."""
        if self._process is not None:
            self._process.close()
            self._process = None
        self._release()

    def _open(self) -> None:
        """Create the buffer and start the writer process, unless they exist."""
        if not self._release.alive:
            self._buffer = SharedBuffer()
            self._release = weakref.finalize(self, self._buffer.close)
        if self._background and self._process is None:
            self._process = WriterProcess(self._buffer.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _finished(self, *, wait: bool) -> bool:
        if wait:
            self.finish_copy()
        if self._process is None:
            return self._copying is None
        with self._replaced_if_gone():
            return self._process.finished(wait=wait) and self._copying is None

    @contextmanager
    def _replaced_if_gone(self) -> Iterator[None]:
        """A context that forgets the writer process if it is gone, so that the next save starts another one."""
        try:
            yield
        except CheckpointError:
            if self._process is not None and self._process.gone:
                self._process = None
            raise


class _Copying:
    """Copies tensors in a thread, and detects whether they change during the copy."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Stored]], job: Job) -> None:
        self.job = job
        self._copied = [(stored, version_of(stored.tensor)) for _, stored in pairs]
        pool = ThreadPoolExecutor(1)
        self.done = pool.submit(begin_copy((target, stored.tensor) for target, stored in pairs))
        pool.shutdown(wait=False)

    def check(self) -> None:
        """Raise `CheckpointError` if a tensor was written to since the copy began."""
        changed = [f"{each.part}: {each.name}" for each, version in self._copied if version_of(each.tensor) != version]
        if changed:
            more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
            raise CheckpointError(
                f"the checkpoint of step {self.job.step} was not saved: during the copy, something other than "
                f"optimizer.step() wrote to {', '.join(changed[:_SHOWN])}{more}",
                "set checkpoint.overlap=False: the state is then copied before training continues",
            )


@contextmanager
def _enough_memory(size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"not enough host memory for a copy of the state: {size:,} bytes are needed ({error})",
            "each process that saves needs memory for a copy of its state; give the job more memory",
        ) from None
