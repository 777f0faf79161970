"""Run by test_memory.py: trains where a rank runs out of memory at chosen moments, and prints what it ends with.

    memory.py CASES     each: {"at": "loss" | "forward" | "backward" | null, "ranks", "step", "fits", ...}

Memory is a pretence: what takes more than `fits` samples raises what torch raises.
"""

import json
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from toys import flat

from ddp_kit import Loss, Trainer, TrainerConfig

RANK = int(os.environ.get("RANK", "0"))
cases: list[dict[str, Any]] = json.loads(sys.argv[1])


class Full(torch.autograd.Function):
    """Nothing, until its backward pass finds too many samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, case: dict[str, Any]) -> Tensor:
        ctx.case = case
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if strikes(ctx.case, "backward", len(gradient)):
            raise torch.OutOfMemoryError("CUDA out of memory (a pretence)")
        return gradient, None


def strikes(case: dict[str, Any], where: str, samples: int) -> bool:
    if case["at"] != where or RANK not in case["ranks"] or samples <= case["fits"]:
        return False
    return case["trainer"].step + 1 >= case["step"]


def train_short_of_memory(case: dict[str, Any]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(90, 3, generator=generator, dtype=torch.float64)
    torch.manual_seed(1)
    # Three buckets: the last layers' gradients are on their way when the first layer's backward pass fails.
    first, rest = (
        nn.Linear(3, 40).double(),
        nn.Sequential(nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)).double(),
    )
    model = nn.ModuleDict({"first": first, "rest": rest})
    if case.get("buffers"):
        model.register_buffer("calls", torch.zeros((), dtype=torch.float64))
    seen: list[list[float]] = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            if strikes(case, "forward", len(x)):
                raise torch.OutOfMemoryError("CUDA out of memory (a pretence)")
            if case.get("buffers"):
                model.calls += 1
            return self.parts["rest"](Full.apply(self.parts["first"](x), case))

    def loss_fn(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        seen.append(batch[0][:, 0].tolist())
        if strikes(case, "loss", len(batch[0])):  # before the model is called
            raise torch.OutOfMemoryError("CUDA out of memory (a pretence)")
        errors = (net(batch[0]) - batch[1]) ** 2
        if case.get("twice"):
            errors = errors + (net(batch[0] * 0.9) - batch[1]) ** 2
        if case.get("weighted"):
            weights = (batch[0][:, :1] * 3).round().clamp(min=0)
            return Loss((errors * weights).sum(), weight=weights.sum())
        return errors.mean()

    config = TrainerConfig(
        epochs=2,
        global_batch_size=24,
        log_every_steps=3,
        micro_batch_size="auto" if case["auto"] else None,
        parallel={"bucket_mb": 0.001, "strategy": case.get("strategy", "ddp"), **case.get("parallel", {})},
        memory={"offload": case.get("offload")},
    )
    optimizers = {"sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), "adam": lambda p: torch.optim.Adam(p)}
    trainer = Trainer(Net(), optimizers[case.get("optimizer", "sgd")], loss_fn, config)
    case["trainer"] = trainer
    result = trainer.fit(TensorDataset(x, x.sum(1, keepdim=True)))
    return {
        "weights": flat(trainer.model.parameters()).tolist(),
        "losses": [row.loss for row in result.history],
        "samples": result.samples,
        "micro_batch": trainer.batch_plan.micro_batch,
        "main": trainer.world.is_main,
    }


if __name__ == "__main__":
    results = [train_short_of_memory(case) for case in cases]
    if results[0]["main"]:
        print(json.dumps(results))
