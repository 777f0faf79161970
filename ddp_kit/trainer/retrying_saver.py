"""A Saver that survives transient errors, for long runs."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ddp_kit.checkpoint.saver import Saver
from ddp_kit.errors import CheckpointError
from ddp_kit.log import logger


class RetryingSaver(Saver):
    """A Saver that logs transient errors, such as a full disk, as warnings; the next save tries again."""

    unsaved: CheckpointError | None = None
    """The transient error of the last save; None if it has not failed so far."""

    def save(self, step: int, state: Mapping[str, Any], **options: Any) -> None:
        self.check(wait=True)
        self.unsaved = None
        with self._retrying():
            super().save(step, state, **options)

    def check(self, *, wait: bool = False) -> bool:
        with self._retrying():
            if not wait:
                return super().check()
            self.wait()
        return True

    def finish_copy(self) -> None:
        with self._retrying():
            super().finish_copy()

    def settle(self) -> None:
        """Wait until the last checkpoint is complete. Raises the error of a failed save."""
        self.wait()
        if self.unsaved is not None:
            raise self.unsaved

    @contextmanager
    def _retrying(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            if not error.transient:
                raise
            self.unsaved = error.with_traceback(None)  # traceback frames keep tensors alive
            logger.warning("{}; training continues, and the next save tries again", error.message)


def copy_finisher(saver: Saver) -> Callable[..., None]:
    """An optimizer step pre-hook that waits for an overlapped copy of the state before the optimizer changes it."""
    held = weakref.ref(saver)  # the hook must not keep a deleted Trainer's memory alive

    def before_optimizer_step(*_: Any) -> None:
        saver = held()
        if saver is not None:
            saver.finish_copy()

    return before_optimizer_step
