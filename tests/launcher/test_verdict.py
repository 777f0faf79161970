"""Who failed first, with what, and the exit code."""

import signal

import pytest

from ddp_kit.launcher.verdict import Failure, Outcome, judge


def failure(rank: int, exit_code: int, time: float, message: str = "", told: bool = False) -> Failure:
    return Failure(rank, local_rank=rank, pid=100 + rank, exit_code=exit_code, after=time, message=message, told=told)


def test_all_went_well() -> None:
    assert (judge(Outcome()).exit_code, judge(Outcome()).text) == (0, "")


def test_the_first_failure_counts_not_those_that_were_stopped_after_it() -> None:
    stopped = failure(0, -signal.SIGTERM, 10.0, told=True)
    verdict = judge(Outcome((stopped, failure(2, 9, 12.0), failure(1, 7, 11.0, "ValueError: no"))))
    assert verdict.exit_code == 7
    assert verdict.text == "rank 1 failed first: exit code 7 (local rank 1, pid 101): ValueError: no"


@pytest.mark.parametrize(
    ("code", "name", "shell"), [(-11, "SIGSEGV", 139), (-9, "SIGKILL", 137), (-15, "SIGTERM", 143)]
)
def test_a_signal_is_called_by_its_name(code: int, name: str, shell: int) -> None:
    verdict = judge(Outcome((failure(0, code, 1.0),)))
    assert verdict.exit_code == shell
    assert f"killed by {name}" in verdict.text


def test_a_launcher_that_was_stopped_says_by_what() -> None:
    verdict = judge(Outcome(stopped_by=signal.SIGINT))
    assert (verdict.exit_code, verdict.text) == (130, "stopped by SIGINT")


def test_a_lost_node_has_an_exit_code_of_its_own() -> None:
    verdict = judge(Outcome(lost="h2 has not been heard of for 3 s"))
    assert (verdict.exit_code, verdict.text) == (4, "the job cannot go on: h2 has not been heard of for 3 s")


def test_an_error_file_of_torchs_record_gives_the_message_and_the_place() -> None:
    first = failure(3, 1, 2.0, "ValueError: no")
    verdict = judge(Outcome((first, failure(1, 1, 2.5, "RuntimeError: Connection closed by peer")), note="not again"))
    assert verdict.text == "rank 3 failed first: exit code 1 (local rank 3, pid 103): ValueError: no\n  not again"
