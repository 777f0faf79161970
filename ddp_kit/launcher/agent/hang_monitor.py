"""Detect that this node's workers hang, from their heartbeat files, and report it with the stacks of all ranks."""

import os
import select
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_kit.env import GROUP_WORLD_SIZE, RANK, STACKS_FILE
from ddp_kit.heartbeat import Heartbeat, read_heartbeat
from ddp_kit.launcher.agent.hang_rule import (
    DEFAULT_SECONDS,
    HangRule,
    NoProgress,
    all_wait_for_ranks,
    culprit,
    is_debugged,
    may_take_long,
)
from ddp_kit.launcher.agent.stacks import Stack, read_stacks, state, wait_channel
from ddp_kit.launcher.streams import open_log
from ddp_kit.launcher.verdict import rank_list
from ddp_kit.launcher.warm.cleanup import is_stopped
from ddp_kit.masking import masked

_RAISE_LIMIT = "if it is just slow, raise the limit with --hang-timeout SECONDS, or set it to 0 for no limit"
_NO_STACK = ", but its stack cannot be read: py-spy is not installed, or the kernel does not permit it"
_NATIVE_SECONDS = 10.0
_ENDING_SECONDS = 1.0


@dataclass(frozen=True)
class Hung:
    """A worker that hangs."""

    message: str
    trace: str
    """Its stack, in the form of a traceback."""
    others: tuple[str, ...]
    """What the other ranks of this node were doing, in lines of text."""
    hint: str
    waits: bool = False
    """Whether it only waits for other ranks, so that the cause is elsewhere."""


class HangMonitor:
    """Monitors the workers of one round on this node.

    `hang_timeout`: --hang-timeout in seconds; None: the default; 0: no limit. `interrupted`: whether to stop waiting.
    """

    def __init__(
        self,
        hang_timeout: float | None,
        envs: Mapping[int, Mapping[str, str]],
        error_files: Mapping[int, str],
        interrupted: Callable[[], bool],
    ) -> None:
        self._ranks = {local_rank: int(env[RANK]) for local_rank, env in envs.items()}
        self._several_nodes = any(env.get(GROUP_WORLD_SIZE, "1") != "1" for env in envs.values())
        self._error_files = error_files
        self._interrupted = interrupted
        self._has_user_limit = hang_timeout is not None  # if not, doubtful cases are left to torch's own timeouts
        self._left_to_other_nodes = False
        floor = DEFAULT_SECONDS if hang_timeout is None else hang_timeout
        self._rule = HangRule(floor, hang_timeout is not None, time.monotonic()) if floor else None
        self.count_interval = (
            self._rule.check_interval / 2 if self._rule is not None and hang_timeout is not None else 0.0
        )
        """Seconds between two counts of a worker's collectives, the heartbeat without a Trainer; 0: never."""
        self.found: dict[int, Hung] = {}
        """By local rank; at most one."""
        self.others: tuple[str, ...] = ()
        """What the running ranks were doing when a collective timed out on another rank, in lines of text."""
        self.stacks: dict[int, str] = {}
        """By global rank."""

    def next_check(self) -> float | None:
        """Seconds until the next call of `check`; None: never."""
        return None if self._rule is None or self.found else self._rule.next_check(time.monotonic())

    def check(self, pids: Mapping[int, int]) -> int | None:
        """Return the local rank that hangs; None: none. `pids`: of the running workers, by local rank."""
        if self._rule is None or self.next_check() != 0.0 or not pids:
            return None
        heartbeats, read_at = self._read_heartbeats(pids), time.monotonic_ns()
        no_progress = self._rule.check(heartbeats, time.monotonic(), stopped=any(map(is_stopped, pids.values())))
        self._left_to_other_nodes = self._left_to_other_nodes and no_progress is not None
        if no_progress is None or (self._left_to_other_nodes and not no_progress.past_other_nodes_limit):
            return None
        if any(state(pid) == "t" for pid in pids.values()):  # traced by gdb or strace
            self._rule.reset()
            return None
        stacks = self._read_stacks(pids, max(_NATIVE_SECONDS / 5, min(_NATIVE_SECONDS, no_progress.limit / 2)))
        if self._interrupted() or any(map(_has_ended, pids.values())) or self._read_heartbeats(pids) != heartbeats:
            return None
        if is_debugged(stacks.values()):
            self._rule.reset()
            return None
        waits = all_wait_for_ranks(stacks.values())
        if waits and self._several_nodes and not (self._has_user_limit and no_progress.past_other_nodes_limit):
            self._left_to_other_nodes = True
            return None
        local_rank = culprit(heartbeats, stacks)
        if not self._has_user_limit and may_take_long(heartbeats[local_rank]) and not stacks[local_rank].stopped:
            self._rule.reset()
            return None
        message = self._message(heartbeats, read_at, no_progress, waits)
        self._record(local_rank, heartbeats, stacks, message, _RAISE_LIMIT, waits)
        return local_rank

    def after_timeout(self, pids: Mapping[int, int]) -> int | None:
        """After a collective timed out, return the local rank that did not reach it; None: not known."""
        heartbeats, stacks = self._read_heartbeats(pids), self._read_stacks(pids, _NATIVE_SECONDS)
        seen = {rank: stack for rank, stack in stacks.items() if stack.frames or stack.stopped}  # others have ended
        self.others = self._locations(seen, heartbeats, stacks)
        self._write_stacks(stacks)
        late = [rank for rank, stack in seen.items() if stack.stopped or not stack.waits_for_ranks]
        if len(late) != 1 or _is_ending(pids[late[0]]):
            return None
        message = "it did not reach the collective that timed out on other ranks"
        self._record(
            late[0],
            heartbeats,
            stacks,
            message,
            "if it is just slow, raise the timeout: init_process_group(timeout=...)",
        )
        return late[0]

    def check_sleeping(self, pids: Mapping[int, int]) -> int | None:
        """Return a local rank in the kernel's uninterruptible sleep; None: none.

        It reads no stack, because py-spy would block until the process wakes up.
        """
        found = next((rank for rank, pid in pids.items() if state(pid) == "D"), None)
        if found is not None and found not in self.found:
            where = wait_channel(pids[found])
            self.found[found] = Hung(
                message="in uninterruptible sleep (state D)" + (f", in the kernel function {where}" if where else ""),
                trace="",
                others=(),
                hint="a disk, a network file system or a driver does not respond (`dmesg -T`); if that is expected, "
                "raise TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT",
            )
        return found

    def _read_stacks(self, pids: Mapping[int, int], native_seconds: float) -> dict[int, Stack]:
        return read_stacks(pids, native_seconds, {rank: self._stacks_file(rank) for rank in pids}, self._interrupted)

    def _stacks_file(self, local_rank: int) -> str:
        path = self._error_files[local_rank]
        return "" if path == os.devnull else str(Path(path).with_name(STACKS_FILE))

    def _read_heartbeats(self, pids: Mapping[int, int]) -> dict[int, Heartbeat]:
        return {local_rank: read_heartbeat(self._error_files[local_rank]) for local_rank in pids}

    def _message(self, heartbeats: Mapping[int, Heartbeat], read_at: int, no_progress: NoProgress, waits: bool) -> str:
        message = f"no progress for more than {no_progress.limit:.3g} s"
        # A rank that holds the interpreter lock has stopped counting, and may have started more collectives since.
        is_current = all(read_at - each.counted_at < no_progress.limit / 2 * 1e9 for each in heartbeats.values())
        counts = sorted({each.collectives for each in heartbeats.values()}) if is_current else []
        if waits and self._several_nodes:
            return f"{message}; the cause may be on another node"
        if waits:
            ended = len(heartbeats) < len(self._ranks)
            return f"{message}; {'others have ended' if ended else 'all ranks are waiting for each other'}"
        if len(counts) > 1 and all(each.step is None for each in heartbeats.values()):
            return f"{message}; it has started {counts[0]} collectives, other ranks {counts[-1]}"
        return message

    def _record(
        self,
        local_rank: int,
        heartbeats: Mapping[int, Heartbeat],
        stacks: Mapping[int, Stack],
        message: str,
        hint: str,
        waits: bool = False,
    ) -> None:
        stack = stacks[local_rank]
        how = " and stopped by a signal" if stack.stopped else " with the interpreter lock held" * stack.holds_lock
        others = {rank: each for rank, each in stacks.items() if rank != local_rank}
        self.others = self._locations(others, heartbeats, stacks)
        self.found[local_rank] = Hung(
            message=f"{message}; {stack.doing(heartbeats[local_rank].phase)}{how}{'' if stack.frames else _NO_STACK}",
            trace=_trace(self._ranks[local_rank], stack),
            others=self.others,
            hint=hint,
            waits=waits,
        )
        self._write_stacks(stacks)

    def _locations(
        self, which: Mapping[int, object], heartbeats: Mapping[int, Heartbeat], stacks: Mapping[int, Stack]
    ) -> tuple[str, ...]:
        """What the ranks are doing, with one line for all ranks at the same location."""
        by_activity: dict[str, list[int]] = {}
        for local_rank in which:
            doing = stacks[local_rank].doing(heartbeats[local_rank].phase)
            by_activity.setdefault(doing, []).append(self._ranks[local_rank])
        return tuple(
            f"{rank_list(ranks)} {'was' if len(ranks) == 1 else 'were'} {doing}" for doing, ranks in by_activity.items()
        )

    def remove_empty_files(self) -> None:
        """Remove empty stack files: workers that write their own stacks create them when they start."""
        for path in filter(None, map(self._stacks_file, self._ranks)):
            with suppress(OSError):
                if not os.stat(path).st_size:  # noqa: PTH116
                    os.unlink(path)  # noqa: PTH108

    def _write_stacks(self, stacks: Mapping[int, Stack]) -> None:
        """Write the complete stacks next to the logs."""
        for local_rank, stack in stacks.items():
            text = self.stacks[self._ranks[local_rank]] = masked(stack.text, os.environ)
            path = self._stacks_file(local_rank)
            if text and path:
                with suppress(OSError), os.fdopen(open_log(path), "w") as file:
                    file.write(text)


def _has_ended(pid: int) -> bool:
    return state(pid) in ("", "Z", "X")


def _is_ending(pid: int) -> bool:
    """Whether it ends within a second, like a rank whose own collective has also timed out."""
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


def _trace(rank: int, stack: Stack) -> str:
    shown = stack if stack.loader is None else stack.loader
    who = f"rank {rank} (pid {stack.pid})"
    if stack.loader is not None:
        who = f"a DataLoader worker (pid {shown.pid}) of {who}"
    lines = shown.as_trace()
    return f"Stack of {who}, most recent call last:\n{lines}" if lines else ""
