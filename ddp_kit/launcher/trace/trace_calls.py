"""Who called whom in a trace: the events of each thread as a tree."""

import re
import sys
from collections import defaultdict
from collections.abc import Iterator

from ddp_kit.launcher.trace.trace_file import HOST, Event
from ddp_kit.launcher.trace.trace_records import Place

_OUTERMOST_FIRST = {"python_function": 0, "user_annotation": 1, "cpu_op": 2, "cuda_runtime": 3, "cuda_driver": 3}
_FRAME = re.compile(r"^([^<].*)\((\d+)\): (.+)$")
_PACKAGES = re.compile(r"^.*/(?:site|dist)-packages/")
_MODULE = "nn.Module: "
_BACKWARD = "autograd::engine::evaluate_function"


class CallTree:
    """The host's events, sorted by start; `caller[i]`: the index of what called event i, -1 for none."""

    def __init__(self, events: list[Event]) -> None:
        host = (event for event in events if event.kind in HOST)
        self.events = sorted(host, key=lambda event: (event.start, -event.end, _OUTERMOST_FIRST[event.kind]))
        self.caller = [-1] * len(self.events)
        self.operator = [-1] * len(self.events)
        """The operator within which event i ran, -1 for none."""
        self._nest()
        self._forward = self._forward_operators()

    def _nest(self) -> None:
        running: dict[object, list[int]] = defaultdict(list)
        for index, event in enumerate(self.events):
            stack = running[event.thread]
            while stack and self.events[stack[-1]].end <= event.start:
                stack.pop()
            if stack:
                self.caller[index] = caller = stack[-1]
                is_operator = self.events[caller].kind == "cpu_op"
                self.operator[index] = caller if is_operator else self.operator[caller]
            stack.append(index)

    def callers(self, index: int) -> Iterator[int]:
        """What event `index` ran within, from the inside out."""
        start, outer = self.events[index].start, self.caller[index]
        while outer >= 0:
            # An annotation begins within the function that makes it, and outlives it.
            if self.events[outer].end > start:
                yield outer
            outer = self.caller[outer]

    def operators(self, index: int) -> Iterator[int]:
        """The operators among `callers`."""
        outer = self.operator[index]
        while outer >= 0:
            yield outer
            outer = self.operator[outer]

    def place(self, index: int) -> Place | None:
        """The innermost function of Python that is neither torch's nor Python's own, of a backward pass the forward's.

        Functions of ddpkit count: what they do is not what the user's own code does.
        """
        for outer in self.callers(self._source(index)):
            found = _place(self.events[outer])
            if found is not None and found.library not in ("torch", "python"):
                return found
        return None

    def module(self, index: int) -> str | None:
        """The innermost module, such as `Linear_3`: the fourth Linear that was called; of a backward pass likewise."""
        for outer in self.callers(self._source(index)):
            name = self.events[outer].name
            if name.startswith(_MODULE):
                return name.removeprefix(_MODULE)
        return None

    def within(self, index: int, folders: tuple[str, ...]) -> bool:
        """Whether event `index` ran within a function of one of these folders, such as `torch/profiler/`."""
        return any(in_folder(self.events[outer], folders) for outer in self.callers(index))

    def _source(self, index: int) -> int:
        """The event itself; in a backward pass the operator of the forward pass to which it belongs."""
        for outer in self.operators(index):
            event = self.events[outer]
            if event.name.startswith(_BACKWARD):
                return self._forward.get(event.args.get("Sequence number"), index)
        return index

    def _forward_operators(self) -> dict[object, int]:
        """By sequence number: the last operator with it is the one that the backward pass is of."""
        found = {}
        for index, event in enumerate(self.events):
            number = event.args.get("Sequence number")
            if event.kind == "cpu_op" and number is not None and not event.args.get("Fwd thread id"):
                found[number] = index
        return found


def in_folder(event: Event, folders: tuple[str, ...]) -> bool:
    """Whether an event is a function of Python from one of these folders."""
    if event.kind != "python_function" or event.name.startswith("<"):
        return False
    return _inside_packages(event.name).startswith(folders)


def _place(event: Event) -> Place | None:
    if event.kind != "python_function":
        return None
    parts = _FRAME.match(event.name)
    if parts is None:
        return None
    return Place(parts[3], parts[1], int(parts[2]), _library(parts[1]))


def _library(file: str) -> str:
    file = _inside_packages(file)
    if file.startswith("torch/"):
        return "torch"
    if file.startswith("ddp_kit/"):
        return "ddpkit"
    own = "/lib/python3" in file or file.split("/")[0].removesuffix(".py") in sys.stdlib_module_names
    return "python" if own else ""


def _inside_packages(file: str) -> str:
    """A file as seen from the folder of its package; torch itself cuts off only what is in `sys.path`."""
    return _PACKAGES.sub("", file)
