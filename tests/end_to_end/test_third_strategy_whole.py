"""The tests of exactness, evaluation, out-of-memory steps and resume, unchanged, with the strategy in flat.py."""

import pytest

from tests.end_to_end.test_evaluation import test_evaluation_and_predictions_do_not_depend_on_the_ranks
from tests.end_to_end.test_exact import (
    test_rank_without_samples_contributes_zeros_to_sparse_gradients,
    test_training_at_any_number_of_ranks_equals_that_of_the_whole_global_batch,
)
from tests.end_to_end.test_memory import test_out_of_memory_in_any_place_does_not_change_the_result
from tests.end_to_end.test_resume import test_killed_run_ends_like_an_undisturbed_one
from tests.support.launching import ROOT

pytestmark = pytest.mark.slow

__all__ = [
    "test_evaluation_and_predictions_do_not_depend_on_the_ranks",
    "test_killed_run_ends_like_an_undisturbed_one",
    "test_out_of_memory_in_any_place_does_not_change_the_result",
    "test_rank_without_samples_contributes_zeros_to_sparse_gradients",
    "test_training_at_any_number_of_ranks_equals_that_of_the_whole_global_batch",
]


@pytest.fixture(autouse=True)
def _flat_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "strategies"))
