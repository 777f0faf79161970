"""The course of a job, decided by a machine without clocks or sockets: every story can be told in numbers."""

import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_kit.exit_codes import ExitCode
from ddp_kit.launcher.job import (
    LOST_NODES,
    Dismiss,
    End,
    Job,
    Limits,
    Node,
    Order,
    Pause,
    Report,
    StandBy,
    StartRound,
    State,
    Steps,
    Stop,
)
from ddp_kit.launcher.verdict import Failure, Outcome, judge


def node(number: int, **changes: object) -> Node:
    return Node(**{"number": number, "host": f"h{number}", "processes": 2, "port": 100 + number, **changes})  # type: ignore[arg-type]


def job(limits: Limits, *nodes: Node) -> tuple[Job, list[Order]]:
    """A job to which these nodes have come at time 0."""
    machine = Job(limits, 0.0)
    return machine, [order for one in nodes for order in machine.joined(one, 0.0)]


def failure_of(rank: int = 1, **changes: object) -> Failure:
    return Failure(**{"rank": rank, "local_rank": rank, "pid": 7, "exit_code": 1, "after": 1.0, **changes})  # type: ignore[arg-type]


def report(number: int, state: State, *failures: Failure, round: int = 0, port: int = 0, **more: Any) -> Report:
    return Report(number, round, state, failures, port or 200 + number, **more)


def the_start(orders: list[Order]) -> StartRound:
    (order,) = [order for order in orders if not isinstance(order, StandBy)]
    assert isinstance(order, StartRound)
    return order


def the_end(orders: list[Order]) -> Outcome:
    (order,) = orders
    assert isinstance(order, End)
    return order.outcome


def the_pause(orders: list[Order]) -> str:
    (order,) = orders
    assert isinstance(order, Pause)
    return order.why


TWO = Limits(min_nodes=2, max_nodes=2)
ELASTIC = Limits(min_nodes=1, max_nodes=2)


def test_job_of_a_single_node_starts_at_once_and_ends_with_its_workers() -> None:
    machine, orders = job(Limits(), node(0))
    assert the_start(orders).assignments[0].world_size == 2
    assert the_end(machine.reported(report(0, State.DONE), 1.0)) == Outcome()


FAULTY = failure_of(3, exit_code=ExitCode.FAULTY, faulty=True)


def test_job_excludes_the_node_of_a_faulty_rank_and_continues_with_the_others() -> None:
    machine, _ = job(ELASTIC, node(0), node(1))
    machine.reported(report(0, State.FAILED, failure_of(0, secondary=True)), 1.0)
    dismissal, start = machine.reported(report(1, State.FAILED, FAULTY), 1.1)
    assert isinstance(dismissal, Dismiss)
    assert (dismissal.node, judge(dismissal.outcome).exit_code) == (1, ExitCode.FAULTY)
    assert isinstance(start, StartRound)
    assert start.assignments.keys() == {0}
    assert "h1 was excluded from the job: rank 3 failed first" in start.why
    assert machine.alive == (0,)


@pytest.mark.parametrize(
    ("limits", "number"),
    [(Limits(min_nodes=2, max_nodes=2, max_restarts=3), 1), (Limits(min_nodes=1, max_nodes=2, max_restarts=3), 0)],
)
def test_job_with_a_faulty_rank_on_a_node_that_it_needs_ends(limits: Limits, number: int) -> None:
    machine, _ = job(limits, node(0), node(1))
    machine.reported(report(1 - number, State.FAILED, failure_of(0, secondary=True)), 1.0)
    outcome = the_end(machine.reported(report(number, State.FAILED, FAULTY), 1.1))
    assert judge(outcome).exit_code == ExitCode.FAULTY
    assert "not restarted: its device would compute wrong numbers again" in outcome.note


XID = failure_of(3, exit_code=ExitCode.FAULTY, host="h1", message="GPU 1 has a fatal error: Xid 79")


def test_job_excludes_a_node_with_a_failed_gpu_although_a_rank_of_another_node_failed_first() -> None:
    machine, _ = job(TWO, node(0), node(1), node(2))
    assert machine.reported(report(0, State.FAILED, failure_of(0)), 1.0) == [Stop(0)]
    stopped = failure_of(3, exit_code=-signal.SIGTERM, terminated=True)
    dismissal, start = machine.reported(report(1, State.STOPPED, stopped, gpu_failure=XID), 1.1)
    assert isinstance(dismissal, Dismiss)
    assert (dismissal.node, judge(dismissal.outcome).exit_code) == (1, ExitCode.FAULTY)
    assert "GPU 1 has a fatal error: Xid 79" in judge(dismissal.outcome).text
    assert isinstance(start, StartRound)
    assert start.assignments.keys() == {0, 2}
    assert "h1 was excluded from the job: rank 3 failed first" in start.why


def test_job_excludes_all_nodes_with_failed_gpus_for_which_there_is_room() -> None:
    machine, _ = job(Limits(min_nodes=2, max_nodes=4), *map(node, range(4)))
    for number in range(3):
        machine.reported(report(number, State.FAILED, failure_of(number), gpu_failure=XID), 1.0)
    *dismissals, start = machine.reported(report(3, State.FAILED, failure_of(3), gpu_failure=XID), 1.1)
    assert [order.node for order in dismissals if isinstance(order, Dismiss)] == [1, 2]
    assert isinstance(start, StartRound)
    assert start.assignments.keys() == {0, 3}


@pytest.mark.parametrize(("nodes", "number"), [(2, 1), (3, 0)], ids=["no room", "host"])
def test_job_restarts_on_a_node_with_a_failed_gpu_that_it_needs(nodes: int, number: int) -> None:
    machine, _ = job(Limits(min_nodes=2, max_nodes=2, max_restarts=1), *map(node, range(nodes)))
    for restarts in (0, 1):
        machine.reported(report(1 - number, State.FAILED, failure_of(0, secondary=True), round=restarts), 1.0)
        failed = report(number, State.FAILED, failure_of(2), round=restarts, gpu_failure=XID)
        orders = machine.reported(failed, 1.1)
        if not restarts:
            assert the_start(orders).assignments.keys() == {0, 1}
    assert judge(the_end(orders)).exit_code == 1


@pytest.mark.parametrize("delayed", [False, True])
def test_reason_for_a_restart_has_the_lines_of_the_kernel(delayed: bool) -> None:
    machine, _ = job(Limits(max_restarts=3), node(0))
    for number in range(1 + delayed):
        failed = failure_of(
            1, exit_code=-signal.SIGSEGV, message=str(number), health=("kernel, 0.1 s before: segfault",)
        )
        (order,) = machine.reported(report(0, State.FAILED, failed, round=number), float(number))
    assert isinstance(order, Pause if delayed else StartRound)
    restart = "restart 2 of 3 in 1 s" if delayed else "restart 1 of 3"
    assert order.why.endswith(f"; {restart}\n  kernel, 0.1 s before: segfault")


def test_job_numbers_ranks_through_nodes_and_roles() -> None:
    mixed = [
        node(0, processes=1, role="ps"),
        node(1, processes=3),
        node(2, processes=2),
        node(3, processes=2, role="ps"),
    ]
    assignments = the_start(job(Limits(min_nodes=4, max_nodes=4), *mixed)[1]).assignments
    assert [(s.group_rank, s.first_rank, s.world_size) for s in assignments.values()] == [
        (0, 0, 8), (1, 1, 8), (2, 4, 8), (3, 6, 8)
    ]  # fmt: skip
    assert [(s.first_role_rank, s.role_world_size) for s in assignments.values()] == [(0, 3), (0, 5), (3, 5), (1, 3)]
    assert {(s.master_addr, s.master_port) for s in assignments.values()} == {("", 100)}


def test_job_uses_given_node_ranks_in_any_order_of_arrival() -> None:
    assignments = the_start(job(TWO, node(0, rank=1), node(1, rank=0))[1]).assignments
    assert (assignments[0].group_rank, assignments[1].group_rank) == (1, 0)


def test_job_waits_for_the_last_call_if_more_nodes_may_join() -> None:
    machine, orders = job(ELASTIC, node(0))
    machine.heartbeat(0, 29.0)
    assert not orders
    assert not machine.tick(29.0)
    assert the_start(machine.tick(30.0)).assignments.keys() == {0}


def test_job_with_too_few_nodes_ends_after_the_join_timeout() -> None:
    machine, _ = job(TWO, node(0))
    machine.heartbeat(0, 601.0)
    assert the_end(machine.tick(601.0)).lost == "only 1 of 2 nodes joined within 600 s"


def test_job_after_a_failure_stops_all_nodes_and_restarts_with_a_new_store() -> None:
    machine, _ = job(Limits(min_nodes=2, max_nodes=2, max_restarts=1), node(0), node(1))
    assert machine.reported(report(1, State.FAILED, failure_of(2)), 1.0) == [Stop(0)]
    start = the_start(machine.reported(report(0, State.STOPPED, port=777), 1.1))
    assert (start.assignments[0].round, start.assignments[0].restarts, start.assignments[1].master_port) == (1, 1, 777)
    assert "rank 2 failed first" in start.why


def test_job_without_restarts_left_ends_with_all_failures() -> None:
    machine, _ = job(TWO, node(0), node(1))
    machine.reported(report(1, State.FAILED, failure_of(2, after=1.2)), 1.0)
    outcome = the_end(
        machine.reported(report(0, State.STOPPED, failure_of(0, after=1.1), failure_of(1, terminated=True)), 1.0)
    )
    assert {each.rank for each in outcome.failures} == {0, 1, 2}


@pytest.mark.parametrize("limits", [ELASTIC, Limits(min_nodes=1, max_nodes=2, max_restarts=3)])
def test_job_does_not_count_a_dead_node_as_a_restart(limits: Limits) -> None:
    machine, _ = job(limits, node(0), node(1))
    assert machine.reported(report(0, State.FAILED, failure_of(0)), 1.0) == [Stop(0)]
    machine.heartbeat(0, 3.5)
    start = the_start(machine.tick(3.6))
    assert (start.assignments.keys(), start.assignments[0].restarts) == ({0}, 0)
    assert "no heartbeat from h1 for 3 s" in start.why


def short_of(limits: Limits, *nodes: Node) -> Job:
    """A job whose node 1 has died, so that a replacement is waited for from time 4 on."""
    machine, _ = job(limits, *nodes)
    living = [each.number for each in nodes if each.number != 1]
    for number in living:
        machine.heartbeat(number, 3.5)
    assert machine.tick(3.6) == [Stop(0)]
    orders = [order for number in living for order in machine.reported(report(number, State.STOPPED), 4.0)]
    assert the_pause(orders) == "no heartbeat from h1 for 3 s; waiting 12 s for a replacement"
    for number in living:
        machine.heartbeat(number, 15.0)
    return machine


def test_job_replaces_a_dead_node_that_it_needs() -> None:
    machine = short_of(TWO, node(0), node(1))
    assert not machine.tick(15.0)
    start = the_start(machine.joined(node(2), 15.5))
    assert (start.assignments.keys(), start.assignments[0].round, start.assignments[0].restarts) == ({0, 2}, 1, 0)
    machine = short_of(TWO, node(0, rank=0), node(1, rank=1))
    assert the_start(machine.joined(node(2, rank=1), 15.5)).assignments[2].group_rank == 1


def test_job_ends_if_a_dead_node_is_not_replaced_in_time() -> None:
    machine = short_of(TWO, node(0), node(1))
    outcome = the_end(machine.tick(16.0))
    assert outcome.lost == "no heartbeat from h1 for 3 s; no replacement joined within 12 s"
    assert judge(outcome).exit_code == ExitCode.NODE_LOST


def test_of_many_lost_nodes_only_a_few_are_named() -> None:
    machine, _ = job(Limits(min_nodes=9, max_nodes=9), *(node(number) for number in range(9)))
    machine.heartbeat(0, 3.5)
    machine.tick(3.6)
    why = the_pause(machine.reported(report(0, State.STOPPED), 4.0))
    lost = [f"no heartbeat from h{number} for 3 s" for number in (1, 2, 3, 4)]
    assert why == "; ".join([*lost, "4 more nodes were lost; waiting 12 s for a replacement"])
    machine.heartbeat(0, 15.0)
    assert the_end(machine.tick(16.0)).lost.endswith("4 more nodes were lost; no replacement joined within 12 s")


def test_job_does_not_wait_for_replacements_after_a_node_has_left() -> None:
    machine = short_of(Limits(min_nodes=3, max_nodes=3), node(0), node(1), node(2))
    outcome = the_end(machine.reported(Report(2, 0, State.LEFT, signal=signal.SIGTERM), 5.0))
    assert (outcome.lost.partition("; ")[2], outcome.stopped_by) == ("h2 left the job", signal.SIGTERM)
    machine, _ = job(Limits(min_nodes=2, max_nodes=2, replacement_timeout=0.0), node(0), node(1))
    machine.heartbeat(0, 3.5)
    machine.tick(3.6)
    assert the_end(machine.reported(report(0, State.STOPPED), 3.7)).lost == "no heartbeat from h1 for 3 s"


def test_job_ends_if_too_many_replacements_die() -> None:
    machine, now = job(TWO, node(0), node(1))[0], 0.0
    for number in range(2, 2 * LOST_NODES):
        now += 10.0
        machine.heartbeat(0, now)
        machine.tick(now)
        the_pause(machine.reported(report(0, State.STOPPED, round=number - 2), now))
        (order,) = machine.joined(node(number), now)
        if isinstance(order, End):
            assert order.outcome.lost.startswith(f"nodes were lost {LOST_NODES + 1} times")
            return
    raise AssertionError("it does not end")


def test_job_with_room_admits_a_new_node() -> None:
    machine, _ = job(ELASTIC, node(0))
    machine.heartbeat(0, 30.0)
    machine.tick(30.0)
    assert machine.joined(node(1), 31.0) == [Stop(0, may_save=True)]
    start = the_start(machine.reported(report(0, State.STOPPED, failure_of(0, terminated=True)), 31.1))
    assert (start.assignments.keys(), start.assignments[0].restarts, start.why) == ({0, 1}, 0, "a node joined")


def test_job_without_room_keeps_a_new_node_waiting_until_another_dies() -> None:
    machine, _ = job(ELASTIC, node(0), node(1))
    assert machine.joined(node(2), 1.0) == [StandBy((2,))]
    for number in (0, 2):
        machine.heartbeat(number, 3.5)
    assert machine.tick(3.6) == [Stop(0)]
    assert the_start(machine.reported(report(0, State.STOPPED), 3.7)).assignments.keys() == {0, 2}


def group_ranks(orders: list[Order]) -> dict[int, int]:
    """The position of each node in the round that starts."""
    return {number: given.group_rank for number, given in the_start(orders).assignments.items()}


def test_spares_take_the_positions_of_lost_nodes_and_the_others_keep_theirs() -> None:
    machine, orders = job(Limits(min_nodes=3, max_nodes=3), *(node(number, rank=number) for number in range(3)))
    assert group_ranks(orders) == {0: 0, 1: 1, 2: 2}
    for spare in (3, 4):
        assert machine.joined(node(spare, rank=spare), 1.0) == [StandBy((spare,))]
    for number in (0, 2, 3, 4):
        machine.heartbeat(number, 3.5)
    assert machine.tick(3.6) == [Stop(0)]
    machine.reported(report(0, State.STOPPED), 3.7)
    orders = machine.reported(report(2, State.STOPPED), 3.7)
    assert group_ranks(orders) == {0: 0, 3: 1, 2: 2}
    assert orders[1:] == [StandBy((4,))]
    assert machine.joined(node(5, rank=1), 4.0) == [StandBy((5,))], "the lost node is back, as a spare"


def test_nodes_move_up_if_there_is_no_spare() -> None:
    machine, orders = job(Limits(min_nodes=2, max_nodes=3), node(0), node(1), node(2))
    assert group_ranks(orders) == {0: 0, 1: 1, 2: 2}
    for number in (0, 2):
        machine.heartbeat(number, 3.5)
    machine.tick(3.6)
    machine.reported(report(0, State.STOPPED), 3.7)
    assert group_ranks(machine.reported(report(2, State.STOPPED), 3.7)) == {0: 0, 2: 1}


def test_job_that_is_ending_does_not_restart_for_a_new_node() -> None:
    machine, _ = job(Limits(min_nodes=1, max_nodes=3), node(0), node(1))
    for number in (0, 1):
        machine.heartbeat(number, 30.0)
    machine.tick(30.0)
    machine.reported(report(0, State.DONE), 31.0)
    assert not machine.joined(node(2), 31.1)
    assert the_end(machine.reported(report(1, State.DONE), 31.2)) == Outcome()


def test_job_accepts_a_replacement_before_the_death_is_noticed() -> None:
    machine, _ = job(TWO, node(0, rank=0), node(1, rank=1))
    assert machine.joined(node(2, rank=1), 1.0) == [Stop(0)]
    assert the_start(machine.reported(report(0, State.STOPPED), 1.1)).assignments.keys() == {0, 2}


def test_job_continues_without_a_node_that_has_left() -> None:
    machine, _ = job(ELASTIC, node(0), node(1))
    leaving = Report(1, 0, State.LEFT, signal=signal.SIGTERM)
    assert machine.reported(leaving, 1.0) == [Stop(0, may_save=True)]
    assert the_start(machine.reported(report(0, State.STOPPED), 1.1)).assignments.keys() == {0}


def test_job_without_the_host_of_the_rendezvous_ends() -> None:
    machine, _ = job(ELASTIC, node(0), node(1))
    machine.reported(Report(0, 0, State.LEFT, signal=signal.SIGTERM), 1.0)
    outcome = the_end(machine.reported(report(1, State.STOPPED), 1.1))
    assert (outcome.lost, outcome.stopped_by) == ("h0 left the job", signal.SIGTERM)


def test_job_distinguishes_hosts_with_the_same_name_by_address() -> None:
    machine, _ = job(ELASTIC, *(node(number, host="gpu", address=f"10.0.0.{number}") for number in range(2)))
    machine.reported(Report(0, 0, State.LEFT, signal=signal.SIGTERM), 1.0)
    assert the_end(machine.reported(report(1, State.STOPPED), 1.1)).lost == "gpu (10.0.0.0) left the job"


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        (node(1, rank=0), "two nodes were given node rank 0: h0 and h1"),
        (node(1, rank=1, nnodes="3"), "h0 was started with --nnodes 1, h1 with --nnodes 3"),
    ],
)
def test_job_with_inconsistent_nodes_refuses_them(second: Node, problem: str) -> None:
    machine, orders = job(TWO, node(0, rank=0), second)
    outcome = the_end(orders)
    assert (outcome.lost, judge(outcome).exit_code) == (problem, ExitCode.USAGE)
    assert machine.alive == (0, 1), "both nodes get the outcome"


def test_job_that_runs_refuses_a_node_with_another_number_of_nodes() -> None:
    machine, _ = job(ELASTIC, node(0, rank=0), node(1, rank=1))
    (order,) = machine.joined(node(2, rank=1, nnodes="3"), 1.0)
    assert order == Dismiss(
        2, Outcome(lost="h0 was started with --nnodes 1, h2 with --nnodes 3", started=False, usage=True)
    )
    assert machine.alive == (0, 1), "the node with the same rank is not replaced"


def test_job_lists_ranks_that_exited_early_once() -> None:
    machine, _ = job(TWO, node(0), node(1))
    machine.reported(Report(0, 0, State.DONE, ended_well=(0, 1)), 1.0)
    machine.reported(report(1, State.FAILED, failure_of(2, secondary=True)), 2.0)
    outcome = the_end(machine.reported(Report(0, 0, State.STOPPED, ended_well=(0, 1)), 2.1))
    assert judge(outcome).text.startswith("ranks 0, 1 ended early, with exit code 0")


def test_job_does_not_restart_after_an_import_error() -> None:
    machine, _ = job(Limits(max_restarts=3), node(0))
    outcome = the_end(machine.reported(report(0, State.FAILED, failure_of(at_start=True)), 1.0))
    assert outcome.note == "not restarted: an import in the script failed"


def test_job_whose_round_fails_without_a_failure_ends() -> None:
    machine, _ = job(Limits(max_restarts=3), node(0))
    outcome = the_end(machine.reported(report(0, State.FAILED), 1.0))
    assert judge(outcome).exit_code != 0
    assert "no node reported a failure" in outcome.lost


def test_job_counts_failures_that_were_all_terminated() -> None:
    machine, _ = job(Limits(max_restarts=1), node(0))
    told = failure_of(terminated=True, exit_code=-signal.SIGTERM)
    assert the_start(machine.reported(report(0, State.FAILED, told), 1.0)).assignments[0].restarts == 1
    assert the_end(machine.reported(report(0, State.FAILED, told, round=1), 2.0)).failures == (told,)


def waiting(limits: Limits, *nodes: Node) -> Job:
    """A job that has crashed twice by time 2, and restarts at time 3."""
    machine, _ = job(limits, *nodes)
    for round_ in range(2):
        orders: list[Order] = []
        for each in nodes:
            orders = machine.reported(report(each.number, State.FAILED, failure_of(message="no"), round=round_), 2.0)
    assert the_pause(orders).endswith("; restart 2 of 9 in 1 s")
    return machine


def test_job_in_a_crash_loop_waits_before_the_next_round() -> None:
    machine = waiting(Limits(max_restarts=9), node(0))
    assert machine.timeout(2.25) == 0.75
    assert not machine.tick(2.75)
    start = the_start(machine.tick(3.0))
    assert (start.assignments[0].round, start.assignments[0].restarts, start.why) == (2, 2, "")
    assert machine.timeout(3.0) is None


def test_job_that_loses_a_node_during_the_wait_continues_or_ends() -> None:
    for least, goes_on in ((1, True), (2, False)):
        machine = waiting(Limits(min_nodes=least, max_nodes=2, max_restarts=9), node(0), node(1))
        orders = machine.reported(Report(1, 1, State.LEFT, signal=signal.SIGTERM), 2.5)
        if goes_on:
            assert not orders
            assert the_start(machine.tick(3.0)).assignments.keys() == {0}
        else:
            assert (the_end(orders).lost, the_end(orders).stopped_by) == ("h1 left the job", signal.SIGTERM)


def test_job_assigns_ranks_to_a_node_that_joins_during_the_wait() -> None:
    machine = waiting(Limits(min_nodes=1, max_nodes=2, max_restarts=9), node(0), node(1))
    assert not machine.reported(Report(1, 1, State.LEFT), 2.25)
    assert not machine.joined(node(2), 2.5)
    start = the_start(machine.tick(3.0))
    assert (start.assignments.keys(), start.why) == ({0, 2}, "h1 left the job")


def test_job_counts_new_steps_of_any_node_as_progress() -> None:
    machine, _ = job(Limits(min_nodes=2, max_nodes=2, max_restarts=1), node(0), node(1))
    whys = []
    for round_, (began, reached) in enumerate([(0, 8), (5, 12), (10, 14)]):
        not_begun = failure_of(2, message=str(round_))
        machine.reported(report(1, State.FAILED, not_begun, round=round_, steps=Steps(0, 0, 0)), 1.0)
        stopped = report(0, State.STOPPED, round=round_, steps=Steps(began, reached, began))
        whys.append(the_start(machine.reported(stopped, 1.0)).why.rpartition("; ")[2])
    assert whys == ["restart 1 of 1", "restart 2 (1 of 1 since step 12)", "restart 3 (1 of 1 since step 14)"]


def lose_nodes(times: int, lasting: float) -> Outcome | None:
    """Nodes come and, after so many seconds each, leave. How the job ended, if it did."""
    machine, _ = job(Limits(min_nodes=1, max_nodes=2, last_call_timeout=0.0), node(0))
    for time in range(1, times + 1):
        machine.joined(node(time), time * lasting)  # for which a round is stopped, as the next one is when it leaves
        machine.reported(report(0, State.STOPPED, round=2 * time - 2), time * lasting)
        machine.reported(Report(time, 2 * time - 1, State.LEFT), (time + 1) * lasting)
        (order,) = machine.reported(report(0, State.STOPPED, round=2 * time - 1), (time + 1) * lasting)
        if isinstance(order, End):
            return order.outcome
    return None


def test_job_has_a_separate_limit_of_lost_nodes() -> None:
    outcome = lose_nodes(2 * LOST_NODES, lasting=1.0)
    assert outcome is not None
    assert outcome.lost == f"nodes were lost {LOST_NODES + 1} times in a row without progress"
    assert judge(outcome).exit_code == ExitCode.NODE_LOST


def test_job_counts_nodes_that_are_lost_during_the_wait() -> None:
    machine, _ = job(Limits(min_nodes=1, max_nodes=2, max_restarts=4 * LOST_NODES), node(0), node(1))
    now = 0.0

    def fail(other: int, round_: int) -> list[Order]:
        machine.reported(report(0, State.FAILED, failure_of(message=f"no {now}"), round=round_), now)
        return machine.reported(report(other, State.STOPPED, round=round_), now)

    the_start(fail(1, 0))  # the first restart is immediate
    for number in range(1, 2 * LOST_NODES):
        now += 1.0
        the_pause(fail(number, 2 * number - 1))
        assert not machine.reported(Report(number, 2 * number - 1, State.LEFT), now)
        now += machine.timeout(now) or 0.0
        machine.heartbeat(0, now)
        (order,) = machine.tick(now)
        if isinstance(order, End):
            assert order.outcome.lost == f"nodes were lost {LOST_NODES + 1} times in a row without progress"
            assert number == LOST_NODES + 1
            return
        assert machine.joined(node(number + 1), now) == [Stop(2 * number, may_save=True)]
        the_start(machine.reported(report(0, State.STOPPED, round=2 * number), now))
    raise AssertionError("lost nodes do not count during the wait")


def test_job_with_long_rounds_between_lost_nodes_does_not_end() -> None:
    assert lose_nodes(2 * LOST_NODES, lasting=3600.0) is None


def test_job_does_not_count_failures_caused_by_admitting_a_node() -> None:
    machine, _ = job(Limits(min_nodes=2, max_nodes=3), node(0), node(1))
    for number in (0, 1):
        machine.heartbeat(number, 30.0)
    machine.tick(30.0)
    assert machine.joined(node(2), 31.0) == [Stop(0, may_save=True)]
    assert not machine.reported(report(0, State.STOPPED, failure_of(0, terminated=True)), 31.1)
    start = the_start(
        machine.reported(report(1, State.FAILED, failure_of(2)), 31.2)
    )  # its peer had been stopped a moment before
    assert (start.assignments.keys(), start.assignments[0].restarts) == ({0, 1, 2}, 0)


def test_job_stops_other_nodes_as_soon_as_one_is_failing() -> None:
    machine, _ = job(TWO, node(0), node(1))
    assert machine.reported(report(1, State.FAILING), 1.0) == [Stop(0)]
    assert not machine.reported(report(0, State.STOPPED, failure_of(0, terminated=True)), 1.1)
    outcome = the_end(machine.reported(report(1, State.FAILED, failure_of(2)), 5.0))
    assert [each.rank for each in outcome.failures] == [0, 2]


def test_job_whose_host_leaves_while_nodes_gather_ends() -> None:
    machine, _ = job(TWO, node(0))
    outcome = the_end(machine.reported(Report(0, -1, State.LEFT, signal=signal.SIGTERM), 1.0))
    assert (outcome.lost, outcome.stopped_by, outcome.started) == ("h0 left the job", signal.SIGTERM, False)


def test_job_does_not_start_before_its_host_has_joined() -> None:
    machine, orders = job(ELASTIC, node(1), node(2))
    assert not orders
    assert 0 in the_start(machine.joined(node(0), 1.0)).assignments


def test_job_that_has_ended_reports_its_outcome_to_a_late_node() -> None:
    machine, _ = job(Limits(), node(0))
    machine.reported(report(0, State.DONE), 1.0)
    assert the_end(machine.joined(node(1), 2.0)) == Outcome()
    assert machine.alive == (0,)


def test_job_gives_a_restarted_node_its_former_rank_while_others_gather() -> None:
    machine, _ = job(Limits(min_nodes=3, max_nodes=3), node(0, rank=0), node(1, rank=1, host="h1"))
    assert not machine.joined(node(2, rank=1, host="h1"), 1.0)
    assert machine.alive == (0, 2)


def test_job_does_not_report_an_earlier_signal_for_a_later_loss() -> None:
    machine, _ = job(Limits(min_nodes=2, max_nodes=3, replacement_timeout=0.0), node(0), node(1), node(2))
    machine.reported(Report(2, 0, State.LEFT, signal=signal.SIGTERM), 1.0)
    machine.reported(report(0, State.STOPPED), 1.1)
    machine.reported(report(1, State.STOPPED), 1.1)
    machine.heartbeat(0, 5.0)
    machine.tick(5.0)
    assert the_end(machine.reported(report(0, State.STOPPED, round=1), 5.1)).stopped_by == 0


def test_job_ignores_reports_of_earlier_rounds() -> None:
    machine, _ = job(Limits(max_restarts=2), node(0))
    the_start(machine.reported(report(0, State.FAILED, failure_of()), 1.0))
    assert not machine.reported(report(0, State.FAILED, failure_of()), 1.1)


KINDS = ["join", "silence", "done", "failed", "terminated", "no failure", "left", "tick"]
EVENTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5)), max_size=40)
FAILURES = st.lists(  # what the next failures say, and between which steps their rounds were
    st.tuples(st.sampled_from(["no", "no 1", "not"]), st.none() | st.tuples(st.integers(0, 3), st.integers(0, 3))),
    max_size=20,
)


@given(EVENTS, FAILURES, st.integers(1, 3), st.integers(0, 2), st.integers(0, 3))
def test_job_with_any_events_has_whole_rounds_and_ends_once(
    events: list[tuple[str, int]],
    failures: list[tuple[str, tuple[int, int] | None]],
    least: int,
    more: int,
    restarts: int,
) -> None:
    """A model of the nodes: each obeys, until it falls silent."""
    limits = Limits(min_nodes=least, max_nodes=least + more, max_restarts=restarts)
    machine, now = Job(limits, 0.0), 0.0
    living: set[int] = set()
    rounds: list[StartRound] = []
    ended, paused = 0, False
    came_or_went = 0
    kept = {0}  # the steps that rounds have begun after

    def obey(orders: list[Order]) -> None:
        nonlocal ended, paused
        for order in orders:
            assert not ended, "an order after the end"
            assert not (paused and isinstance(order, Stop)), "nothing runs that could be stopped"
            paused = isinstance(order, Pause)
            if isinstance(order, StartRound):
                sizes = {assignment.group_world_size for assignment in order.assignments.values()}
                assert sizes == {len(order.assignments)}
                assert least <= len(order.assignments) <= least + more
                assert sorted(assignment.first_rank for assignment in order.assignments.values()) == list(
                    range(0, 2 * len(order.assignments), 2)
                )
                rounds.append(order)
            elif isinstance(order, Stop):
                for number in sorted(living & rounds[-1].assignments.keys()):
                    obey(machine.reported(report(number, State.STOPPED, round=order.round), now))
            elif isinstance(order, End):
                ended += 1

    def beat() -> None:
        for number in living:
            machine.heartbeat(number, now)

    for kind, number in [*events, *[("tick", 0)] * 5]:
        now += 1.0
        beat()
        if kind == "join" and number not in living and number not in machine.alive:
            living.add(number)
            came_or_went += 1
            obey(machine.joined(node(number), now))
        elif kind == "silence":
            came_or_went += number in living
            living.discard(number)
        elif number in living and rounds and number in rounds[-1].assignments and not ended and not paused:
            latest = rounds[-1].assignments[number].round
            if kind == "done":
                obey(machine.reported(report(number, State.DONE, round=latest), now))
            elif kind == "failed":
                message, noted = failures.pop() if failures else ("no", None)
                steps = None if noted is None else Steps(noted[0], sum(noted), noted[0])
                if steps is not None:
                    kept.add(steps.began)
                one = failure_of(message=message, step=None if steps is None else steps.reached)
                obey(machine.reported(report(number, State.FAILED, one, round=latest, steps=steps), now))
            elif kind == "terminated":
                told = failure_of(terminated=True, exit_code=-signal.SIGTERM)
                obey(machine.reported(report(number, State.FAILED, told, round=latest), now))
            elif kind == "no failure":
                obey(machine.reported(report(number, State.FAILED, round=latest), now))
            elif kind == "left":
                came_or_went += 1
                living.discard(number)
                obey(machine.reported(Report(number, latest, State.LEFT), now))
        obey(machine.tick(now))
        if ended:
            break
    if rounds and not ended and not living & rounds[-1].assignments.keys():
        raise AssertionError("a round without nodes continues")
    most = restarts * len(kept)  # each new one may begin the count anew, once
    assert len(rounds) <= 1 + most + came_or_went, "a round without a reason that counts"
    restarts_of_rounds = [assignment.restarts for order in rounds for assignment in order.assignments.values()]
    assert max(restarts_of_rounds, default=0) <= most
