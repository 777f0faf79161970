"""Run by test_incomplete.py in 1 to 3 processes: user code leaves samples out of batches, in training and evaluation.

Each rank compares its results with those of one process on the samples that remain, and prints the largest difference.
"""

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from toys import momentum_sgd, small_network

from ddp_kit import Loss, Trainer, TrainerConfig

Sample = tuple[Tensor, Tensor]

SAMPLES, GLOBAL_BATCH = 25, 12
LEFT_OUT = {0, 5, 13, 14, 15, 16, 19}  # at 3 ranks, all samples of a micro-batch
generator = torch.Generator().manual_seed(3)
X = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
Y = torch.randn(SAMPLES, generator=generator, dtype=torch.float64)
KEPT = torch.tensor([index not in LEFT_OUT for index in range(SAMPLES)])


class Whole(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample | None:
        return None if index in LEFT_OUT else (X[index], Y[index])


class FewerAtOnce(Whole):
    """Leaves out samples, but never all samples of a batch: torch's collate function rejects an empty list."""

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        return [(X[index], Y[index]) for index in indices if index not in LEFT_OUT or len(indices) == 1]


class Parts(IterableDataset[Any]):
    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def __iter__(self) -> Iterator[Any]:
        return islice((Whole()[index] for index in range(24)), self.rank, None, self.ranks)


def without_none(samples: list[Any]) -> dict[str, Tensor]:
    kept = [each for each in samples if each is not None]
    x = torch.stack([x for x, _ in kept]) if kept else X[:0]
    return {"x": x, "y": torch.stack([y for _, y in kept]) if kept else Y[:0]}


def inputs_of(batch: Any) -> tuple[Tensor, Tensor]:
    return (batch["x"], batch["y"]) if isinstance(batch, dict) else tuple(batch)  # type: ignore[return-value]


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = inputs_of(batch)
    return ((model(x).squeeze(1) - y) ** 2).mean()


def weighted_loss(model: nn.Module, batch: Any) -> Loss:
    x, y = inputs_of(batch)
    return Loss(((model(x).squeeze(1) - y) ** 2).sum(), weight=len(y))


def trainer_of(loss_fn: Any, **settings: Any) -> Trainer:
    config = TrainerConfig(**{"global_batch_size": GLOBAL_BATCH, "epochs": 2, "log_every_steps": 1, **settings})
    return Trainer(
        small_network(),
        momentum_sgd,
        loss_fn,
        config,
        metrics={"error": lambda output, batch: (output.squeeze(1) - inputs_of(batch)[1]).abs().mean()},
    )


def model_and_losses_by_hand(steps: list[range], kept: Tensor) -> tuple[nn.Module, list[float]]:
    model, losses = small_network(), []
    optimizer = momentum_sgd(model.parameters())
    for step in steps:
        chosen = [index for index in step if kept[index]]
        loss = mean_loss(model, (X[chosen], Y[chosen]))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def apart(ours: Any, theirs: Any) -> float:
    first, second = (torch.as_tensor(each, dtype=torch.float64) for each in (ours, theirs))
    return float((first - second).abs().max())


def trained_apart(trainer: Trainer, data: Any, steps: list[range], kept: Tensor) -> float:
    result = trainer.fit(data)
    model, losses = model_and_losses_by_hand(steps, kept)
    after = trainer.evaluate(data)["loss"]
    with torch.no_grad():
        expected = mean_loss(model, (X[kept], Y[kept]))
    return max(apart([row.loss for row in result.history], losses), apart(after, expected))


def evaluated_apart(trainer: Trainer, data: Any, kept: Tensor) -> float:
    found, predicted = trainer.evaluate(data), trainer.predict(data, lambda model, batch: model(inputs_of(batch)[0]))
    with torch.no_grad():
        output = small_network()(X[kept])
        loss, error = mean_loss(small_network(), (X[kept], Y[kept])), (output.squeeze(1) - Y[kept]).abs().mean()
    return max(apart(found["loss"], loss), apart(found["error"], error), apart(predicted, output))


if __name__ == "__main__":
    ranks, largest = int(sys.argv[1]), 0.0
    epoch = [range(0, 12), range(12, 24), range(24, 25)] * 2
    own: dict[str, Any] = {"collate_fn": without_none, "shuffle": False, "compare_items": 0}
    # With several ranks, only a Loss says how many samples the other ranks have.
    loss_fns = [weighted_loss, mean_loss] if ranks == 1 else [weighted_loss]
    for settings in (
        {"data": own},
        {"data": own, "accumulation_steps": 2},
        {"data": {**own, "num_workers": 1}},
        *({"data": own, "parallel": name} for name in ("zero1", "fsdp") if ranks > 1),
    ):
        for loss_fn in loss_fns:
            largest = max(largest, trained_apart(trainer_of(loss_fn, **settings), Whole(), epoch, KEPT))
    largest = max(largest, evaluated_apart(trainer_of(mean_loss, data=own), Whole(), KEPT))

    at_once = KEPT.clone()
    at_once[24] = True
    plain = {"shuffle": False, "compare_items": 0}
    if ranks < 3:  # at 3 ranks, a whole batch of 12 // 3 samples is left out
        for loss_fn in loss_fns:
            largest = max(largest, trained_apart(trainer_of(loss_fn, data=plain), FewerAtOnce(), epoch, at_once))
        largest = max(largest, evaluated_apart(trainer_of(mean_loss, data=plain), FewerAtOnce(), at_once))

    loader = DataLoader(Whole(), batch_size=5, collate_fn=without_none)
    trainer = trainer_of(mean_loss, global_batch_size=None, accumulation_steps=1, data={"compare_items": 0})
    largest = max(largest, evaluated_apart(trainer, loader, KEPT))

    trainer = trainer_of(mean_loss, global_batch_size=24, epochs=1, data=own)
    stream = Parts(trainer.world.rank, trainer.world.world_size)
    of_stream = KEPT & (torch.arange(SAMPLES) < 24)
    largest = max(largest, trained_apart(trainer, stream, [range(24)], of_stream))
    assert largest < 1e-12, largest
    sys.stdout.write(f"{largest:.1e}\n")
