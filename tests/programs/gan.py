"""A GAN in float64: `ddpkit launch gan.py FOLDER DIES_AFTER` prints the result of rank 0. By hand: `gan_by_hand`."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_kit import Loss, Trainer, TrainerConfig, Update

SAMPLES, BATCH, EPOCHS = 29, 8, 3  # 4 steps an epoch, the last of 5 samples
LIMIT = 0.5


def models() -> nn.ModuleDict:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    critic = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    return nn.ModuleDict({"generator": generator, "critic": critic}).double()


def real_and_noise() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    real = torch.randn(SAMPLES, 3, generator=draw, dtype=torch.float64) + 1
    noise = torch.randn(SAMPLES, 2, generator=draw, dtype=torch.float64)
    weights = torch.rand(SAMPLES, generator=draw, dtype=torch.float64)
    return [real, noise, weights]


def critic_losses(model: Any, batch: Any) -> Tensor:
    real, noise, _ = batch
    fake = model["generator"](noise)  # not detached: its parameters are not this update's
    losses: Tensor = F.softplus(-model["critic"](real)) + F.softplus(model["critic"](fake))
    return losses.squeeze(1)


def generator_losses(model: Any, batch: Any) -> Tensor:
    losses: Tensor = F.softplus(-model["critic"](model["generator"](batch[1])))
    return losses.squeeze(1) * batch[2]


def optimizers(model: Any) -> dict[str, Any]:
    return {
        "critic": torch.optim.Adam(model["critic"].parameters(), lr=0.02, betas=(0.5, 0.9)),
        "generator": torch.optim.SGD(model["generator"].parameters(), lr=0.1, momentum=0.9),
    }


def gan_by_hand() -> tuple[list[Tensor], dict[str, float]]:
    """The weights of one process that takes each global batch at once, and the last step's losses."""
    model = models()
    made, data = optimizers(model), real_and_noise()
    schedule = torch.optim.lr_scheduler.StepLR(made["critic"], 5)
    step, last = 0, {}
    for _ in range(EPOCHS):
        for start in range(0, SAMPLES, BATCH):
            batch = [each[start : start + BATCH] for each in data]
            step += 1
            loss = critic_losses(model, batch).mean()
            last["critic"] = loss.item()
            gradients = torch.autograd.grad(loss, [*model["critic"].parameters()])
            for parameter, gradient in zip(model["critic"].parameters(), gradients, strict=True):
                parameter.grad = gradient
            made["critic"].step()
            schedule.step()
            model.zero_grad()
            if step % 2 == 0:
                loss = generator_losses(model, batch).sum() / batch[2].sum()
                last["generator"] = loss.item()
                gradients = torch.autograd.grad(loss, [*model["generator"].parameters()])
                for parameter, gradient in zip(model["generator"].parameters(), gradients, strict=True):
                    parameter.grad = gradient
                nn.utils.clip_grad_norm_(model["generator"].parameters(), LIMIT)
                made["generator"].step()
                model.zero_grad()
    return [each.detach() for each in model.parameters()], last


def gan_trainer(folder: str | None) -> Trainer:
    model = models()
    made = optimizers(model)
    config = TrainerConfig(
        epochs=EPOCHS,
        global_batch_size=BATCH,
        accumulation_steps=2,
        log_every_steps=1,
        data={"shuffle": False},
        checkpoint={"dir": folder, "every_steps": 3, "resume": "auto"} if folder else {},
    )
    return Trainer(
        model,
        updates=[
            Update(
                "critic",
                lambda model, batch: critic_losses(model, batch).mean(),
                made["critic"],
                scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5),
            ),
            Update(
                "generator",
                lambda model, batch: Loss(generator_losses(model, batch).sum(), batch[2].sum()),
                made["generator"],
                every=2,
                max_grad_norm=LIMIT,
            ),
        ],
        config=config,
    )


if __name__ == "__main__":
    folder, dies_after = Path(sys.argv[1]), int(sys.argv[2])
    run = gan_trainer(str(folder))
    for step in run.steps(TensorDataset(*real_and_noise())):
        if step.number == dies_after and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        last = step.log
    metrics = run.evaluate(TensorDataset(*real_and_noise()))
    if run.world.is_main:
        assert last is not None
        weights = [each.tolist() for each in run.model.parameters()]
        state = repr(run.optimizer.state_dict())
        ended = {"weights": weights, "state": state, "values": last.values, "loss": last.loss, "metrics": metrics}
        os.write(1, f"ended {json.dumps(ended)}\n".encode())
