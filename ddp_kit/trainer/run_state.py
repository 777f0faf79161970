"""What a Trainer is doing, which decides what a call of the user's means at that moment."""

from collections.abc import Iterator
from contextlib import contextmanager

from ddp_kit.errors import DataError


class RunState:
    """The state of one Trainer's loop, in one place.

    called        while no loop runs   between two steps     in a callback or an evaluation
    save()        saves                saves                 saves once the step is over
    stop()        does nothing         no further step       no further step
    evaluate()    evaluates            evaluates             evaluates; its callbacks are called within these
    fit, steps    trains               overtakes that loop   overtakes that loop
    """

    def __init__(self) -> None:
        self.stopping = False
        """Whether no further step is to be done."""
        self.seeded = False
        """Whether the random states are those of the run."""
        self._loop: object = None  # stands for the loop that trains; an older one is overtaken
        self._in_loop = False
        self._half_done = 0

    @property
    def loop(self) -> object:
        """Stands for the loop that began last."""
        return self._loop

    @property
    def may_save(self) -> bool:
        """Whether the state is that after a whole step, and the loop does not save by itself."""
        return not self._in_loop and not self._half_done

    @property
    def half_done(self) -> bool:
        """Whether callbacks or an evaluation are running: a checkpoint would hold half of what they change."""
        return self._half_done > 0

    def begin_loop(self) -> object:
        """A new loop trains from here on. Returns what stands for it."""
        self._loop = object()
        return self._loop

    def check_current(self, loop: object) -> None:
        """Raise `DataError` where another loop has begun since."""
        if self._loop is not loop:
            raise DataError(
                "this loop over steps() was overtaken by a later one", "finish or leave one before the next begins"
            )

    def resumed(self) -> None:
        """Another state was loaded: a loop that is open does not continue with it."""
        self.seeded, self._loop = False, None

    @contextmanager
    def in_loop(self) -> Iterator[None]:
        """Within, steps are done, and saves that were asked for come after them."""
        self._in_loop = True
        try:
            yield
        finally:
            self._in_loop = False

    @contextmanager
    def in_callbacks(self) -> Iterator[None]:
        """Within, callbacks or an evaluation run; may be nested."""
        self._half_done += 1
        try:
            yield
        finally:
            self._half_done -= 1
