"""What is checked before the first step: an evaluation of one batch, the names of metrics, callbacks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from ddp_kit import (
    Callback,
    ConfigError,
    DdpKitError,
    EarlyStopping,
    Loss,
    LossError,
    Trainer,
    TrainerConfig,
)

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))


class CountedSamples(Dataset[tuple[Tensor]]):
    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor]:
        self.read += 1
        return (X[index] + torch.rand(3),)


def evaluated_run(metric: Any = None, callbacks: Any = (), **settings: Any) -> tuple[Trainer, CountedSamples]:
    """A run of two steps with evaluation data of 40 samples in batches of 4."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 1))
    trainer = Trainer(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda model, batch: model(batch[0]).square().mean(),
        TrainerConfig(max_steps=2, global_batch_size=4, **settings),
        metrics={} if metric is None else {"error": metric},
        callbacks=callbacks,
    )
    data = CountedSamples()
    trainer.fit(TensorDataset(X), data)
    return trainer, data


def test_sanity_check_shows_a_mistake_in_a_metric_before_the_first_step() -> None:
    steps = []

    class Counts(Callback):
        def on_step(self, trainer: Any) -> None:
            steps.append(trainer.step)

    with pytest.raises(LossError) as caught:
        evaluated_run(lambda output, batch: output, [Counts()])
    assert "metric 'error' returned a tensor of shape (4, 1)" in str(caught.value)
    assert 'sanity_check="off" skips the check' in caught.value.__notes__[0]
    assert not steps
    with pytest.raises(DdpKitError):
        evaluated_run(lambda output, batch: output, [Counts()], sanity_check="off")
    assert steps == [1, 2]


def test_sanity_check_reads_one_batch_and_does_not_change_the_run() -> None:
    (with_check, data), (without, other) = evaluated_run(), evaluated_run(sanity_check="off")
    assert (data.read, other.read) == (44, 40)
    for one, two in zip(with_check.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"callbacks": [EarlyStopping("eror")]}, "EarlyStopping monitors 'eror'"),
        ({"checkpoint": {"best_metric": "eror"}}, "checkpoint.best_metric monitors 'eror'"),
    ],
)
def test_sanity_check_of_an_unknown_metric_names_it_before_the_first_step(settings: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        evaluated_run(lambda output, batch: output.mean(), **settings)
    assert words in str(caught.value)
    assert "did you mean 'error'?" in str(caught.value)


# --- advice of the first step ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "passes", "advised"),
    [
        (lambda total, tokens: total / tokens, 2, True),
        (lambda total, tokens: total / tokens, 1, False),  # one mean is right
        (Loss, 2, False),
    ],
)
def test_sanity_check_advises_against_a_mean_over_tokens_of_several_passes(
    loss: Any, passes: int, advised: bool, said: list[str]
) -> None:
    model = nn.Embedding(5, 5)
    targets = torch.tensor([[1, 2, 3], [1, 2, -100], [4, -100, -100], [1, 1, 1]])

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        total = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")
        return loss(total, (batch[1] != -100).sum())

    config = TrainerConfig(max_steps=2, global_batch_size=4, accumulation_steps=passes, data={"shuffle": False})
    trainer = Trainer(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), loss_fn, config)
    trainer.fit(TensorDataset(targets.clamp(min=0), targets))
    advice = [line for line in said if "from 2 to 3 tokens" in line]
    assert len(advice) == int(advised), said


def test_global_batch_larger_than_the_dataset_is_reported(said: list[str]) -> None:
    config = TrainerConfig(max_steps=1, global_batch_size=64)
    model = nn.Linear(3, 1)
    trainer = Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch[0]).mean(), config
    )
    trainer.fit(TensorDataset(X))
    assert any("the global batch is 64 samples, but train_data has only 40" in line for line in said)
