"""Detect hangs of this node's workers by their heartbeat files, and report them with the stacks of all ranks."""

import os
import select
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_kit.env import GROUP_WORLD_SIZE, RANK, STACKS_FILE
from ddp_kit.heartbeat import Heartbeat, read_heartbeat
from ddp_kit.launcher.agent.stacks import Stack, state, take, wait_channel
from ddp_kit.launcher.agent.watch import (
    DEFAULT_SECONDS,
    Quiet,
    Watch,
    all_wait,
    culprit,
    is_debugged,
    may_take_long,
)
from ddp_kit.launcher.masking import masked
from ddp_kit.launcher.streams import open_log
from ddp_kit.launcher.verdict import in_words
from ddp_kit.launcher.warm.cleanup import is_stopped

_LONGER = "if it only takes longer than usual: --hang-timeout SECONDS, 0 for no limit"
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


class Hangs:
    """Watches one round's workers on one node.

    `hang_timeout`: --hang-timeout in seconds; None: the default, 0: no limit. `interrupted`: whether to stop waiting.
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
        self._has_user_limit = hang_timeout is not None  # else doubtful cases are left to torch's own timeouts
        self._left_to_other_nodes = False
        floor = DEFAULT_SECONDS if hang_timeout is None else hang_timeout
        self._watch = Watch(floor, hang_timeout is not None, time.monotonic()) if floor else None
        self.counts_every = self._watch.period / 2 if self._watch is not None and hang_timeout is not None else 0.0
        """Seconds between two counts of a worker's collectives, the heartbeat of scripts without a Trainer; 0: none."""
        self.found: dict[int, Hung] = {}
        """By local rank; at most one."""
        self.others: tuple[str, ...] = ()
        """What the running ranks were doing when a collective of another one timed out, in lines of text."""
        self.stacks: dict[int, str] = {}
        """By global rank."""

    def due(self) -> float | None:
        """Seconds until the next call of `look`; None: never."""
        return None if self._watch is None or self.found else self._watch.due(time.monotonic())

    def look(self, pids: Mapping[int, int]) -> int | None:
        """The local rank that hangs; None: none. `pids`: of the running workers."""
        if self._watch is None or self.due() != 0.0 or not pids:
            return None
        heartbeats = self._read_heartbeats(pids)
        quiet = self._watch.look(heartbeats, time.monotonic(), stopped=any(map(is_stopped, pids.values())))
        self._left_to_other_nodes = self._left_to_other_nodes and quiet is not None
        if quiet is None or (self._left_to_other_nodes and not quiet.long):
            return None
        if any(state(pid) == "t" for pid in pids.values()):  # traced by gdb or strace
            self._watch.start_again()
            return None
        stacks = self._take(pids, max(_NATIVE_SECONDS / 5, min(_NATIVE_SECONDS, quiet.limit / 2)))
        if self._interrupted() or any(map(_has_ended, pids.values())) or self._read_heartbeats(pids) != heartbeats:
            return None
        if is_debugged(stacks.values()):
            self._watch.start_again()
            return None
        waits = all_wait(stacks.values())
        if waits and self._several_nodes and not (self._has_user_limit and quiet.long):
            self._left_to_other_nodes = True
            return None
        local_rank = culprit(heartbeats, stacks)
        if not self._has_user_limit and may_take_long(heartbeats[local_rank]) and not stacks[local_rank].stopped:
            self._watch.start_again()
            return None
        self._record(local_rank, heartbeats, stacks, self._message(heartbeats, quiet, waits), _LONGER, waits)
        return local_rank

    def after_timeout(self, pids: Mapping[int, int]) -> int | None:
        """After a collective timed out: the local rank that did not reach it; None: not known."""
        heartbeats, stacks = self._read_heartbeats(pids), self._take(pids, _NATIVE_SECONDS)
        seen = {rank: stack for rank, stack in stacks.items() if stack.frames or stack.stopped}  # others have ended
        self.others = self._locations(seen, heartbeats, stacks)
        self._write_stacks(stacks)
        late = [rank for rank, stack in seen.items() if stack.stopped or not stack.waits_for_ranks]
        if len(late) != 1 or _is_ending(pids[late[0]]):
            return None
        message = "it did not reach the collective that timed out on other ranks"
        self._record(late[0], heartbeats, stacks, message, "if it only needs longer: init_process_group(timeout=...)")
        return late[0]

    def asleep(self, pids: Mapping[int, int]) -> int | None:
        """The local rank that is in the kernel's uninterruptible sleep; None: none.

        There is no stack, because py-spy would block as long as the process does.
        """
        found = next((rank for rank, pid in pids.items() if state(pid) == "D"), None)
        if found is not None and found not in self.found:
            where = wait_channel(pids[found])
            self.found[found] = Hung(
                message="in the kernel's uninterruptible sleep" + (f", in {where}" if where else ""),
                trace="",
                others=(),
                hint="a disk, a network file system or a driver does not answer (`dmesg -T`); if that may take "
                "longer, raise TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT",
            )
        return found

    def _take(self, pids: Mapping[int, int], native_seconds: float) -> dict[int, Stack]:
        return take(pids, native_seconds, {rank: self._stacks_file(rank) for rank in pids}, self._interrupted)

    def _stacks_file(self, local_rank: int) -> str:
        path = self._error_files[local_rank]
        return "" if path == os.devnull else str(Path(path).with_name(STACKS_FILE))

    def _read_heartbeats(self, pids: Mapping[int, int]) -> dict[int, Heartbeat]:
        return {local_rank: read_heartbeat(self._error_files[local_rank]) for local_rank in pids}

    def _message(self, heartbeats: Mapping[int, Heartbeat], quiet: Quiet, waits: bool) -> str:
        words = f"no progress for more than {quiet.limit:.3g} s"
        counts = sorted({each.collectives for each in heartbeats.values()})
        if waits:
            where = "the cause may be on another node" if self._several_nodes else "all ranks wait for each other"
            return f"{words}; {where}"
        if len(counts) > 1 and all(each.step is None for each in heartbeats.values()):
            return f"{words}, {counts[0]} collectives begun, while others have begun {counts[-1]}"
        return words

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
        """What the ranks are doing: one line for all ranks at the same place."""
        alike: dict[str, list[int]] = {}
        for local_rank in which:
            doing = stacks[local_rank].doing(heartbeats[local_rank].phase)
            alike.setdefault(doing, []).append(self._ranks[local_rank])
        return tuple(
            f"{in_words(ranks)} {'was' if len(ranks) == 1 else 'were'} {doing}" for doing, ranks in alike.items()
        )

    def remove_empty_files(self) -> None:
        """Remove stack files without content: workers that write their own stacks create them at the start."""
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
    """Whether it ends within a moment, as a rank does whose collective also timed out."""
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
