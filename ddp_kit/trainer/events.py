"""The events of the loop, and the order in which its subscribers hear of them."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from ddp_kit.records import Step


class Subscriber:
    """Hears of the loop's events, on the loop's thread. Override what is needed.

    with subscriber.loop():
        for each optimizer step:
            subscriber.step_begins(number)
            ...                                # gradients and the update
            subscriber.step_done(step)
            ...                                # the body of the loop: an evaluation, the user's code
            subscriber.step_over(step)
    """

    def loop(self) -> AbstractContextManager[object]:
        """Entered before the first step, left after the last one, also by an error."""
        return nullcontext()

    def step_begins(self, number: int) -> None:
        """Optimizer step `number`, counted from 1, is next."""

    def step_done(self, step: Step) -> None:
        """The optimizer has stepped, and the position is that after it."""

    def step_over(self, step: Step) -> None:
        """The body of the loop is through with the step."""


class Events:
    """Publishes events to subscribers, in their order. Contexts are entered in it and left in reverse."""

    def __init__(self, subscribers: Sequence[Subscriber]) -> None:
        self._subscribers = subscribers
        # Those that hear of each event: most hear of one or two, and a step may take a tenth of a millisecond.
        self._at_begin = [each.step_begins for each in subscribers if _overrides(each, "step_begins")]
        self._at_done = [each.step_done for each in subscribers if _overrides(each, "step_done")]
        self._at_over = [each.step_over for each in subscribers if _overrides(each, "step_over")]

    @contextmanager
    def loop(self) -> Iterator[None]:
        """The steps of one call are done within."""
        with ExitStack() as entered:
            for subscriber in self._subscribers:
                entered.enter_context(subscriber.loop())
            yield

    def step_begins(self, number: int) -> None:
        for tell in self._at_begin:
            tell(number)

    def step_done(self, step: Step) -> None:
        for tell in self._at_done:
            tell(step)

    def step_over(self, step: Step) -> None:
        for tell in self._at_over:
            tell(step)


def _overrides(subscriber: Subscriber, event: str) -> bool:
    return getattr(type(subscriber), event) is not getattr(Subscriber, event)
