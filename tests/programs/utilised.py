"""The MFU under each strategy, on 2 ranks. A line per rank: strategy, FLOPs per sample and device, and
whether the loss is that of a run without MFU."""

import torch
from torch import nn
from torch.utils.data import TensorDataset
from toys import ResidualBlock, mean_squared_error, sgd

from ddp_kit import Trainer, TrainerConfig
from ddp_kit.trainer import model_flops
from ddp_kit.trainer.model_flops import PeakRates

WIDTH = 8
PEAK = 1e12
PLAN = {"*.up": "column", "*.down": "row"}
STRATEGIES = {
    "ddp": "ddp",
    "zero1": "zero1",
    "fsdp": "fsdp",
    "tensor": {"tensor": 2, "tensor_plan": PLAN},
    "pipeline": {"pipeline": 2},
}


def residual_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), ResidualBlock(WIDTH, 16), ResidualBlock(WIDTH, 16), nn.Linear(WIDTH, 1)
    )


def flops_and_loss(name: str, *, mfu: bool) -> tuple[float | None, float]:
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))
    config = TrainerConfig(
        global_batch_size=8, max_steps=4, log_every_steps=2, mfu=mfu, parallel=STRATEGIES[name], micro_batch_size=2
    )
    trainer = Trainer(residual_network(), sgd, mean_squared_error, config)
    row = trainer.fit(TensorDataset(x, x[:, :1])).history[-1]
    return (None if row.mfu is None else row.mfu * PEAK / row.samples_per_second), row.loss


def main() -> None:
    model_flops.TABLE = (PeakRates("cpu", {"fp32": PEAK / 1e12}, "this test"),)
    for name in STRATEGIES:
        none, plain = flops_and_loss(name, mfu=False)
        flops, loss = flops_and_loss(name, mfu=True)
        assert none is None
        print(f"{name}: {'none' if flops is None else round(flops)} {'same' if loss == plain else 'other'}", flush=True)


if __name__ == "__main__":
    main()
