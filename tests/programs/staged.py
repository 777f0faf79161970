"""Run by test_staged.py: pipelines of models with random numbers, buffers and averages; prints what comes out."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ddp_kit import EMA, Callback, Trainer, TrainerConfig, load_model

WIDTH = 8


class MaskedBlock(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), dropout
        self.register_buffer("bias", torch.zeros(WIDTH))
        self.masks: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x) + self.bias)
        if self.dropout and self.training:
            mask = torch.rand(y.shape) > self.dropout
            self.masks.append(str(mask.int().flatten().tolist()))
            y = y * mask
        return x + y


class StagedNetwork(nn.Module):
    def __init__(self, dropout: float = 0.0, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inputs = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(MaskedBlock(dropout) for _ in range(blocks))
        self.outputs = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("late", torch.zeros(()))
        self.calls, self.first_change = 0, 10**6
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        self.calls += self.training
        if self.training and self.calls > self.first_change:
            self.late += 1
        return self.outputs(x)  # type: ignore[no-any-return]


class Balance(Callback):
    """Changes a buffer of each block after each step, on all ranks."""

    def on_step(self, trainer: Any) -> None:
        for number, block in enumerate(trainer.model.blocks):
            block.bias += 0.01 * (number + 1)


def denoising(model: nn.Module, batch: Any) -> Tensor:
    noise = torch.randn_like(batch[0])
    return functional.mse_loss(model(batch[0] + noise), noise)


def error_of_doubled_input(model: nn.Module, batch: Any) -> Tensor:
    return functional.mse_loss(model(batch[0]), 2 * batch[0])


def losses_and_trainer(
    model: StagedNetwork,
    parallel: Any,
    folder: Path | None = None,
    *,
    loss: Any = error_of_doubled_input,
    **settings: Any,
) -> Any:
    callbacks = settings.pop("callbacks", [])
    if folder is not None:
        settings["checkpoint"] = {"dir": folder, "every_steps": 3, "keep_last": 9}
    sizes = {"max_steps": 6, "global_batch_size": 8, "accumulation_steps": 2, "log_every_steps": 1}
    config = TrainerConfig(**{**sizes, **settings}, parallel=parallel)
    make = lambda parameters: torch.optim.Adam(parameters, lr=0.05)  # noqa: E731
    trainer = Trainer(model, make, loss, config, callbacks=callbacks)
    data = TensorDataset(torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(2)).double())
    losses = [row.loss for row in trainer.fit(data).history]
    return losses, trainer


def main(folder: Path) -> None:
    if len(sys.argv) > 2:
        model = StagedNetwork()
        model.first_change = 3
        losses_and_trainer(model, {"pipeline": 2})
    found: dict[str, Any] = {}
    for schedule in ("gpipe", "1f1b"):
        pipeline = {"pipeline": 2, "pipeline_schedule": schedule}
        found[schedule], _ = losses_and_trainer(StagedNetwork(), pipeline, loss=denoising)
        model = StagedNetwork(0.5)
        whole, trainer = losses_and_trainer(model, pipeline, folder / schedule, loss=denoising)
        found[f"{schedule} masks"] = [mask for block in model.blocks for mask in block.masks]
        rest, _ = losses_and_trainer(
            StagedNetwork(0.5), pipeline, loss=denoising, checkpoint={"resume": folder / schedule / "step-00000003"}
        )
        found[f"{schedule} resumed"] = rest == whole[3:]
    model = StagedNetwork()
    losses_and_trainer(model, {"pipeline": 2}, folder / "buffers", callbacks=[Balance()])
    net = StagedNetwork()
    load_model(folder / "buffers", net)
    found["biases"] = [float(block.bias[0]) for block in net.blocks]
    for name, parallel in (("ddp", "ddp"), ("moved", {"pipeline": 2})):
        for steps, place in ((3, "ddp"), (6, parallel)):
            losses_and_trainer(
                StagedNetwork(), place, folder / f"average {name}", callbacks=[EMA(0.8)], max_steps=steps
            )
        net = StagedNetwork()
        load_model(folder / f"average {name}", net, ema=True)
        found[f"average {name}"] = torch.cat([each.flatten() for each in net.parameters()]).tolist()
    found["rank"] = trainer.world.rank
    print("result " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
