"""Saving: a copy of the state in host memory, and a process that writes it to the disk while training continues."""

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
from ddp_kit.checkpoint.writing import make_folder, refused, write
from ddp_kit.errors import CheckpointError
from ddp_kit.manifest import STATE
from ddp_kit.torch_internals import version_of

_VERSIONS = {"ddpkit": __version__, "torch": torch.__version__, "python": platform.python_version()}
_SHOWN = 3
_dumps = json.JSONEncoder(separators=(",", ":")).encode


def _nothing(part: str, name: str) -> bool:  # noqa: ARG001
    return False


class Saver:
    """Writes checkpoints into `folder`; a context manager, which ends with `close`.

    `keep_last`: how many whole checkpoints are kept, the new one included; the best one is kept in addition.
    `background`: whether a separate process writes, hashes and waits for the disk.
    `writer`, `writers`: which of how many Savers, in as many processes, that write each checkpoint together.

        saver.save(12, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": {"epoch": 3}})
        saver.check()    now and then: raises what went wrong
        saver.close()

    It holds host memory of the size of what it writes from `reserve` or the first save on. Raises `CheckpointError`
    where the folder cannot be written to.
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
            raise refused(error, self._folder) from None
        self._buffer = SharedBuffer()
        self._release = weakref.finalize(self, self._buffer.close)
        self._background = background
        self._process: WriterProcess | None = None  # started by the first save
        self._division: Division | None = None  # of the save before
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
        """Begin a checkpoint. When this returns, the state of this writer is copied and may change.

        One at a time: while the one before is still being written, this waits for it. Where that one has failed, its
        `CheckpointError` is raised here, unless `check` or `wait` has raised it before, and nothing is begun.
        `state`: part -> what `packing.pack` can store, on any device. `best`: whether it is the best so far.

        Where several writers save, all of them call this; `token` is the same in all, and another one in each save.
        Those tensors that are `replicated` are divided among the writers; of the state of writers other than 0,
        nothing else is looked at.

        `overlap`: return while the replicated tensors are still copied, in a thread: call `finish_copy` before they
        change.
        """
        packed = pack(state)
        self.wait()
        if self._division is None or not self._division.suits(packed):
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
        """Return when the whole state is copied. Raises `CheckpointError` if it changed during the copy."""
        if self._copying is None:
            return
        self._copying.done.result()
        copying, self._copying = self._copying, None
        copying.check()
        self._begin(copying.job)

    def _begin(self, job: Job) -> None:
        """Let the copied state be written."""
        if not self._background:
            with self._buffer.view as view:
                write(job, view)
            return
        assert self._process is not None, "opened by the save"
        with self._replaced_if_gone():
            self._process.start(job)

    def reserve(self, size: int) -> None:
        """Get host memory ready in the background, for a state of `size` bytes that all writers have; else the first
        save does that."""
        active = active_writers(size, self._writers)
        if self._writer < active:
            self._open()
            with _enough_memory(size // active):
                self._buffer.reserve(size // active)

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
        """Stop the writer process and free the memory; a later save recreates both.

        Only once `wait` has returned.
        """
        if self._process is not None:
            self._process.close()
            self._process = None
        self._release()

    def _open(self) -> None:
        """Create the buffer and start the writer process if needed."""
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

    def _finished(self, *, wait: bool) -> None:
        if wait:
            self.finish_copy()
        if self._process is not None:
            with self._replaced_if_gone():
                self._process.finished(wait=wait)

    @contextmanager
    def _replaced_if_gone(self) -> Iterator[None]:
        """Let the next save start another process if this one is gone."""
        try:
            yield
        except CheckpointError:
            if self._process is not None and self._process.gone:
                self._process = None
            raise


class _Copying:
    """Copies tensors in a thread and detects whether they change during the copy."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Stored]], job: Job) -> None:
        self.job = job
        self._copied = [(stored, version_of(stored.tensor)) for _, stored in pairs]
        pool = ThreadPoolExecutor(1)
        self.done = pool.submit(begin_copy((target, stored.tensor) for target, stored in pairs))
        pool.shutdown(wait=False)

    def check(self) -> None:
        """Raise `CheckpointError` where a tensor was written to since the beginning."""
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
