"""Breaking an evaluation off: where that can be done, and where it cannot."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_kit import Trainer, TrainerConfig
from ddp_kit.data.feed import EvaluationData
from ddp_kit.trainer.evaluation import evaluate

BATCHES = [(2, torch.ones(2, 3))] * 3


def seen_until_stopped(meet: bool, after: int, *, divides_weights: bool = False) -> tuple[int, bool]:
    """How many batches were seen with a stop asked for after so many, and whether there were values."""
    seen: list[Tensor] = []

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(batch)
        loss: Tensor = model(batch).mean()
        if meet:
            dist.all_reduce(loss)
        return loss

    model = nn.Linear(3, 1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters()), loss_fn, TrainerConfig(max_steps=1))
    trainer._run.strategy.divides_weights = divides_weights
    values = evaluate(trainer._run, {}, EvaluationData(lambda: BATCHES, list), lambda: len(seen) >= after)
    return len(seen), values is not None


@pytest.mark.usefixtures("group")
def test_evaluation_that_is_stopped_ends_after_the_current_batch() -> None:
    assert seen_until_stopped(meet=False, after=2) == (2, False)
    assert seen_until_stopped(meet=False, after=4) == (3, True)


@pytest.mark.usefixtures("group")
def test_evaluation_with_collectives_in_each_batch_is_not_stopped() -> None:
    assert seen_until_stopped(meet=True, after=1) == (3, True)


def test_evaluation_with_divided_weights_is_not_stopped() -> None:
    assert seen_until_stopped(meet=False, after=1, divides_weights=True) == (3, True)


def test_evaluation_line_begins_with_its_name(said: list[str]) -> None:
    model = nn.Linear(3, 1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters()), lambda model, batch: model(batch).mean() * 0)
    for names in ({}, {"name": "test"}):
        trainer.evaluate([torch.ones(3)] * 4, **names)
    assert [line for line in said if " at step " in line] == ["evaluation at step 0: loss 0", "test at step 0: loss 0"]
