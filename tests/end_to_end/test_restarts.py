"""Failures and what follows: restarts that work, and those that are not worth trying. One node; see rigs/ for more."""

import os
import re
import select
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.labels import unlabelled
from tests.support.launching import DDPKIT, PROGRAMS, launch, seconds, started

pytestmark = pytest.mark.slow

Start = Callable[..., "subprocess.CompletedProcess[str]"]
Script = Callable[[str], Path]


@pytest.mark.parametrize(("flags", "ranks"), [((), 2), ((), 4), (("--cold",), 2)])
def test_restart_after_every_kill_starts_all_ranks(ranks: int, flags: tuple[str, ...], tmp_path: Path) -> None:
    kills = 3 if flags else 10
    words = ["--nproc-per-node", ranks, "--max-restarts", kills, PROGRAMS / "killed_in_each_attempt.py", kills]
    run = launch(*flags, *words, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    there = re.findall(r"there (\d+) (\d+)", run.stdout)
    assert {total for _, total in there} == {str(ranks)}
    assert [attempt for attempt, _ in there].count(str(kills)) == ranks
    assert len(re.findall(rf"killed by SIGKILL .*; restart \d+ of {kills}", run.stderr)) == kills


def test_verdict_without_restarts_left_is_the_last_failure(start: Start, script: Script) -> None:
    run = start("ddpkit", 2, script("import sys\nif os.environ['RANK'] == '1': sys.exit(9)\nsay('ok')"))
    assert run.returncode == 9
    assert "rank 1 failed first: exit code 9" in run.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "statement"),
    [
        ((), "import nowhere_to_be_found"),
        (("--cold",), "from os import nothing_like_it"),
        ((), "from os import nothing_like_it"),
        (("--cold",), "import nowhere_to_be_found"),
    ],
)
def test_import_error_at_the_top_is_shown_once_and_not_restarted(
    script: Script, statement: str, flags: tuple[str, ...]
) -> None:
    main = script(f"import os\n{statement}\n")
    run = launch(*flags, "--nproc-per-node", 3, "--max-restarts", 5, main)
    assert run.returncode == 1
    assert run.stderr.count("Traceback") == 1
    assert "restart 1 of" not in run.stderr
    assert "not restarted: an import in the script failed" in run.stderr


def test_import_error_in_a_function_is_restarted(script: Script) -> None:
    main = script("def work():\n    import nowhere_to_be_found\nwork()\n")
    run = launch("--nproc-per-node", 1, "--max-restarts", 1, main)
    assert run.returncode == 1
    assert run.stderr.count("Traceback") == 2
    assert "restart 1 of 1" in run.stderr


def test_script_that_recovers_is_restarted_as_often_as_allowed(script: Script) -> None:
    main = script("attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\nassert attempt == 2, attempt\nsay('done')")
    run = launch("--nproc-per-node", 1, "--max-restarts", 2, main)
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr
    assert re.findall(r"restart .*", run.stderr) == ["restart 1 of 2", "restart 2 of 2 in 1 s"]


def test_signal_during_the_delay_of_a_crash_loop_ends_it_at_once(script: Script) -> None:
    main = script("raise ValueError('always')")
    with started(DDPKIT, "launch", "--nproc-per-node", 1, "--max-restarts", 50, main) as launcher:
        assert launcher.stderr is not None
        said = next(line for line in launcher.stderr if "in 4 s" in line)
        assert said.endswith("ValueError: always; restart 4 of 50 in 4 s\n")
        launcher.send_signal(signal.SIGTERM)
        after = launcher.stderr.read()
        launcher.wait()
    assert launcher.returncode == 128 + signal.SIGTERM
    assert after == "ddpkit: stopped by SIGTERM\n"  # nor was another round begun


TRAINS = PROGRAMS / "restarted.py"


def test_failures_after_newly_saved_steps_use_up_no_restarts(tmp_path: Path) -> None:
    run = launch("--nproc-per-node", 2, "--max-restarts", 1, TRAINS, tmp_path, "kills")
    assert run.returncode == 0, run.stderr
    assert re.findall(r"restart .*", run.stderr) == [
        "restart 1 of 1",
        "restart 2 (1 of 1 since step 6)",
        "restart 3 (1 of 1 since step 9)",
    ]


def test_non_finite_loss_at_the_same_step_twice_is_not_restarted(tmp_path: Path) -> None:
    run = launch("--nproc-per-node", 2, "--max-restarts", 10, TRAINS, tmp_path, "nan")
    assert run.returncode == 1
    assert re.findall(r"restart .*", run.stderr) == ["restart 1 of 10"]
    assert "\n  not restarted again: the same error occurred twice after step 5\n" in run.stderr


def test_crash_loop_ends_after_max_restarts_without_a_new_step(tmp_path: Path) -> None:
    run = launch("--nproc-per-node", 2, "--max-restarts", 2, TRAINS, tmp_path, "crashes")
    assert run.returncode == 1
    assert re.findall(r"restart .*", run.stderr) == ["restart 1 of 2", "restart 2 of 2 in 1 s"]
    assert "ddpkit: rank 1 failed first" in run.stderr
    assert run.stderr.endswith("\n  not restarted again: 2 consecutive restarts made no progress\n"), run.stderr


@pytest.mark.parametrize("flags", [(), ("-m",)])
def test_workers_of_a_killed_launcher_end(script: Script, flags: tuple[str, ...], tmp_path: Path) -> None:
    main = script(
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); say(os.getpid())\nwhile True: signal.pause()"
    )
    words = ["--nproc-per-node", 3, *flags, main.stem if flags else main]
    with started(DDPKIT, "launch", *words, cwd=tmp_path, stderr=subprocess.DEVNULL) as launcher:
        assert launcher.stdout is not None
        workers = [os.pidfd_open(int(unlabelled(launcher.stdout.readline()))) for _ in range(3)]
        launcher.send_signal(signal.SIGKILL)
        for worker in workers:
            assert select.select([worker], [], [], seconds(60))[0], "it is still there"
            os.close(worker)


def test_second_interrupt_kills_workers_that_ignore_the_first(script: Script) -> None:
    main = script(
        "import signal; signal.signal(signal.SIGINT, lambda *_: say('told'))\nsay(os.getpid())\n"
        "while True: signal.pause()"
    )
    words = ["--nproc-per-node", 2, "--shutdown-timeout", 3000, main]
    with started(DDPKIT, "launch", *words) as launcher:
        assert launcher.stdout is not None
        workers = [os.pidfd_open(int(unlabelled(launcher.stdout.readline()))) for _ in range(2)]
        launcher.send_signal(signal.SIGINT)
        for _ in workers:  # until then, a second signal could be taken for the first
            assert unlabelled(launcher.stdout.readline()) == "told\n"
        assert not select.select(workers, [], [], 0.5)[0], "they have their grace"
        launcher.send_signal(signal.SIGINT)
        _, errors = launcher.communicate(timeout=seconds(60))
    assert launcher.returncode == 130
    assert "stopped by SIGINT" in errors
    for worker in workers:
        os.close(worker)


def test_peers_of_a_failed_rank_end_before_the_shutdown_timeout(tmp_path: Path) -> None:
    words = ["--nproc-per-node", 2, "--max-restarts", 1, "--shutdown-timeout", 3000]
    run = launch(*words, PROGRAMS / "ignores_stop.py", tmp_path / "run")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("ended after step 6") == 2
