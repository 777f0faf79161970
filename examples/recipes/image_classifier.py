"""A ResNet on synthetic images, with mixup, averaged weights (EMA) and checkpoints.

ddpkit launch --nproc-per-node 2 examples/recipes/image_classifier.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Beta
from torch.utils.data import Dataset

from ddp_kit import EMA, Loss, Trainer, TrainerConfig

SIZE, CLASSES = 16, 3
Batch = tuple[Tensor, Tensor]


class Shapes(Dataset[Batch]):
    """Noisy images of a disc, a square or a cross, with the probability of each class. `mixes`: apply mixup."""

    def __init__(self, samples: int, *, seed: int = 0, mixes: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(CLASSES, (samples,), generator=generator)
        centres = torch.randint(4, SIZE - 4, (samples, 2, 1, 1), generator=generator)
        rows, columns = (torch.stack(torch.meshgrid([torch.arange(SIZE)] * 2, indexing="ij")) - centres).unbind(1)
        disc, square = rows**2 + columns**2 <= 9, rows.abs().maximum(columns.abs()) <= 2
        cross = (rows.abs() == columns.abs()) & (rows.abs() <= 3)
        chosen = torch.stack([disc, square, cross], 1)[torch.arange(samples), labels]
        self.images = chosen.unsqueeze(1) + 0.3 * torch.randn(samples, 1, SIZE, SIZE, generator=generator)
        self.targets = torch.eye(CLASSES)[labels]
        self.mixes = mixes

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Batch:
        image, target = self.images[index], self.targets[index]
        if self.mixes:  # mixup (Zhang et al. 2018) within a sample, so it does not depend on the number of ranks
            other, share = int(torch.randint(len(self), ())), Beta(0.3, 0.3).sample()
            image = share * image + (1 - share) * self.images[other]
            target = share * target + (1 - share) * self.targets[other]
        return image, target


class Block(nn.Module):
    """A residual block, with GroupNorm, because BatchNorm depends on how a batch is divided among ranks."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(4, outputs), nn.GroupNorm(4, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return F.relu(out + self.shortcut(x))


def build() -> nn.Module:
    torch.manual_seed(0)
    stages = [Block(1, 16, 1), Block(16, 32, 2), Block(32, 32, 2)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    images, targets = batch
    return F.cross_entropy(model(images), targets)


def accuracy(logits: Tensor, batch: Batch) -> Loss:
    return Loss((logits.argmax(1) == batch[1].argmax(1)).sum(), weight=len(logits))


def main() -> None:
    config = TrainerConfig.from_command_line(
        epochs=4,
        global_batch_size=32,
        data={"seed_samples": True},  # mixup draws the same numbers at any number of ranks
        checkpoint={"dir": "image-classifier", "every_steps": 20},  # the same command resumes
    )
    trainer = Trainer(
        build(),
        lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        loss_fn,
        config,
        metrics={"accuracy": accuracy},
        callbacks=[EMA(0.95)],  # evaluations use the averaged weights
    )
    result = trainer.fit(Shapes(1000, mixes=True), Shapes(300, seed=1))
    if trainer.world.is_main:
        print(f"test accuracy: {result.metrics['accuracy']:.2%}")
        print(f"test loss: {result.metrics['loss']:.8f}")


if __name__ == "__main__":
    main()
