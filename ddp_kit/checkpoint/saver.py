"""Saving: a copy of the state in host memory, and a process that writes it to the disk while training continues."""

import hashlib
import json
import platform
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from ddp_kit import __version__
from ddp_kit.checkpoint.background import WriterProcess
from ddp_kit.checkpoint.buffer import SharedBuffer
from ddp_kit.checkpoint.copying import copy
from ddp_kit.checkpoint.files import Job, Region
from ddp_kit.checkpoint.layout import Layout, lay_out
from ddp_kit.checkpoint.packing import Packed, pack
from ddp_kit.checkpoint.writing import make_folder, refused, write
from ddp_kit.errors import CheckpointError
from ddp_kit.manifest import STATE

BYTES_PER_WRITER = 16 << 20
"""A further process writes only where there are so many bytes for each: small checkpoints stay in one file per part."""
_VERSIONS = {"ddpkit": __version__, "torch": torch.__version__, "python": platform.python_version()}
_dumps = json.JSONEncoder(separators=(",", ":")).encode


def _nothing(part: str, name: str) -> bool:  # noqa: ARG001
    return False


class Saver:
    """Writes checkpoints into `folder`; a context manager, which ends with `close`.

    `keep_last`: how many whole checkpoints are kept, the new one included; the best one is kept in addition.
    `background`: whether a process of its own writes, hashes and waits for the disk.
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
        self._plan: _Plan | None = None  # of the save before

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        best: bool = False,
        token: str = "",
        replicated: Callable[[str, str], bool] = _nothing,
    ) -> None:
        """Begin a checkpoint. When this returns, all that this writer saves is copied and may change.

        One at a time: while the one before is still being written, this waits for it. Where that one has failed, its
        `CheckpointError` is raised here, unless `check` or `wait` has raised it before, and nothing is begun.
        `state`: part -> what `packing.pack` can store, on any device. `best`: whether it is the best so far.

        Where several writers save, all of them call this; `token` is the same in all, and another one in each save.
        `replicated`: part and name of a tensor -> whether every writer has the same. These are divided among the
        writers; of the state of writers other than 0, nothing else is looked at.
        """
        packed = pack(state)
        self.wait()
        if self._plan is None or not self._plan.suits(packed):
            self._plan = _Plan(packed, self._divided(packed, replicated), self._writer)
        plan = self._plan
        if self._writer >= plan.writers:
            return
        text = _dumps(packed.text).encode() if self._writer == 0 else b""
        self._open()
        tensors = [packed.tensors[number].tensor for number in plan.numbers]
        with _enough_memory(plan.layout.bytes):
            self._buffer.prepare(plan.layout, tensors, text)
        copy(zip(self._buffer.targets, tensors, strict=True))
        files = plan.layout.files
        if self._writer == 0:
            files = (*files, Region(STATE, plan.layout.bytes, len(text)))
        job = Job(
            str(self._folder), step, best, self._keep_last, _VERSIONS, files,
            token, self._writer, plan.writers, plan.tensors,
        )  # fmt: skip
        if not self._background:
            with self._buffer.view as view:
                write(job, view)
            return
        assert self._process is not None, "opened above"
        with self._replaced_if_gone():
            self._process.start(job)

    def reserve(self, size: int) -> None:
        """Get host memory ready in the background, for a state of `size` bytes that all writers have; else the first
        save does that."""
        active = self._active(size)
        if self._writer < active:
            self._open()
            with _enough_memory(size // active):
                self._buffer.reserve(size // active)

    def _active(self, size: int) -> int:
        """How many writers there are for so many bytes."""
        return max(1, min(self._writers, size // BYTES_PER_WRITER))

    def _divided(self, packed: Packed, replicated: Callable[[str, str], bool]) -> "_Division":
        """Which writer has which tensor: the largest first, each to the one that has the least so far."""
        if self._writers == 1:
            return _Division([0] * len(packed.tensors), 1, "")
        shared = [number for number, one in enumerate(packed.tensors) if replicated(one.part, one.name)]
        sizes = {number: packed.tensors[number].tensor.nbytes for number in shared}
        writers = self._active(sum(sizes.values()))
        owners, load = [0] * len(packed.tensors), [0] * writers
        for number in sorted(shared, key=lambda number: -sizes[number]):
            owners[number] = load.index(min(load))
            load[owners[number]] += sizes[number]
        keys = [packed.tensors[number][:4] for number in shared]
        return _Division(owners, writers, hashlib.sha256(repr(keys).encode()).hexdigest())

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
        if self._process is not None:
            self._process.close()
            self._process = None
        self._release()

    def _open(self) -> None:
        """Get what a save needs, where it is not there."""
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
        if self._process is not None:
            with self._replaced_if_gone():
                self._process.finished(wait=wait)

    @contextmanager
    def _replaced_if_gone(self) -> Iterator[None]:
        """The next save starts another process where this one has ended."""
        try:
            yield
        except CheckpointError:
            if self._process is not None and self._process.gone:
                self._process = None
            raise


class _Division(NamedTuple):
    owners: Sequence[int]
    """Of each tensor."""
    writers: int
    tensors: str
    """A hash of what is divided."""


class _Plan:
    """Which tensors this writer saves, and where they lie: the same for every save whose tensors are of one kind."""

    def __init__(self, packed: Packed, division: _Division, writer: int) -> None:
        self._key = _key(packed)
        self.writers, self.tensors = division.writers, division.tensors
        own = [number for number, owner in enumerate(division.owners) if owner == writer]
        suffix = f"-{writer + 1:05d}-of-{division.writers:05d}" if division.writers > 1 else ""
        self.layout: Layout = lay_out([packed.tensors[number] for number in own], packed.aliases, suffix)
        self.numbers = [own[place.number] for place in self.layout.places]
        """Of this writer's tensors among all, in the order of their places."""

    def suits(self, packed: Packed) -> bool:
        return self._key == _key(packed)


def _key(packed: Packed) -> tuple[list[Any], list[Any]]:
    """What a layout depends on; also the order of aliases, which is that of a file's header."""
    return [stored[:4] for stored in packed.tensors], [(part, *names.items()) for part, names in packed.aliases.items()]


@contextmanager
def _enough_memory(size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"there is no host memory for a copy of the state: {size:,} bytes are needed ({error})",
            "each process that saves needs as much as its state; ask for more memory",
        ) from None
