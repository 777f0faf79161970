"""Who failed first, with what, and the exit code."""

import json
import signal
from dataclasses import asdict, replace

import pytest

from ddp_kit.exit_codes import ExitCode
from ddp_kit.launcher.verdict import Failure, Outcome, first_failure, judge, record, summary
from ddp_kit.launcher.wire import from_json, to_json


def failure(rank: int, exit_code: int, time: float, message: str = "", terminated: bool = False) -> Failure:
    return Failure(
        rank, local_rank=rank, pid=100 + rank, exit_code=exit_code, after=time, message=message, terminated=terminated
    )


def test_verdict_without_a_failure_is_empty() -> None:
    assert (judge(Outcome()).exit_code, judge(Outcome()).text) == (0, "")


def test_verdict_names_the_first_failure_and_not_stopped_ranks() -> None:
    stopped = failure(0, -signal.SIGTERM, 10.0, terminated=True)
    verdict = judge(Outcome((stopped, failure(2, 9, 12.0), failure(1, 7, 11.0, "ValueError: no"))))
    assert verdict.exit_code == 7
    assert verdict.text.splitlines() == [
        "rank 1 failed first: exit code 7 (local rank 1, pid 101): ValueError: no",
        "  rank 2 then failed: exit code 9",
    ]


@pytest.mark.parametrize(
    ("code", "name", "shell"), [(-11, "SIGSEGV", 139), (-9, "SIGKILL", 137), (-15, "SIGTERM", 143)]
)
def test_verdict_names_a_signal(code: int, name: str, shell: int) -> None:
    verdict = judge(Outcome((failure(0, code, 1.0),)))
    assert verdict.exit_code == shell
    assert f"killed by {name}" in verdict.text


def test_verdict_of_a_stopped_launcher_names_the_signal() -> None:
    verdict = judge(Outcome(stopped_by=signal.SIGINT))
    assert (verdict.exit_code, verdict.text) == (130, "stopped by SIGINT")


def test_verdict_of_a_lost_node_has_its_exit_code() -> None:
    verdict = judge(Outcome(lost="no heartbeat from h2 for 3 s"))
    assert (verdict.exit_code, verdict.text) == (4, "the job cannot continue: no heartbeat from h2 for 3 s")


def test_verdict_merges_equal_messages_of_other_ranks() -> None:
    first = failure(3, 1, 2.0, "ValueError: no")
    echoes = [
        failure(rank, 1, 2.5, f"RuntimeError: [pair.cc:538] Closed by peer [10.0.0.{rank}]:4{rank}") for rank in (0, 1)
    ]
    verdict = judge(Outcome((*echoes, first), note="not again"))
    assert verdict.text.splitlines() == [
        "rank 3 failed first: exit code 1 (local rank 3, pid 103): ValueError: no",
        "  ranks 0, 1 then failed with the same error: RuntimeError: Closed by peer",
        "  not again",
    ]


def test_verdict_does_not_repeat_the_first_message_for_other_ranks() -> None:
    first, *others = (failure(rank, 1, 2.0 + rank, f"ValueError: no sample {rank}") for rank in range(3))
    assert judge(Outcome((first, *others))).text.splitlines() == [
        "rank 0 failed first: exit code 1 (local rank 0, pid 100): ValueError: no sample 0",
        "  ranks 1, 2 then failed with the same error",
    ]


def test_verdict_does_not_name_a_secondary_failure_first() -> None:
    echo = replace(failure(0, 1, 1.0, "RuntimeError: Connection closed by peer"), secondary=True)
    on_its_way_out = failure(1, 1, 1.1, "ValueError: no", terminated=True)
    assert first_failure((echo, on_its_way_out)).rank == 1
    stopped = failure(2, -signal.SIGTERM, 0.9, terminated=True)
    assert first_failure((echo, stopped)).rank == 0


def test_verdict_names_a_rank_that_exited_early_if_the_others_only_miss_it() -> None:
    echo = replace(failure(0, 1, 1.0, "RuntimeError: Connection closed by peer"), secondary=True)
    verdict = judge(Outcome((echo,), ended_well=(1,)))
    assert verdict.exit_code == 1
    assert verdict.text.startswith(
        "rank 1 ended early, with exit code 0, while other ranks still needed it; then rank 0"
    )


def test_verdict_shows_the_traceback_once() -> None:
    first = replace(failure(3, 1, 2.0, "ValueError: no"), trace="Traceback ...")
    assert judge(Outcome((first,))).trace == "Traceback ..."
    assert judge(Outcome((first,)), shown={3}).trace == ""


def test_verdict_does_not_repeat_a_message_already_printed() -> None:
    first = replace(failure(1, 1, 2.0, "LossError: no"), printed=True)
    other = replace(failure(0, 1, 2.1, "LossError: no"), printed=True, secondary=True)
    assert judge(Outcome((first, other))).text.splitlines() == [
        "rank 1 failed first: exit code 1 (local rank 1, pid 101)",
        "  rank 0 then failed: exit code 1",
    ]
    on_another_node = replace(first, host="h2")
    assert judge(Outcome((on_another_node,))).text.endswith(", host h2, pid 101): LossError: no")


def test_verdict_names_the_rank_that_printed_a_common_error() -> None:
    silent = replace(failure(0, 1, 2.0, "ConfigError: no"), printed=True)
    printing = replace(failure(1, 1, 2.1, "ConfigError: no", terminated=True), printed=True, printed_here=True)
    assert first_failure((silent, printing)).rank == 1
    assert first_failure((replace(silent, message="KeyError: 'x'", printed=False), printing)).rank == 0


def test_verdict_of_saved_workers_asks_for_a_restart() -> None:
    saved = tuple(failure(rank, ExitCode.REQUEUE, 1.0) for rank in range(2))
    echo = replace(failure(2, 1, 0.5, "Connection closed by peer"), secondary=True)
    assert judge(Outcome((*saved, echo), stopped_by=signal.SIGTERM)).exit_code == ExitCode.REQUEUE
    assert judge(Outcome((*saved, failure(2, 1, 2.0, "ValueError: no")))).exit_code == 1


def test_verdict_record_names_the_first_failure() -> None:
    outcome = Outcome((failure(1, -signal.SIGSEGV, 2.0),))
    found = json.loads(json.dumps(record(outcome)))
    assert (found["exit_code"], found["first_failure"]["rank"], found["first_failure"]["how"]) == (
        139,
        1,
        "killed by SIGSEGV",
    )


def test_verdict_shows_what_the_kernel_has_reported_under_the_failure_also_on_other_nodes() -> None:
    health = ("kernel, 0.8 s before: NVRM: Xid (PCI:0000:4f:00): 79 (rank 5's GPU)", "GPU 3: 2 uncorrected ECC errors")
    outcome = Outcome((replace(failure(5, 1, 2.0, "NCCL error"), host="h", health=health),), note="not restarted")
    lines = judge(outcome).text.splitlines()
    assert lines[1:] == [f"  {line}" for line in (*health, "not restarted")]
    assert judge(from_json(Outcome, json.loads(to_json(summary(outcome))))).text.splitlines() == lines
    assert record(outcome)["first_failure"]["health"] == health


def test_verdict_shows_what_was_reported_on_a_node_whose_ranks_were_only_stopped() -> None:
    first = replace(failure(0, 1, 2.0, "NCCL error"), host="h0", health=("kernel, 0.1 s before: Link down",))
    stopped = replace(failure(0, -signal.SIGTERM, 2.3, terminated=True), host="h1", health=("GPU 3: Xid 79", "a", "b"))
    others = (stopped, replace(stopped, rank=1, health=("c",)), replace(first, rank=2))
    assert judge(Outcome((first, *others))).text.splitlines()[1:4] == [
        "  kernel, 0.1 s before: Link down", "  h1: GPU 3: Xid 79", "  h1: a",
    ]  # fmt: skip


def test_verdict_of_a_hang_shows_where_the_other_ranks_were() -> None:
    hung = replace(
        failure(1, ExitCode.HUNG, 30.0, "no progress for more than 12 s; in data (train.py:31 in __getitem__)"),
        step=40,
        hung=True,
        others=("rank 0 was in the gradient all-reduce (train.py:80 in <module>)",),
    )
    verdict = judge(Outcome((hung,)))
    assert verdict.exit_code == 124
    assert verdict.text.splitlines() == [
        "rank 1 failed first: hung (local rank 1, pid 101, after step 40): "
        "no progress for more than 12 s; in data (train.py:31 in __getitem__)",
        "  rank 0 was in the gradient all-reduce (train.py:80 in <module>)",
    ]


def test_summary_gives_the_same_verdict_as_all_failures_in_a_few_bytes() -> None:
    stopped = failure(9, -signal.SIGTERM, 1.0, terminated=True)
    sizes = []
    for count in (50, 5000):
        failures = tuple(
            replace(
                failure(rank, 3, 50.0 - rank % 50, f"ValueError: {'abcdefg'[rank % 7]}"), host="h1", trace="T" * 400
            )
            for rank in range(10, count)
        )
        for outcome in (
            Outcome((*failures, stopped), ended_well=tuple(range(count)), note="not restarted", restarts=2),
            Outcome(tuple(replace(each, secondary=True) for each in failures), ended_well=tuple(range(count))),
            Outcome(failures, lost="no heartbeat from h2 for 3 s", stopped_by=signal.SIGTERM),
            Outcome(tuple(replace(each, exit_code=ExitCode.REQUEUE) for each in failures), lost="h2 left the job"),
        ):
            assert judge(summary(outcome)) == judge(outcome)
            assert judge(summary(outcome), shown=range(count)) == judge(outcome, shown=range(count))
            sizes.append(len(json.dumps(asdict(summary(outcome)))))
    assert max(sizes) < 2000
    assert summary(Outcome(lost="no host")) == Outcome(lost="no host")


def test_record_of_a_summary_has_the_first_failure_and_those_of_the_node() -> None:
    first, *others = (replace(failure(rank, 1, 1.0 + rank, "ValueError: no"), host="h", trace="T") for rank in range(4))
    outcome = Outcome((first, *others), ended_well=(7,))
    found = record(summary(outcome), own=(others[1], others[2]))
    assert [each["rank"] for each in found["failures"]] == [0, 2, 3]
    assert (found["text"], found["first_failure"]) == (judge(outcome).text, record(outcome)["first_failure"])
    assert "ranks 1, 2, 3 then failed" in found["text"]
    everything = record(outcome, own=(others[1],))
    assert [each["rank"] for each in everything["failures"]] == [0, 1, 2, 3]
    assert everything["text"] == judge(outcome).text
