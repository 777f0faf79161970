"""What users override is called as a loop by hand calls it: every public method of every class that they hand us."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, Subset, TensorDataset

from ddp_kit import Trainer, TrainerConfig

EPOCHS, SAMPLES, BATCH = 3, 12, 4
NOT_INHERITED = ("get_extra_state", "set_extra_state")  # of Module: called only where a subclass defines them
DUNDERS = ("__call__", "__iter__", "__len__", "__getitem__", "__getitems__")


def counting(kind: type, counts: Counter[str], own: tuple[str, ...] = ()) -> Any:
    """A subclass that counts the calls of each public method that user code can override.

    `own`: methods that `kind` lacks and a loop by hand calls where they exist.
    """

    def counted(name: str) -> Callable[..., Any]:
        def method(self: Any, *values: Any, **options: Any) -> Any:
            counts[name] += 1
            return getattr(super(subclass, self), name)(*values, **options) if hasattr(kind, name) else None

        return method

    public = {
        name
        for name, value in inspect.getmembers(kind)
        if inspect.isfunction(value) and (not name.startswith("_") or name in DUNDERS) and name not in NOT_INHERITED
    }
    subclass: Any = type("Own", (kind,), {name: counted(name) for name in {*public, *own}})
    return subclass


class NormedLine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(1), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(x))
        return result


class Squared(nn.Module):
    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        result: Tensor = model(batch[0]).square().mean()
        return result


class Items(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (torch.full((1,), float(index)),)


class AtOnce(Items):
    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor]]:
        return [Items.__getitem__(self, index) for index in indices]


class CountingStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor]]:
        return ((torch.full((1,), float(index)),) for index in range(SAMPLES))


class Reversed(Sampler[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES - 1, -1, -1))


class Mean:
    """A metric with the methods of torchmetrics."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def update(self, output: Tensor, _target: Any = None) -> None:
        self.values += output.flatten().tolist()

    def compute(self) -> Tensor:
        return torch.tensor(sum(self.values) / len(self.values))

    def reset(self) -> None:
        self.values = []


class Pieces:
    """What a user hands over, of which one class counts."""

    def __init__(self, kind: type | None = None, counts: Counter[str] | None = None, own: tuple[str, ...] = ()) -> None:
        def made(base: type, *values: Any, **options: Any) -> Any:
            return (counting(base, counts, own) if base is kind and counts is not None else base)(*values, **options)

        torch.manual_seed(0)
        self.model: nn.Module = made(NormedLine)
        optimizer = kind if kind is not None and issubclass(kind, Optimizer) else torch.optim.SGD
        self.optimizer: Optimizer = made(optimizer, self.model.parameters(), lr=0.01)
        self.scheduler: LRScheduler = made(torch.optim.lr_scheduler.ExponentialLR, self.optimizer, 0.5)
        self.loss_fn: Any = made(Squared)
        self.metric: Any = made(Mean)
        self.data: Any = Items()
        for dataset in (Items, AtOnce, CountingStream):
            if kind is dataset:
                self.data = made(dataset)
        if kind is TensorDataset:
            self.data = made(TensorDataset, torch.arange(float(SAMPLES)).reshape(-1, 1))
        if kind is Subset:
            self.data = made(Subset, Items(), range(SAMPLES - 1, -1, -1))
        if kind is BatchSampler:
            self.loader: Any = DataLoader(self.data, batch_sampler=made(BatchSampler, Reversed(), BATCH, False))
        elif kind is DataLoader or kind is CountingStream:
            self.loader = made(DataLoader, self.data, batch_size=BATCH)
        else:
            self.loader = DataLoader(self.data, batch_size=BATCH, sampler=made(Reversed) if kind is Reversed else None)


def loop_by_hand(pieces: Pieces) -> tuple[list[float], float, float]:
    """The weights, the loss of an evaluation and a metric after the loop that the Trainer replaces."""
    model, optimizer, loader = pieces.model, pieces.optimizer, pieces.loader
    for epoch in range(EPOCHS):
        for part in (loader.batch_sampler, loader.sampler, loader.dataset):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            pieces.loss_fn(model, batch).backward()
            optimizer.step()
            pieces.scheduler.step()
        model.eval()
        pieces.loss_fn.eval()
        pieces.metric.reset()
        losses, outputs = [], []
        hook = model.register_forward_hook(lambda *call, seen=outputs: seen.append(call[-1]))
        with torch.no_grad():
            for batch in loader:
                losses.append(pieces.loss_fn(model, batch).item())
                pieces.metric.update(outputs.pop())
        hook.remove()
        value = float(pieces.metric.compute())
        pieces.loss_fn.train()
    model.train()
    return [each.item() for each in model.state_dict().values()], sum(losses) / len(losses), value


def weights_and_metrics(pieces: Pieces) -> tuple[list[float], float, float]:
    trainer = Trainer(
        pieces.model,
        pieces.optimizer,
        pieces.loss_fn,
        TrainerConfig(epochs=EPOCHS, sanity_check="off"),
        scheduler=pieces.scheduler,
        metrics={"mean": (pieces.metric, lambda output, _batch: (output,))},
    )
    result = trainer.fit(pieces.loader, pieces.loader)
    weights = [each.item() for each in pieces.model.state_dict().values()]
    return weights, result.metrics["loss"], result.metrics["mean"]


EPOCH = ("set_epoch",)
OPTIMIZERS = [
    kind
    for name, kind in vars(torch.optim).items()
    # The others need a closure, sparse gradients or matrices.
    if inspect.isclass(kind) and name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
]
CLASSES: dict[type, tuple[str, ...]] = {
    NormedLine: (),
    Squared: (),
    Mean: (),
    **dict.fromkeys(OPTIMIZERS, ()),
    torch.optim.lr_scheduler.ExponentialLR: (),
    Items: EPOCH,
    AtOnce: EPOCH,
    CountingStream: EPOCH,
    TensorDataset: EPOCH,
    Subset: EPOCH,
    Reversed: EPOCH,
    BatchSampler: EPOCH,
    DataLoader: (),
}
EQUAL = {  # as often as in the loop by hand: these have an effect each time
    "step", "zero_grad", "__getitem__", "__getitems__", "forward", "update", "compute",
}  # fmt: skip


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_methods_that_a_loop_by_hand_calls_are_called(kind: type) -> None:
    by_hand, ours = Counter[str](), Counter[str]()
    expected = loop_by_hand(Pieces(kind, by_hand, CLASSES[kind]))
    found = weights_and_metrics(Pieces(kind, ours, CLASSES[kind]))
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1:] == pytest.approx(expected[1:], rel=1e-6)
    assert {name for name in by_hand if not ours[name]} == set()
    repeated = EQUAL & {*by_hand}
    assert {name: ours[name] for name in repeated} == {name: by_hand[name] for name in repeated}


def with_state(kind: type) -> Any:
    return type("Remembers", (kind,), {"state_dict": lambda self: {}, "load_state_dict": lambda self, state: None})


STATEFUL: dict[str, Callable[[], Any]] = {
    "dataset": lambda: with_state(Items)(),
    "sampler": lambda: DataLoader(Items(), batch_size=BATCH, sampler=with_state(Reversed)()),
    "batch sampler": lambda: DataLoader(Items(), batch_sampler=with_state(BatchSampler)(Reversed(), BATCH, False)),
    "sampler in a batch sampler": lambda: DataLoader(Items(), batch_size=BATCH, sampler=with_state(Reversed)()),
}


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("saves", [True, False])
def test_state_of_data_that_no_checkpoint_contains_is_named(
    name: str, saves: bool, tmp_path: Path, said: list[str]
) -> None:
    model = NormedLine()
    config = TrainerConfig(checkpoint={"dir": tmp_path if saves else None}, max_steps=1)
    Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), Squared(), config).fit(STATEFUL[name]())
    named = [line for line in said if "state_dict() of Remembers is not called" in line]
    assert len(named) == saves
