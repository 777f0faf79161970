"""The batches of a step that are used several times."""

from collections.abc import Callable, Iterator
from typing import Any

from ddp_kit.torch_internals import pytree


class StepBatches:
    """A step's batches, fetched once and given to each update."""

    def __init__(self, fetch: Callable[[], Any]) -> None:
        self._fetch = fetch
        self._kept: list[Any] = []

    def again(self) -> Callable[[], Any]:
        """A function that returns the first batch, then the next, and so on."""
        kept = iter(self._from_the_first())
        return lambda: own_containers(next(kept))

    def _from_the_first(self) -> Iterator[Any]:
        number = 0
        while True:
            if number == len(self._kept):
                self._kept.append(self._fetch())
            yield self._kept[number]
            number += 1


def own_containers(batch: Any) -> Any:
    """The same tensors in dicts and lists of their own: loss functions may take those apart."""
    return pytree.tree_map(lambda leaf: leaf, batch)
