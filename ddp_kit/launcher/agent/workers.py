"""The worker processes of one round on one node: started warm where that can be, cold where not."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import LogsSpecs, RunProcsResult, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from ddp_kit.env import STACKS_FILE
from ddp_kit.errors import LaunchError, UsageError
from ddp_kit.exit_codes import ExitCode
from ddp_kit.heartbeat import Phase, read_heartbeat
from ddp_kit.launcher import hints, last_words
from ddp_kit.launcher.agent import torch_versions
from ddp_kit.launcher.agent.hangs import Hangs
from ddp_kit.launcher.agent.inbox import Inbox, wait_readable
from ddp_kit.launcher.agent.logs import Console, Remembered
from ddp_kit.launcher.agent.stacks import can_be_seen
from ddp_kit.launcher.cgroups import oom_kills
from ddp_kit.launcher.output import LastWords
from ddp_kit.launcher.streams import private_files
from ddp_kit.launcher.warm.client import Process, WarmServer
from ddp_kit.launcher.warm.messages import Program

_SIGNAL_LOOK_SECONDS = 0.05
# In the kernel's uninterruptible sleep a process outlives SIGKILL; the launcher does not wait for it.
_UNKILLABLE_SECONDS = 5.0
# For those that train with one that has failed. There is nothing left to save, which is what a Trainer does when it is
# told to stop; and in a collective of NCCL it would not even hear of that. Others end at SIGTERM, or have reasons.
_IN_VAIN_SECONDS = 0.2
_SAVING_SECONDS = 1.0  # what a save in hand gets, as long as others do not wait for it for long
_LAST_OUTPUT_SECONDS = 2.0  # for what is left in the pipes, once all workers have ended


@dataclass(frozen=True)
class Means:
    """What workers are started by."""

    warm: WarmServer | None
    """None: this process starts them."""
    program: Program | None
    """What a fork would become; None: each is executed."""
    cpus: Sequence[tuple[int, ...]]
    """The cores of each local rank; empty where they are left to torch or the system."""
    console: Console
    grace: float
    """Seconds between SIGTERM and SIGKILL when workers are stopped."""
    wrapped: bool = False
    """Whether a worker may be another program around the rank, such as a shell (--no-python)."""
    hang_timeout: float | None = None
    """After which one that does nothing is ended; None: the default, 0: never."""


class Workers(SubprocessContext):
    """torch's worker processes with its log files; forked, watched without polling, ended within one grace."""

    def __init__(
        self,
        *,
        means: Means,
        inbox: Inbox,
        say: Callable[[str], None],
        on_failure: Callable[[], None],
        logs_specs: LogsSpecs,
        **torch_settings: Any,
    ) -> None:
        self._logs = Remembered(logs_specs)
        with private_files():
            super().__init__(logs_specs=self._logs, **torch_settings)
        self._program, self._warm, self._cpus = means.program, means.warm, means.cpus
        self._wrapped = means.wrapped
        self._inbox = inbox
        self._grace = means.grace
        self._say = say
        self._on_failure = on_failure  # called before the other workers are stopped
        self._interrupted = False
        self._output = means.console.output(self._logs.dest, self.name, self.envs, self._is_ending)
        self.hangs = Hangs(means.hang_timeout, self.envs, self.error_files, lambda: inbox.signals > 0)
        self._began = time.monotonic()
        self._oom_kills = oom_kills()
        self._after: dict[int, float] = {}  # local rank -> seconds from the start to its end
        self._told: set[int] = set()
        self._words: dict[int, LastWords] | None = None  # once all have ended

    def start(self) -> None:
        """Start the workers. Signals stay with the agent's own handlers."""
        self._start()
        self._output.start()
        with private_files():
            for tail in self._tail_logs[2:]:  # those that filter; the others' work is the output's
                tail.start()

    def _start(self) -> None:
        if self._warm is None:
            for local_rank in range(self.nprocs):
                self.subprocess_handlers[local_rank] = self._start_here(local_rank)
            return
        processes = {local_rank: self._ask(self._warm, local_rank) for local_rank in range(self.nprocs)}
        if not self._answered(processes.values(), self._warm):
            return
        for process in processes.values():
            if process.error:
                raise _cannot_start(self._command(0)[0], process.error)
        for reason in sorted({process.cold for process in processes.values() if process.cold}):
            self._say(f"starting cold: {reason}")
        self.subprocess_handlers = {rank: _Served(process) for rank, process in processes.items()}  # type: ignore[misc]

    def _command(self, local_rank: int) -> tuple[str, ...]:
        return (str(self.entrypoint), *map(str, self.args[local_rank]))

    def _ask(self, warm: WarmServer, local_rank: int) -> Process:
        command, program = self._command(local_rank), self._program
        if program is not None:
            skip = 4 if program.module else 3  # python -u (-m) name
            program = replace(program, arguments=command[skip:])
        return warm.start(
            command,
            self._environment(local_rank),
            program,
            self._output.ends(local_rank),
            self._cores(local_rank),
            self.hangs.counts_every,
            "" if can_be_seen(warm.pid) else self._beside_error_file(local_rank, STACKS_FILE),
        )

    def _beside_error_file(self, local_rank: int, name: str) -> str:
        path = self.error_files[local_rank]
        return "" if path == os.devnull else str(Path(path).with_name(name))

    def _environment(self, local_rank: int) -> dict[str, str]:
        env = {**os.environ, **self.envs[local_rank]}
        return {name: value for name, value in env.items() if value is not None}

    def _cores(self, local_rank: int) -> tuple[int, ...]:
        """--numa-binding's, else those near the worker's GPU."""
        if self._numa_options is not None:
            return _bound(local_rank, self._numa_options)
        return self._cpus[local_rank] if local_rank < len(self._cpus) else ()

    def _answered(self, processes: Iterable[Process], warm: WarmServer) -> bool:
        """Wait for the server, which may still be importing torch; False where the launcher is told to stop first."""
        for process in processes:
            while not process.answered:
                wait_readable([warm], _SIGNAL_LOOK_SECONDS)
                warm.pump()
                if self._inbox.signals:
                    return False  # the agent's loop acts on it; it ends the server, and with it the workers
        return True

    def _start_here(self, local_rank: int) -> SubprocessHandler:
        try:
            return _Cold(
                str(self.entrypoint),
                self.args[local_rank],
                self._environment(local_rank),
                None,
                None,
                local_rank,
                self._numa_options,
                ends=self._output.ends(local_rank),
            )
        except OSError as error:
            raise _cannot_start(str(self.entrypoint), error.strerror or str(error)) from None

    def watched(self) -> list[Any]:
        """What becomes readable when a worker ends."""
        return [self._warm] if self._warm is not None and not self._warm.gone else []

    def patience(self) -> float | None:
        """Seconds after which `_poll` has something to decide though no worker has ended; None: never."""
        server = self._warm.patience() if self._warm is not None and not self._warm.gone else None
        waits = (self._patience_with_others(), self.hangs.due(), server)
        return min((seconds for seconds in waits if seconds is not None), default=None)

    def _patience_with_others(self) -> float | None:
        """Seconds that are left to the others once a worker has saved and asked for another run; None: no limit."""
        left = [self._after[rank] for rank in self._after if self._exit_code(rank) == ExitCode.REQUEUE]
        return max(0.0, self._began + min(left) + self._grace - time.monotonic()) if left else None

    def _poll(self) -> RunProcsResult | None:
        self._note_ends()
        self._end_if_hung(self.hangs.look(self._pids()))
        codes = {rank: self._exit_code(rank) for rank in self._after}
        hung = self.hangs.found  # in the kernel's uninterruptible sleep one outlives its kill, and is left behind
        failed = bool(hung) or any(code not in (0, ExitCode.REQUEUE) for code in codes.values())
        if self._running_local_ranks and not failed and self._patience_with_others() != 0.0:
            return None
        if failed or any(codes.values()):
            if self._running_local_ranks and not self.hangs.found and any(map(self._is_late, codes)):
                self._end_if_hung(self.hangs.after_timeout(self._pids()))
            self._on_failure()
        if failed:
            self.stop_after_failure()
        self.close()
        self._settle()
        failures = {
            rank: self._process_failure(rank, handler.proc.pid, code)
            for rank, handler in sorted(self.subprocess_handlers.items(), key=lambda pair: self._order(pair[0]))
            if (code := handler.proc.poll() or -signal.SIGKILL * (rank in hung))
        }
        values = {} if failures else dict.fromkeys(range(self.nprocs))
        return RunProcsResult(values, failures, self.stdouts, self.stderrs)

    def _pids(self) -> dict[int, int]:
        """Of the workers that run."""
        return {rank: self.subprocess_handlers[rank].proc.pid for rank in sorted(self._running_local_ranks)}

    def _is_late(self, local_rank: int) -> bool:
        """Whether this one has ended because other ranks did not come to a collective."""
        code = self._exit_code(local_rank)
        if not code:
            return False
        said = str(note_of(self._process_failure(local_rank, 0, code)).get("message", ""))
        return hints.is_late(said or self._output.tail(local_rank))

    def _end_if_hung(self, local_rank: int | None) -> None:
        if local_rank is None:
            return
        self._kill({local_rank})
        deadline = time.monotonic() + _UNKILLABLE_SECONDS
        while local_rank in self._running_local_ranks and time.monotonic() < deadline and self._inbox.signals < 2:
            self._wait_for_ends(deadline - time.monotonic())

    def end_asleep(self) -> None:
        """End a worker that is in the kernel's uninterruptible sleep for too long: a failure like a hang."""
        self._end_if_hung(self.hangs.asleep(self._pids()))

    def _process_failure(self, local_rank: int, pid: int, code: int) -> ProcessFailure:
        """What torch makes of a worker's end and its error file, if that has one of torch's forms."""
        path = self.error_files[local_rank]
        return ProcessFailure(local_rank, pid, code, path if _is_error_file(path) else "")

    def _order(self, local_rank: int) -> tuple[bool, float]:
        """The first failure first: torch takes the first of those with the same time, which it knows in seconds."""
        after, told = self.story(local_rank)
        return told, after

    def _exit_code(self, local_rank: int) -> int | None:
        code: int | None = self.subprocess_handlers[local_rank].proc.poll()
        return code

    def _note_ends(self) -> None:
        if self._warm is not None:
            self._warm.pump()
        for rank in list(self._running_local_ranks):
            proc = self.subprocess_handlers[rank].proc
            if proc.poll() is not None:
                ended = getattr(proc, "ended_at", None) or time.monotonic()
                self._after[rank] = ended - self._began
                self._running_local_ranks.discard(rank)
                if proc.poll():
                    self._output.failed(rank)

    def story(self, local_rank: int) -> tuple[float, bool]:
        """Seconds from the start of the workers to this one's end, and whether it had been told to stop."""
        return self._after.get(local_rank, 0.0), local_rank in self._told

    def ended_well(self) -> tuple[int, ...]:
        """The local ranks that had ended with exit code 0 before anyone was told to stop."""
        return tuple(rank for rank in sorted(self._after) if rank not in self._told and self._exit_code(rank) == 0)

    def saved(self) -> bool:
        """Whether the workers have ended with the exit code that asks for another run, and none in another way."""
        codes = {self._exit_code(rank) for rank in self._after}
        return ExitCode.REQUEUE in codes and codes <= {0, ExitCode.REQUEUE}

    def last_words(self, local_rank: int) -> LastWords:
        """How a failed worker ended, in its own words."""
        return (self._words or {}).get(local_rank, LastWords())

    def killed_for_memory(self) -> bool:
        """Whether the kernel has killed any process for want of memory since the workers were started."""
        return oom_kills() > self._oom_kills

    def lost(self, local_rank: int) -> bool:
        """Whether this one died because the warm server did."""
        return bool(getattr(self.subprocess_handlers[local_rank].proc, "lost", False))

    def pass_on(self, number: signal.Signals) -> None:
        """Give a signal to every worker that has something to do with it; the others it would end."""
        deaf = []
        for rank in sorted(self._running_local_ranks):
            pid = self.subprocess_handlers[rank].proc.pid
            if not handles(pid, number):
                deaf.append(str(rank))
                continue
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if deaf:
            self._say(f"{number.name} was not passed on to local rank {', '.join(deaf)}: no handler for it there")

    def stop_after_failure(self) -> None:
        """End what still runs, now that another worker has failed."""
        if Phase.OUTSIDE in self._phases():
            self.close()
            return
        self._tell(signal.SIGTERM)
        began = time.monotonic()
        while self._running_local_ranks and self._inbox.signals < 2:
            saving = Phase.CHECKPOINT in self._phases()
            left = began + min(self._grace, _SAVING_SECONDS if saving else _IN_VAIN_SECONDS) - time.monotonic()
            if left <= 0:
                break
            self._wait_for_ends(left)
        super().close(timeout=0)

    def _phases(self) -> set[Phase]:
        return {read_heartbeat(self.error_files[rank]).phase for rank in self._running_local_ranks}

    def close(self, death_sig: signal.Signals | None = None, timeout: float = 0) -> None:  # noqa: ARG002
        """End what still runs, within the user's grace on every path: torch's `timeout` is often its own default."""
        super().close(death_sig, self._grace)  # type: ignore[arg-type]

    def _close(self, death_sig: signal.Signals, timeout: float = 30) -> None:
        """Send `death_sig`; after `timeout` seconds, or at the second signal to the launcher, SIGKILL."""
        if not self.subprocess_handlers:
            return
        self._note_ends()
        if self._running_local_ranks:
            self._tell(death_sig)
            deadline = time.monotonic() + timeout
            while self._running_local_ranks and time.monotonic() < deadline and self._inbox.signals < 2:
                self._wait_for_ends(deadline - time.monotonic())
            self._kill(self._running_local_ranks)
            deadline = time.monotonic() + max(timeout, _UNKILLABLE_SECONDS)
            while self._running_local_ranks and time.monotonic() < deadline:
                self._wait_for_ends(deadline - time.monotonic())
        self._settle()

    def _settle(self) -> None:
        """All have ended: clear up after them, and take their last words."""
        if self._words is not None:
            return
        if self._warm is not None:
            self._warm.clear(well=not any(map(self._exit_code, self._after)))
        self.hangs.remove_empty_files()
        failed = [rank for rank in self._after if self._exit_code(rank)]
        cause = any(rank not in self._told for rank in failed)  # else what they say of being stopped is shown
        self._words = self._output.end(
            failed,
            keep_back=lambda trace: cause or hints.is_echo(trace) or last_words.is_interrupt(trace),
            is_secondary=lambda trace: hints.is_echo(trace) or last_words.is_interrupt(trace),
            seconds=_LAST_OUTPUT_SECONDS,
            hurry=lambda: self._inbox.signals > 1,
        )
        if failed:
            self._output.end_line()

    def _is_ending(self, local_rank: int) -> bool:
        """Whether a rank that has written a traceback ends of it: it has noted its error, or was told by Ctrl-C."""
        return self._interrupted or Path(self.error_files[local_rank]).is_file()

    def _tell(self, number: signal.Signals) -> None:
        """Tell the ranks alone, who need their data loaders to save; a program of another kind with all it started."""
        self._told |= self._running_local_ranks - self.hangs.found.keys()
        self._interrupted |= number == signal.SIGINT
        for rank in self._running_local_ranks:
            pid = self.subprocess_handlers[rank].proc.pid
            with suppress(ProcessLookupError):
                (os.killpg if self._wrapped else os.kill)(pid, number)

    def _kill(self, local_ranks: Iterable[int]) -> None:
        """End these ranks at once; the server sees to all that they have started."""
        for rank in local_ranks:
            proc = self.subprocess_handlers[rank].proc
            if self._warm is not None and isinstance(proc, Process):
                self._warm.kill(proc)
            else:
                with suppress(ProcessLookupError):
                    os.killpg(proc.pid, signal.SIGKILL)

    def _wait_for_ends(self, timeout: float) -> None:
        """Until a worker ends, or for a moment: the caller looks for signals in between."""
        wait_readable(self.watched(), min(timeout, _SIGNAL_LOOK_SECONDS))
        self._note_ends()


def note_of(failure: ProcessFailure) -> dict[str, Any]:
    """The note in a worker's error file, by the script itself or by `warm.script`; empty where there is no file.

    Torch's own handler writes a dict; other programs write the message as a plain string, which torch accepts, too.
    """
    if isinstance(failure.message, dict):
        return failure.message
    given = os.path.isfile(failure.error_file)  # noqa: PTH113  # without a file torch makes a message up
    return {"message": failure.message} if given else {}


class _Cold(SubprocessHandler):
    """torch's handler of a subprocess, for systems without a warm server."""

    def __init__(self, *words: Any, ends: tuple[int, int]) -> None:
        self._worker_s_ends = ends
        super().__init__(*words)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> "subprocess.Popen[bytes]":
        out, err = self._worker_s_ends
        return subprocess.Popen(args, env=env, stdout=out, stderr=err, start_new_session=True)


class _Served:
    """A worker of the server in the place of torch's handler of a subprocess."""

    def __init__(self, process: Process) -> None:
        self.proc = process


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process catches or ignores a signal, instead of being ended by it."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(("SigCgt:", "SigIgn:")) and int(line.split()[1], 16) >> (number - 1) & 1:
                return True
    return False


def _is_error_file(path: str) -> bool:
    """Whether torch can read this file; it writes a traceback of its own to the console where it cannot."""
    try:
        error = json.loads(Path(path).read_bytes())
        message = error["message"]
        int(error.get("timestamp", 0) if isinstance(message, str) else message["extraInfo"]["timestamp"])
    except (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError):
        return False
    return True


def _cannot_start(command: str, why: str) -> LaunchError:
    return LaunchError(f"{command} cannot be started: {why}", "check that it can be run by hand")


def _bound(local_rank: int, numa_options: Any) -> tuple[int, ...]:
    """The cores that --numa-binding gives this rank; empty without it."""
    if numa_options is None:
        return ()
    try:
        cpus = torch_versions.numa_cpus(local_rank, numa_options)
    except Exception as error:  # whatever the machine does not tell torch
        raise UsageError(
            f"--numa-binding cannot be had on this machine: {error}", "leave it out, or install numactl"
        ) from None
    return tuple(sorted(cpus))
