"""Run by test_evaluation.py in 1 to 4 processes: evaluates and predicts, and compares with the whole data at once.

Each rank compares what it got and prints the largest difference.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ddp_kit import DataConfig, Loss, Trainer, TrainerConfig


class LargestError:
    """A metric that joins its state over the ranks itself."""

    def reset(self) -> None:
        self.largest = torch.zeros((), dtype=torch.float64)

    def update(self, output: Tensor, targets: Tensor) -> None:
        self.largest = torch.maximum(self.largest, (output - targets).abs().max())

    def compute(self) -> Tensor:
        if dist.is_initialized():
            dist.all_reduce(self.largest, op=dist.ReduceOp.MAX)
        return self.largest


def rounded_sums(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(dim=1).round())


def squared(model: nn.Module, batch: Any) -> Tensor:
    return ((model(batch[0]).squeeze(1) - batch[1]) ** 2).mean()


def weighted_by_label(model: nn.Module, batch: Any) -> Loss:
    weights = batch[1].clamp(min=0)
    return Loss((model(batch[0]).squeeze(1) * weights).sum(), weight=weights.sum().item())


def nested(model: nn.Module, batch: Any) -> dict[str, Any]:
    y = model(batch[0]).squeeze(1)
    return {
        "number": torch.arange(len(y)),
        "parts": [y > 0, (y.bfloat16(), y.round().int().reshape(-1, 1, 1)), y.new_empty(len(y), 0)],
        "targets": batch[1],
    }


def trained_with_batch_norm(loss_fn: Any, metrics: dict[str, Any]) -> Trainer:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    config = TrainerConfig(global_batch_size=32, data=DataConfig(drop_last=True))
    trainer = Trainer(model, lambda parameters: torch.optim.SGD(parameters, lr=0.01), loss_fn, config, metrics=metrics)
    trainer.fit(rounded_sums(64))  # so that each rank has BatchNorm statistics of its own
    return trainer


def evaluation_apart(samples: int) -> float:
    data: Dataset[Any] = rounded_sums(samples)
    x, y = data[:]
    trainer = trained_with_batch_norm(
        squared,
        {
            "absolute": lambda output, batch: (output.squeeze(1) - batch[1]).abs().mean(),
            "positive": lambda output, batch: Loss((output > 0).double().sum(), weight=len(output)),
            "largest": (LargestError(), lambda output, batch: (output.squeeze(1), batch[1])),
        },
    )
    given = [data, DataLoader(data, batch_size=5), [*zip(x, y, strict=True)]]
    found = [trainer.evaluate(one) for one in given]
    model = trainer.model.eval()
    with torch.no_grad():
        output = model(x).squeeze(1)
    expected = {
        "loss": ((output - y) ** 2).mean().item(),
        "absolute": (output - y).abs().mean().item(),
        "positive": (output > 0).double().mean().item(),
        "largest": (output - y).abs().max().item(),
    }
    assert all(list(one) == list(expected) for one in found)
    return max(abs(one[name] - expected[name]) for one in found for name in expected)


def weighted_apart(samples: int) -> float:
    trainer, (x, y) = trained_with_batch_norm(weighted_by_label, {}), rounded_sums(samples)[:]
    found = trainer.evaluate(rounded_sums(samples))["loss"]
    weights = y.clamp(min=0)
    with torch.no_grad():
        expected = (trainer.model.eval()(x).squeeze(1) * weights).sum() / weights.sum()
    return abs(found - expected.item()) if weights.any() else float(found == found)


def check_predictions(samples: int) -> None:
    data = rounded_sums(samples)
    trainer = trained_with_batch_norm(squared, {})
    x, y = data[:]
    found = trainer.predict(data, nested)
    plain = trainer.predict(x)
    assert torch.equal(plain, trainer.predict(data)), "the model's output inside the loss function"
    with torch.no_grad():
        expected = nested(trainer.model.eval(), (x, y))
        assert torch.allclose(plain, trainer.model(x), atol=1e-13, rtol=0)
    assert torch.equal(found["targets"], y), "in the dataset's order"
    kinds = [torch.bool, torch.bfloat16, torch.int32, torch.float64]
    flat = [[one["parts"][0], *one["parts"][1], one["parts"][2]] for one in (found, expected)]
    assert isinstance(found["parts"][1], tuple)
    for ours, theirs, kind in zip(*flat, kinds, strict=True):
        assert ours.dtype == theirs.dtype == kind
        assert ours.shape == theirs.shape
        assert torch.equal(ours, theirs)


def torchmetrics_apart(samples: int) -> float:
    import torchmetrics

    def kinds() -> dict[str, Any]:
        return {
            "hits": torchmetrics.Accuracy(task="binary"),
            "error": torchmetrics.MeanSquaredError(),
            "order": torchmetrics.SpearmanCorrCoef(),
            "all": torchmetrics.CatMetric(),
        }

    selects = {
        "hits": lambda output, batch: (output.squeeze(1).sigmoid(), (batch[1] > 0).int()),
        "error": lambda output, batch: (output.squeeze(1), batch[1]),
        "order": lambda output, batch: (output.squeeze(1), batch[1]),
        "all": lambda output, batch: (output.squeeze(1),),
    }
    trainer = trained_with_batch_norm(squared, {name: (metric, selects[name]) for name, metric in kinds().items()})
    x, y = rounded_sums(samples)[:]
    trainer.evaluate(rounded_sums(samples + 1))  # whose state is forgotten
    found = trainer.evaluate(rounded_sums(samples))
    with torch.no_grad():
        output = trainer.model.eval()(x)
    expected = {}
    for name, metric in kinds().items():
        metric.distributed_available_fn = lambda: False
        metric.update(*selects[name](output, (x, y)))
        value = metric.compute().double()
        several = value.numel() > 1
        expected |= (
            {f"{name}.{number}": one for number, one in enumerate(value.tolist())} if several else {name: float(value)}
        )
    expected["loss"] = found["loss"]
    assert found.keys() == expected.keys(), (found, expected)
    return max(abs(found[name] - expected[name]) for name in expected)


if __name__ == "__main__":
    largest = 0.0
    for samples in (1, 2, 3, 7, 101, 1000):
        if sys.argv[1] == "torchmetrics":
            if samples > 1:  # a correlation needs two
                largest = max(largest, torchmetrics_apart(samples))
            continue
        largest = max(largest, evaluation_apart(samples), weighted_apart(samples))
        check_predictions(samples)
    assert largest < 1e-12 if sys.argv[1] == "own" else largest < 1e-6, largest
    sys.stdout.write(f"{largest:.1e}\n")
