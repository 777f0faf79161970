"""The state of a Trainer's loop, which determines what the user's calls do."""

from collections.abc import Iterator
from contextlib import contextmanager

from ddp_kit.errors import DataError


class RunState:
    """The state of one Trainer's loop. What a call does, by when it is made:

    call          while no loop runs   between two steps     in a callback or an evaluation
    save()        saves                saves                 saves when the step is complete
    stop()        does nothing         no further step       no further step
    evaluate()    evaluates            evaluates             evaluates; calls callbacks within the outer ones
    fit, steps    trains               replaces that loop    replaces that loop
    """

    def __init__(self) -> None:
        self.stopping = False
        """Whether the run ends after the current step."""
        self.seeded = False
        """Whether the run's random states have been set."""
        self._loop: object = None  # identifies the current loop; earlier ones may not continue
        self._in_loop = False
        self._callback_depth = 0

    @property
    def loop(self) -> object:
        """The identity of the loop that started last."""
        return self._loop

    @property
    def may_save(self) -> bool:
        """Whether the state is that after a complete step, and no loop is running, which would save it itself."""
        return not self._in_loop and not self._callback_depth

    @property
    def is_in_callback(self) -> bool:
        """Whether callbacks or an evaluation are running: a checkpoint would contain half of their changes."""
        return self._callback_depth > 0

    def begin_loop(self) -> object:
        """Start a new loop, which becomes the current one. Returns its identity."""
        self._loop = object()
        return self._loop

    def check_current(self, loop: object) -> None:
        """Raise `DataError` if another loop has started since."""
        if self._loop is not loop:
            raise DataError(
                "another loop over steps() was started while this one was not finished",
                "finish or leave a loop before starting the next one",
            )

    def resumed(self) -> None:
        """Note that a checkpoint was loaded: a loop that is still open may not continue."""
        self.seeded, self._loop = False, None

    @contextmanager
    def in_loop(self) -> Iterator[None]:
        """A context in which steps are done; requested saves wait for the end of a step."""
        self._in_loop = True
        try:
            yield
        finally:
            self._in_loop = False

    @contextmanager
    def in_callbacks(self) -> Iterator[None]:
        """A context in which callbacks or an evaluation run; may be nested."""
        self._callback_depth += 1
        try:
            yield
        finally:
            self._callback_depth -= 1
