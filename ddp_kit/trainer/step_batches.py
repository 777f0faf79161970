"""Batches of a step that are used several times."""

from collections.abc import Callable, Iterator
from typing import Any

from ddp_kit.containers import with_copied_containers


class StepBatches:
    """The batches of a step, fetched once and used by each update or closure call."""

    def __init__(self, fetch: Callable[[], Any]) -> None:
        self._fetch = fetch
        self._kept: list[Any] = []

    def again(self) -> Callable[[], Any]:
        """A function that returns the step's batches one by one, from the first."""
        kept = iter(self._from_the_first())
        return lambda: with_copied_containers(next(kept))

    def _from_the_first(self) -> Iterator[Any]:
        number = 0
        while True:
            if number == len(self._kept):
                self._kept.append(self._fetch())
            yield self._kept[number]
            number += 1
