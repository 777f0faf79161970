"""The worker processes of one round on one node: started warm where that can be, cold where not."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from torch.distributed.elastic.multiprocessing.api import RunProcsResult, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.numa import binding

from ddp_kit.errors import LaunchError, UsageError
from ddp_kit.launcher.agent.inbox import Inbox, wait_readable
from ddp_kit.launcher.warm.client import Fork, WarmServer
from ddp_kit.launcher.warm.dying import die_with_parent
from ddp_kit.launcher.warm.messages import Program

_SIGNAL_LOOK_SECONDS = 0.05
# In the kernel's uninterruptible sleep a process outlives SIGKILL; the launcher does not wait for it.
_UNKILLABLE_SECONDS = 5.0


class Workers(SubprocessContext):
    """torch's worker processes with its log files and tees; forked, watched without polling, ended within one grace."""

    def __init__(
        self,
        *,
        program: Program | None,
        warm: WarmServer | None,
        inbox: Inbox,
        grace: float,
        say: Callable[[str], None],
        on_failure: Callable[[], None],
        **torch_settings: Any,
    ) -> None:
        super().__init__(**torch_settings)
        self._program = program
        self._warm = warm
        self._inbox = inbox
        self._grace = grace
        self._say = say
        self._on_failure = on_failure  # called before the other workers are stopped
        self._pidfds: dict[int, int] = {}  # local rank -> descriptor, of cold workers
        self._began = time.monotonic()
        self._after: dict[int, float] = {}  # local rank -> seconds from the start to its end
        self._told: set[int] = set()

    def start(self) -> None:
        """Start the workers and the tees. Signals stay with the agent's own handlers."""
        self._start()
        for tail in self._tail_logs:
            tail.start()

    def _start(self) -> None:
        forks = self._fork() if self._warm is not None and self._program is not None else {}
        if not self._answered(forks.values()):
            return
        for refusal in sorted({fork.refusal for fork in forks.values() if fork.refusal}):
            self._say(f"starting cold: {refusal}")
        for local_rank in range(self.nprocs):
            fork = forks.get(local_rank)
            if fork is not None and not fork.refusal:
                self.subprocess_handlers[local_rank] = _Forked(fork)  # type: ignore[assignment]
            else:
                self._start_cold(local_rank)

    def _fork(self) -> dict[int, Fork]:
        assert self._warm is not None
        assert self._program is not None
        forks = {}
        for local_rank in range(self.nprocs):
            words = tuple(map(str, self.args[local_rank]))
            skip = 3 if self._program.module else 2  # -u (-m) name
            forks[local_rank] = self._warm.fork(
                Program(self._program.python, self._program.name, words[skip:], self._program.module),
                {**os.environ, **self.envs[local_rank]},
                self.stdouts[local_rank],
                self.stderrs[local_rank],
                _cpus(local_rank, self._numa_options),
            )
        return forks

    def _answered(self, forks: Iterable[Fork]) -> bool:
        """Wait for the server, which may still be importing torch; False where the launcher is told to stop first."""
        for fork in forks:
            while not fork.answered and self._warm is not None:
                wait_readable([self._warm], _SIGNAL_LOOK_SECONDS)
                self._warm.pump()
                if self._inbox.signals:
                    return False  # the agent's loop acts on it; it ends the server, and with it the forks
        return True

    def _start_cold(self, local_rank: int) -> None:
        assert isinstance(self.entrypoint, str)
        try:
            handler = _Cold(
                self.entrypoint,
                self.args[local_rank],
                {name: value for name, value in self.envs[local_rank].items() if value is not None},
                self.stdouts[local_rank],
                self.stderrs[local_rank],
                local_rank,
                self._numa_options,
            )
        except OSError as error:
            raise LaunchError(
                f"{self.entrypoint} cannot be started: {error.strerror or error}", "check that it can be run by hand"
            ) from None
        self.subprocess_handlers[local_rank] = handler
        if hasattr(os, "pidfd_open"):
            self._pidfds[local_rank] = os.pidfd_open(handler.proc.pid)

    def watched(self) -> list[Any]:
        """What becomes readable when a worker ends."""
        warm = [self._warm] if self._warm is not None and not self._warm.gone else []
        return [*self._pidfds.values(), *warm]

    def _poll(self) -> RunProcsResult | None:
        self._note_ends()
        failed = any(self._exit_code(rank) for rank in self._after)
        if self._running_local_ranks and not failed:
            return None
        if failed:
            self._on_failure()
        self.close()
        failures = {
            rank: self._process_failure(rank, handler.proc.pid, code)
            for rank, handler in sorted(self.subprocess_handlers.items(), key=lambda pair: self._order(pair[0]))
            if (code := handler.proc.poll())
        }
        values = {} if failures else dict.fromkeys(range(self.nprocs))
        return RunProcsResult(values, failures, self.stdouts, self.stderrs)

    def _process_failure(self, local_rank: int, pid: int, code: int) -> ProcessFailure:
        """What torch makes of a worker's end and its error file; without a file that was left half-written."""
        try:
            return ProcessFailure(local_rank, pid, code, self.error_files[local_rank])
        except (ValueError, LookupError, TypeError, AttributeError, OSError):
            return ProcessFailure(local_rank, pid, code, "")

    def _order(self, local_rank: int) -> tuple[bool, float]:
        """The first failure first: torch takes the first of those with the same time, which it knows in seconds."""
        after, told = self.story(local_rank)
        return told, after

    def _exit_code(self, local_rank: int) -> int | None:
        code: int | None = self.subprocess_handlers[local_rank].proc.poll()
        return code

    def _note_ends(self) -> None:
        for rank in list(self._running_local_ranks):
            proc = self.subprocess_handlers[rank].proc
            if proc.poll() is not None:
                ended = getattr(proc, "ended_at", None) or time.monotonic()
                self._after[rank] = ended - self._began
                self._running_local_ranks.discard(rank)
                if rank in self._pidfds:
                    os.close(self._pidfds.pop(rank))

    def story(self, local_rank: int) -> tuple[float, bool]:
        """Seconds from the start of the workers to this one's end, and whether it had been told to stop."""
        return self._after.get(local_rank, 0.0), local_rank in self._told

    def lost(self, local_rank: int) -> bool:
        """Whether this one died because the warm server did."""
        return bool(getattr(self.subprocess_handlers[local_rank].proc, "lost", False))

    def close(self, death_sig: signal.Signals | None = None, timeout: float | None = None) -> None:
        """End what still runs, within the user's grace on every path."""
        super().close(death_sig, self._grace if timeout is None else timeout)  # type: ignore[arg-type]

    def _close(self, death_sig: signal.Signals, timeout: float = 30) -> None:
        """Send `death_sig`; after `timeout` seconds, or at the second signal to the launcher, SIGKILL."""
        if not self.subprocess_handlers:
            return
        self._note_ends()
        if not self._running_local_ranks:
            return
        self._told |= self._running_local_ranks
        self._signal(death_sig)
        deadline = time.monotonic() + timeout
        while self._running_local_ranks and time.monotonic() < deadline and self._inbox.signals < 2:
            self._wait_for_ends(deadline - time.monotonic())
        self._kill()
        deadline = time.monotonic() + max(timeout, _UNKILLABLE_SECONDS)
        while self._running_local_ranks and time.monotonic() < deadline:
            self._wait_for_ends(deadline - time.monotonic())
        for handler in self.subprocess_handlers.values():
            for file in (getattr(handler, "_stdout", None), getattr(handler, "_stderr", None)):
                if file is not None:
                    file.close()

    def _signal(self, number: signal.Signals) -> None:
        """Tell the ranks alone, who need their data loaders to save; a program of another kind with all it started."""
        for rank in self._running_local_ranks:
            pid = self.subprocess_handlers[rank].proc.pid
            with suppress(ProcessLookupError):
                (os.kill if self._program is not None else os.killpg)(pid, number)

    def _kill(self) -> None:
        """End what still runs of the ranks that were told to stop, and what they have left behind."""
        for rank in self._told:
            pid = self.subprocess_handlers[rank].proc.pid
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            if rank in self._running_local_ranks:  # also one forked a moment ago, not yet the leader of its group
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _wait_for_ends(self, timeout: float) -> None:
        """Until a worker ends, or for a moment: the caller looks for signals in between."""
        wait_readable(self.watched(), min(timeout, _SIGNAL_LOOK_SECONDS))
        self._note_ends()


class _Cold(SubprocessHandler):
    """torch's handler of a subprocess; the process dies with this one."""

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> "subprocess.Popen[bytes]":
        tied = partial(die_with_parent, os.getpid()) if sys.platform == "linux" else None
        return subprocess.Popen(
            args, env=env, stdout=self._stdout, stderr=self._stderr, start_new_session=True, preexec_fn=tied
        )


class _Forked:
    """A warm worker in the place of torch's handler of a subprocess."""

    def __init__(self, fork: Fork) -> None:
        self.proc = fork


def _cpus(local_rank: int, numa_options: Any) -> tuple[int, ...]:
    """The cores that --numa-binding gives this rank; empty without it."""
    if numa_options is None:
        return ()
    try:
        cpus = binding._get_validated_logical_cpus_to_bind_to(gpu_index=local_rank, numa_options=numa_options)
    except Exception as error:  # whatever the machine does not tell torch
        raise UsageError(
            f"--numa-binding cannot be had on this machine: {error}", "leave it out, or install numactl"
        ) from None
    return tuple(sorted(cpus))
