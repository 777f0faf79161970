"""A contrastive loss as in CLIP, with the samples of all ranks as negatives, and the exact gradient.

ddpkit launch --nproc-per-node 2 examples/recipes/contrastive.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_kit import Trainer, TrainerConfig, World

SEEN, SAID = 24, 16  # the sizes of an "image" and of its "text"


class TwoTowers(nn.Module):
    """Embeds the image and the text of a pair in the same space."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(SEEN, 64), nn.GELU(), nn.Linear(64, 16))
        self.text = nn.Sequential(nn.Linear(SAID, 64), nn.GELU(), nn.Linear(64, 16))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return F.normalize(self.image(batch[0]), dim=1), F.normalize(self.text(batch[1]), dim=1)


def compared(world: World, own: Tensor, others: Tensor, scale: Tensor) -> Tensor:
    """The mean loss over this rank's rows, each of which is classified among the rows of all ranks."""
    logits = scale.exp() * own @ world.all_gather(others).T
    rows = world.all_gather(torch.tensor([len(own)], device=own.device))  # of each rank: they may differ by one
    targets = rows[: world.rank].sum() + torch.arange(len(own), device=own.device)
    return F.cross_entropy(logits, targets)


def data(samples: int, seed: int) -> TensorDataset:
    """Pairs of vectors, each generated from 6 latent numbers."""
    draw = torch.Generator().manual_seed(0)
    to_seen, to_said = torch.randn(6, SEEN, generator=draw), torch.randn(6, SAID, generator=draw)
    hidden = torch.randn(samples, 6, generator=draw.manual_seed(seed))
    return TensorDataset((hidden @ to_seen).sin(), (hidden @ to_said).tanh())


def main() -> None:
    config = TrainerConfig.from_command_line(
        max_steps=200,
        global_batch_size=64,
        data={"drop_last": True},  # every rank has rows in every step
        log_every_steps=50,
    )

    def loss_fn(model: TwoTowers, batch: tuple[Tensor, Tensor]) -> Tensor:
        image, text = model(batch)
        world = trainer.world
        return (compared(world, image, text, model.scale) + compared(world, text, image, model.scale)) / 2

    torch.manual_seed(0)
    trainer = Trainer(TwoTowers(), lambda parameters: torch.optim.AdamW(parameters, lr=3e-3), loss_fn, config)
    trainer.fit(data(1000, seed=1))
    image, text = trainer.predict(data(200, seed=2), lambda model, batch: model(batch))
    found = (image @ text.T).argmax(dim=1) == torch.arange(len(image))
    distance = (image - text).norm(dim=1).mean()
    if trainer.world.is_main:
        print(f"pairs found among 200 unseen ones: {found.float().mean():.1%}")
        print(f"mean distance within a pair: {distance:.8f}")


if __name__ == "__main__":
    main()
