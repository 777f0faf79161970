"""Gather rows of all ranks with gradients, and compare with one process; then gather rows that do not fit together."""

import sys

import torch
from torch import Tensor

from ddp_kit import Trainer, TrainerConfig, World
from ddp_kit.errors import WorldError


def loss_of(own: Tensor, everyone: Tensor) -> Tensor:
    """A sum over `own` rows, each compared with all rows."""
    return (own @ everyone.T).exp().sum() + (everyone[:, 0] * torch.arange(len(everyone))).sum() * len(own)


def gathered_difference(world: World, counts: list[int]) -> float:
    """The largest difference in rows and gradients, if rank r has counts[r] rows."""
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(sum(counts), 3, generator=generator, dtype=torch.float64, requires_grad=True)
    loss_of(whole, whole).backward()  # type: ignore[no-untyped-call]
    assert whole.grad is not None
    begin = sum(counts[: world.rank])
    own = whole.detach()[begin : begin + counts[world.rank]].clone().requires_grad_()
    everyone = world.all_gather(own)
    loss_of(own, everyone).backward()  # type: ignore[no-untyped-call]
    assert own.grad is not None
    of_rows = (everyone - whole).abs().max()
    of_gradients = (own.grad - whole.grad[begin : begin + len(own)]).abs().sum()
    return float(max(of_rows, of_gradients))


model = torch.nn.Linear(1, 1)
world = Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch), TrainerConfig()
).world
ranks = world.world_size
for counts in ([2] * ranks, [*range(1, ranks + 1)], [0, *[3] * (ranks - 1)]):
    sys.stdout.write(f"{'equal' if gathered_difference(world, counts) < 1e-9 else 'different'}\n")
for rows in (torch.zeros(2, 3 + world.rank), torch.zeros(2, dtype=(torch.int64, torch.float32)[world.rank % 2])):
    try:
        world.all_gather(rows)
    except WorldError as error:
        sys.stdout.write(f"{error}\n")
try:
    world.all_gather(torch.tensor(1.0))
except WorldError as error:
    sys.stdout.write(f"{error}\n")
