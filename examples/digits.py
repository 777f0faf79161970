"""Train a small network on scikit-learn's 1,797 images of handwritten digits, and report its test accuracy.

ddpkit launch --nproc-per-node 2 examples/digits.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset, random_split

from ddp_kit import Loss, Trainer, TrainerConfig

Batch = tuple[Tensor, Tensor]


def load() -> tuple[Subset[tuple[Tensor, ...]], Subset[tuple[Tensor, ...]]]:
    """8 x 8 images with values from 0 to 1, in a fixed split: 80 % for training, 20 % for testing."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    data = TensorDataset(images, torch.tensor(labels))
    train_data, test_data = random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    return train_data, test_data


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def accuracy(logits: Tensor, batch: Batch) -> Loss:
    hits = (logits.argmax(dim=1) == batch[1]).sum()
    return Loss(hits, weight=len(logits))


def main() -> None:
    torch.manual_seed(0)  # the same initial weights in every process
    model = build()
    train_data, test_data = load()
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loss_fn,
        TrainerConfig(epochs=15, global_batch_size=64, log_every_steps=50),
        metrics={"accuracy": accuracy},
    )
    result = trainer.fit(train_data, test_data)
    if trainer.world.is_main:
        print(f"final loss: {result.loss:.8f}")
        print(f"test accuracy: {result.metrics['accuracy']:.2%}")


if __name__ == "__main__":
    main()
