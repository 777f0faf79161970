"""Read the stacks of other processes with py-spy, which works even if a process is stuck in native code."""

import ctypes
import json
import linecache
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddp_kit.env import STACKS_SIGNAL
from ddp_kit.heartbeat import Phase
from ddp_kit.launcher.processes import is_stopped

_LIBC = ctypes.CDLL(None)
_TIMEOUT_SECONDS = 3.0
_POLL_SECONDS = 0.05
_MAX_FRAMES = 20
_MAX_CALLED = 3  # library frames shown below the user's innermost frame
_PACKAGE = Path(__file__).parents[2]
_LIBRARY_PATHS = ("site-packages/", "dist-packages/", str(_PACKAGE), sysconfig.get_path("stdlib"), "<")
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_BACKWARD = "_engine_run_backward"
_LOADER = "torch/utils/data/dataloader.py"
_DATASET_FETCH = "torch/utils/data/_utils/fetch.py"
_WAITS = re.compile(r"c10d::(Work|\w+Work|Reducer|ProcessGroup\w*|Logger)\b|gloo::|ncclGroupEnd")
_STORE = re.compile(r"c10d::(TCPStore|PrefixStore|Store|detail::TCPClient)")
_DEVICE = re.compile(
    r"cu(da)?(Stream|Event|Device|Ctx)Synchronize|cu(da)?(LaunchKernel|GraphLaunch|Memcpy|Malloc|Free)"
)


@dataclass(frozen=True)
class Frame:
    """A frame of a stack."""

    name: str
    file: str
    line: int
    native: bool = False

    @property
    def where(self) -> str:
        """The location of the frame, for example `train.py:10 in main`."""
        return f"{Path(self.file).name}:{self.line} in {self.name}"

    @property
    def is_user_code(self) -> bool:
        """Whether the frame belongs neither to a library nor to ddpkit."""
        return not self.native and not any(part in self.file for part in _LIBRARY_PATHS)


@dataclass(frozen=True)
class Stack:
    """The stack of a process."""

    pid: int = 0
    frames: tuple[Frame, ...] = ()
    """The frames of the main thread, innermost first; empty: the stack could not be read."""
    text: str = ""
    """The stacks of all threads."""
    stopped: bool = False
    """Whether a signal such as SIGSTOP has stopped the process."""
    holds_lock: bool = False
    """Whether a thread of the process holds the interpreter lock (GIL)."""
    loader: "Stack | None" = None
    """The stack of the DataLoader worker that the process waits for, if that worker is stopped or runs dataset code."""

    @property
    def python(self) -> tuple[Frame, ...]:
        """The Python frames."""
        return tuple(frame for frame in self.frames if not frame.native)

    @property
    def location(self) -> str:
        """The location of the innermost frame of user code, or else of the innermost Python frame; empty: no frame."""
        own = [frame for frame in self.frames if frame.is_user_code]
        frames = own or self.python
        return frames[0].where if frames else ""

    @property
    def waits_for_ranks(self) -> str:
        """The collective or other operation in which the process waits for other ranks, or an empty string."""
        for frame in self.python:
            if frame.file.endswith(_COLLECTIVES):
                return frame.name
            if frame.is_user_code:
                break
        native = [frame.name for frame in self.frames if frame.native]
        names = [frame.name for frame in self.python]
        if not native and names[:1] == [_BACKWARD]:
            return "the backward pass, which may be waiting for other ranks"
        if any(map(_STORE.search, native)):
            return "a store operation that waits for another rank"
        if any(map(_WAITS.search, native)):
            return "the gradient all-reduce" if _BACKWARD in names else "a collective"
        if any(map(_DEVICE.search, native)):
            return "a CUDA call that waits for the device"
        return ""

    @property
    def waits_for_data(self) -> bool:
        """Whether the process is waiting for a DataLoader worker."""
        return any(frame.file.endswith(_LOADER) for frame in self.python)

    def doing(self, phase: Phase) -> str:
        """Describe what the process is currently doing, for example `in all_reduce (train.py:10 in main)`.

        `phase`: the phase of training according to the heartbeat of the process.
        """
        what = self.waits_for_ranks
        if not what and self.waits_for_data and phase.in_user_code:
            what = "data"
        doing = f"in {what or phase.description}"
        location = (self.loader or self).location
        return f"{doing} ({location})" if location else doing

    def as_trace(self) -> str:
        """The Python frames in the form of a traceback.

        If there are frames of the user's code, most library frames are left out.
        """
        frames = list(reversed(self.python))
        user_frames = [number for number, frame in enumerate(frames) if frame.is_user_code]
        shown = {*user_frames, *range(max(user_frames, default=-1) + 1, len(frames))[:_MAX_CALLED]}
        lines: list[str] = []
        left_out = 0
        for number, frame in enumerate(frames):
            if user_frames and number not in shown:
                left_out += 1
                continue
            if left_out and lines:  # frames before the script's first one belong to the launcher
                lines.append(f"  ... {left_out} library frames")
            left_out = 0
            lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.name}')
            source = linecache.getline(frame.file, frame.line).strip()
            if source:
                lines.append(f"    {source}")
        return "\n".join(lines[-2 * _MAX_FRAMES :])


def read_stacks(
    pids: Mapping[int, int], native_seconds: float, files: Mapping[int, str], interrupted: Callable[[], bool]
) -> dict[int, Stack]:
    """Read the stack of each process. The result has the same keys as `pids`; a stack that cannot be read is empty.

    `native_seconds`: time limit for native frames, which are slow to resolve. The time limit for Python frames is
    the same, but at least 3 s, because py-spy takes seconds to start on a busy machine. `files`: the files to which
    processes write their own stacks if py-spy cannot read them. `interrupted`: a function that returns whether to stop
    early; the result then contains the stacks that have been read so far.
    """
    spy = program()
    if not spy:
        unknown = {name: Stack(pid, stopped=is_stopped(pid)) for name, pid in pids.items()}
        return _with_own_stacks(unknown, files, interrupted)
    seen = _dumps(spy, pids.values(), [], max(_TIMEOUT_SECONDS, native_seconds), interrupted)
    # For native stacks, py-spy has to stop the process, which fails if it is stopped already.
    running = [pid for pid in pids.values() if not is_stopped(pid)]
    seen |= _dumps(spy, running, ["--native"], native_seconds, interrupted)
    stacks = {name: _stack(pid, seen.get(pid)) for name, pid in pids.items()}
    stacks = {name: _with_loader_worker(spy, stack, interrupted) for name, stack in stacks.items()}
    return _with_own_stacks(stacks, files, interrupted)


def _with_own_stacks(
    stacks: Mapping[int, Stack], files: Mapping[int, str], interrupted: Callable[[], bool]
) -> dict[int, Stack]:
    """Fill in empty stacks: processes that have a handler for STACKS_SIGNAL are asked to write their own stacks."""
    unseen = {name: stack for name, stack in stacks.items() if not stack.frames and not stack.stopped}
    asked: dict[int, Stack] = {}
    for name, stack in unseen.items():
        with suppress(OSError, AttributeError):  # a C library without tgkill
            # To the main thread, whose stack `_read_own_stack` looks for.
            if has_handler(stack.pid, STACKS_SIGNAL) and not _LIBC.tgkill(stack.pid, stack.pid, STACKS_SIGNAL):
                asked[name] = stack
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    answered: dict[int, Stack] = {}
    while len(answered) < len(asked) and time.monotonic() < deadline and not interrupted():
        time.sleep(_POLL_SECONDS)
        for name, stack in asked.items():
            frames, text = _read_own_stack(files.get(name, ""))
            if frames:
                answered[name] = replace(stack, frames=frames, text=f"process {stack.pid}\n{text}")
    return {**stacks, **answered}


def has_handler(pid: int, number: int, or_ignores: bool = False) -> bool:
    """Whether a process has a handler for the signal `number` or, if `or_ignores` is true, ignores this signal."""
    fields = ("SigCgt:", "SigIgn:") if or_ignores else ("SigCgt:",)
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(fields) and int(line.split()[1], 16) >> (number - 1) & 1:
                return True
    return False


def _read_own_stack(path: str) -> tuple[tuple[Frame, ...], str]:
    """Read the file to which a process wrote its own stacks. Return its main thread's frames and the whole text."""
    with suppress(OSError):
        text = Path(path).read_text(errors="replace")
        _, mark, last = text.rpartition("Current thread ")
        if mark and last.endswith("\n"):
            frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', last, re.MULTILINE)
            return tuple(Frame(name, file, int(line)) for file, line, name in frames), text
    return (), ""


def can_be_inspected(pid: int) -> bool:
    """Whether py-spy is installed, and this process has permission to open /proc/PID/mem, which py-spy reads."""
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return bool(program())


def program() -> str:
    """The path of py-spy, or an empty string if it is not installed."""
    return shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy") or ""


def wait_channel(pid: int) -> str:
    """The kernel function in which a process sleeps, or an empty string if it is not known."""
    with suppress(OSError):
        name = Path(f"/proc/{pid}/wchan").read_text().strip()
        return "" if name == "0" else name
    return ""


def _with_loader_worker(spy: str, stack: Stack, interrupted: Callable[[], bool]) -> Stack:
    """Add to `stack` the DataLoader worker that the process waits for, if it is stopped or runs dataset code."""
    if not stack.waits_for_data:
        return stack
    children: list[int] = []
    with suppress(OSError):
        children += map(int, Path(f"/proc/{stack.pid}/task/{stack.pid}/children").read_text().split())
    seen = _dumps(spy, children, [], _TIMEOUT_SECONDS, interrupted)
    workers = [_stack(pid, seen.get(pid)) for pid in children]
    others = "".join(f"\n{worker.text}" for worker in workers if worker.text)
    busy = [worker for worker in workers if any(frame.file.endswith(_DATASET_FETCH) for frame in worker.frames)]
    stuck = [*busy, *(worker for worker in workers if worker.stopped)]
    return replace(stack, text=stack.text + others, loader=stuck[0] if stuck else None)


def _dumps(
    spy: str, pids: Collection[int], flags: list[str], seconds: float, interrupted: Callable[[], bool]
) -> dict[int, list[dict[str, Any]]]:
    """Run py-spy on all processes in parallel; return the output for each process that py-spy could read in time."""
    started = {}
    stopped = {pid for pid in pids if is_stopped(pid)}
    for pid in pids:
        command = [spy, "dump", "--json", *flags, "--pid", str(pid)]
        if pid in stopped:  # py-spy need not pause it
            command.append("--nonblocking")
        with suppress(OSError):
            started[pid] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
    deadline = time.monotonic() + seconds
    dumps = {}
    for pid, process in started.items():
        text = _output_of(process, deadline, interrupted)
        with suppress(ValueError):
            dumps[pid] = json.loads(text)
        if not text and pid not in stopped:  # a killed py-spy may leave the process stopped
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)
    return dumps


def _output_of(process: "subprocess.Popen[bytes]", deadline: float, interrupted: Callable[[], bool]) -> bytes:
    while True:  # at least once, because py-spy may have ended during the wait for another process
        try:
            return process.communicate(timeout=_POLL_SECONDS)[0]
        except subprocess.TimeoutExpired:
            if interrupted() or time.monotonic() >= deadline:
                process.kill()
                process.communicate()
                return b""


def _stack(pid: int, threads: list[dict[str, Any]] | None) -> Stack:
    if not threads:
        return Stack(pid, stopped=is_stopped(pid))
    main = next((thread for thread in threads if thread["os_thread_id"] == pid), threads[0])
    parts = [f"process {pid}"]
    for thread in threads:
        lock = ", holds the interpreter lock" if thread["owns_gil"] else ""
        parts.append(f"  thread {thread['os_thread_id']} {thread['thread_name'] or ''}{lock} (most recent call first)")
        parts += [f"    {frame.name} ({frame.file}:{frame.line})" for frame in _frames(thread)]
    return Stack(
        pid,
        tuple(_frames(main)),
        "\n".join(parts) + "\n",
        stopped=is_stopped(pid),
        holds_lock=any(thread["owns_gil"] for thread in threads),
    )


def _frames(thread: dict[str, Any]) -> list[Frame]:
    return [
        Frame(frame["name"], frame["filename"], int(frame["line"]), native=frame["module"] is not None)
        for frame in thread["frames"]
    ]
