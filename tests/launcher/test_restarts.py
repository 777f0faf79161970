"""Which failures are followed by another try: the counts, told in numbers."""

import signal

import pytest

from ddp_kit.launcher.job import (
    IDENTICAL_FAILURES,
    LOST_NODES,
    MAX_WAIT,
    PROGRESS_SECONDS,
    GiveUp,
    Restart,
    Restarts,
    Steps,
)
from ddp_kit.launcher.verdict import Failure

KILL = -signal.SIGKILL


def failure_of_rank_1(message: str = "", **changes: object) -> Failure:
    plain = {"rank": 1, "local_rank": 1, "pid": 7, "exit_code": 1, "after": 1.0, "message": message}
    return Failure(**{**plain, **changes})  # type: ignore[arg-type]


def failed_round(restarts: Restarts, began: int, reached: int, **changes: object) -> Restart | GiveUp:
    """A round of a Trainer: killed unless it is said otherwise."""
    restarts.round_ended(Steps(began, reached, began), 1.0)
    return restarts.round_failed(failure_of_rank_1(**{"exit_code": KILL, "step": reached, **changes}))  # type: ignore[arg-type]


def words(follows: Restart | GiveUp) -> str:
    return follows.description if isinstance(follows, Restart) else follows.note


def test_restarts_without_steps_counts_each_failure() -> None:
    restarts = Restarts(2)
    told = []
    for number in range(3):
        restarts.round_ended(None, 1.0)
        told.append(words(restarts.round_failed(failure_of_rank_1(f"no {number}"))))
    assert told == ["restart 1 of 2", "restart 2 of 2", ""]


def test_restarts_after_new_saved_steps_are_unlimited() -> None:
    restarts = Restarts(1)
    told = [words(failed_round(restarts, 10 * number, 10 * number + 15)) for number in range(50)]
    assert told[0] == "restart 1 of 1"
    assert told[1:] == [f"restart {n + 1} (1 of 1 since step {10 * n + 15})" for n in range(1, 50)]
    assert restarts.count == 50


@pytest.mark.parametrize(
    ("rounds", "spent"),
    [
        ([(0, 100 + n) for n in range(9)], 2),  # it keeps nothing: each begins at 0, and comes one step further
        ([(50, 100 + n) for n in range(9)], 2),  # it keeps nothing more than it had
        ([(0, 100), (50, 90), (60, 95), (70, 100), (80, 100)], 2),  # it goes over the same steps
        ([(0, 5)] + [(5, 5)] * 8, 2),
        ([(0, 5), (5, 9)] + [(9, 9)] * 8, 3),
        ([(0, 0), (0, 7), (4, 8), (6, 8), (6, 10), (6, 11), (6, 11)], 6),
    ],
)
def test_restarts_of_a_crash_loop_without_new_saved_steps_end(rounds: list[tuple[int, int]], spent: int) -> None:
    restarts = Restarts(2)
    told = [words(failed_round(restarts, *steps)) for steps in rounds]
    end = told.index("not restarted again: 2 consecutive restarts made no progress")
    assert (end, restarts.count) == (spent, spent)


def test_restarts_of_zero_allows_none_despite_progress() -> None:
    restarts = Restarts(0)
    assert failed_round(restarts, 100, 200) == GiveUp("")


def test_restarts_after_a_round_without_a_trainer_keeps_the_progress() -> None:
    restarts = Restarts(2)
    failed_round(restarts, 0, 10)
    failed_round(restarts, 8, 20)
    restarts.round_ended(None, 1.0)
    assert words(restarts.round_failed(failure_of_rank_1("no"))) == "restart 3 (2 of 2 since step 20)"


def test_restarts_after_the_same_error_at_the_same_step_gives_up() -> None:
    restarts = Restarts(10)
    failed_round(restarts, 0, 12, exit_code=1, message="ValueError: bad sample at 0x7f10 (pid 71)", rank=0)
    failed_round(restarts, 10, 11)  # a kill in between
    follows = failed_round(restarts, 10, 12, exit_code=1, message="ValueError: bad sample at 0x7e22 (pid 99)", rank=1)
    assert follows == GiveUp("not restarted again: the same error occurred twice after step 12")


ERROR = {"exit_code": 1, "step": 12, "message": "KeyError: 'a'"}


@pytest.mark.parametrize(
    "second",
    [
        ERROR | {"message": "KeyError: 'b'"},
        ERROR | {"step": 13},
        ERROR | {"exit_code": 3},
        ERROR | {"exit_code": -signal.SIGSEGV},
    ],
)
def test_restarts_after_another_error_or_step_continues(second: dict[str, object]) -> None:
    restarts = Restarts(10)
    assert isinstance(restarts.round_failed(failure_of_rank_1(**ERROR)), Restart)  # type: ignore[arg-type]
    assert isinstance(restarts.round_failed(failure_of_rank_1(**second)), Restart)  # type: ignore[arg-type]


@pytest.mark.parametrize("chance", [{"exit_code": -signal.SIGSEGV}, {"step": None}, {"secondary": True}])
def test_restarts_after_possibly_transient_failures_continues(chance: dict[str, object]) -> None:
    restarts = Restarts(10)
    for _ in range(2):
        assert isinstance(restarts.round_failed(failure_of_rank_1(**ERROR | chance)), Restart)  # type: ignore[arg-type]


def test_restarts_after_six_identical_failures_gives_up() -> None:
    restarts = Restarts(100)
    follows = [restarts.round_failed(failure_of_rank_1("ValueError: no")) for _ in range(IDENTICAL_FAILURES + 1)]
    assert words(follows[-1]) == "not restarted again: the same failure occurred 6 times in a row without progress"
    assert restarts.count == IDENTICAL_FAILURES


@pytest.mark.parametrize("harmless", [failure_of_rank_1(exit_code=KILL), failure_of_rank_1(after=PROGRESS_SECONDS)])
def test_restarts_after_kills_from_outside_or_long_rounds_does_not_wait(harmless: Failure) -> None:
    restarts = Restarts(50)
    assert {follows.wait for _ in range(50) if isinstance(follows := restarts.round_failed(harmless), Restart)} == {0.0}
    assert restarts.round_failed(harmless) == GiveUp("")
    assert restarts.count == 50


def waits(restarts: Restarts, times: int) -> list[float]:
    found = [restarts.round_failed(failure_of_rank_1(f"no {restarts.count}")) for _ in range(times)]
    return [follows.wait for follows in found if isinstance(follows, Restart)]


def test_restarts_of_a_crash_loop_wait_longer_each_time() -> None:
    assert waits(Restarts(2000), 2000) == [0, 1, 2, 4, 8, 16, 32] + [MAX_WAIT] * 1993


def test_restarts_after_progress_or_a_kill_from_outside_resets_the_wait() -> None:
    restarts = Restarts(100)
    assert waits(restarts, 3) == [0, 1, 2]
    assert failed_round(restarts, 0, 1) == Restart("restart 4 of 100", 0)
    assert waits(restarts, 2) == [0, 1]
    restarts.round_ended(Steps(1, 2, 1), 1.0)
    assert waits(restarts, 2) == [0, 1]


def test_lost_nodes_are_counted_separately_from_failures() -> None:
    restarts = Restarts(1)
    assert {restarts.node_lost() for _ in range(LOST_NODES)} == {""}
    assert words(restarts.round_failed(failure_of_rank_1("no"))) == "restart 1 of 1"
    assert restarts.node_lost() == "nodes were lost 101 times in a row without progress"


@pytest.mark.parametrize(("steps", "seconds"), [(Steps(5, 9, 5), 1.0), (None, PROGRESS_SECONDS)])
def test_lost_nodes_are_counted_from_zero_after_progress(steps: Steps | None, seconds: float) -> None:
    restarts = Restarts(0)
    for _ in range(LOST_NODES):
        restarts.node_lost()
    restarts.round_ended(steps, seconds)
    assert restarts.node_lost() == ""


def rounds_from_copies(
    restarts: Restarts, rounds: int, seconds: float = 1.0, **changes: object
) -> list[Restart | GiveUp]:
    """Rounds that each start 10 steps later than the one before, from copies in memory; on disk there is nothing."""
    follows = []
    for number in range(rounds):
        restarts.round_ended(Steps(10 * number, 10 * number + 15, 0), seconds)
        follows.append(restarts.round_failed(failure_of_rank_1(**{"step": 10 * number + 15, **changes})))
    return follows


def test_crash_after_each_copy_in_memory_uses_up_the_restarts() -> None:
    follows = rounds_from_copies(Restarts(3), 4, message="it crashes")
    assert [isinstance(each, Restart) for each in follows] == [True, True, True, False]


def test_kill_from_outside_after_a_copy_in_memory_does_not_use_up_the_restarts() -> None:
    follows = rounds_from_copies(Restarts(1), 50, exit_code=KILL)
    assert all(isinstance(each, Restart) for each in follows)


def test_long_round_from_a_copy_in_memory_is_progress() -> None:
    follows = rounds_from_copies(Restarts(1), 50, PROGRESS_SECONDS, message="it crashes")
    assert all(isinstance(each, Restart) for each in follows)
