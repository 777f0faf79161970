"""What is said while nodes are waited for."""

import os
import shlex
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ddp_kit.launcher import spec
from ddp_kit.launcher.agent.waiting import Commands, Reminder, waiting_for_nodes
from ddp_kit.launcher.job import Limits
from tests.support.launching import DDPKIT, free_port, seconds, started


def typed(flags: str) -> Mapping[str, tuple[str, ...]]:
    return spec.parse([*flags.split(), "train.py"], {}).flags


def test_reminder_is_due_after_three_seconds_and_then_at_growing_intervals() -> None:
    reminder = Reminder(100.0)
    times = [second for second in range(1000) if reminder.due(100.0 + second)]
    assert times == [3, 12, 39, 120, 363, 663, 963]
    reminder = Reminder(100.0, at_once=True)
    assert [second for second in range(100) if reminder.due(100.0 + second)] == [0, 3, 12, 39]


@pytest.mark.parametrize(
    ("flags", "alone"),
    [("--nnodes 2", True), ("--nnodes=2 --node_rank 1", False), ("--nnodes 2 --rdzv-endpoint=h:1", False)],
)
def test_reminder_with_only_a_number_of_nodes_is_due_at_once(flags: str, alone: bool) -> None:
    assert Commands(typed(flags), "train.py", 2).lack_endpoint is alone


@pytest.mark.parametrize(
    ("flags", "static", "host", "others"),
    [
        ("--nnodes 2 --rdzv-backend c10d", False, "", ""),
        ("--rdzv-conf a=1,is_host=0", False, "--rdzv-conf a=1,is_host=1", "--rdzv-conf a=1,is_host=0"),
        ("--nnodes 2 --node_r=0", True, "--nnodes 2 --node-rank 0", "--nnodes 2 --node-rank 1"),
        ("--node-rank 0 --nnodes=2", True, "--nnodes=2 --node-rank 0", "--nnodes=2 --node-rank 1"),
    ],
)
def test_command_for_other_nodes_differs_only_where_necessary(flags: str, static: bool, host: str, others: str) -> None:
    commands = Commands(typed(flags), "train.py ...", 2, static)
    assert commands.command_for_host() == f"ddpkit launch {host or flags} train.py ..."
    assert commands.command_for_other_nodes() == f"ddpkit launch {others or flags} train.py ..."


def test_command_for_other_nodes_has_a_reachable_master_address() -> None:
    commands = Commands(typed("--nnodes 3 --master-port=29501"), "train.py", 3, True, ("10.0.0.1", 29501))
    where = "--master-addr 10.0.0.1 --master-port 29501 train.py"
    assert commands.command_for_other_nodes() == f"ddpkit launch --nnodes 3 --node-rank N {where}"
    assert commands.command_for_host() == f"ddpkit launch --nnodes 3 --node-rank 0 {where}"
    alone = Commands(typed("--nnodes 2"), "train.py", 2, True, ("127.0.0.1", 29500))
    assert f"--master-addr {socket.gethostname()} " in alone.command_for_other_nodes()


def test_waiting_message_shows_joined_nodes_and_the_time_limit() -> None:
    commands = Commands(typed("--nnodes 2:4"), "train.py", 4)
    limits = Limits(min_nodes=2, max_nodes=4)
    first = waiting_for_nodes(1, limits, ("10.0.0.1", 29400), commands)
    assert first == (
        "1 of 2 nodes has joined; waiting up to 600 s at 10.0.0.1:29400; "
        "on the other nodes, type: ddpkit launch --nnodes 2:4 train.py"
    )
    assert "waiting up to 30 s for more" in waiting_for_nodes(3, limits, ("10.0.0.1", 29400), commands)
    assert "no other machine can reach" in waiting_for_nodes(1, limits, ("127.0.0.1", 29400), commands)


@pytest.mark.slow
def test_command_that_a_waiting_node_prints_starts_the_missing_node(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os; os.write(1, b'rank %s\\n' % os.environb[b'RANK'])")
    endpoint = f"127.0.0.1:{free_port()}"
    words = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=j"]
    env = {"PATH": f"{DDPKIT.parent}{os.pathsep}{os.environ['PATH']}"}
    with started(DDPKIT, "launch", *words, "script.py", cwd=tmp_path, env=env) as first:
        assert first.stderr is not None
        line = first.stderr.readline()
        assert "1 of 2 nodes has joined" in line
        assert endpoint in line
        with started(*shlex.split(line.rpartition(": ")[2]), cwd=tmp_path, env=env) as second:
            said = [text for node in (first, second) for text in node.communicate(timeout=seconds(120))]
    assert (first.returncode, second.returncode) == (0, 0), said
    assert sorted([said[0], said[2]]) == ["rank 0\n", "rank 1\n"]


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Port on which connections are accepted, by the kernel, and never answered."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def words_to_join(port: int, join_timeout: float) -> list[object]:
    endpoint = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=j", f"--rdzv-endpoint=127.0.0.1:{port}"]
    return [DDPKIT, "launch", *endpoint, f"--rdzv-conf=join_timeout={join_timeout:g}", "-m", "this"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_node_at_a_port_that_never_answers_reports_it_and_obeys_a_signal(
    silent_port: int, number: signal.Signals
) -> None:
    with started(*words_to_join(silent_port, 3600)) as node:
        assert node.stderr is not None
        line = node.stderr.readline()
        assert f"127.0.0.1:{silent_port}; the port is used by pid {os.getpid()}" in line
        assert "has accepted the connection, but does not answer; waiting up to 3600 s for it" in line
        node.send_signal(number)
        _, errors = node.communicate(timeout=seconds(60))
    assert (node.returncode, errors) == (128 + number, f"ddpkit: stopped by {number.name}\n")


@pytest.mark.slow
def test_node_at_a_port_that_never_answers_ends_after_the_join_timeout(silent_port: int) -> None:
    with started(*words_to_join(silent_port, 0.5)) as node:
        _, errors = node.communicate(timeout=seconds(60))
    assert node.returncode == 3
    assert f"the process that listens at 127.0.0.1:{silent_port} has accepted the connection, but has not" in errors
    assert "hint: if it is the launcher of this job, check whether it is suspended" in errors
