"""The part of a save that is done beside its caller.

copy          what stays as it is for a while; all else has been copied before
be told       that it did stay so, once its time is over: a copy of something in between is never written
look, write   by a process of its own
"""

from collections.abc import Callable, Sequence
from threading import Event, Thread

import torch

from ddp_kit.checkpoint.copying import Pair
from ddp_kit.errors import CheckpointError


class Steady:
    """Tensors that nothing is to change for a while, beside their copies. That is not taken on trust.

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
        """Whether they are still what was copied. Takes about as long as copying."""
        return self.untouched() and all(torch.equal(copied.to(tensor.device), tensor) for copied, tensor in self._pairs)

    def _found(self) -> list[int]:
        return [tensor._version for _, tensor in self._pairs]


class Staging(Thread):
    """Copies and looks, where there is something to copy and to look at, and has it written."""

    def __init__(
        self, copy: Callable[[], None] | None, look: Callable[[], None] | None, write: Callable[[], None]
    ) -> None:
        super().__init__(name="checkpoint")
        self._copy, self._look, self._write = copy, look, write
        self._copied, self._judged = Event(), Event()
        self._sound = False
        self._error: Exception | None = None

    def run(self) -> None:
        """In the thread."""
        try:
            if self._copy is not None:
                self._finish(self._copy)
            if self._look is not None:
                self._look()
            self._write()
        except Exception as error:
            self._error = error

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

    def judge(self, sound: Callable[[], bool]) -> bool:
        """Once all is copied: are the copies `sound`? To be called once, where nothing changes what was copied."""
        self._copied.wait()
        self._sound = sound()
        self._judged.set()
        return self._sound

    def settle(self) -> None:
        """Return when it is done, which takes a `judge`. Raises what was in the way."""
        self.join()
        if self._error is not None:
            raise self._error
