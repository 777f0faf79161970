"""The heartbeat of a worker: numbers in a file that its launcher reads at any time."""

import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from ddp_kit.env import ERROR_FILE, HEARTBEAT_FILE


class Phase(IntEnum):
    """What a worker is doing, as its heartbeat says."""

    OUTSIDE = 0
    """Nothing that the Trainer knows of."""
    BETWEEN_STEPS = 1
    """In the script's own loop over `Trainer.steps`, or what `fit` does there."""
    DATA = 2
    TRANSFER = 3
    FORWARD = 4
    BACKWARD = 5
    OPTIMIZER = 6
    CALLBACKS = 7
    EVALUATION = 8
    CHECKPOINT = 9
    FAILED = 10
    """What the Trainer did ended with an exception; the script has it."""

    @property
    def is_script_s(self) -> bool:
        """Whether it is the script's own affair, for as long as that may take."""
        return self in (Phase.OUTSIDE, Phase.BETWEEN_STEPS, Phase.FAILED)

    @property
    def words(self) -> str:
        """For a sentence: `in ...`."""
        return {
            Phase.OUTSIDE: "the script",
            Phase.FAILED: "the script, after an exception",
            Phase.BETWEEN_STEPS: "the script, between two steps",
            Phase.TRANSFER: "the transfer to the device",
            Phase.FORWARD: "the forward pass",
            Phase.BACKWARD: "the backward pass",
            Phase.OPTIMIZER: "the optimizer",
        }.get(self, self.name.lower())


class HeartbeatField(IntEnum):
    """The numbers of a heartbeat file in their order: eight bytes each, this machine's own way round.

    Each is written by itself, in one piece, and changes whenever there is progress: no reader can be misled by more
    than one of them being old.
    """

    STEP = 0
    """The last optimizer step done, and 1 more; 0: no Trainer is there."""
    PHASE = 1
    BEATS = 2
    """Counts whatever the Trainer does."""
    STEPS = 3
    """Optimizer steps done by this process."""
    COLLECTIVES = 4
    """Begun in the default group, by any script; noted where the launcher asks for it."""
    ALL_COLLECTIVES = 5
    """In all groups."""
    BEGAN = 6
    """The step that the run continued after, 0 or that of a checkpoint, and 1 more; 0: it has not begun."""


@dataclass(frozen=True)
class Signs:
    """The signs of life in a heartbeat file."""

    step: int | None = None
    """The last optimizer step done; None where there is no Trainer."""
    phase: Phase = Phase.OUTSIDE
    beats: int = 0
    steps: int = 0
    collectives: int = 0
    all_collectives: int = 0
    began: int | None = None
    """The step that the run continued after; None where it has not begun."""


_heartbeats: "dict[str, memoryview[int]]" = {}
"""What this process has mapped, by its error file: each mapping holds a descriptor."""


def heartbeat_memory(env: Mapping[str, str] | None = None) -> "memoryview[int] | None":
    """The numbers of this worker's heartbeat file, shared with the launcher; None where none has started it."""
    error_file = (os.environ if env is None else env).get(ERROR_FILE)
    if not error_file or error_file == os.devnull:
        return None
    if error_file in _heartbeats:
        return _heartbeats[error_file]
    with suppress(OSError, ValueError):  # the launcher then hears nothing of it
        size = 8 * len(HeartbeatField)
        descriptor = os.open(
            Path(error_file).with_name(HEARTBEAT_FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            if os.fstat(descriptor).st_size < size:
                os.pwrite(descriptor, bytes(size), 0)  # a hole would be SIGBUS where the disk has no room for it
            _heartbeats[error_file] = memoryview(mmap.mmap(descriptor, size)).cast("q")
            return _heartbeats[error_file]
        finally:
            os.close(descriptor)
    return None


def read_heartbeat(error_file: str) -> Signs:
    """What the worker with this error file has noted next to it; no signs where there is nothing."""
    with suppress(OSError, ValueError, TypeError, IndexError):
        found = memoryview(Path(error_file).with_name(HEARTBEAT_FILE).read_bytes()).cast("q").tolist()
        step, phase, beats, steps, collectives, all_collectives, began = found
        return Signs(
            step - 1 if step else None,
            Phase(phase),
            beats,
            steps,
            collectives,
            all_collectives,
            began - 1 if began else None,
        )
    return Signs()
