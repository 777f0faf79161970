"""The exit codes of `ddpkit`: a contract with schedulers and scripts."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `ddpkit`.

    If none of these codes applies, `ddpkit` exits with the exit code of the worker that failed first, or with
    128 + the number of the signal that killed this worker.
    """

    OK = 0
    BROKEN = 1
    """A check of `ddpkit doctor` failed, a checkpoint is damaged, or output of workers was lost, as on a full disk."""
    USAGE = 2
    LAUNCH_FAILED = 3
    NODE_LOST = 4
    FAULTY = 5
    """A rank computes wrong gradients, which `verify_ranks="replay"` has found, or a GPU of this node has failed."""
    REQUEUE = 75
    """The run saved a checkpoint and must be started again. Workers use the same code (EX_TEMPFAIL of sysexits.h)."""
    HUNG = 124
    """The launcher killed a worker that hung. The `timeout` command of coreutils uses the same code."""

    @staticmethod
    def of_signal(number: int) -> int:
        """The exit code that shells report for a process killed by a signal."""
        return 128 + number
