"""`Saver` copies a state to host memory, from which another process writes it to disk while training continues."""

import json
import mmap
import os
import platform
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from ctypes import CDLL, c_size_t, c_void_p
from dataclasses import replace
from pathlib import Path
from threading import Lock, Thread
from types import TracebackType
from typing import Any, Self

import psutil
import torch
from torch import Tensor

from ddp_kit import __version__
from ddp_kit.checkpoint.format import STATE
from ddp_kit.checkpoint.packing import Division, Layout, Packed, Replicated, Stored, active_writers, pack
from ddp_kit.checkpoint.writer import (
    Region,
    WriteTask,
    cannot_write,
    make_folder,
    note_gone,
    unfinished_folder,
    write,
)
from ddp_kit.child_program import ChildProgram
from ddp_kit.env import CHECKPOINT_WRITER
from ddp_kit.errors import CheckpointError
from ddp_kit.log import logger
from ddp_kit.storage.client import CLIENT_PACKAGES
from ddp_kit.storage.urls import Location, is_url
from ddp_kit.texts import some
from ddp_kit.torch_internals import version_of

# --- Shared memory ----------------------------------------------------------------------------------------------------
# Host memory shared by the training process and the writer process; each save reuses its pages.


_PAGE = mmap.PAGESIZE
_ROOM_TO_GROW = 1 << 20  # for buffers, headers and a slightly longer state.json next time
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14
_POPULATED_AT_ONCE = 16 << 20
_LIBC = CDLL(None)


class SharedBuffer:
    """Memory from memfd_create: freed when the last process closes it, and not limited by the size of /dev/shm."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("ddpkit-checkpoint", os.MFD_CLOEXEC)
        self._memory: mmap.mmap | None = None
        self._bytes: Tensor | None = None
        self._pinned: bool | None = False  # None: the driver refused
        self._layout: Layout | None = None
        self._filling: Thread | None = None
        self._pinning = Lock()
        self.targets: list[Tensor] = []
        """Tensors in this memory to which the state is copied, in the order of the layout's places."""

    @property
    def view(self) -> memoryview:
        """The content of the memory."""
        assert self._memory is not None
        return memoryview(self._memory)

    def reserve(self, size: int) -> None:
        """Allocate `size` bytes; a background thread faults in the pages, and pins them if this process uses a GPU."""
        if self._grow(size):
            gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
            filling = Thread(target=self._fill, args=(self._bytes, gpu), daemon=True)  # daemon: exit does not wait
            with suppress(RuntimeError):  # no thread is available: pages are faulted in on first write
                filling.start()
                self._filling = filling

    def _fill(self, memory: Tensor, gpu: int | None) -> None:
        _fault_in(memory)
        if gpu is not None:
            with self._pinning, torch.cuda.device(gpu):  # otherwise this thread would use the first GPU
                if memory is self._bytes:
                    self._pin()

    def prepare(self, layout: Layout, tensors: Sequence[Tensor], text: bytes) -> None:
        """Make room for `tensors`, create views of that memory (`targets`), and write the file headers and `text`.

        `tensors`: in the order of `layout.places`. If the layout has not changed, only `text` is written.
        """
        if self._filling is not None:
            self._filling.join()
        grown = self._grow(layout.bytes + len(text))
        assert self._memory is not None
        assert self._bytes is not None
        if grown:
            _fault_in(self._bytes)
        if layout is not self._layout:
            for offset, header in layout.headers.items():
                self._memory[offset : offset + len(header)] = header
            self.targets = [
                self._bytes[place.offset : place.offset + place.bytes].view(tensor.dtype).view(tensor.shape)
                for place, tensor in zip(layout.places, tensors, strict=True)
            ]
            self._layout = layout
        self._memory[layout.bytes : layout.bytes + len(text)] = text
        if torch.cuda.is_initialized() and any(tensor.is_cuda for tensor in tensors):  # type: ignore[no-untyped-call]
            self._pin()

    def close(self) -> None:
        """Free the memory."""
        self._release()
        with suppress(OSError):
            os.close(self.descriptor)
        self.descriptor = -1

    def _grow(self, size: int) -> bool:
        """Grow to at least `size` bytes; returns whether the pages still have to be faulted in."""
        if self._memory is not None and len(self._memory) >= size:
            return False
        self._release()
        size = -(-(size + _ROOM_TO_GROW) // _PAGE) * _PAGE
        os.ftruncate(self.descriptor, size)
        self._memory = mmap.mmap(self.descriptor, size)
        with suppress(OSError):  # forked DataLoader workers must not keep the memory
            self._memory.madvise(mmap.MADV_DONTFORK)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        return True

    def _release(self) -> None:
        with self._pinning:
            if self._pinned and self._bytes is not None:
                torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())  # type: ignore[no-untyped-call]
            self._pinned = False
            self._layout = self._bytes = self._memory = None
            self.targets = []

    def _pin(self) -> None:
        """Pin the memory, so that copies from a GPU run at full speed; if the driver refuses, copies are slower."""
        if self._pinned is not False or self._bytes is None:
            return
        error = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self._bytes.numel(), 0)  # type: ignore[no-untyped-call]
        self._pinned = int(error) == 0 or None
        if self._pinned is None:
            # CUDA keeps the error until it is queried, and torch would attribute it to its next kernel.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")


def _fault_in(memory: Tensor) -> None:
    """Fault in all pages of the memory now; one by one, on first write, it would take about a second per GB.

    Works in chunks, because other memory allocations in this process wait until a chunk is done. Releases the GIL.
    """
    begin = memory.data_ptr()
    size = memory.numel()
    for done in range(0, size, _POPULATED_AT_ONCE):
        if _LIBC.madvise(c_void_p(begin + done), c_size_t(min(_POPULATED_AT_ONCE, size - done)), _POPULATE_WRITE) != 0:
            return


# --- Copies of tensors ------------------------------------------------------------------------------------------------


Pair = tuple[Tensor, Tensor]
"""A contiguous target in host memory, and the tensor to copy to it."""


@torch.no_grad()
def begin_copy(pairs: Iterable[Pair]) -> Callable[[], None]:
    """Start copying each tensor to its target. Returns a function that finishes the copies; any thread may call it.

    GPU tensors are copied after the work that is already queued on their device's current stream.
    """
    streams: dict[torch.device, torch.cuda.Stream] = {}
    pairs = [*pairs]
    for target, tensor in pairs:
        if tensor.is_cuda:
            stream = streams.get(tensor.device)
            if stream is None:
                stream = streams[tensor.device] = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
                stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(stream):
                target.copy_(tensor, non_blocking=True)

    @torch.no_grad()
    def finish() -> None:
        for target, tensor in pairs:
            if not tensor.is_cuda:
                target.copy_(tensor)
        for stream in streams.values():
            stream.synchronize()

    return finish


# --- Writers of one process -------------------------------------------------------------------------------------


class WriterProcess(ChildProgram):
    """This rank's handle on its writer process, which runs `writer.main` and writes one checkpoint at a time.

    Making one starts the process. `memory`: the file descriptor of the shared memory. `packages`: what it imports.
    """

    purpose = "writes checkpoints"

    def __init__(self, memory: int, packages: Sequence[str]) -> None:
        super().__init__(CHECKPOINT_WRITER, packages, [memory])
        self._task: WriteTask | None = None
        self.lost: WriteTask | None = None
        """The task that the process was doing when it ended."""

    @property
    def seconds(self) -> float:
        """The processor time that the process has used so far."""
        with suppress(psutil.Error):
            times = psutil.Process(self.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    def start(self, task: WriteTask) -> None:
        """Start writing a checkpoint; the previous one must be finished."""
        self._task = task
        self.begin(task.to_json())

    def finished(self, *, wait: bool) -> bool:
        """Whether the last checkpoint is complete. `wait`: whether to wait for it. Raises an error if it failed."""
        try:
            done = super().finished(wait=wait)
        except CheckpointError:
            self._task = None
            raise
        if done:
            self._task = None
        return done

    def release(self) -> CheckpointError:
        """Release what a process that is gone has used, and return the error for the checkpoint that it was writing."""
        self.lost = self._task
        self._task = None
        return super().release()


class BlockingWriter:
    """The interface of `WriterProcess` without a process: `start` returns when the checkpoint is on disk."""

    gone = False

    def __init__(self, buffer: SharedBuffer) -> None:
        self._buffer = buffer
        self._error: CheckpointError | None = None

    def start(self, task: WriteTask) -> None:
        """Write a checkpoint."""
        try:
            with self._buffer.view as view:
                write(task, view)
        except CheckpointError as error:
            self._error = error.with_traceback(None)  # traceback frames keep tensors alive

    def finished(self, *, wait: bool) -> bool:  # noqa: ARG002
        """True. Raises the error of the last checkpoint, once."""
        error = self._error
        self._error = None
        if error is not None:
            raise error
        return True

    def close(self) -> None:
        """Nothing to do."""


# --- Saver ------------------------------------------------------------------------------------------------------------


_VERSIONS = {"ddpkit": __version__, "torch": torch.__version__, "python": platform.python_version()}
_dumps = json.JSONEncoder(separators=(",", ":")).encode


class Saver:
    """Writes checkpoints into a folder. A context manager that calls `close` on exit.

        saver.save(12, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": {"epoch": 3}})
        saver.check()    # after each step: logs or raises the error of a failed save
        saver.wait()     # until it is on disk
        saver.close()

    A transient error of a save, such as a full disk, is logged as a warning, and the next save tries again; `wait`
    raises it. Any other error is raised by the next call of any method.

    `keep_last`: the number of complete checkpoints to keep, including the new one; the best one is kept in addition.
    `background`: whether to write in a separate process; if False, `save` returns when the checkpoint is on disk.
    `makes_room`: whether to remove other checkpoints before one is written, which is then one more than `keep_last`.
    `writer`, `writers`: the index of this Saver, and the number of Savers that write each checkpoint together, one per
    process. `folder`: a path, or a URL in object storage. `holder`: the run that has locked it, for object storage.
    The first call of `save` or `reserve` allocates as much host memory as this Saver writes per checkpoint; `release`
    and `close` free it.
    Raises `CheckpointError` if the folder cannot be written to.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep_last: int,
        makes_room: bool = False,
        background: bool = True,
        writer: int = 0,
        writers: int = 1,
        holder: str = "",
    ) -> None:
        self._folder: Location = folder if is_url(folder) else Path(folder).absolute()
        self._holder = holder
        self._keep_last = keep_last
        self._makes_room = makes_room
        self._number = writer
        self._writers = writers
        if isinstance(self._folder, Path):
            try:
                make_folder(self._folder)
            except OSError as error:
                raise cannot_write(error, self._folder) from None
        self._buffer = SharedBuffer()
        self._free_memory = weakref.finalize(self, self._buffer.close)
        self._waits = not background
        self._has_process = background or is_url(folder)  # a client of a store must not run in this one
        self._writer: WriterProcess | BlockingWriter | None = None  # created by the first save
        self._division: Division | None = None  # of the previous save
        self._copying: _Copying | None = None
        self._error: CheckpointError | None = None  # the transient error of the last save, which was logged

    def begin(self, step: int, token: str | None = None) -> str:
        """Create the folder of a checkpoint that several writers will write, and return the token for `save`.

        `token`: a text that is different for each save; None: a random one.

        Called for writer 0, before the other writers save. Waits until the previous save is finished, which would
        remove the folder. If the folder cannot be created, the save reports the error.
        """
        self.check(wait=True)
        token = token or secrets.token_hex(4)
        if self._writers > 1 and isinstance(self._folder, Path):
            with suppress(OSError):
                make_folder(self._folder)
                unfinished_folder(self._folder, step, token).mkdir()
        return token

    def save(
        self,
        step: int,
        state: Mapping[str, Any] | Packed,
        *,
        best: bool = False,
        token: str = "",
        replicated: Replicated = lambda _part, _name: False,
        overlap: bool = False,
    ) -> None:
        """Start a save. When this returns, the state has been copied and may change, except with `overlap`.

        Waits until the previous save is finished. If that save failed with an error that is not transient, and that has
        not been raised yet, the error is raised here, and no new save is started.
        `state`: part -> values that `packing.pack` can store, with tensors on any device. `best`: whether to mark the
        checkpoint as the best so far. A state may have been packed before.

        If there are several writers, all of them call this. `token`: what `begin` returned for writer 0.
        `replicated`: a function that returns whether a tensor is identical on all writers; such tensors
        are divided among the writers. Writers other than 0 save only replicated tensors and pieces.

        `overlap`: whether to return while a thread still copies replicated tensors; the caller must then call
        `wait_for_copy` before these tensors change.
        """
        packed = state if isinstance(state, Packed) else pack(state)
        self.check(wait=True)
        self._error = None
        if self._division is None or not self._division.fits(packed):
            self._division = Division(packed, replicated, self._number, self._writers)
        division = self._division
        if self._number >= division.writers:
            return
        writer = self._open()
        text = b""
        files = division.layout.files
        if self._number == 0:
            for name, content in {STATE: _dumps(packed.text).encode(), **division.indexes}.items():
                files = (*files, Region(name, division.layout.bytes + len(text), len(content)))
                text += content
        tensors = [packed.tensors[number] for number in division.numbers]
        with _enough_memory(division.layout.bytes):
            self._buffer.prepare(division.layout, [stored.tensor for stored in tensors], text)
        now: list[tuple[Tensor, Stored]] = []
        later: list[tuple[Tensor, Stored]] = []
        for target, stored, is_replicated in zip(self._buffer.targets, tensors, division.replicated, strict=True):
            copies = later if overlap and is_replicated else now
            copies.append((target, stored))
        begin_copy((target, stored.tensor) for target, stored in now)()
        task = WriteTask(
            str(self._folder), step, best, self._keep_last, _VERSIONS, files,
            token, self._number, division.writers, division.bytes + len(text), division.tensors,
            self._makes_room, overlap, self._holder,
        )  # fmt: skip
        if overlap:
            self._copying = _Copying(later, task)
        else:
            writer.start(task)
            if self._waits:
                self.check(wait=True)

    @property
    def writer_seconds(self) -> float:
        """The processor time that the writer process has used so far; 0 if there is none."""
        return self._writer.seconds if isinstance(self._writer, WriterProcess) else 0.0

    def wait_for_copy(self) -> None:
        """Wait until the whole state is copied. Raises `CheckpointError` if the state changed during the copy."""
        if self._copying is None:
            return
        copying = self._copying
        copying.done.result()
        self._copying = None
        copying.check()
        assert self._writer is not None, "`save` has created it"
        self._writer.start(copying.task)

    def reserve(self, size: int) -> None:
        """Allocate host memory in the background, so that the first save does not have to.

        `size`: the bytes of the state, which the writers will divide among themselves.
        """
        active = active_writers(size, self._writers)
        if self._number < active:
            self._open()
            with _enough_memory(size // active):
                self._buffer.reserve(size // active)

    def check(self, *, wait: bool = False) -> bool:
        """Whether no save is in progress. Logs a transient error of a save, and raises any other, once.

        `wait`: whether to wait until the save is finished.
        """
        try:
            return self.finished(wait=wait)
        except CheckpointError as error:
            if not error.transient:
                raise
            self._error = error.with_traceback(None)  # traceback frames keep tensors alive
            logger.warning("{}; training continues, and the next save tries again", error.message)
            return True

    def wait(self) -> None:
        """Wait until the last save is finished; raise the error if it failed. Can be repeated after an interrupt."""
        error = self._error
        self._error = None
        if error is not None:
            raise error
        self.finished(wait=True)

    def close(self) -> None:
        """Wait until the last save is finished, then release all resources. Raises the error of a failed save."""
        try:
            self.wait()
        finally:
            self.release()

    def release(self) -> None:
        """Stop the writer process and free the memory; a later save recreates both. Call `wait` first."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._free_memory()

    def _open(self) -> WriterProcess | BlockingWriter:
        """Create the buffer and the writer, unless they exist. Returns the writer."""
        if not self._free_memory.alive:
            self._buffer = SharedBuffer()
            self._free_memory = weakref.finalize(self, self._buffer.close)
        if isinstance(self._writer, WriterProcess) and self._writer.gone:  # since the last save
            logger.warning("{}; a new one is started", self._writer.release().message)
            self._writer = None
        if self._writer is None and not self._has_process:
            self._writer = BlockingWriter(self._buffer)
        elif self._writer is None:
            packages = CLIENT_PACKAGES if is_url(self._folder) else ("xxhash",)
            self._writer = WriterProcess(self._buffer.descriptor, packages)
        return self._writer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def finished(self, *, wait: bool) -> bool:
        """Whether no save is in progress. `wait`: whether to wait until then. Raises the error of a failed save."""
        if wait:
            self.wait_for_copy()
        if self._writer is None:
            return self._copying is None
        try:
            return self._writer.finished(wait=wait) and self._copying is None
        except CheckpointError:
            if self._writer.gone:
                self._note_lost()
            raise

    def _note_lost(self) -> None:
        """Tell the other writers that this one has ended during a save. The next save starts another process."""
        task = self._writer.lost if isinstance(self._writer, WriterProcess) else None
        self._writer = None
        if task is None or task.writer == 0:
            return
        if not is_url(task.folder):
            note_gone(task)
            return
        writer = self._open()
        assert isinstance(writer, WriterProcess), "in object storage"
        writer.start(replace(task, lost=True))


class _Copying:
    """Copies tensors in a thread, and detects whether they change during the copy."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Stored]], task: WriteTask) -> None:
        self.task = task
        self._copied = [(stored, version_of(stored.tensor)) for _, stored in pairs]
        pool = ThreadPoolExecutor(1)
        self.done = pool.submit(begin_copy((target, stored.tensor) for target, stored in pairs))
        pool.shutdown(wait=False)

    def check(self) -> None:
        """Raise `CheckpointError` if a tensor was written to since the copy began."""
        changed = [
            f"{stored.part}: {stored.name}" for stored, version in self._copied if version_of(stored.tensor) != version
        ]
        if changed:
            raise CheckpointError(
                f"the checkpoint of step {self.task.step} was not saved: during the copy, something other than "
                f"optimizer.step() wrote to {some(changed)}",
                "set checkpoint.save='background': the state is then copied before training continues",
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
