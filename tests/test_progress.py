"""The heartbeat: what the launcher reads of a worker."""

from pathlib import Path

import pytest

from ddp_kit.env import ERROR_FILE
from ddp_kit.heartbeat import Phase, read_heartbeat
from ddp_kit.progress import Heartbeat


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    return str(tmp_path / "error.json")


def test_a_phase_lasts_as_long_as_what_it_is_about(error_file: str) -> None:
    heart = Heartbeat()
    with heart.during(Phase.DATA):
        with heart.during(Phase.EVALUATION):
            assert read_heartbeat(error_file).phase is Phase.EVALUATION
        assert read_heartbeat(error_file).phase is Phase.DATA
    assert read_heartbeat(error_file).phase is Phase.OUTSIDE


def test_an_exception_that_leaves_the_trainer_is_seen_until_it_does_something_again(error_file: str) -> None:
    heart = Heartbeat()
    with pytest.raises(RuntimeError), heart.during(Phase.BACKWARD):
        raise RuntimeError("lost its peer")
    assert read_heartbeat(error_file).phase is Phase.FAILED
    with heart.during(Phase.EVALUATION), pytest.raises(ValueError), heart.during(Phase.CHECKPOINT):  # noqa: PT011
        raise ValueError("handled inside")
    assert read_heartbeat(error_file).phase is Phase.OUTSIDE


def test_a_loop_that_is_left_has_not_failed(error_file: str) -> None:
    with pytest.raises(SystemExit), Heartbeat().during(Phase.DATA):
        raise SystemExit(75)
    assert read_heartbeat(error_file).phase is Phase.OUTSIDE
