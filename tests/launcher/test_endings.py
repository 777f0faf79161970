"""When the workers of a round are waited for, ended or stopped, and which of them have failed."""

import signal
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_kit.exit_codes import ExitCode
from ddp_kit.heartbeat import Phase
from ddp_kit.launcher.agent.endings import Decision, Endings, FailedWorker, seconds_to_stop

TIMEOUT = 25.0
KILLED = -signal.SIGKILL
TERMINATED = -signal.SIGTERM


def endings_of(codes: Iterable[int | None], after: float = 10.0) -> Endings:
    """One worker per code, which ended one second after the one before; None: it is running."""
    endings = Endings(TIMEOUT)
    codes = list(codes)
    for rank in range(len(codes)):
        endings.started(rank, 100 + rank)
    for rank, code in enumerate(codes):
        if code is not None:
            endings.ended(rank, code, after + rank)
    return endings


@pytest.mark.parametrize(
    ("codes", "seconds", "decision"),
    [
        ([None, None], 10, Decision.WAIT),
        ([0, None], 1000, Decision.WAIT),
        ([0, 0], 10, Decision.END),
        ([1, None], 10, Decision.STOP),
        ([0, KILLED], 10, Decision.STOP),
        ([ExitCode.REQUEUE, None], 10, Decision.WAIT),
        ([ExitCode.REQUEUE, None], 10 + TIMEOUT, Decision.END),
        ([ExitCode.REQUEUE, 0], 10, Decision.END),
        ([ExitCode.REQUEUE, 1, None], 10, Decision.STOP),
    ],
)
def test_decision_follows_from_the_exit_codes(codes: list[int | None], seconds: float, decision: Decision) -> None:
    assert endings_of(codes).decide({}, seconds) is decision


@given(st.lists(st.sampled_from([None, 0, 1, ExitCode.REQUEUE, KILLED]), min_size=1), st.floats(0, 1000))
def test_no_worker_is_stopped_without_a_failure_and_none_is_waited_for_after_one(
    codes: list[int | None], seconds: float
) -> None:
    decision = endings_of(codes).decide({}, seconds)
    assert (decision is Decision.STOP) == bool({1, KILLED} & set(codes))
    if decision is Decision.WAIT:
        assert None in codes


def test_running_workers_have_the_shutdown_timeout_after_the_first_saved() -> None:
    assert endings_of([None, 0]).seconds_left(12) is None
    endings = endings_of([ExitCode.REQUEUE, ExitCode.REQUEUE, None])
    assert [endings.seconds_left(now) for now in (12, 35, 50)] == [TIMEOUT - 2, 0, 0]


@pytest.mark.parametrize(("timeout", "limit"), [(25.0, 25.0), (1.0, 5.0)])
def test_worker_that_does_not_exit_after_an_exception_is_stopped(timeout: float, limit: float) -> None:
    endings = Endings(timeout)
    endings.started(0, 100)
    endings.started(1, 101)
    assert endings.decide({1: 100.0}, 100 + limit - 0.1) is Decision.WAIT
    assert endings.decide({1: 100.0}, 100 + limit) is Decision.STOP
    endings.killed_while_exiting({1: 100.0})
    endings.signalled()
    endings.ended(1, KILLED, 106.0)
    endings.ended(0, TERMINATED, 105.0)
    assert endings.failed() == [
        FailedWorker(1, 101, 1, 100.0, False),
        FailedWorker(0, 100, TERMINATED, 105.0, True),
    ]


def test_hung_worker_has_failed_even_if_it_cannot_be_killed() -> None:
    endings = endings_of([None, None])
    endings.hangs(1)
    endings.hangs(0)
    assert endings.decide({}, 10) is Decision.STOP
    endings.signalled()
    endings.ended(0, TERMINATED, 11)
    assert endings.failed() == [
        FailedWorker(1, 101, KILLED, 0.0, False),
        FailedWorker(0, 100, TERMINATED, 11, True),
    ]
    endings.ended(1, 0, 12)
    assert endings.failed()[0] == FailedWorker(1, 101, KILLED, 12, False), "it hung, however it ended"


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, KILLED]), st.floats(0, 100), st.booleans()), min_size=1),
    st.randoms(use_true_random=False),
)
def test_failures_are_in_the_order_of_their_ends_and_terminated_workers_come_last(
    workers: list[tuple[int, float, bool]], random: "st.random.Random"
) -> None:
    endings = Endings(TIMEOUT)
    for rank in range(len(workers)):
        endings.started(rank, 100 + rank)
    order = list(range(len(workers)))
    random.shuffle(order)
    order.sort(key=lambda rank: workers[rank][2])  # those that are terminated end later
    for place, rank in enumerate(order):
        code, after, terminated = workers[rank]
        if terminated and not any(workers[earlier][2] for earlier in order[:place]):
            endings.signalled()
        endings.ended(rank, code, after)
    failed = endings.failed()
    assert [(worker.terminated, worker.after) for worker in failed] == sorted(
        (terminated, after) for code, after, terminated in workers if code
    )
    assert {worker.local_rank: worker.code for worker in failed} == {
        rank: code for rank, (code, _, _) in enumerate(workers) if code
    }
    assert endings.ended_well() == [rank for rank, (code, _, late) in enumerate(workers) if not code and not late]


@pytest.mark.parametrize(
    ("codes", "saved"),
    [([ExitCode.REQUEUE, 0], True), ([0, 0], False), ([ExitCode.REQUEUE, 1], False), ([ExitCode.REQUEUE, None], True)],
)
def test_job_has_saved_if_a_worker_asks_for_another_run_and_none_has_failed(
    codes: list[int | None], saved: bool
) -> None:
    assert endings_of(codes).saved() is saved


@pytest.mark.parametrize(
    ("phases", "timeout", "seconds"),
    [
        ({Phase.FORWARD}, 25, 0.2),
        ({Phase.FORWARD, Phase.CHECKPOINT}, 25, 1.0),
        ({Phase.CHECKPOINT}, 0, 0),
        (set(), 25, 0.2),
    ],
)
def test_ranks_in_a_trainer_get_less_time_to_stop(phases: set[Phase], timeout: float, seconds: float) -> None:
    assert seconds_to_stop(phases, timeout) == seconds
