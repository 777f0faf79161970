"""The heartbeat of a worker, which the launcher reads."""

import math
from pathlib import Path

import pytest

from ddp_kit.env import ERROR_FILE
from ddp_kit.heartbeat import ADVICE_WORDS, HeartbeatWriter, Phase, read_heartbeat


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    return str(tmp_path / "error.json")


def test_heartbeat_phase_lasts_for_its_block(error_file: str) -> None:
    heartbeat = HeartbeatWriter()
    with heartbeat.during(Phase.DATA):
        with heartbeat.during(Phase.EVALUATION):
            assert read_heartbeat(error_file).phase is Phase.EVALUATION
        assert read_heartbeat(error_file).phase is Phase.DATA
    assert read_heartbeat(error_file).phase is Phase.OUTSIDE


def test_heartbeat_phase_after_an_exception_is_failed_until_the_next_phase(error_file: str) -> None:
    heartbeat = HeartbeatWriter()
    with pytest.raises(RuntimeError), heartbeat.during(Phase.BACKWARD):
        raise RuntimeError("lost its peer")
    assert read_heartbeat(error_file).phase is Phase.FAILED
    with heartbeat.during(Phase.EVALUATION), pytest.raises(ValueError), heartbeat.during(Phase.CHECKPOINT):  # noqa: PT011
        raise ValueError("handled inside")
    assert read_heartbeat(error_file).phase is Phase.OUTSIDE


def test_heartbeat_phase_after_system_exit_is_not_failed(error_file: str) -> None:
    with pytest.raises(SystemExit), HeartbeatWriter().during(Phase.DATA):
        raise SystemExit(75)
    assert read_heartbeat(error_file).phase is Phase.OUTSIDE


def test_heartbeat_has_the_values_of_the_last_log_point(error_file: str) -> None:
    assert read_heartbeat(error_file).loss is None
    HeartbeatWriter().log_point(0.1, 0.25, 0.5, 0.4321)
    read = read_heartbeat(error_file)
    assert (read.loss, read.data_share, read.communication_share, read.mfu) == (0.1, 0.25, 0.5, 0.432)
    HeartbeatWriter().log_point(0.0, 0.25, 0.5)
    assert read_heartbeat(error_file).mfu == 0.0
    assert read_heartbeat(error_file).loss == 0.0
    HeartbeatWriter().log_point(float("nan"), 0.25, 0.5)
    assert math.isnan(read_heartbeat(error_file).loss or 0.0)


def test_heartbeat_has_the_total_of_steps_if_it_is_known(error_file: str) -> None:
    with HeartbeatWriter().follow(3, 600):
        assert (read_heartbeat(error_file).step, read_heartbeat(error_file).total) == (3, 600)
    with HeartbeatWriter().follow(3, None):
        assert read_heartbeat(error_file).total is None


def test_heartbeat_has_the_last_advice_cut_to_its_length(error_file: str) -> None:
    heartbeat = HeartbeatWriter()
    assert read_heartbeat(error_file).advice == ""
    for line in ("data 31%: raise data.num_workers (2)", "rank 1"):
        heartbeat.advise(line)
        assert read_heartbeat(error_file).advice == line
    heartbeat.advise("x" * 8 * ADVICE_WORDS + "y")
    assert read_heartbeat(error_file).advice == "x" * 8 * ADVICE_WORDS
    assert read_heartbeat(error_file).phase is Phase.OUTSIDE


def test_heartbeat_without_a_launcher_ignores_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ERROR_FILE, raising=False)
    HeartbeatWriter().advise("rank 1")
