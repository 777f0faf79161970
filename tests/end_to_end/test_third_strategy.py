"""The tests of exactness, evaluation, out-of-memory steps and resume, unchanged, with the strategy in flat.py."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from test_evaluation import test_values_and_predictions_do_not_depend_on_the_ranks
from test_exact import (
    test_a_rank_without_samples_stands_in_for_sparse_gradients_too,
    test_training_is_that_of_the_whole_global_batch_at_every_number_of_ranks,
)
from test_memory import test_whatever_does_not_fit_the_result_is_the_same
from test_resume import test_a_killed_run_ends_as_an_undisturbed_one

Start = Callable[..., "subprocess.CompletedProcess[str]"]
Script = Callable[[str], Path]
STRATEGIES = Path(__file__).parents[1] / "strategies"

__all__ = [
    "test_a_killed_run_ends_as_an_undisturbed_one",
    "test_a_rank_without_samples_stands_in_for_sparse_gradients_too",
    "test_training_is_that_of_the_whole_global_batch_at_every_number_of_ranks",
    "test_values_and_predictions_do_not_depend_on_the_ranks",
    "test_whatever_does_not_fit_the_result_is_the_same",
]


@pytest.fixture(autouse=True)
def _flat_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STRATEGIES))


NAMED = """
import torch
from ddp_kit import Trainer
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).mean())
say(type(trainer._parts.strategy).__name__)
"""


@pytest.mark.slow
def test_it_is_this_strategy_and_short(start: Start, script: Script) -> None:
    assert len((STRATEGIES / "flat.py").read_text().splitlines()) <= 150
    run = start("ddpkit", 2, script(NAMED))
    assert run.stdout.split() == ["FlatAllReduce"] * 2, run.stderr
