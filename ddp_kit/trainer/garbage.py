"""Garbage collection between optimizer steps instead of during them."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


class DeferredGarbageCollection:
    """Collects garbage about once a second, between steps, instead of automatically during a step.

    With many objects, a collection takes long, and the next one comes later: they take at most 2 % of the time.
    """

    _SECONDS = 1.0
    _LONGEST_SHARE = 0.02
    _due = 0.0  # shared by all Trainers of the process, because a collection covers all objects; 0: no run has begun

    def __init__(self) -> None:
        self._on = False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Context manager that turns automatic garbage collection off.

        Objects that exist on entry are frozen (`gc.freeze`), so the collections between steps do not traverse them.
        """
        if not gc.isenabled():
            yield
            return
        self._on = True
        if self._due:
            self.collect_if_due()  # the garbage of earlier runs, which is frozen from here on
        else:
            DeferredGarbageCollection._due = time.perf_counter() + self._SECONDS
        gc.disable()
        freezes = gc.get_freeze_count() == 0  # otherwise gc.unfreeze would undo what the warm server or the user froze
        if freezes:
            gc.freeze()
        try:
            yield
        finally:
            self._on = False
            if freezes:
                gc.unfreeze()
            gc.enable()

    def collect_if_due(self) -> None:
        """Collect garbage if a collection is due."""
        began = time.perf_counter()
        if self._on and began > self._due:
            gc.collect()
            ended = time.perf_counter()
            DeferredGarbageCollection._due = ended + max(self._SECONDS, (ended - began) / self._LONGEST_SHARE)
