"""Runs of MLflow and Trackio, kept on this machine by the real packages."""

import json
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_kit import ConfigError, MLflowLogger, TrackioLogger
from tests.support.launching import PROGRAMS, run

VARIABLES = {"MLFLOW_ALLOW_FILE_STORE": "true", "GIT_PYTHON_REFRESH": "quiet", "HF_HUB_OFFLINE": "1"}


@pytest.mark.slow
def test_tracker_of_a_resumed_run_continues_the_same_run(start: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="needs mlflow: pip install mlflow-skinny")
    pytest.importorskip("trackio", reason="needs trackio: pip install trackio")
    env = {**VARIABLES, "TRACKIO_DIR": str(tmp_path / "trackio")}
    path = PROGRAMS / "tracked.py"
    for steps in ("4", "8"):
        done = start("python", 1, path, steps, env=env)
        assert done.returncode == 0, done.stderr
    # In another process: what these packages import warns, and keeps threads.
    read = run(sys.executable, PROGRAMS / "read_mlflow.py", cwd=tmp_path, env=VARIABLES)
    assert read.returncode == 0, read.stderr
    (found,) = json.loads(read.stdout.splitlines()[-1])
    assert (found["name"], found["status"]) == ("first", "FINISHED")
    assert (found["train"], found["eval"]) == ([2, 4, 6, 8], [4, 8])
    assert found["params"]["global_batch_size"] == "4"
    assert found["params"]["data.num_workers"] == "0"
    (database,) = (tmp_path / "trackio").glob("ours*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT run_name, step, CAST(metrics AS TEXT) FROM metrics ORDER BY id").fetchall()
        configs = connection.execute("SELECT CAST(config AS TEXT) FROM configs").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    drawn = [(step, "train/loss" in metrics, "eval/loss" in metrics) for _, step, metrics in rows]
    assert drawn == [
        (2, True, False), (4, True, False), (4, False, True), (6, True, False), (8, True, False), (8, False, True),
    ]  # fmt: skip
    assert all('"note":"by hand"' in config.replace(": ", ":") for (config,) in configs)


@pytest.mark.parametrize(
    ("package", "logger"),
    [("mlflow", MLflowLogger), ("trackio", lambda: TrackioLogger("ours"))],
    ids=["mlflow", "trackio"],
)
def test_tracker_without_the_package_shows_the_pip_command(
    monkeypatch: pytest.MonkeyPatch, package: str, logger: Callable[[], object]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"not installed\n.*pip install {package}"):
        logger()
