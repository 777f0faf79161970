"""Detection of hung workers: the rule that recognises a hang, and the monitor that applies it."""

import os
import re
import select
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ddp_kit.env import GROUP_WORLD_SIZE, RANK, STACKS_FILE
from ddp_kit.exit_codes import ExitCode
from ddp_kit.heartbeat import Heartbeat, Phase, read_heartbeat
from ddp_kit.launcher.agent.stacks import Stack, read_stacks, wait_channel
from ddp_kit.launcher.output import open_log
from ddp_kit.launcher.processes import is_stopped, state
from ddp_kit.launcher.verdict import Failure, rank_list
from ddp_kit.masking import masked

# --- Hang rule --------------------------------------------------------------------------------------------------------
# Decides whether the ranks of this node hang, without using files or a clock. Each check compares the heartbeats of all
# running ranks with their heartbeats at the previous check:
#     one has changed                       this rank is alive; the limit grows to twice the longest pause of any rank
#     none has changed within the limit     a hang: once one rank is stuck, all others soon wait for it
#
# A rank outside of the Trainer may take any amount of time, unless other ranks wait for it in a collective, or all
# running ranks are in native code that does not return, such as the last rank after the others have ended.


DEFAULT_SECONDS = 300.0
"""Seconds without progress that count as a hang, in a run without longer pauses."""
_MAX_CHECK_SECONDS = 1.0
_PAUSE_FACTOR = 2  # times the longest pause so far: a later evaluation may take longer, for example to compile again
_FIRST_STEPS = 2
_FIRST_COLLECTIVES = 10
_STARTUP_FACTOR = 10  # times the limit, for the first steps or collectives
_OTHER_NODES_FACTOR = 1.5  # times the limit: a node whose ranks only wait lets a node with a stuck rank report first
# Files of debuggers: a process that runs a debugger is waiting for its user.
_DEBUGGER = re.compile(r"(^|/)(i?pdb|bdb|pudb/\w+|debugpy/.*|pydevd\w*)\.py$")


@dataclass(frozen=True)
class NoProgress:
    """Time during which no rank of this node made progress, and the limit that it reached; both in seconds."""

    seconds: float
    limit: float

    @property
    def past_other_nodes_limit(self) -> bool:
        """Whether enough time has passed for another node to report the hang, if one of its ranks is stuck."""
        return self.seconds >= _OTHER_NODES_FACTOR * self.limit


@dataclass
class _Rank:
    heartbeat: Heartbeat
    idle: float = 0.0
    in_native_code: float = 0.0
    """Seconds since the rank's main thread was last seen running Python code."""
    uncounted: float = 0.0
    """Seconds since the rank's collectives were last counted. Counting stops only if another thread holds the GIL."""
    collectives: int = 0
    """Number of collectives started in the default process group; kept when that group is destroyed."""


class HangRule:
    """Rule that decides whether the ranks of this node hang. Each round has its own instance.

    `floor`: the minimum limit in seconds. `any_script`: whether the rule also applies to scripts without a Trainer.
    """

    def __init__(self, floor: float, any_script: bool, now: float) -> None:
        self._floor = floor
        self._any_script = any_script
        self._ranks: dict[int, _Rank] = {}
        self._last_check = now
        self._pause = 0.0  # the longest pause so far
        self._stopped = 0.0  # seconds for which a signal has kept any rank stopped

    @property
    def check_interval(self) -> float:
        """Seconds between two checks."""
        return min(_MAX_CHECK_SECONDS, self._floor / 4)

    def next_check(self, now: float) -> float:
        """Seconds until the next check."""
        return max(0.0, self._last_check + self.check_interval - now)

    def check(self, heartbeats: Mapping[int, Heartbeat], now: float, *, stopped: bool = False) -> NoProgress | None:
        """Return a `NoProgress` if the ranks have hung, else None.

        `heartbeats`: the heartbeats of all running ranks. `stopped`: whether a signal such as SIGSTOP has stopped any
        of these ranks; if so, the smallest possible limit applies.

        However much time has passed since the last check, at most two check intervals count as idle, so that a
        suspended machine or launcher is not mistaken for a hang.
        """
        passed = min(now - self._last_check, 2 * self.check_interval)
        self._last_check = now
        before = self._ranks
        self._ranks = {rank: self._after(before.get(rank), heartbeat, passed) for rank, heartbeat in heartbeats.items()}
        self._stopped = self._stopped + passed if stopped else 0.0
        idle = min(rank.idle for rank in self._ranks.values())
        limit = self.limit
        if stopped:
            idle = min(idle, self._stopped)
            limit = self._floor
        elif not self._progress_expected():
            return None
        return NoProgress(idle, limit) if idle >= limit else None

    def reset(self) -> None:
        """Reset the idle times after a legitimate pause, for example in a debugger."""
        for rank in self._ranks.values():
            rank.idle = rank.in_native_code = rank.uncounted = 0.0

    @property
    def limit(self) -> float:
        """Seconds without progress that count as a hang at this point of the run."""
        is_settled = all(map(self._is_settled, self._ranks.values()))
        factor = 1 if is_settled else _STARTUP_FACTOR
        return max(factor * self._floor, _PAUSE_FACTOR * self._pause)

    def _is_settled(self, rank: _Rank) -> bool:
        """Whether the rank is past its first steps or collectives, and is not saving a checkpoint.

        If not, a higher limit applies, because start-up and saving may be slow.
        """
        if rank.heartbeat.phase is Phase.CHECKPOINT:
            return False
        if rank.heartbeat.step is not None:  # it has a Trainer
            return rank.heartbeat.steps >= _FIRST_STEPS
        return self._any_script and rank.collectives >= _FIRST_COLLECTIVES

    def _after(self, before: _Rank | None, heartbeat: Heartbeat, passed: float) -> _Rank:
        if before is None:
            return _Rank(heartbeat, collectives=heartbeat.collectives)
        after = _Rank(heartbeat, collectives=heartbeat.collectives or before.collectives)
        if before.heartbeat.python_at == heartbeat.python_at:
            after.in_native_code = before.in_native_code + passed
        if before.heartbeat.counted_at == heartbeat.counted_at:
            after.uncounted = before.uncounted + passed
        if before.heartbeat == heartbeat:
            after.idle = before.idle + passed
        elif self._in_trainer(before.heartbeat):  # pauses in user code do not show how long the Trainer takes
            self._pause = max(self._pause, before.idle)
        return after

    def _progress_expected(self) -> bool:
        """Whether at least one rank should be making progress.

        True if a rank is running Trainer code, if some ranks have started more collectives than others, or if all
        ranks are stuck in native code.
        """
        heartbeats = [rank.heartbeat for rank in self._ranks.values()]
        apart = self._any_script and len({beat.collectives for beat in heartbeats}) > 1
        if apart or any(map(self._in_trainer, heartbeats)):
            return True
        return all(map(self._is_in_native_code, self._ranks.values()))

    def _is_in_native_code(self, rank: _Rank) -> bool:
        """Whether the rank's main thread has executed no Python code for as long as the limit.

        In a script without collectives, a rank counts only if it has also held the interpreter lock (GIL) for all of
        that time: a rank that does not hold the lock may be waiting for another program.
        """
        if not self._any_script or not rank.heartbeat.python_at or rank.in_native_code < self.limit:
            return False
        return bool(rank.collectives or rank.heartbeat.steps) or rank.uncounted >= self.limit

    @staticmethod
    def _in_trainer(heartbeat: Heartbeat) -> bool:
        return not heartbeat.phase.in_user_code


def culprit(heartbeats: Mapping[int, Heartbeat], stacks: Mapping[int, Stack]) -> int:
    """Return the rank that the others are waiting for.

    A stopped rank takes precedence, then a rank outside a collective, then the rank that is furthest behind.
    """

    def order(rank: int) -> tuple[bool, bool, int, int, int, int, int]:
        stack = stacks.get(rank, Stack())
        beat = heartbeats[rank]
        step = -1 if beat.step is None else beat.step
        within = (beat.phase - Phase.CALLBACKS) % len(Phase)  # the end of a step is recorded before its callbacks
        counts = beat.collectives, step, beat.all_collectives, within
        return (not stack.stopped, bool(stack.waits_for_ranks), *counts, rank)

    return min(heartbeats, key=order)


def all_wait_for_ranks(stacks: Collection[Stack]) -> bool:
    """Whether all these processes are only waiting for other ranks. The cause of the hang is then elsewhere."""
    return bool(stacks) and all(stack.waits_for_ranks and not stack.stopped for stack in stacks)


def is_debugged(stacks: Iterable[Stack]) -> bool:
    """Whether a debugger is running in one of these processes."""
    return any(_DEBUGGER.search(frame.file) for stack in stacks for frame in stack.frames)


# --- Hang monitor -----------------------------------------------------------------------------------------------------
# Detects hung workers of this node from their heartbeat files, and reports them with the stacks of all ranks.


_RAISE_LIMIT = "if the rank is only slow, raise the limit with --hang-timeout SECONDS; --hang-timeout 0 disables it"
_NO_STACK = ", but the stack cannot be read: py-spy is not installed, or the kernel prevents py-spy from reading it"
_RAISE_TIMEOUT = "if the rank is only slow, raise the timeout: init_process_group(timeout=...)"
_LOOK_IN_DMESG = (
    "look in `dmesg -T` for a disk, network file system or driver that does not respond; if the wait is expected, "
    "raise TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
)
_SLEEP_CHECK_SECONDS = 1.0  # between two checks for uninterruptible sleep; the user has to enable these checks
_NATIVE_SECONDS = 10.0
_ENDING_SECONDS = 1.0


class HangMonitor:
    """Monitors the workers of one round on this node.

    `hang_timeout`: the value of --hang-timeout in seconds; None: the default applies; 0: no limit. `sleep_timeout`:
    seconds that a worker may be in the kernel's uninterruptible sleep; 0: no limit. `host`: the name of this node in
    failures. `interrupted`: a function that returns whether to stop reading stacks.
    """

    def __init__(
        self,
        hang_timeout: float | None,
        sleep_timeout: float,
        envs: Mapping[int, Mapping[str, str]],
        error_files: Mapping[int, str],
        host: str,
        interrupted: Callable[[], bool],
    ) -> None:
        self._ranks = {local_rank: int(env[RANK]) for local_rank, env in envs.items()}
        self._several_nodes = any(env.get(GROUP_WORLD_SIZE, "1") != "1" for env in envs.values())
        self._error_files = error_files
        self._host = host
        self._sleep_timeout = sleep_timeout
        self._asleep_since: dict[int, float] = {}  # ranks in uninterruptible sleep
        self._began = time.monotonic()
        self._interrupted = interrupted
        self._has_user_limit = hang_timeout is not None  # if not, doubtful cases are left to torch's own timeouts
        self._left_to_other_nodes = False
        self._rule: HangRule | None = None
        self.count_interval = 0.0
        """Seconds between counts of a worker's collectives, which show progress without a Trainer; 0: never."""
        if hang_timeout is None:
            self._rule = HangRule(DEFAULT_SECONDS, False, self._began)
        elif hang_timeout:
            self._rule = HangRule(hang_timeout, True, self._began)
            self.count_interval = self._rule.check_interval / 2
        self.failure: Failure | None = None
        """The failure of the worker that hangs, with its stack; None: no worker hangs."""
        self.others: tuple[str, ...] = ()
        """Lines of text that say what the running ranks were doing when a collective timed out on another rank."""
        self.stacks: dict[int, str] = {}
        """Stacks by global rank."""

    def next_check(self) -> float | None:
        """Seconds until the next call of `check` and `check_sleeping`, or None if no further call is needed."""
        checks = []
        if self._rule is not None and self.failure is None:
            checks.append(self._rule.next_check(time.monotonic()))
        if self._sleep_timeout:
            checks.append(min(_SLEEP_CHECK_SECONDS, self._sleep_timeout / 4))
        return min(checks, default=None)

    def check(self, pids: Mapping[int, int]) -> int | None:
        """Return the local rank that hangs, or None. `pids`: the process ids of the running workers, by local rank."""
        if self._rule is None or self.failure is not None or not pids or self._rule.next_check(time.monotonic()) != 0.0:
            return None
        heartbeats = self._read_heartbeats(pids)
        read_at = time.monotonic_ns()
        no_progress = self._rule.check(heartbeats, time.monotonic(), stopped=any(map(is_stopped, pids.values())))
        if any(heartbeat.phase is Phase.EXITING for heartbeat in heartbeats.values()):
            return None  # the launcher ends a worker whose exit takes too long
        self._left_to_other_nodes = self._left_to_other_nodes and no_progress is not None
        if no_progress is None or (self._left_to_other_nodes and not no_progress.past_other_nodes_limit):
            return None
        if any(state(pid) == "t" for pid in pids.values()):  # traced by gdb or strace
            self._rule.reset()
            return None
        stacks = self._read_stacks(pids, max(_NATIVE_SECONDS / 5, min(_NATIVE_SECONDS, no_progress.limit / 2)))
        has_ended = any(state(pid) in ("", "Z", "X") for pid in pids.values())
        if self._interrupted() or has_ended or self._read_heartbeats(pids) != heartbeats:
            return None
        if is_debugged(stacks.values()):
            self._rule.reset()
            return None
        waits = all_wait_for_ranks(stacks.values())
        if waits and self._several_nodes and not (self._has_user_limit and no_progress.past_other_nodes_limit):
            self._left_to_other_nodes = True
            return None
        local_rank = culprit(heartbeats, stacks)
        phase = heartbeats[local_rank].phase
        in_user_code = phase.in_user_code or phase is Phase.CALLBACKS  # which may take any amount of time
        if not self._has_user_limit and in_user_code and not stacks[local_rank].stopped:
            self._rule.reset()
            return None
        message = self._message(heartbeats, read_at, no_progress, waits)
        self._fail_with_stack(local_rank, heartbeats, stacks, message, _RAISE_LIMIT, waits)
        return local_rank

    def after_timeout(self, pids: Mapping[int, int]) -> int | None:
        """After a collective has timed out, return the local rank that did not reach it, or None if not known."""
        heartbeats = self._read_heartbeats(pids)
        stacks = self._read_stacks(pids, _NATIVE_SECONDS)
        seen = {rank: stack for rank, stack in stacks.items() if stack.frames or stack.stopped}  # others have ended
        self.others = self._locations(seen, heartbeats)
        self._write_stacks(stacks)
        late = [rank for rank, stack in seen.items() if stack.stopped or not stack.waits_for_ranks]
        if len(late) != 1 or heartbeats[late[0]].phase is Phase.EXITING or _is_ending(pids[late[0]]):
            return None
        message = "this rank did not reach the collective that timed out on other ranks"
        self._fail_with_stack(late[0], heartbeats, stacks, message, _RAISE_TIMEOUT)
        return late[0]

    def check_sleeping(self, pids: Mapping[int, int]) -> int | None:
        """Return a local rank that has been in the kernel's uninterruptible sleep for too long, or None.

        This reads no stack, because py-spy would block until the process wakes up.
        """
        if not self._sleep_timeout:
            return None
        now = time.monotonic()
        asleep = [rank for rank, pid in pids.items() if state(pid) == "D"]
        self._asleep_since = {rank: self._asleep_since.get(rank, now) for rank in asleep}
        late = [rank for rank, since in self._asleep_since.items() if now - since >= self._sleep_timeout]
        if not late:
            return None
        local_rank = late[0]
        if self.failure is None:
            function = wait_channel(pids[local_rank])
            where = f", in the kernel function {function}" if function else ""
            message = f"the process is in uninterruptible sleep (state D){where}"
            step = read_heartbeat(self._error_files[local_rank]).step
            self.failure = self._failure(local_rank, pids[local_rank], step, message, _LOOK_IN_DMESG)
        return local_rank

    def _read_stacks(self, pids: Mapping[int, int], native_seconds: float) -> dict[int, Stack]:
        return read_stacks(pids, native_seconds, {rank: self.stacks_file(rank) for rank in pids}, self._interrupted)

    def stacks_file(self, local_rank: int) -> str:
        """The path of the file for a worker's stacks; empty if no logs are written."""
        path = self._error_files[local_rank]
        return "" if path == os.devnull else str(Path(path).with_name(STACKS_FILE))

    def _read_heartbeats(self, pids: Mapping[int, int]) -> dict[int, Heartbeat]:
        return {local_rank: read_heartbeat(self._error_files[local_rank]) for local_rank in pids}

    def _message(self, heartbeats: Mapping[int, Heartbeat], read_at: int, no_progress: NoProgress, waits: bool) -> str:
        message = f"no progress for more than {no_progress.limit:.3g} s"
        if waits and self._several_nodes:
            return f"{message}; the cause may be on another node"
        if waits and len(heartbeats) < len(self._ranks):
            return f"{message}; other ranks have ended"
        if waits:
            return f"{message}; all ranks are waiting for each other"
        beats = heartbeats.values()
        # A rank that holds the interpreter lock has stopped counting, and may have started more collectives since.
        is_current = all(read_at - beat.counted_at < no_progress.limit / 2 * 1e9 for beat in beats)
        fewest = min(beat.collectives for beat in beats)
        most = max(beat.collectives for beat in beats)
        if is_current and fewest < most and all(beat.step is None for beat in beats):
            return f"{message}; this rank has started {fewest} collectives, but other ranks have started {most}"
        return message

    def _fail_with_stack(
        self,
        local_rank: int,
        heartbeats: Mapping[int, Heartbeat],
        stacks: Mapping[int, Stack],
        message: str,
        hint: str,
        waits: bool = False,
    ) -> None:
        """Set `failure` to that of a worker whose stack has been read, and keep the stacks of all workers."""
        stack = stacks[local_rank]
        heartbeat = heartbeats[local_rank]
        message = f"{message}; {stack.doing(heartbeat.phase)}"
        if stack.stopped:
            message += " and stopped by a signal"
        elif stack.holds_lock:
            message += " with the interpreter lock held"
        if not stack.frames:
            message += _NO_STACK
        process = f"rank {self._ranks[local_rank]} (pid {stack.pid})"
        if stack.loader is not None:
            process = f"a DataLoader worker (pid {stack.loader.pid}) of {process}"
        trace = (stack.loader or stack).as_trace()
        if trace:
            trace = f"Stack of {process}, most recent call last:\n{trace}"
        self.failure = replace(
            self._failure(local_rank, stack.pid, heartbeat.step, message, hint),
            trace=masked(trace, os.environ),
            others=self._locations({rank: stacks[rank] for rank in stacks if rank != local_rank}, heartbeats),
            secondary=waits,
        )
        self._write_stacks(stacks)

    def _failure(self, local_rank: int, pid: int, step: int | None, message: str, hint: str) -> Failure:
        return Failure(
            rank=self._ranks[local_rank],
            local_rank=local_rank,
            pid=pid,
            exit_code=ExitCode.HUNG,
            after=time.monotonic() - self._began,
            host=self._host,
            message=masked(message, os.environ),
            step=step,
            hint=hint,
            hung=True,
        )

    def _locations(self, stacks: Mapping[int, Stack], heartbeats: Mapping[int, Heartbeat]) -> tuple[str, ...]:
        """Lines that say what the ranks are doing; ranks at the same location share a line."""
        by_activity: dict[str, list[int]] = {}
        for local_rank, stack in stacks.items():
            doing = stack.doing(heartbeats[local_rank].phase)
            by_activity.setdefault(doing, []).append(self._ranks[local_rank])
        lines = []
        for doing, ranks in by_activity.items():
            verb = "was" if len(ranks) == 1 else "were"
            lines.append(masked(f"{rank_list(ranks)} {verb} {doing}", os.environ))
        return tuple(lines)

    def remove_empty_files(self) -> None:
        """Remove empty stack files. Workers that can write their own stacks create these files when they start."""
        for path in filter(None, map(self.stacks_file, self._ranks)):
            with suppress(OSError):
                if not os.stat(path).st_size:  # noqa: PTH116
                    os.unlink(path)  # noqa: PTH108

    def _write_stacks(self, stacks: Mapping[int, Stack]) -> None:
        """Write the complete stacks next to the logs."""
        for local_rank, stack in stacks.items():
            text = masked(stack.text, os.environ)
            self.stacks[self._ranks[local_rank]] = text
            path = self.stacks_file(local_rank)
            if text and path:
                with suppress(OSError), os.fdopen(open_log(path), "w") as file:
                    file.write(text)


def _is_ending(pid: int) -> bool:
    """Wait up to a second for a process to end, and return whether it did.

    The process may be ending because its own collective has timed out as well.
    """
    try:
        end = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        poll = select.poll()  # the descriptor may be too high for `select`
        poll.register(end, select.POLLIN)
        return bool(poll.poll(_ENDING_SECONDS * 1000))
    finally:
        os.close(end)
