"""Stop signals that arrive before a job is running."""

import os
import signal
from types import FrameType

from ddp_kit.exit_codes import ExitCode


class StoppedError(BaseException):
    """Raised when a stop signal arrives before the job is running.

    It is raised once, and only where `main` catches it. Anywhere else, it would start a normal interpreter shutdown,
    which can abort in one of torch's threads.
    """

    first: "StoppedError | None" = None
    """The first instance. It is stored because torch ignores any exception that is raised while it imports NumPy."""
    may_be_raised = False

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(by)
        self.by = by

    @classmethod
    def raise_on_signals(cls) -> None:
        """Install the handlers that are used until the agent installs its own. They raise, so that cleanup code runs.

        An inherited SIG_IGN is respected for SIGHUP, which nohup ignores, but not for SIGINT and SIGQUIT: a shell
        script ignores both for the commands that it starts in the background, but Ctrl-C is meant for these commands
        too.
        """
        cls.first = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, cls._handle)
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # these are meant for the workers, but no worker runs yet
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)

    @classmethod
    def _handle(cls, number: int, _frame: FrameType | None) -> None:
        """Raise the exception for the first signal. The second one ends the process: the warm server cleans up."""
        if cls.first is not None:
            os._exit(ExitCode.of_signal(cls.first.by))
        cls.first = cls(signal.Signals(number))
        if cls.may_be_raised:
            raise cls.first
