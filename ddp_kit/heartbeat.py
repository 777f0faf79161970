"""The heartbeat of a worker: a memory-mapped file of integers, which the launcher may read at any time."""

import mmap
import os
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from time import monotonic_ns

from ddp_kit.env import ERROR_FILE, HEARTBEAT_FILE, attempt_folder
from ddp_kit.errors import LossError


class Phase(IntEnum):
    """The current activity of a worker."""

    OUTSIDE = 0
    """The script is running outside of the Trainer."""
    BETWEEN_STEPS = 1
    """The script is running the body of its loop over `Trainer.steps`, or `fit` is between two steps."""
    DATA = 2
    TRANSFER = 3
    FORWARD = 4
    BACKWARD = 5
    OPTIMIZER = 6
    CALLBACKS = 7
    EVALUATION = 8
    CHECKPOINT = 9
    FAILED = 10
    """The Trainer raised an exception, which the script may handle."""
    EXITING = 11
    """An uncaught exception has ended the script, and its traceback is printed; the process is exiting."""

    @property
    def in_user_code(self) -> bool:
        """Whether the script's own code is running, which may take any amount of time."""
        return self in (Phase.OUTSIDE, Phase.BETWEEN_STEPS, Phase.FAILED, Phase.EXITING)

    @property
    def description(self) -> str:
        """The phase in words, for use after the word "in"."""
        return {
            Phase.OUTSIDE: "the script",
            Phase.FAILED: "the script, after an exception",
            Phase.EXITING: "the exit, after an exception",
            Phase.BETWEEN_STEPS: "the script, between two steps",
            Phase.TRANSFER: "the transfer to the device",
            Phase.FORWARD: "the forward pass",
            Phase.BACKWARD: "the backward pass",
            Phase.OPTIMIZER: "the optimizer",
        }.get(self, self.name.lower())


class HeartbeatField(IntEnum):
    """The fields of a heartbeat file, in the order of the file: 64-bit integers in this machine's byte order.

    Each field is written atomically, but the fields are written one after the other: a reader may see a new value of
    one field together with an old value of another field.
    """

    STEP = 0
    """The number of the last completed optimizer step, plus 1; 0 if there is no Trainer."""
    PHASE = 1
    BEATS = 2
    """Counter that every action of the Trainer increments."""
    STEPS = 3
    """Optimizer steps completed by this process."""
    COLLECTIVES = 4
    """Number of collectives started in the default group; counted only if the launcher asks for it."""
    ALL_COLLECTIVES = 5
    """Number of collectives started in all groups."""
    BEGAN = 6
    """One more than the step from which the run started, which is 0 or a checkpoint's step; 0: not started yet."""
    CHANGED_AT = 7
    """Time at which the phase was last set, in nanoseconds of CLOCK_MONOTONIC, which all processes share."""
    STEP_NANOSECONDS = 8
    """The moving average of the time per step, in nanoseconds; 0: fewer than two steps are complete."""
    DATA_SHARE = 9
    """The share of time spent waiting for data, in thousandths, as of the last log point."""
    COMMUNICATION_SHARE = 10
    """The share of time spent waiting for other ranks and the network, in thousandths."""
    MFU = 11
    """Model FLOPs utilisation, in thousandths, as of the last log point; 0: not known."""
    COUNTED_AT = 12
    """Time at which a background thread last counted collectives, in nanoseconds of CLOCK_MONOTONIC."""
    PYTHON_AT = 13
    """Time at which the main thread was last seen running Python code, in nanoseconds of CLOCK_MONOTONIC; 0: never."""
    TOTAL = 14
    """The step after which the run ends; 0: not known."""
    LOSS = 15
    """The loss of the last log point: the bits of a 64-bit floating-point number; 0: not known."""
    ON_DISK = 16
    """Like BEGAN, but of a checkpoint on disk: an earlier step than BEGAN if the run started from a copy in memory."""


ADVICE_WORDS = 64
"""The number of 8-byte words, after the fields, for the last line of advice: UTF-8, padded with zeros."""


@dataclass(frozen=True)
class Heartbeat:
    """The content of a heartbeat file."""

    step: int | None = None
    """The last completed optimizer step; None: there is no Trainer."""
    phase: Phase = Phase.OUTSIDE
    beats: int = 0
    steps: int = 0
    collectives: int = 0
    all_collectives: int = 0
    began: int | None = None
    """The step from which the run started; None: the run has not started."""
    changed_at: int = 0
    """Time at which the phase was last set, in nanoseconds of CLOCK_MONOTONIC; 0: never."""
    step_seconds: float = 0.0
    """The moving average of the time per step; 0: not known yet."""
    data_share: float = 0.0
    """The share of time spent waiting for data, 0 to 1, as of the last log point."""
    communication_share: float = 0.0
    mfu: float = 0.0
    """Model FLOPs utilisation, 0 to 1; 0: not known."""
    counted_at: int = field(default=0, compare=False)  # a change of only this time or `python_at` is not progress
    """Time at which collectives were last counted, in nanoseconds of CLOCK_MONOTONIC; 0: never."""
    python_at: int = field(default=0, compare=False)
    """Time at which the main thread was last seen running Python code, in nanoseconds of CLOCK_MONOTONIC; 0: never."""
    advice: str = ""
    """The last advice that the Trainer has logged; "": there was none."""
    total: int | None = None
    """The step after which the run ends; None: not known."""
    loss: float | None = None
    """The loss of the last log point; None: there was none."""
    on_disk: int = 0
    """The step of a checkpoint on disk from which the run could have started."""


def loss_bits(loss: float) -> int:
    """A loss as an integer for `HeartbeatField.LOSS`, which is 0 if the loss is not known."""
    return int(struct.unpack("q", struct.pack("d", loss or -0.0))[0])


_heartbeats: "dict[str, memoryview[int]]" = {}
"""Error file -> mapping of the heartbeat file next to it, so that this process maps each file only once."""


def heartbeat_memory(env: Mapping[str, str] | None = None) -> "memoryview[int] | None":
    """This worker's heartbeat file as shared memory; None: the worker was not started by a launcher."""
    error_file = (os.environ if env is None else env).get(ERROR_FILE)
    if not error_file or error_file == os.devnull:
        return None
    if error_file in _heartbeats:
        return _heartbeats[error_file]
    with suppress(OSError, ValueError):  # the launcher then sees no heartbeat
        size = 8 * (len(HeartbeatField) + ADVICE_WORDS)
        descriptor = os.open(
            Path(error_file).with_name(HEARTBEAT_FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            if os.fstat(descriptor).st_size < size:
                os.pwrite(descriptor, bytes(size), 0)  # a sparse file could raise SIGBUS on a full disk
            _heartbeats[error_file] = memoryview(mmap.mmap(descriptor, size)).cast("q")
            return _heartbeats[error_file]
        finally:
            os.close(descriptor)
    return None


def note_exiting() -> None:
    """Record that the worker is exiting after an uncaught exception. Called after the exception was printed."""
    if os.getpid() != os.getsid(0):
        return  # not the worker, which leads a session, but a process that it has started
    memory = heartbeat_memory()
    if memory is not None:
        memory[HeartbeatField.CHANGED_AT] = time.monotonic_ns()
        memory[HeartbeatField.PHASE] = Phase.EXITING


def read_heartbeat(error_file: str) -> Heartbeat:
    """Read the heartbeat file next to this error file; without such a file, return the default `Heartbeat`."""
    with suppress(OSError, ValueError, TypeError, IndexError):
        content = Path(error_file).with_name(HEARTBEAT_FILE).read_bytes()
        fields = 8 * len(HeartbeatField)
        numbers = memoryview(content[:fields]).cast("q").tolist()
        step, phase, beats, steps, collectives, all_collectives, began, changed_at, *numbers = numbers
        step_time, data, others, mfu, counted_at, python_at, total, loss, on_disk = numbers
        return Heartbeat(
            step - 1 if step else None,
            Phase(phase),
            beats,
            steps,
            collectives,
            all_collectives,
            began - 1 if began else None,
            changed_at,
            step_time / 1e9,
            data / 1000,
            others / 1000,
            mfu / 1000,
            counted_at,
            python_at,
            content[fields:].rstrip(b"\0").decode(errors="replace"),
            total or None,
            struct.unpack("d", struct.pack("q", loss))[0] if loss else None,
            max(0, on_disk - 1),
        )
    return Heartbeat()


def highest_earlier_step() -> int:
    """The highest step that this node's first rank completed before the launcher restarted it; 0 if it did not."""
    folder = attempt_folder()
    if folder is None:
        return 0
    files = folder.parent.glob(f"attempt_*/0/{HEARTBEAT_FILE}")
    earlier = [read_heartbeat(str(file)).step for file in files if file.parents[1] != folder]
    return max((step for step in earlier if step is not None), default=0)


# Plain integers: a step looks them up faster than the members of the enum.
_STEP, _PHASE, _BEATS, _STEPS, _BEGAN, _CHANGED_AT, _STEP_NANOSECONDS = (
    int(HeartbeatField[name]) for name in ("STEP", "PHASE", "BEATS", "STEPS", "BEGAN", "CHANGED_AT", "STEP_NANOSECONDS")
)
_SIZE = len(HeartbeatField) + ADVICE_WORDS
_AVERAGED = 8
"""Each new step has weight 1 / `_AVERAGED` in the moving average of the time per step."""


class HeartbeatWriter:
    """Writes this process's heartbeat to memory that the launcher may read at any time. Needs no system calls."""

    def __init__(self) -> None:
        memory = heartbeat_memory()
        self._memory = memoryview(bytearray(8 * _SIZE)).cast("q") if memory is None else memory
        self._beats = self._memory[_BEATS]
        self._stepped_at = 0  # nanoseconds; 0: no step is done yet

    @property
    def phase(self) -> Phase:
        """The current phase."""
        return Phase(self._memory[_PHASE])

    @property
    def where(self) -> str:
        """The current phase and step, in words."""
        return f"{Phase(self._memory[_PHASE]).description}, after step {max(0, self._memory[_STEP] - 1)}"

    def enter(self, phase: Phase) -> None:
        """Set the phase that begins."""
        memory = self._memory
        memory[_PHASE] = phase
        memory[_BEATS] = self._beats = self._beats + 1
        memory[_CHANGED_AT] = monotonic_ns()

    def set_step(self, step: int) -> None:
        """Set the number of the last completed optimizer step, such as the step of a loaded checkpoint."""
        self._memory[_STEP] = step + 1

    def step(self, step: int) -> None:
        """Record a completed optimizer step."""
        memory = self._memory
        now = monotonic_ns()
        memory[_STEP] = step + 1
        memory[_STEPS] += 1
        if self._stepped_at:
            taken = now - self._stepped_at
            average = memory[_STEP_NANOSECONDS] or taken
            memory[_STEP_NANOSECONDS] = average + (taken - average) // _AVERAGED
        self._stepped_at = now

    def log_point(self, loss: float, data: float, communication: float, mfu: float = 0.0) -> None:
        """Set the values of a log point.

        `data`, `communication`: the shares of time spent waiting for data and for other ranks. `mfu`: 0 if unknown.
        """
        self._memory[HeartbeatField.LOSS] = loss_bits(loss)
        self._memory[HeartbeatField.DATA_SHARE] = round(1000 * data)
        self._memory[HeartbeatField.COMMUNICATION_SHARE] = round(1000 * communication)
        self._memory[HeartbeatField.MFU] = round(1000 * mfu)

    def advise(self, line: str) -> None:
        """Set the last line of advice; a line that is too long is truncated."""
        content = line.encode()[: 8 * ADVICE_WORDS].ljust(8 * ADVICE_WORDS, b"\0")
        self._memory[len(HeartbeatField) : _SIZE] = memoryview(content).cast("q")

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Set the phase inside the context, and restore the previous phase afterwards.

        If an exception leaves the outermost context, the phase becomes `Phase.FAILED`.
        """
        before = Phase(self._memory[_PHASE])
        outermost = before in (Phase.OUTSIDE, Phase.FAILED)
        after = Phase.OUTSIDE if outermost else before
        self.enter(phase)
        try:
            yield
        except Exception:
            if outermost:
                after = Phase.FAILED
            raise
        finally:
            self.enter(after)

    @contextmanager
    def follow(self, step: int, total: int | None = None, *, on_disk: int | None = None) -> Iterator[None]:
        """Context manager for training. Records `step` as the step from which training starts.

        `total`: the step after which training ends, if known. `on_disk`: the step of a checkpoint on disk from which
        it could have started, if that is another one.
        If a `LossError` names the step in which it occurred, the previous step is recorded as the last completed one.
        """
        self.set_step(step)
        self._memory[HeartbeatField.TOTAL] = total or 0
        self._stepped_at = 0
        if not self._memory[_BEGAN]:
            self._memory[_BEGAN] = step + 1
            self._memory[HeartbeatField.ON_DISK] = (step if on_disk is None else on_disk) + 1
        try:
            yield
        except LossError as error:
            if error.step is not None:
                self.set_step(error.step - 1)
            raise
