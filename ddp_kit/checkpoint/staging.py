"""The part of a save that is done beside its caller.

copy          what stays as it is for a while; all else has been copied before
be told       that it did stay so, once its time is over: a copy of something in between is never written
look, write   by a process of its own
"""

from collections.abc import Callable, Sequence
from threading import Event

import torch

from ddp_kit.checkpoint.copying import Pair
from ddp_kit.errors import CheckpointError


class Steady:
    """Tensors that nothing is to change for a while, with their copies: has it?

    What torch changes in place counts up in the tensor's version. `tensor.data` has a version of its own: there only
    a look at the values helps.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = pairs
        self._versions = self._found()

    def untouched(self) -> bool:
        """Whether no operation has changed them since."""
        return self._versions == self._found()

    def as_copied(self) -> bool:
        """Whether they are still what was copied; False where that cannot be told. Takes as long as copying."""
        try:
            return self.untouched() and all(torch.equal(copied, tensor.cpu()) for copied, tensor in self._pairs)
        except RuntimeError:  # of memory, or of the device
            return False

    def _found(self) -> list[int]:
        return [tensor._version for _, tensor in self._pairs]


class Staging:
    """Copies and looks, where there is something to copy and to look at, and has it written."""

    def __init__(
        self, copy: Callable[[], None] | None, look: Callable[[], None] | None, write: Callable[[], None]
    ) -> None:
        self._copy, self._look, self._write = copy, look, write
        self._copied, self._judged = Event(), Event()
        self._sound = False

    def run(self) -> None:
        """In a thread; where something is copied, it takes a `judge` in another one. Raises what is in the way."""
        copy, look = self._copy, self._look
        self._copy = self._look = None  # they hold tensors
        if copy is not None:
            self._finish(copy)
        if look is not None:
            look()
        self._write()

    def judge(self, sound: Callable[[], bool]) -> bool:
        """Once all is copied: are the copies `sound`? To be called once, where nothing changes what was copied."""
        try:
            self._copied.wait()
            self._sound = sound()
        finally:  # interrupted, nothing is written
            self._judged.set()
        return self._sound

    def give_up(self) -> None:
        """Have nothing written."""
        self._judged.set()

    def _finish(self, copy: Callable[[], None]) -> None:
        try:
            copy()
        finally:
            self._copied.set()
        self._judged.wait()
        if not self._sound:
            raise CheckpointError(
                "the weights were changed between a save and the optimizer's next step, while they were being copied: "
                "that checkpoint is not written",
                "nothing has to be done: from now on the loop waits for the copy",
                may_pass=True,
            )
