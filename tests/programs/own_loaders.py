"""Run by test_own_loaders.py in 2 and 3 processes: DataLoaders that iterate in their own way, against a loop by hand.

Prints the largest difference in weights, evaluations and predictions, for each kind of DataLoader.
"""

import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ddp_kit import DataError, Trainer, TrainerConfig

X = torch.arange(1.0, 17.0).reshape(16, 1)


class Scaled(DataLoader[Any]):
    """Changes each batch, as a loader that normalises or mixes up."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for (x,) in super().__iter__():
            yield [x * 0.5]


class FirstTwo(DataLoader[Any]):
    """Yields only some of the batches."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return islice(super().__iter__(), len(self))

    def __len__(self) -> int:
        return 2


class OneIterator(DataLoader[Any]):
    """Keeps its iterator from epoch to epoch, and starts it again at its end."""

    _kept: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(len(self)):
            batch = next(self._kept, None) if self._kept is not None else None
            if batch is None:
                self._kept = super().__iter__()
                batch = next(self._kept)
            yield batch


class OwnIterator(DataLoader[Any]):
    """Overrides the method that makes torch's iterator."""

    def _get_iterator(self) -> Any:
        return ([x + 1] for (x,) in super()._get_iterator())


class OtherLength(DataLoader[Any]):
    """Overrides only the length, which a loop by hand does not read."""

    def __len__(self) -> int:
        return 1


class OwnIndices(DataLoader[Any]):
    """Chooses the samples itself."""

    @property
    def _index_sampler(self) -> Any:
        return [[0, 3], [5], [7, 1, 2]]


class StreamOfX(IterableDataset[Any]):
    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter([[x] for x in X])


def patched() -> DataLoader[Any]:
    loader: Any = DataLoader(TensorDataset(X), batch_size=4)
    plain = loader._get_iterator
    loader._get_iterator = lambda: ([x + 2] for (x,) in plain())
    return loader


def of(kind: type[DataLoader[Any]], **options: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: kind(TensorDataset(X), **{"batch_size": 4, **options})


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    **{kind.__name__: of(kind) for kind in (Scaled, FirstTwo, OneIterator, OwnIterator, OtherLength, OwnIndices)},
    "patched": patched,
    "with workers": of(Scaled, num_workers=1),
    "with persistent workers": of(Scaled, num_workers=1, persistent_workers=True),
    "uneven": of(Scaled, batch_size=5),
    "last batch dropped": of(Scaled, batch_size=5, drop_last=True),
    "own batch sampler": lambda: Scaled(TensorDataset(X), batch_sampler=[[0, 3], [5], [7, 1, 2]]),
    "own collate function": of(Scaled, collate_fn=lambda samples: [torch.stack([x for (x,) in samples]) * 2]),
    "over a stream": lambda: Scaled(StreamOfX(), batch_size=4),
    "samples that are batches": lambda: Scaled(TensorDataset(X[:, None]), batch_size=None),
}


def model_of_weights() -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()


def by_hand(loader: DataLoader[Any], epochs: int, ranks: int = 1) -> tuple[list[list[float]], Tensor]:
    """The batches of a loop by hand, and the weight after it. A step uses one batch per rank."""
    seen, model = [], model_of_weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(epochs):
        batches = iter(loader)
        while together := [x for (x,) in islice(batches, ranks)]:
            optimizer.zero_grad()
            loss_fn(model, [torch.cat(together)]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            seen += [x.flatten().tolist() for x in together]
    return seen, next(model.parameters()).detach()


class OfRank(DataLoader[Any]):
    """Divides the batches among the ranks itself, as for a loop by hand."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return islice(super().__iter__(), torch.distributed.get_rank(), None, torch.distributed.get_world_size())


def main() -> None:
    for name, loader in LOADERS.items():
        if name == "over a stream":
            continue  # which divides itself
        model = model_of_weights()
        config = TrainerConfig(epochs=2, parallel=sys.argv[1])
        trainer = Trainer(model, lambda parameters: torch.optim.SGD(parameters, lr=1e-4), loss_fn, config)
        before = trainer.predict(loader(), lambda model, batch: model(batch[0]))
        trainer.fit(loader())
        ranks = trainer.world.world_size
        _, weight = by_hand(loader(), epochs=2, ranks=ranks)
        everything = torch.cat([x for (x,) in loader()])
        after = trainer.predict(loader(), lambda model, batch: model(batch[0]))
        loss = trainer.evaluate(loader())["loss"]
        apart = max(
            (before - everything).abs().max().item(),
            (after - everything * weight).abs().max().item(),
            abs(loss - (everything * weight).square().mean().item()) / loss,
        )
        sys.stdout.write(f"{name}: {'equal' if apart < 1e-5 else f'differs by {apart}'}\n")
    divided = OfRank(TensorDataset(X), batch_size=4)
    for call in (
        trainer.evaluate,
        trainer.predict,
        Trainer(model_of_weights(), lambda p: torch.optim.SGD(p), loss_fn).fit,
    ):
        try:
            call(divided)
        except DataError as error:
            sys.stdout.write(f"{error}\n")


if __name__ == "__main__":
    main()
