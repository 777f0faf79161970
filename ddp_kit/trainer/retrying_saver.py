"""A Saver for long runs: transient errors do not end them."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ddp_kit.checkpoint.saver import Saver
from ddp_kit.errors import CheckpointError
from ddp_kit.log import logger


class RetryingSaver(Saver):
    """A Saver that warns of transient errors, such as a full disk, and tries again with the next save."""

    unsaved: CheckpointError | None = None
    """Why the last save failed; None if it is not known to have failed."""

    def save(self, step: int, state: Mapping[str, Any], **options: Any) -> None:
        self.check(wait=True)
        self.unsaved = None
        with self._retrying():
            super().save(step, state, **options)

    def check(self, *, wait: bool = False) -> None:
        with self._retrying():
            if wait:
                self.wait()
            else:
                super().check()

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


def finishes_copy(saver: Saver) -> Callable[..., None]:
    """An optimizer step pre-hook that finishes an overlapped copy of the state before the optimizer changes it."""
    held = weakref.ref(saver)  # the hook must not keep a deleted Trainer's memory alive

    def before_optimizer_step(*_: Any) -> None:
        saver = held()
        if saver is not None:
            saver.finish_copy()

    return before_optimizer_step
