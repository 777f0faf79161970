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
from ddp_kit.checkpoint.staging import Staging, Steady
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
        self._thread = _thread() if background else None
        self._staging: Staging | None = None
        self._staged: Future[None] | None = None
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
        """Return when all is copied: from here on `steady` may change, too."""
        steady, self._steady = self._steady, None
        if steady is None:
            return
        if self._is_steady and self._staging is not None:
            self._is_steady = self._staging.judge(steady.untouched)
        else:
            self._is_steady = steady.as_copied()

    def check(self) -> None:
        """Raise the `CheckpointError` of a save that has failed, once; does not wait."""
        if self._busy:
            self._finished(wait=False)

    def wait(self) -> None:
        """Return when the last checkpoint is whole. Raises its `CheckpointError`."""
        if not self._is_steady:
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
        beside = late if self._is_steady else []
        copy(now if beside else pairs)
        rest = begin_copy(beside) if beside else None
        if self._writer is None:  # the one before is gone, which has been said
            self._writer = WriterProcess(self._buffer.descriptor)
        start = partial(self._writer.start, job)
        if rest is not None or look is not None:
            self._submit(Staging(rest, look, start))
        else:
            self._start(start)
        self._busy, self._steady = True, Steady(late) if late else None

    def _submit(self, staging: Staging) -> None:
        assert self._thread is not None
        try:
            self._staged, self._staging = self._thread.submit(staging.run), staging
        except BaseException:
            staging.give_up()
            raise

    def _start(self, start: Callable[[], None]) -> None:
        try:
            start()
        except CheckpointError:
            self._writer = None
            raise

    def _finished(self, *, wait: bool) -> None:
        assert self._writer is not None
        try:
            if self._staged is not None:
                if not wait and not self._staged.done():
                    return
                self._staged.result()
                self._staging = self._staged = None
            self._busy = not self._writer.finished(wait=wait)
        except Exception:
            self._staging, self._staged, self._busy = None, None, False
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


def _look(check: Check, pairs: Sequence[Pair]) -> None:
    check.refuse([copied for copied, _ in _divided(pairs, check.tensors)[0]])
