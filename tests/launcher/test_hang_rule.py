"""When a node's ranks have hung, and which of them has: by made-up signs and clocks."""

from dataclasses import dataclass, replace
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_kit.heartbeat import Heartbeat, Phase
from ddp_kit.launcher.agent.hangs import HangRule, NoProgress, all_wait_for_ranks, culprit, is_debugged
from ddp_kit.launcher.agent.stacks import Frame, Stack

TRAINS = Heartbeat(step=10, phase=Phase.BACKWARD, beats=60, steps=10, collectives=20, all_collectives=20)
PLAIN = Heartbeat(collectives=20, all_collectives=20)
FRESH = replace(TRAINS, step=0, steps=0)
IN_ALL_REDUCE = Stack(frames=(Frame("all_reduce", "/lib/torch/distributed/distributed_c10d.py", 3252),))
IN_BACKWARD = Stack(frames=(Frame("_engine_run_backward", "/lib/torch/autograd/graph.py", 979),))
IN_THE_SCRIPT = Stack(frames=(Frame("work", "/home/ann/train.py", 12),))


class Course:
    """The rule with a floor of 8 seconds, checked every second."""

    def __init__(self, *ranks: Heartbeat, any_script: bool = False) -> None:
        self.signs = dict(enumerate(ranks))
        self.now = 100.0
        self.rule = HangRule(8.0, any_script, self.now)
        self.look()

    def look(self, after: float = 1.0, *, stopped: bool = False) -> NoProgress | None:
        self.now += after
        return self.rule.check(self.signs, self.now, stopped=stopped)

    def quiet(self, seconds: int) -> list[NoProgress | None]:
        """Nobody does anything."""
        return [self.look() for _ in range(seconds)]

    def beat(self, *ranks: int, **changes: object) -> None:
        for rank in ranks:
            signs = self.signs[rank]
            self.signs[rank] = replace(signs, beats=signs.beats + 1, **changes)  # type: ignore[arg-type]
        assert self.look() is None


@dataclass(frozen=True)
class Check:
    """What has happened since the previous check."""

    seconds: float
    """A multiple of 1/4, so that sums are exact; more than 2 may be a suspended machine."""
    beats: frozenset[int] = frozenset()
    """The ranks that have made progress."""
    phase: Phase = Phase.BACKWARD
    """The phase of the ranks that have made progress."""
    stopped: bool = False
    debugged: bool = False
    """Whether the user has been in a debugger until now."""
    ended: int | None = None
    """The rank that has ended."""


ranks = st.integers(0, 2)
rarely = st.sampled_from([False, False, False, True])
events = st.builds(
    Check,
    seconds=st.integers(1, 8).map(lambda quarters: quarters / 4) | st.just(3600.0),
    beats=st.frozensets(ranks),
    phase=st.sampled_from([Phase.BACKWARD, Phase.CHECKPOINT, Phase.BETWEEN_STEPS, Phase.OUTSIDE]),
    stopped=rarely,
    debugged=rarely,
    ended=st.none() | ranks,
)
without_beats = st.builds(lambda times, stopped: [Check(1.0, stopped=stopped)] * times, st.integers(0, 90), rarely)


@settings(max_examples=120)
@given(
    beats=st.lists(st.sampled_from([TRAINS, TRAINS, TRAINS, FRESH, PLAIN]), min_size=3, max_size=3),
    any_script=st.booleans(),
    parts=st.lists(st.tuples(events, without_beats), max_size=8),
)
def test_hang_rule_reports_no_progress_exactly_if_no_rank_has_progressed_for_the_limit(
    beats: list[Heartbeat], any_script: bool, parts: list[tuple[Check, list[Check]]]
) -> None:
    """And only if a rank is in the Trainer, or stopped."""
    course = Course(*beats, any_script=any_script)
    idle = dict.fromkeys(course.signs, 0.0)
    pause = stopped = 0.0
    for check in chain.from_iterable([event, *quiet] for event, quiet in parts):
        if check.ended is not None and len(idle) > 1:
            idle.pop(check.ended, None)
            course.signs.pop(check.ended, None)
        if check.debugged:
            course.rule.reset()
            idle = dict.fromkeys(idle, 0.0)
        passed = min(check.seconds, 2.0)
        stopped = stopped + passed if check.stopped else 0.0
        for rank, before in course.signs.items():
            if rank not in check.beats:
                idle[rank] += passed
                continue
            if not before.phase.in_user_code:
                pause = max(pause, idle[rank])
            idle[rank] = 0.0
            course.signs[rank] = replace(before, beats=before.beats + 1, phase=check.phase)
        found = course.look(check.seconds, stopped=check.stopped)
        quiet = min(idle.values())
        limit = max(8.0 if all(is_settled(beat, any_script) for beat in course.signs.values()) else 80.0, 2 * pause)
        is_watched = not all(beat.phase.in_user_code for beat in course.signs.values())
        if check.stopped:
            quiet = min(quiet, stopped)
            limit = 8.0
        expected = NoProgress(quiet, limit) if quiet >= limit and (is_watched or check.stopped) else None
        assert found == expected


def is_settled(beat: Heartbeat, any_script: bool) -> bool:
    return beat.phase is not Phase.CHECKPOINT and (any_script if beat.step is None else beat.steps >= 2)


def test_hang_rule_without_progress_for_the_limit_reports_no_progress() -> None:
    course = Course(TRAINS, TRAINS)
    assert course.quiet(7) == [None] * 7
    assert course.look() == NoProgress(8.0, 8.0)


def test_hang_rule_extends_the_limit_to_twice_the_longest_pause() -> None:
    course = Course(TRAINS, TRAINS)
    course.quiet(3)
    course.beat(0, 1)
    assert course.rule.limit == 8.0, "no shorter one changes what was asked for"
    course.quiet(6)
    course.beat(0, 1)
    assert course.rule.limit == 12.0
    assert course.quiet(11) == [None] * 11
    assert any(course.quiet(1))


def test_hang_rule_allows_ten_times_the_limit_for_the_first_steps() -> None:
    course = Course(FRESH, FRESH)
    assert course.rule.limit == 80.0
    course.quiet(60)
    course.beat(0, 1, steps=2, step=2)
    assert course.rule.limit == 120.0
    assert Course(TRAINS, FRESH).rule.limit == 80.0, "the slowest counts"


@pytest.mark.parametrize("phase", [Phase.OUTSIDE, Phase.BETWEEN_STEPS])
def test_hang_rule_has_no_limit_for_user_phases(phase: Phase) -> None:
    course = Course(*[replace(TRAINS, phase=phase)] * 2)
    assert not any(course.quiet(500))
    course.beat(0, phase=Phase.BACKWARD)
    assert course.rule.limit == 8.0, "that was no pause"
    assert any(course.quiet(9)), "but one is not to let the others wait"


def test_hang_rule_watches_scripts_without_a_trainer_only_if_asked() -> None:
    ahead = replace(PLAIN, collectives=21, all_collectives=21)
    assert any(Course(PLAIN, ahead, any_script=True).quiet(9))
    assert not any(Course(PLAIN, ahead).quiet(500))
    assert not any(Course(PLAIN, PLAIN, any_script=True).quiet(500)), "nobody waits for anybody"
    early = replace(PLAIN, collectives=2)
    assert not any(Course(early, replace(early, collectives=3), any_script=True).quiet(79))


def test_hang_rule_with_all_ranks_in_native_code_reports_no_progress() -> None:
    """The time of Python code is known by its changes; it is no progress by itself."""
    observed = replace(PLAIN, python_at=1)
    assert Course(observed, any_script=True).quiet(9)[-1] == NoProgress(9.0, 8.0)
    assert any(Course(observed, observed, any_script=True).quiet(9))
    assert not any(Course(observed, observed).quiet(500)), "not asked for"
    course = Course(replace(observed, collectives=0), any_script=True)
    for tick in range(1, 500):
        course.signs[0] = replace(course.signs[0], counted_at=tick)
        assert course.look() is None, "no distributed program"
    course = Course(replace(observed, collectives=0, counted_at=1), any_script=True)
    assert course.quiet(79) == [None] * 79
    assert any(course.quiet(2)), "it holds the interpreter lock"
    course = Course(observed, observed, any_script=True)
    for tick in range(2, 100):
        course.signs[1] = replace(observed, python_at=tick)
        assert course.look() is None
    course = Course(observed, any_script=True)
    course.beat(0, collectives=0)
    assert any(course.quiet(9)), "the group was destroyed, which is not the start of the script"


def test_no_progress_lets_other_nodes_report_first() -> None:
    assert not NoProgress(11.0, 8.0).past_other_nodes_limit
    assert NoProgress(12.0, 8.0).past_other_nodes_limit


@pytest.mark.parametrize(
    ("signs", "stacks"),
    [
        ((TRAINS, TRAINS), (IN_ALL_REDUCE, replace(IN_ALL_REDUCE, stopped=True))),
        ((TRAINS, TRAINS), (IN_ALL_REDUCE, IN_THE_SCRIPT)),
        ((replace(TRAINS, step=11), TRAINS), (IN_ALL_REDUCE, IN_ALL_REDUCE)),
        ((TRAINS, replace(TRAINS, collectives=19)), (IN_THE_SCRIPT, IN_THE_SCRIPT)),
        ((TRAINS, replace(TRAINS, collectives=19)), (Stack(), Stack())),
        ((TRAINS, replace(TRAINS, phase=Phase.DATA)), (IN_BACKWARD, IN_THE_SCRIPT)),
        ((TRAINS, replace(TRAINS, phase=Phase.DATA)), (Stack(), Stack())),
        ((replace(TRAINS, phase=Phase.DATA), replace(TRAINS, phase=Phase.CALLBACKS)), (Stack(), Stack())),
    ],
)
def test_culprit_is_the_rank_that_is_stopped_outside_collectives_or_behind(
    signs: tuple[Heartbeat, ...], stacks: tuple[Stack, ...]
) -> None:
    assert culprit(dict(enumerate(signs)), dict(enumerate(stacks))) == 1


def test_ranks_that_all_wait_for_each_other_are_recognised() -> None:
    assert all_wait_for_ranks([IN_ALL_REDUCE, IN_ALL_REDUCE])
    assert not all_wait_for_ranks([IN_ALL_REDUCE, IN_THE_SCRIPT])
    assert not all_wait_for_ranks([IN_ALL_REDUCE, replace(IN_ALL_REDUCE, stopped=True)])


def test_rank_in_a_debugger_is_recognised() -> None:
    assert is_debugged([IN_ALL_REDUCE, Stack(frames=(Frame("interaction", "/usr/lib/python3.11/pdb.py", 400),))])
    assert not is_debugged([IN_ALL_REDUCE, IN_THE_SCRIPT])


def test_stack_is_described_by_the_lines_of_the_users_code() -> None:
    user = Frame("__getitem__", "/home/ann/train.py", 31)
    fetch = Frame("fetch", "/lib/site-packages/torch/utils/data/_utils/fetch.py", 54)
    inner = Frame("match", "/lib/site-packages/regex/regex.py", 7)
    main = Frame("<module>", "/home/ann/train.py", 80)
    stack = Stack(frames=(Frame("sre_match", "libpython3.so", 0, native=True), inner, user, *[fetch] * 5, main, fetch))
    assert stack.doing(Phase.DATA) == "in data (train.py:31 in __getitem__)"
    assert stack.as_trace().splitlines() == [
        '  File "/home/ann/train.py", line 80, in <module>',
        "  ... 5 library frames",
        '  File "/home/ann/train.py", line 31, in __getitem__',
        '  File "/lib/site-packages/regex/regex.py", line 7, in match',
    ]


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([Frame("barrier", "/lib/torch/distributed/distributed_c10d.py", 1)], "barrier"),
        ([Frame("c10d::Work::wait", "libtorch", 0, True), Frame("_engine_run_backward", "graph.py", 1)],
         "the gradient all-reduce"),
        ([Frame("c10d::Work::wait", "libtorch", 0, True), Frame("step", "/home/ann/train.py", 1)], "a collective"),
        ([Frame("c10d::TCPStore::wait", "libtorch", 0, True)], "a store operation that waits for another rank"),
        ([Frame("cudaStreamSynchronize", "libcudart.so", 0, True)], "a CUDA call that waits for the device"),
        ([Frame("work", "/home/ann/train.py", 1), Frame("all_reduce", "torch/distributed/distributed_c10d.py", 1)], ""),
    ],
)  # fmt: skip
def test_collective_is_recognised_by_its_function_names(frames: list[Frame], words: str) -> None:
    assert Stack(frames=tuple(frames)).waits_for_ranks == words
