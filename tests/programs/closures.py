"""Optimizers that evaluate the loss several times a step: `ddpkit launch closures.py FOLDER DIES_AFTER`."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_kit import Loss, Trainer, TrainerConfig, Update

SAMPLES, BATCH, STEPS = 26, 10, 8  # the last batch of an epoch has 6


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation over SGD (Foret et al. 2021, arXiv:2010.01412)."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, radius: float) -> None:
        super().__init__(parameters, {"lr": lr, "radius": radius})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        loss = closure()
        for group in self.param_groups:
            own = group["params"]
            norm = torch.linalg.vector_norm(torch.stack([each.grad.norm() for each in own]))
            shifts = [each.grad * (group["radius"] / norm) for each in own]
            for each, shift in zip(own, shifts, strict=True):
                each.add_(shift)
            closure()
            for each, shift in zip(own, shifts, strict=True):
                each.sub_(shift).sub_(each.grad, alpha=group["lr"])
        return loss


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def closure_optimizer(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "sam":
        return SAM(parameters, lr=0.1, radius=0.05)
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def weighted_samples() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 3, generator=draw, dtype=torch.float64)
    return [x, x.sin().sum(dim=1, keepdim=True), torch.rand(SAMPLES, 1, generator=draw, dtype=torch.float64)]


def weighted_squares(model: nn.Module, batch: Any) -> Loss:
    x, y, weights = batch
    return Loss(((model(x) - y) ** 2 * weights).sum(), weights.sum())


def closures_by_hand(kind: str) -> list[Tensor]:
    network, data = small_model(), weighted_samples()
    stepper = closure_optimizer(kind, network.parameters())
    starts = [start for _ in range(STEPS) for start in range(0, SAMPLES, BATCH)][:STEPS]
    for start in starts:
        batch = [each[start : start + BATCH] for each in data]

        def closure(batch: list[Tensor] = batch) -> Tensor:
            with torch.enable_grad():
                stepper.zero_grad()
                found = weighted_squares(network, batch)
                loss: Tensor = found.loss / found.weight
                loss.backward()
            return loss

        stepper.step(closure)
    return [each.detach() for each in network.parameters()]


def trained_with_closures(kind: str, folder: str, dies_after: int) -> Trainer:
    network = small_model()
    config = TrainerConfig(
        max_steps=STEPS,
        global_batch_size=BATCH,
        accumulation_steps=2,
        data={"shuffle": False},
        checkpoint={"dir": f"{folder}-{kind}", "every_steps": 2, "resume": "auto"},
    )
    if kind == "sam":
        one = Update("sam", weighted_squares, closure_optimizer(kind, network.parameters()), closure=True)
        trainer = Trainer(network, updates=[one], config=config)
    else:
        trainer = Trainer(network, closure_optimizer(kind, network.parameters()), weighted_squares, config)
    for step in trainer.steps(TensorDataset(*weighted_samples())):
        if step.number == dies_after and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    return trainer


if __name__ == "__main__":
    for kind in ("sam", "lbfgs"):
        run = trained_with_closures(kind, str(Path(sys.argv[1])), int(sys.argv[2]) if kind == "lbfgs" else 0)
        if run.world.is_main:
            weights = [each.tolist() for each in run.model.parameters()]
            os.write(1, f"ended {kind} {json.dumps(weights)}\n".encode())
