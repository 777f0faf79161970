"""The events of the loop, and their delivery to subscribers in order."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from ddp_kit.records import Step


class Subscriber:
    """Receives the loop's events, on the loop's thread. Override what is needed.

    with subscriber.loop():
        for each optimizer step:
            subscriber.before_step(number)
            ...                                # gradients and the update
            subscriber.after_update(step)
            ...                                # the body of the loop: an evaluation, the user's code
            subscriber.after_step(step)
    """

    def loop(self) -> AbstractContextManager[object]:
        """A context entered before the first step and exited after the last one or on an error."""
        return nullcontext()

    def before_step(self, number: int) -> None:
        """Optimizer step `number`, counted from 1, is about to start."""

    def after_update(self, step: Step) -> None:
        """The optimizer has stepped and the position has advanced."""

    def after_step(self, step: Step) -> None:
        """The body of the loop has run; the step is complete."""


class Events:
    """Publishes events to subscribers in their order. Contexts are entered in that order and exited in reverse."""

    def __init__(self, subscribers: Sequence[Subscriber]) -> None:
        self._subscribers = subscribers
        # Most subscribers override one or two events, and a step may take a tenth of a millisecond.
        self._at_begin = [each.before_step for each in subscribers if _overrides(each, "before_step")]
        self._at_done = [each.after_update for each in subscribers if _overrides(each, "after_update")]
        self._at_over = [each.after_step for each in subscribers if _overrides(each, "after_step")]

    @contextmanager
    def loop(self) -> Iterator[None]:
        """The context in which the steps of one call are done."""
        with ExitStack() as entered:
            for subscriber in self._subscribers:
                entered.enter_context(subscriber.loop())
            yield

    def before_step(self, number: int) -> None:
        for tell in self._at_begin:
            tell(number)

    def after_update(self, step: Step) -> None:
        for tell in self._at_done:
            tell(step)

    def after_step(self, step: Step) -> None:
        for tell in self._at_over:
            tell(step)


def _overrides(subscriber: Subscriber, event: str) -> bool:
    return getattr(type(subscriber), event) is not getattr(Subscriber, event)
