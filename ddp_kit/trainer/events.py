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
        # Call only overridden methods: most subscribers override one or two, and a step may take just 0.1 ms.
        self._on_before_step = [each.before_step for each in subscribers if _overrides(each, "before_step")]
        self._on_after_update = [each.after_update for each in subscribers if _overrides(each, "after_update")]
        self._on_after_step = [each.after_step for each in subscribers if _overrides(each, "after_step")]

    @contextmanager
    def loop(self) -> Iterator[None]:
        """The context in which the steps of one call are done."""
        with ExitStack() as entered:
            for subscriber in self._subscribers:
                entered.enter_context(subscriber.loop())
            yield

    def before_step(self, number: int) -> None:
        for notify in self._on_before_step:
            notify(number)

    def after_update(self, step: Step) -> None:
        for notify in self._on_after_update:
            notify(step)

    def after_step(self, step: Step) -> None:
        for notify in self._on_after_step:
            notify(step)


def _overrides(subscriber: Subscriber, event: str) -> bool:
    return getattr(type(subscriber), event) is not getattr(Subscriber, event)
