"""Saving without standing still: a copy of the state in host memory, and a process that writes it out."""

import platform
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from ddp_kit import __version__
from ddp_kit.checkpoint.background import WriterProcess
from ddp_kit.checkpoint.buffer import SharedBuffer
from ddp_kit.checkpoint.copying import Pair, begin_copy, copy
from ddp_kit.checkpoint.repacking import Repacker
from ddp_kit.checkpoint.steady import Steady
from ddp_kit.checkpoint.writing import Job, Region, make_folder, refused, write
from ddp_kit.errors import CheckpointError
from ddp_kit.manifest import STATE

_VERSIONS = {"ddpkit": __version__, "torch": torch.__version__, "python": platform.python_version()}
_LARGE = 1 << 14  # elements; with fewer, copying takes no longer than leaving it to a thread
_Look = Callable[[], None] | None


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
        self._writer = WriterProcess(self._buffer.descriptor) if background else None
        self._busy = False
        self._thread = _thread() if background else None
        self._copying: Future[None] | None = None  # of what may be copied late
        self._write: Callable[[], None] = _nothing  # once that is copied
        self._writing: Future[None] | None = None  # given to the process, or not yet
        self._repacker = Repacker()
        self._steady: Steady | None = None
        self._is_steady: bool | None = None  # what was said to be; None: not known yet

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        best: bool = False,
        check: Check | None = None,
        steady: Sequence[Tensor] = (),
    ) -> None:
        """Begin a checkpoint: on return the state is copied, and may change again, apart from `steady`.

        One at a time: while the one before is still being written, this waits for it. Where that one has failed, its
        `CheckpointError` is raised here, unless `check` or `wait` has raised it before, and nothing is begun.
        `state`: part -> what `packing.pack` can store, on any device. `best`: whether it is the best so far.
        `steady`: tensors of the state that stay as they are until `copied` is called. The first time they are copied
        as all the rest, and `copied` looks whether they did; from then on they are copied beside the caller.
        """
        prepared = self._repacker.prepare(state)
        layout, text = prepared.layout, prepared.text
        self.wait()
        tensors = [prepared.tensors[place.number] for place in layout.places]
        with _enough_memory(layout.bytes):
            self._buffer.prepare(layout, tensors, text)
        pairs = [*zip(self._buffer.targets, tensors, strict=True)]
        files = (*layout.files, Region(STATE, layout.bytes, len(text)))
        job = Job(str(self._folder), step, best, self._keep_last, _VERSIONS, files)
        look = None if check is None else partial(_look, check, pairs)
        if self._background:
            self._stage(job, pairs, steady, look)
            return
        copy(pairs)
        if look is not None:
            look()
        with self._buffer.view as view:
            write(job, view)

    @property
    def copying(self) -> bool:
        """Whether `copied` is to be called."""
        return self._steady is not None

    def reserve(self, size: int) -> None:
        """Get host memory for a state of so many bytes ready beside the caller; else the first save does that."""
        with _enough_memory(size):
            self._buffer.reserve(size)

    def copied(self) -> None:
        """Return when all is copied: from here on `steady` may change, too. Interrupted, it may be called again."""
        if self._copying is not None:
            failed, write = self._copying.exception(), self._write
            self._is_steady = self._steady is not None and self._steady.untouched()
            self._copying, self._steady, self._write = None, None, _nothing
            if failed is not None:
                raise failed
            self._hand_over(write if self._is_steady else _refuse)
        elif self._steady is not None:
            self._is_steady = self._steady.as_copied()
            self._steady = None

    def check(self) -> None:
        """Raise the `CheckpointError` of a save that has failed, once; does not wait."""
        if self._busy:
            self._finished(wait=False)

    def wait(self) -> None:
        """Return when the last checkpoint is whole. Raises its `CheckpointError`."""
        if self._copying is None:
            self._steady = None  # too early to tell
        self.copied()
        if self._busy:
            self._finished(wait=True)

    def close(self) -> None:
        """Wait, then end the writing process and give the memory back. Raises the last save's `CheckpointError`."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
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

    def _stage(self, job: Job, pairs: Sequence[Pair], steady: Sequence[Tensor], look: _Look) -> None:
        """Copy, and have it written; what can be done beside the caller is left to a thread."""
        large = [tensor for tensor in steady if tensor.numel() >= _LARGE] if self._is_steady is not False else []
        late, now = _divided(pairs, large)
        # Detached, as weights are by now: where the caller exchanges a tensor's memory, this is still the old one.
        late = [(target, tensor.detach()) for target, tensor in late]
        beside = bool(late and self._is_steady)
        copy(now if beside else pairs)
        if self._writer is None:  # the one before is gone, which has been said
            self._writer = WriterProcess(self._buffer.descriptor)
        write = partial(_look_and_write, look, partial(self._writer.start, job))
        if beside:
            self._write, self._steady = write, Steady(late)
            self._copying = self._submit(begin_copy(late))
        elif look is not None:
            self._hand_over(write)
        else:
            self._start(write)
        if late and not beside:
            self._steady = Steady(late)

    def _hand_over(self, write: Callable[[], None]) -> None:
        self._writing = self._submit(write)
        self._busy = True

    def _submit(self, task: Callable[[], None]) -> "Future[None]":
        assert self._thread is not None
        try:
            return self._thread.submit(task)
        except RuntimeError:  # the main thread has ended: this one goes on alone
            done: Future[None] = Future()
            try:
                task()
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)
            return done

    def _start(self, write: Callable[[], None]) -> None:
        try:
            write()
        except CheckpointError:
            self._writer = None
            raise
        self._busy = True

    def _finished(self, *, wait: bool) -> None:
        assert self._writer is not None
        try:
            if self._writing is not None:
                if not wait and not self._writing.done():
                    return
                self._writing.result()
                self._writing = None
            self._busy = not self._writer.finished(wait=wait)
        except Exception:
            self._writing, self._busy = None, False
            if self._writer.gone:
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


def _thread() -> ThreadPoolExecutor:
    """One thread, which is there: to start one with a save takes longer than many a copy, and may fail."""
    thread = ThreadPoolExecutor(1, "checkpoint")
    thread.submit(int).result()
    return thread


def _divided(pairs: Sequence[Pair], tensors: Sequence[Tensor]) -> tuple[list[Pair], list[Pair]]:
    """The pairs of `tensors`, and the others."""
    wanted = {(tensor.data_ptr(), tensor.numel()) for tensor in tensors}
    chosen: list[Pair] = []
    others: list[Pair] = []
    for pair in pairs:
        (chosen if (pair[1].data_ptr(), pair[1].numel()) in wanted else others).append(pair)
    return chosen, others


def _look_and_write(look: _Look, start: Callable[[], None]) -> None:
    if look is not None:
        look()
    start()


def _refuse() -> None:
    raise CheckpointError(
        "the weights were changed between a save and the optimizer's next step, while they were being copied: that "
        "checkpoint is not written",
        "nothing has to be done: from now on the loop waits for the copy",
        may_pass=True,
    )


def _nothing() -> None:
    pass


def _look(check: Check, pairs: Sequence[Pair]) -> None:
    check.refuse([copied for copied, _ in _divided(pairs, check.tensors)[0]])
