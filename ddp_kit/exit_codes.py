"""The exit codes of `ddpkit`, a contract with schedulers and scripts."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `ddpkit`. A failed worker's own code, or 128 + signal, is passed on unchanged."""

    OK = 0
    BROKEN = 1
    """`ddpkit doctor` has found something that keeps this machine from training."""
    USAGE = 2
    LAUNCH_FAILED = 3
    NODE_LOST = 4
    REQUEUE = 75
    """A worker's own, too: it has saved, and wants to be started again. sysexits.h calls it EX_TEMPFAIL."""
    HUNG = 124
    """A worker did nothing any more, and the launcher has ended it. That of coreutils' `timeout`."""

    @staticmethod
    def of_signal(number: int) -> int:
        """The shell's convention for a process that a signal ended."""
        return 128 + number
