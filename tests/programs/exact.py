"""Run by test_exact.py in 1 to 4 processes: trains small models in float64 and prints what rank 0 ends with.

What a case is made of stands here too, for the loop by hand that it is compared with.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from toys import flat

from ddp_kit import DataConfig, Loss, Trainer, TrainerConfig

RATE = 0.05
DECAY = 0.8  # of the learning rate, at each tick


class SmallNetwork(nn.Module):
    """`buffers`: one that counts calls, so that it differs on each rank, and one that the output depends on."""

    def __init__(self, buffers: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        if buffers:
            self.register_buffer("calls", torch.zeros(1))
            self.register_buffer("scale", torch.full((1,), 0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x).squeeze(1)
        if hasattr(self, "scale"):
            self.calls += 1
            y = y * self.scale
        return y


def samples_of(case: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets, and a weight per sample that differs, down to nothing for whole micro-batches and steps."""
    number = case["samples"]
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(number, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(number, generator=generator, dtype=torch.float64)
    weights = torch.randint(-2, 4, (number,), generator=generator).clamp(min=0).double() / 2
    weights[: case["weightless"]] = 0
    return x, y, weights


def optimizer_of(case: dict[str, Any], parameters: Any) -> torch.optim.Optimizer:
    if case["optimizer"] == "sgd":
        return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[case["optimizer"]]
    return kind(parameters, lr=RATE)


def unweighted(model: nn.Module, batch: Any) -> Tensor:
    x, y, _ = batch
    return ((model(x) - y) ** 2).mean()


def weighted_by_number(model: nn.Module, batch: Any) -> Loss:
    x, y, weights = batch
    return Loss(((model(x) - y) ** 2 * weights).sum(), weight=weights.sum().item())


def weighted_by_tensor(model: nn.Module, batch: Any) -> Loss:
    x, y, weights = batch
    return Loss(((model(x) - y) ** 2 * weights).sum(), weight=weights.sum())


LOSSES = {"plain": unweighted, "number": weighted_by_number, "tensor": weighted_by_tensor}


def data_of_case(case: dict[str, Any], micro_batch: int) -> Any:
    tensors = samples_of(case)
    if case["data"] == "tensors":
        return TensorDataset(*tensors)
    one_by_one = [*zip(*tensors, strict=True)]
    if case["data"] == "list":
        return one_by_one
    return DataLoader(one_by_one, batch_size=micro_batch, shuffle=case["shuffle"], drop_last=case["drop_last"])  # type: ignore[arg-type]


def train_case(case: dict[str, Any]) -> dict[str, Any]:
    config = TrainerConfig(
        epochs=case["epochs"],
        max_steps=case["max_steps"],
        **case["sizes"],
        max_grad_norm=case["max_grad_norm"],
        max_grad_value=case["max_grad_value"],
        warmup_steps=case["warmup"],
        non_finite_gradients=case["non_finite_gradients"],
        log_every_steps=case["log_every_steps"],
        data=DataConfig(num_workers=case["workers"], shuffle=case["shuffle"], drop_last=case["drop_last"]),
        parallel=case["parallel"],
    )
    trainer = Trainer(
        SmallNetwork(case["buffers"]),
        lambda parameters: optimizer_of(case, parameters),
        LOSSES[case["loss"]],
        config,
        scheduler=(lambda o: torch.optim.lr_scheduler.ExponentialLR(o, DECAY)) if case["scheduler"] else None,
        metrics={"error": lambda output, batch: (output - batch[1]).abs().mean()},
    )
    data = data_of_case(case, trainer.batch_plan.micro_batch)
    result = trainer.fit(data, data)
    return {
        "weights": flat(trainer.model.parameters()).tolist(),
        "losses": [row.loss for row in result.history],
        "error": result.metrics["error"],
        "counts": [result.steps, result.samples],
        "main": trainer.world.is_main,
    }


if __name__ == "__main__":
    results = [train_case(case) for case in json.loads(Path(sys.argv[1]).read_text())]
    if results[0]["main"]:
        print(json.dumps(results))
