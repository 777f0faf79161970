"""Several updates per step: what each trains, and what is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_kit import ConfigError, DataConfig, Trainer, TrainerConfig, Update
from tests.support.toys import TensorEncoding

DATA = TensorDataset(torch.arange(8.0).reshape(8, 1))


def pair() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"first": nn.Linear(1, 1), "second": nn.Linear(1, 1)})


def product(model: Any, batch: tuple[Tensor]) -> Tensor:
    loss: Tensor = (model["first"](batch[0]) * model["second"](batch[0])).mean()
    return loss


def sgd_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.01)


def test_update_changes_only_its_parameters_in_its_steps() -> None:
    model = pair()
    seen = []

    def watched(model: Any, batch: Any) -> Tensor:
        seen.append([each.detach().clone() for each in model.parameters()])
        return product(model, batch)

    updates = [Update("a", watched, sgd_of(model["first"])), Update("b", watched, sgd_of(model["second"]), every=2)]
    Trainer(model, updates=updates, config=TrainerConfig(max_steps=2, global_batch_size=4)).fit(DATA)
    moved = [
        [not torch.equal(one, other) for one, other in zip(before, after, strict=True)]
        for before, after in zip(seen, [*seen[1:], [each.detach() for each in model.parameters()]], strict=True)
    ]
    assert moved == [[True, True, False, False]] * 2 + [[False, False, True, True]]
    assert all(each.grad is None for each in model.parameters())


def test_update_may_remove_entries_of_the_batch() -> None:
    def taking(model: Any, batch: Any) -> Tensor:
        return product(model, (batch.pop("x"),))

    model = pair()
    updates = [Update(name, taking, sgd_of(model[name])) for name in ("first", "second")]
    data = DataConfig(collate_fn=lambda rows: TensorEncoding(x=torch.stack(rows)))
    config = TrainerConfig(max_steps=2, global_batch_size=4, data=data)
    trainer = Trainer(model, updates=updates, config=config)
    x = DATA.tensors[0]
    assert trainer.fit(x, x).metrics.keys() >= {"loss/first", "loss/second"}


def test_update_that_is_skipped_does_not_affect_the_others() -> None:
    model = pair()

    def bad(model: Any, batch: Any) -> Tensor:
        return product(model, batch) * float("nan")

    updates = [Update("a", product, sgd_of(model["first"])), Update("b", bad, sgd_of(model["second"]))]
    config = TrainerConfig(max_steps=2, global_batch_size=4, log_every_steps=2, non_finite_gradients="skip")
    before = [each.detach().clone() for each in model.parameters()]
    result = Trainer(model, updates=updates, config=config).fit(DATA)
    changed = [not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True)]
    assert changed == [True, True, False, False]
    assert result.skipped == 2
    assert "loss/a" in result.history[0].values
    assert "loss/b" not in result.history[0].values


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: {"updates": [Update("a", product, sgd_of(m["first"]))]}, "does not hold second.weight, second.bias"),
        (lambda m: {"updates": [Update("a", product, sgd_of(m)), Update("b", product, sgd_of(m))]}, "'a' and 'b'"),
        (
            lambda m: {"updates": [Update("a", product, sgd_of(m)), Update("a", product, sgd_of(m))]},
            "names are not unique: a, a",
        ),
        (lambda m: {"updates": [Update("a", product, sgd_of(m), every=2)]}, "at least one must run in every step"),
        (lambda m: {"updates": [Update("a", product, sgd_of(m), every=0)]}, "has every=0"),
        (lambda m: {"updates": [Update("a", product, "adam")]}, "has a str as its optimizer"),  # type: ignore[arg-type]
        (lambda m: {"updates": [Update("a", 3, sgd_of(m))]}, "loss_fn of update 'a' is an int"),  # type: ignore[arg-type]
        (lambda m: {"updates": [sgd_of(m)]}, "updates is not a list of Update"),
        (lambda m: {"updates": [Update("a", product, sgd_of(m))], "loss_fn": product}, "and also an optimizer"),
        (lambda m: {"updates": [Update("a", product, sgd_of(m))], "config": TrainerConfig(precision="fp16")}, "'fp16'"),
        (
            lambda m: {
                "updates": [Update("a", product, torch.optim.LBFGS(m.parameters()))],
                "config": TrainerConfig(non_finite_gradients="skip"),
            },
            "non_finite_gradients = 'skip' is not supported with LBFGS, which evaluates the loss several times",
        ),
    ],
)
def test_invalid_updates_are_refused(change: Any, words: str) -> None:
    model = pair()
    with pytest.raises(ConfigError) as caught:
        Trainer(model, **change(model))
    assert words in str(caught.value)


def test_find_learning_rate_with_updates_is_refused() -> None:
    model = pair()
    with pytest.raises(ConfigError, match="one optimizer"):
        Trainer(model, updates=[Update("a", product, sgd_of(model))]).find_learning_rate(DATA)


class Gan(nn.ModuleDict):
    def __init__(self) -> None:
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        super().__init__({"generator": generator, "critic": nn.Linear(1, 1)})


def test_two_updates_may_share_one_batch_of_fakes_like_the_loop_by_hand() -> None:
    """As docs/several-models.md says; noise depends on the batch, so that both loops use the same."""
    fakes: list[Tensor] = []

    def critic_loss(model: Any, batch: tuple[Tensor]) -> Tensor:
        fakes.append(model["generator"](torch.cat((batch[0], batch[0].sin()), dim=1)))
        critic = model["critic"]
        return (F.softplus(-critic(batch[0])) + F.softplus(critic(fakes[-1].detach()))).mean()

    def generator_loss(model: Any, _batch: Any) -> Tensor:
        return F.softplus(-model["critic"](fakes.pop(0))).mean()

    model, by_hand = Gan(), Gan()
    updates = [
        Update("critic", critic_loss, sgd_of(model["critic"])),
        Update("generator", generator_loss, sgd_of(model["generator"])),
    ]
    config = TrainerConfig(epochs=3, global_batch_size=4, data=DataConfig(shuffle=False))
    Trainer(model, updates=updates, config=config).fit(DATA, DATA)
    optimizers = [sgd_of(by_hand[name]) for name in ("critic", "generator")]
    for _ in range(3):
        for batch in DATA.tensors[0].split(4):
            for optimizer, loss_fn in zip(optimizers, (critic_loss, generator_loss), strict=True):
                loss = loss_fn(by_hand, (batch,))
                by_hand.zero_grad()
                loss.backward()
                optimizer.step()
    assert not fakes
    assert model["generator"][1].num_batches_tracked == 6
    for name, value in by_hand.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
