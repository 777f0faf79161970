"""Runs of MLflow and Trackio, kept on this machine by the real packages."""

import json
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import run

from ddp_kit import ConfigError, MLflowLogger, TrackioLogger

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from ddp_kit import MLflowLogger, TrackioLogger, Trainer, TrainerConfig

x = torch.ones(16, 3)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Linear(3, 1)
trainer = Trainer(
    model,
    torch.optim.SGD(model.parameters(), lr=0.01),
    lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    TrainerConfig(global_batch_size=4, log_every_steps=2, max_steps=int(sys.argv[1]), checkpoint={"dir": "saved"}),
    callbacks=[
        MLflowLogger("ours", tracking_uri="file:./mlruns", run_name="first"),
        TrackioLogger("ours", config={"note": "by hand"}, auto_log_cpu=False),
    ],
)
trainer.fit(data)
trainer.evaluate(data)
"""
# In a process of its own: what these packages import warns, and keeps threads.
READ_MLFLOW = """
import json
import mlflow
mlflow.set_tracking_uri("file:./mlruns")
client = mlflow.tracking.MlflowClient()
runs = client.search_runs([client.get_experiment_by_name("ours").experiment_id])
print(json.dumps([
    {
        "name": run.info.run_name,
        "status": run.info.status,
        "params": run.data.params,
        "train": [each.step for each in client.get_metric_history(run.info.run_id, "train/loss")],
        "eval": [each.step for each in client.get_metric_history(run.info.run_id, "eval/loss")],
    }
    for run in runs
]))
"""
VARIABLES = {"MLFLOW_ALLOW_FILE_STORE": "true", "GIT_PYTHON_REFRESH": "quiet", "HF_HUB_OFFLINE": "1"}


@pytest.mark.slow
def test_a_run_that_resumes_goes_on_in_the_same_run(
    start: Callable[..., Any], script: Callable[[str], Path], tmp_path: Path
) -> None:
    pytest.importorskip("mlflow", reason="needs mlflow: pip install mlflow-skinny")
    pytest.importorskip("trackio", reason="needs trackio: pip install trackio")
    env = {**VARIABLES, "TRACKIO_DIR": str(tmp_path / "trackio")}
    path = script(SCRIPT)
    for steps in ("4", "8"):
        done = start("python", 1, path, steps, env=env)
        assert done.returncode == 0, done.stderr
    read = run(sys.executable, "-c", READ_MLFLOW, cwd=tmp_path, env=VARIABLES)
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
def test_without_the_package_it_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, package: str, logger: Callable[[], object]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"not installed\n.*pip install {package}"):
        logger()
