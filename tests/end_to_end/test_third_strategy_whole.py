"""The tests of exactness, evaluation, out-of-memory steps and resume, unchanged, with the strategy in flat.py."""

import pytest
from launching import ROOT
from test_evaluation import test_values_and_predictions_do_not_depend_on_the_ranks
from test_exact import (
    test_a_rank_without_samples_stands_in_for_sparse_gradients_too,
    test_training_is_that_of_the_whole_global_batch_at_every_number_of_ranks,
)
from test_memory import test_whatever_does_not_fit_the_result_is_the_same
from test_resume import test_a_killed_run_ends_as_an_undisturbed_one

pytestmark = pytest.mark.slow

__all__ = [
    "test_a_killed_run_ends_as_an_undisturbed_one",
    "test_a_rank_without_samples_stands_in_for_sparse_gradients_too",
    "test_training_is_that_of_the_whole_global_batch_at_every_number_of_ranks",
    "test_values_and_predictions_do_not_depend_on_the_ranks",
    "test_whatever_does_not_fit_the_result_is_the_same",
]


@pytest.fixture(autouse=True)
def _flat_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "strategies"))
