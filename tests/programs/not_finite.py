"""Run by test_not_finite.py: a NaN in a random sample or an overflow in a random layer, in many short runs.

Each must end with an error that names the step, the rank, the module and the samples, and is the same on all ranks.
"""

import math
import os
import random
import re
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_kit import Loss, LossError, Trainer, TrainerConfig

SAMPLES, WIDTH, BLOCKS, LARGE = 96, 6, 4, 1e30


class Limit(nn.Module):
    """Passes on what it gets; overflows for large values, and for all while `broken`."""

    broken = False

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.abs() > LARGE / 1e3, x * 1e30, x) if not self.broken else x.sign() * 3e38 * 10


class LimitedBlock(nn.Module):
    def __init__(self, limited: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        if limited:
            self.limit = Limit()

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.1 * self.dropout(self.linear(x))
        return self.limit(x) if hasattr(self, "limit") else x


class LimitedNetwork(nn.Module):
    def __init__(self, limited: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(LimitedBlock(number == limited) for number in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def check_case(draw: random.Random, ranks: int, rank: int, number: int) -> None:
    strategy = draw.choice(["ddp", "zero1", "fsdp"][: 1 if ranks == 1 else 3])
    fault, bad, layer = draw.choice(["nan", "large", "layer"]), draw.randrange(SAMPLES), draw.randrange(BLOCKS)
    broken_at, broken_on = draw.randrange(1, 9), draw.randrange(ranks)
    weighted, accumulation, every = draw.random() < 0.5, draw.choice([1, 2, 3]), draw.choice([1, 3, 50])
    settings: dict[str, Any] = {"log_every_steps": every}
    if strategy == "fsdp" and every > 1:
        settings["max_grad_norm"] = 1.0
    case = f"case {number}: {strategy}, {fault}, sample {bad}, layer {layer}, {settings}, accumulation {accumulation}"
    torch.manual_seed(number)
    x, y = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, 1)
    if fault != "layer":
        x[bad, draw.randrange(WIDTH)] = math.nan if fault == "nan" else LARGE
    found: list[tuple[int, int, int]] = []  # (step, rank, samples) of the first pass with the fault

    def loss_fn(model: Any, batch: dict[str, Tensor]) -> Tensor | Loss:
        inputs, targets, indices = batch.pop("inputs"), batch.pop("targets"), batch.pop("indices")
        limit = model.blocks[layer].limit
        limit.broken = fault == "layer" and trainer.step + 1 >= broken_at and rank == broken_on
        if not found and (limit.broken or (fault != "layer" and bad in indices)):
            found.append((trainer.step + 1, rank, len(indices)))
        losses = (model(inputs) - targets).square()
        return Loss(losses.sum(), len(losses)) if weighted else losses.mean()

    def collate(samples: list[Any]) -> dict[str, Tensor]:
        inputs, targets, indices = map(torch.stack, zip(*samples, strict=True))
        return {"inputs": inputs, "targets": targets, "indices": indices}

    trainer = Trainer(
        LimitedNetwork(layer),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        loss_fn,
        TrainerConfig(
            epochs=1,
            seed=number,
            global_batch_size=10,
            accumulation_steps=accumulation,
            parallel=strategy,
            data={"collate_fn": collate},
            **settings,
        ),
    )
    try:
        trainer.fit(TensorDataset(x, y, torch.arange(SAMPLES)))
    except LossError as error:
        message = error.message
    else:
        raise AssertionError(f"{case}: the run has no error")
    everywhere: list[Any] = [(message, found)]
    if ranks > 1:
        everywhere = [None] * ranks
        dist.all_gather_object(everywhere, (message, found))
    assert {text for text, _ in everywhere} == {message}, f"{case}: ranks have different messages: {everywhere}"
    step, first, samples = min(each for _, of_rank in everywhere for each in of_rank)
    if step == 1:
        assert f"in the first step of this run, on rank {first}\n" in message, f"{case}: {step} {first}: {message}"
    else:
        assert f"from step {step} on, first on rank {first}\n" in message, f"{case}: {step} {first}: {message}"
    module = "blocks.0.linear (Linear)" if fault == "nan" else f"blocks.{layer}.limit (Limit)"
    assert f"the first module whose output is not finite is {module}" in message, f"{case}: {message}"
    if fault != "layer":
        alone = "it is not finite in the rows of" if strategy == "fsdp" else "it comes from"
        assert f"; {alone} sample {bad} of train_data" in message, f"{case}: {message}"
    elif strategy != "fsdp" and samples > 1:
        each = "each sample of the micro-batch" if samples < 10 else "each of the 9 samples that were tried"
        assert f"{each} gives it alone" in message, f"{case}: {message}"
    largest = re.search(r"the largest absolute value before it is (\S+), in (.*)", message)
    assert largest is not None, f"{case}: {message}"
    if fault == "large":
        assert float(largest[1]) >= LARGE / 2, f"{case}: {message}"
    assert all(parameter.requires_grad for parameter in trainer.model.parameters())


def check_pass_with_a_collective(rank: int, ranks: int) -> None:
    """A pass that one rank cannot repeat alone, because its loss function communicates."""

    def loss_fn(model: Any, batch: Any) -> Tensor:
        loss = F.mse_loss(model(batch[0]), batch[1])
        dist.all_reduce(loss.detach().clone())
        return loss * (math.nan if rank == 1 and trainer.step == 2 else 1.0)

    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    config = TrainerConfig(max_steps=4, global_batch_size=4 * ranks, log_every_steps=2)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), loss_fn, config)
    try:
        trainer.fit(TensorDataset(torch.randn(64, 2), torch.randn(64, 1)))
    except LossError as error:
        assert "from step 3 on, first on rank 1\n" in error.message, error.message
        assert "could not be repeated: the loss function communicates with other ranks" in error.message, error.message
    else:
        raise AssertionError("the run has no error")


if __name__ == "__main__":
    world_size, own = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    cases, seed = map(int, sys.argv[1:])
    for case_number in range(cases):
        check_case(random.Random(f"{seed} {world_size} {case_number}"), world_size, own, case_number)
    if world_size > 1:
        check_pass_with_a_collective(own, world_size)
    os.write(1, f"{cases} cases named on rank {own}\n".encode())
