"""DataLoaders that iterate in their own way: the Trainer uses the batches that a loop by hand gets."""

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

from ddp_kit import DataError, Trainer, TrainerConfig, scheduler_steps
from ddp_kit.data.loader_batches import iterates_itself, loader_batches
from tests.programs.own_loaders import LOADERS, FirstTwo, OtherLength, Scaled, X, by_hand, loss_fn, model_of_weights


@pytest.mark.parametrize("name", LOADERS)
def test_trainer_uses_the_batches_of_a_loop_by_hand(name: str) -> None:
    seen: list[list[float]] = []
    model = model_of_weights()

    def noted(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch[0].flatten().tolist())
        return loss_fn(model, batch)

    config = TrainerConfig(epochs=2)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-4), noted, config)
    trainer.fit(LOADERS[name]())
    expected, weight = by_hand(LOADERS[name](), epochs=2)
    assert seen == expected
    assert trainer.step == len(expected)
    assert torch.equal(next(model.parameters()).detach(), weight)


@pytest.mark.parametrize("name", LOADERS)
def test_evaluation_and_prediction_use_the_batches_of_a_loop_by_hand(name: str) -> None:
    batches = [x for (x,) in LOADERS[name]()]
    model = model_of_weights()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-4), loss_fn, TrainerConfig())
    assert (
        trainer.predict(LOADERS[name](), lambda model, batch: model(batch[0])).tolist() == torch.cat(batches).tolist()
    )
    values = torch.cat(batches).square()
    assert trainer.evaluate(LOADERS[name]())["loss"] == pytest.approx(values.mean().item())


@pytest.mark.parametrize("name", LOADERS)
def test_resumed_run_ends_like_an_undisturbed_one(name: str, tmp_path: Path) -> None:
    weights = []
    for stops, folder in (((None,), "whole"), ((3, None), "parts")):
        for stop in stops:
            model = model_of_weights()
            config = TrainerConfig(epochs=2, checkpoint={"dir": tmp_path / folder})
            trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-4), loss_fn, config)
            for step in trainer.steps(LOADERS[name]()):
                if step.number == stop:
                    trainer.save()
                    break
        weights.append(next(model.parameters()).item())
    assert weights[0] == weights[1]


def test_every_member_of_torchs_loader_is_an_option_or_makes_a_loader_iterate_itself() -> None:
    options = {"__init__", "__setattr__", "multiprocessing_context", "check_worker_number_rationality"}
    members = {
        name: value for name, value in vars(DataLoader).items() if callable(value) or isinstance(value, property)
    }
    for name in {*members} - options:
        kind = type("Own", (DataLoader,), {name: members[name]})
        assert iterates_itself(kind([1])), name
    for name in options:
        assert not iterates_itself(type("Own", (DataLoader,), {name: members[name]})([1])), name
    assert not iterates_itself(DataLoader([1]))


def test_loader_of_torchdata_does_not_iterate_itself() -> None:
    module = "torchdata.stateful_dataloader.stateful_dataloader"
    kind = type("StatefulDataLoader", (DataLoader,), {"__iter__": DataLoader.__iter__, "__module__": module})
    assert not iterates_itself(kind([1]))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("kind", [Scaled, FirstTwo, OtherLength])
def test_ranks_share_all_batches(kind: type[DataLoader[Any]], in_order: bool, ranks: int) -> None:
    loader = kind(TensorDataset(X), batch_size=3)
    everything = [x.tolist() for (x,) in loader]
    of_ranks = [
        [x.tolist() for (x,) in loader_batches(loader, rank, ranks, in_order=in_order, role="train_data")]
        for rank in range(ranks)
    ]
    in_turn = [batches[turn] for turn in range(len(everything)) for batches in of_ranks if turn < len(batches)]
    assert ([*chain(*of_ranks)] if in_order else in_turn) == everything


class Remembers(DataLoader[Any]):
    """A loader with a state of its own, which a loop by hand saves."""

    def __init__(self, data: Any) -> None:
        super().__init__(data, batch_size=2)
        self.done = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in islice(super().__iter__(), self.done % 8, None):
            self.done += 1
            yield [batch[0] * (1 + self.done)]

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stop", [0, 1])
def test_loader_with_a_state_continues_from_it(ranks: int, stop: int) -> None:
    for rank in range(ranks):
        whole = [
            x.tolist() for (x,) in loader_batches(Remembers(TensorDataset(X)), rank, ranks, in_order=False, role="")
        ]
        first: Any = loader_batches(Remembers(TensorDataset(X)), rank, ranks, in_order=False, role="")
        begun = [x.tolist() for (x,) in islice(first, stop + 1)]
        second: Any = loader_batches(Remembers(TensorDataset(X)), rank, ranks, in_order=False, role="")
        second.load_state_dict(first.state_dict())
        assert begun + [x.tolist() for (x,) in second] == whole


class WithoutState(Scaled):
    """Has the methods of a state, but the loader inside lacks them."""

    def state_dict(self) -> Any:
        return self.inner.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)  # type: ignore[attr-defined]


def test_loader_whose_state_does_not_exist_is_read_again_after_a_resume() -> None:
    batches = loader_batches(WithoutState(TensorDataset(X), batch_size=4), 0, 1, in_order=False, role="")
    assert not hasattr(batches, "state_dict")
    assert len([*batches]) == 4


def test_steps_of_a_loader_that_iterates_itself_are_counted_by_its_length() -> None:
    loader = FirstTwo(TensorDataset(X), batch_size=4)
    assert scheduler_steps(TrainerConfig(epochs=3), loader) == 6
    assert scheduler_steps(TrainerConfig(epochs=3, accumulation_steps=2), loader) == 3


def test_predictions_in_an_unknown_order_are_refused() -> None:
    model = model_of_weights()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, TrainerConfig())
    with pytest.raises(DataError, match="it is unknown which prediction belongs to which sample"):
        trainer.predict(Scaled(TensorDataset(X), batch_size=4, shuffle=True))
    assert trainer.evaluate(Scaled(TensorDataset(X), batch_size=4, shuffle=True))["loss"] > 0


@pytest.mark.parametrize("size", [4, 3])
@pytest.mark.parametrize("own", ["sampler", "batch sampler"])
def test_predictions_are_in_the_order_of_the_dataset(own: str, size: int) -> None:
    indices = [5, 0, 11, 3, 14, 8, 2]
    options: dict[str, Any] = {"sampler": indices, "batch_size": size}
    if own == "batch sampler":
        options = {"batch_sampler": [indices[start : start + size] for start in range(0, 7, size)]}
    model = model_of_weights()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, TrainerConfig())
    predicted = trainer.predict(DataLoader(TensorDataset(X), **options))
    assert predicted.flatten().tolist() == sorted(X[indices].flatten().tolist())


@pytest.mark.parametrize("kind", [RandomSampler, SequentialSampler])
def test_set_epoch_of_the_samplers_is_called_in_each_epoch(kind: Any) -> None:
    epochs: list[int] = []

    class Noted(kind):  # type: ignore[misc,valid-type]
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

    data = TensorDataset(X)
    model = model_of_weights()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-4), loss_fn, TrainerConfig(epochs=3))
    trainer.fit(Scaled(data, batch_size=4, sampler=Noted(data)))
    assert epochs == [0, 1, 2]


class Failing(Scaled):
    def __iter__(self) -> Iterator[Any]:
        yield from islice(super().__iter__(), 2)
        raise OSError("gone")


def test_error_while_iterating_names_the_class_of_the_user() -> None:
    model = model_of_weights()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, TrainerConfig())
    with pytest.raises(OSError, match="gone") as caught:
        trainer.fit(Failing(TensorDataset(X), batch_size=4))
    assert caught.value.__notes__[0].startswith("while reading item 0 of batch 2 of Failing")
    config = TrainerConfig(data={"seed_samples": True})
    with pytest.raises(DataError, match="the samples of a Failing have no index"):
        Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, config).fit(
            Failing(TensorDataset(X), batch_size=4)
        )
