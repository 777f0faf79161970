"""Where a process stands, as py-spy sees it from outside: whether it answers or not, and whatever holds its lock."""

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
from ddp_kit.launcher.warm.dying import is_stopped

_LOOK_SECONDS = 3.0
_WAIT_SECONDS = 0.05
_MOST_FRAMES = 20
_MOST_CALLED = 3
_PACKAGE = Path(__file__).parents[2]
_NOT_THE_USER_S = ("site-packages/", "dist-packages/", str(_PACKAGE), sysconfig.get_path("stdlib"), "<")
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_LOADER = "torch/utils/data/dataloader.py"
_LOADER_FETCHES = "torch/utils/data/_utils/fetch.py"
_WAITS = re.compile(r"c10d::(Work|\w+Work|Reducer|ProcessGroup\w*|Logger)\b|gloo::|ncclGroupEnd")
_STORE = re.compile(r"c10d::(TCPStore|PrefixStore|Store|detail::TCPClient)")
_DEVICE = re.compile(
    r"cu(da)?(Stream|Event|Device|Ctx)Synchronize|cu(da)?(LaunchKernel|GraphLaunch|Memcpy|Malloc|Free)"
)


@dataclass(frozen=True)
class Frame:
    """A line of a stack."""

    name: str
    file: str
    line: int
    native: bool = False

    @property
    def where(self) -> str:
        """Its place in the words of a verdict."""
        return f"{Path(self.file).name}:{self.line} in {self.name}"

    @property
    def is_user_s(self) -> bool:
        """Whether it is neither a library's nor ours."""
        return not self.native and not any(part in self.file for part in _NOT_THE_USER_S)


@dataclass(frozen=True)
class Stack:
    """Where a process stands."""

    pid: int = 0
    frames: tuple[Frame, ...] = ()
    """Of its main thread, the innermost first; nothing where that could not be seen."""
    text: str = ""
    """All its threads."""
    stopped: bool = False
    """By a signal such as SIGSTOP."""
    holds_lock: bool = False
    """Whether it runs Python, or native code that lets no other thread run Python."""
    loader: "Stack | None" = None
    """The DataLoader worker that its data is waited for from, where that stands in the user's code."""

    @property
    def python(self) -> tuple[Frame, ...]:
        """The frames that Python knows."""
        return tuple(frame for frame in self.frames if not frame.native)

    @property
    def place(self) -> str:
        """The innermost line of the user's own."""
        own = next((frame for frame in self.frames if frame.is_user_s), None)
        found = own or next(iter(self.python), None)
        return "" if found is None else found.where

    @property
    def waits_for_ranks(self) -> str:
        """The collective that it is in, by name; empty where it is in none."""
        for frame in self.python:
            if frame.file.endswith(_COLLECTIVES):
                return frame.name
            if frame.is_user_s:
                break
        native = [frame.name for frame in self.frames if frame.native]
        if not native and self.python and self.python[0].name == "_engine_run_backward":
            return "the backward pass, which may wait for other ranks"
        if any(map(_STORE.search, native)):
            return "a store, for another rank's word"
        if any(map(_WAITS.search, native)):
            in_backward = any(frame.name == "_engine_run_backward" for frame in self.python)
            return "the gradients' all-reduce" if in_backward else "a collective"
        return "a wait for the device" if any(map(_DEVICE.search, native)) else ""

    @property
    def waits_for_data(self) -> bool:
        """Whether it waits for a DataLoader worker."""
        return any(frame.file.endswith(_LOADER) for frame in self.python)

    def doing(self, phase: Phase) -> str:
        """What it is in, and where. `phase`: by its own word."""
        what = self.waits_for_ranks
        if not what:
            what = "data" if self.waits_for_data and phase.is_script_s else phase.words
        place = self.loader.place if self.loader is not None else self.place
        return f"in {what} ({place})" if place else f"in {what}"

    def as_trace(self) -> str:
        """Its Python lines in the form of a traceback: the user's own ones, and the last ones of what they call."""
        frames = list(reversed(self.python))
        own = [number for number, frame in enumerate(frames) if frame.is_user_s]
        shown = {*own, *range(max(own, default=-1) + 1, len(frames))[:_MOST_CALLED]}
        lines: list[str] = []
        left_out = 0
        for number, frame in enumerate(frames):
            if own and number not in shown:
                left_out += 1
                continue
            if left_out and lines:  # before the script's first line there are the launcher's own
                lines.append(f"  ... {left_out} of libraries")
            left_out = 0
            lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.name}')
            if source := linecache.getline(frame.file, frame.line).strip():
                lines.append(f"    {source}")
        return "\n".join(lines[-2 * _MOST_FRAMES :])


def take(
    pids: Mapping[int, int], native_seconds: float, files: Mapping[int, str], hurry: Callable[[], bool]
) -> dict[int, Stack]:
    """The stack of each process, by any name; an empty one where it cannot be read.

    `native_seconds`: how long native frames may take, where torch's libraries have many symbols. `files`: where they
    write their own account, should py-spy not be able to look. `hurry`: whether to leave it at what there is.
    """
    spy = program()
    if not spy:
        return _with_signals(_unseen(pids), files, hurry)
    seen = _dumps(spy, pids.values(), [], _LOOK_SECONDS, hurry)
    # A stopped process cannot be stopped once more, and native stacks need that.
    running = [pid for pid in pids.values() if not is_stopped(pid)]
    seen |= _dumps(spy, running, ["--native"], native_seconds, hurry)
    found = {name: _stack(pid, seen.get(pid)) for name, pid in pids.items()}
    found = {name: _with_loader(spy, stack, hurry) for name, stack in found.items()}
    return _with_signals(found, files, hurry)


def _unseen(pids: Mapping[int, int]) -> dict[int, Stack]:
    return {name: Stack(pid, stopped=is_stopped(pid)) for name, pid in pids.items()}


def _with_signals(stacks: Mapping[int, Stack], files: Mapping[int, str], hurry: Callable[[], bool]) -> dict[int, Stack]:
    """The same, where those that could not be seen have been asked for their own account, if they can give one."""
    unseen = {name: stack for name, stack in stacks.items() if not stack.frames and not stack.stopped}
    asked = {name: stack for name, stack in unseen.items() if _asked(stack.pid)}
    deadline = time.monotonic() + _LOOK_SECONDS
    told: dict[int, Stack] = {}
    while len(told) < len(asked) and time.monotonic() < deadline and not hurry():
        time.sleep(_WAIT_SECONDS)
        for name, stack in asked.items():
            frames, text = _own_account(files.get(name, ""))
            if frames:
                told[name] = replace(stack, frames=frames, text=f"process {stack.pid}\n{text}")
    return {**stacks, **told}


def _asked(pid: int) -> bool:
    """Whether a process has been asked, its main thread, by the signal for it, which it has a handler for."""
    with suppress(OSError, AttributeError):  # a C library without tgkill
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:") and int(line.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1:
                return bool(ctypes.CDLL(None).tgkill(pid, pid, STACKS_SIGNAL) == 0)
    return False


def _own_account(path: str) -> tuple[tuple[Frame, ...], str]:
    """The frames of the thread that heard the signal, the main one, and all of the text."""
    with suppress(OSError):
        text = Path(path).read_text(errors="replace")
        _, found, last = text.rpartition("Current thread ")
        if found and last.endswith("\n"):
            frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', last, re.MULTILINE)
            return tuple(Frame(name, file, int(line)) for file, line, name in frames), text
    return (), ""


def can_be_seen(pid: int) -> bool:
    """Whether py-spy is there, and the kernel lets it read a process; it checks that when `mem` is opened."""
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return bool(program())


def program() -> str:
    """Where py-spy is; empty where it is not."""
    beside = shutil.which("py-spy", path=sysconfig.get_path("scripts"))
    return beside or shutil.which("py-spy") or ""


def state(pid: int) -> str:
    """A process's letter in proc(5); empty where there is none."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def wait_channel(pid: int) -> str:
    """The kernel function in which a process sleeps; empty where the kernel does not tell."""
    with suppress(OSError):
        name = Path(f"/proc/{pid}/wchan").read_text().strip()
        return "" if name == "0" else name
    return ""


def _with_loader(spy: str, stack: Stack, hurry: Callable[[], bool]) -> Stack:
    """The rank that waits for its loader's processes, and the first of these that is in the user's code."""
    if not stack.waits_for_data:
        return stack
    children = _children(stack.pid)
    seen = _dumps(spy, children, [], _LOOK_SECONDS, hurry)
    found = [_stack(pid, seen.get(pid)) for pid in children]
    busy = [each for each in found if any(frame.file.endswith(_LOADER_FETCHES) for frame in each.frames)]
    others = "".join(f"\n{each.text}" for each in found if each.text)
    stuck = next((each for each in [*busy, *found] if each in busy or each.stopped), None)
    return replace(stack, text=stack.text + others, loader=stuck)


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _dumps(
    spy: str, pids: Collection[int], flags: list[str], seconds: float, hurry: Callable[[], bool]
) -> dict[int, list[dict[str, Any]]]:
    """What py-spy says of each process, all at once; those that it does not tell of in time are left out."""
    pipe, nothing, started = subprocess.PIPE, subprocess.DEVNULL, {}
    stopped = {pid for pid in pids if is_stopped(pid)}
    for pid in pids:
        # A stopped process is seen without being paused for it.
        words = [spy, "dump", "--json", *flags, *(["--nonblocking"] if pid in stopped else []), "--pid", str(pid)]
        with suppress(OSError):
            started[pid] = subprocess.Popen(words, stdin=nothing, stdout=pipe, stderr=nothing)
    deadline, found = time.monotonic() + seconds, {}
    for pid, process in started.items():
        text = _said(process, deadline, hurry)
        with suppress(ValueError):
            found[pid] = json.loads(text)
        if not text and pid not in stopped:  # a dump that was ended in the middle may have left it paused
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)
    return found


def _said(process: "subprocess.Popen[bytes]", deadline: float, hurry: Callable[[], bool]) -> bytes:
    while True:  # once in any case: it may have spoken while another one was waited for
        try:
            return process.communicate(timeout=_WAIT_SECONDS)[0]
        except subprocess.TimeoutExpired:
            if hurry() or time.monotonic() >= deadline:
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
