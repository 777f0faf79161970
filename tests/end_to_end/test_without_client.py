"""Without the extra `cloud`, each command that gets a URL says what to install, once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

HIDES = """
import sys
from importlib.machinery import PathFinder


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name == "obstore" else PathFinder.find_spec(name, path, target)


sys.meta_path = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
"""
TRAINS = """
import torch
from ddp_kit import Trainer, TrainerConfig

model = torch.nn.Linear(2, 2)
config = TrainerConfig(max_steps=1, global_batch_size=2, checkpoint={"dir": "s3://bucket/run"})
Trainer(model, torch.optim.SGD(model.parameters()), lambda model, batch: model(batch[0]).sum(), config)
"""
INSTALL = "pip install 'ddpkit[cloud]'"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["checkpoints", "s3://bucket/run"], 2),
        (["checkpoints", "run", "--diff", "3", "gs://bucket/run/step-00000003"], 2),
        (["export", "az://bucket/run", "new.safetensors"], 2),
        (["doctor", "--dir", "s3://bucket/run"], 1),
        (["launch", "--nproc-per-node", "2", "trains.py"], 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_command(words: list[str], code: int, ddpkit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(HIDES)
    (tmp_path / "trains.py").write_text(TRAINS)
    (tmp_path / "run" / "step-00000003").mkdir(parents=True)
    before = sorted(tmp_path.iterdir())
    done = ddpkit(*words, env={"PYTHONPATH": str(tmp_path / "hidden")})
    told = done.stdout + done.stderr
    assert done.returncode == code, told
    assert told.count(INSTALL) == 1, told
    assert "Traceback" not in told
    assert sorted(tmp_path.iterdir()) == before
