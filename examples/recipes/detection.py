"""An object detector as in CenterNet: images have different numbers of boxes, and all boxes have equal weight.

ddpkit launch --nproc-per-node 2 examples/recipes/detection.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_kit import Loss, Trainer, TrainerConfig

SIZE, GRID = 32, 8  # the sizes of an image and of the model's output
Sample = tuple[Tensor, Tensor]
Batch = tuple[Tensor, list[Tensor]]


class Rectangles(Dataset[Sample]):
    """Synthetic images with 0 to 4 bright rectangles, and a box for each: centre and size, relative to the image."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        self.samples, self.seed = samples, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Sample:
        draw = torch.Generator().manual_seed(self.seed + index)
        image = 0.3 * torch.randn(1, SIZE, SIZE, generator=draw)
        boxes = torch.rand(int(torch.randint(5, (), generator=draw)), 4, generator=draw)
        boxes = torch.cat([0.15 + 0.7 * boxes[:, :2], 0.1 + 0.15 * boxes[:, 2:]], 1)
        for box in boxes:
            left, top = ((box[:2] - box[2:] / 2) * SIZE).long().tolist()
            right, bottom = ((box[:2] + box[2:] / 2) * SIZE).long().tolist()
            image[0, top : bottom + 1, left : right + 1] += 1.0
        return image, boxes


def collate(samples: list[Sample]) -> Batch:
    return torch.stack([image for image, _ in samples]), [boxes for _, boxes in samples]


def build() -> nn.Module:
    """A model that returns three numbers per cell: the logit of a box's centre, and the box's width and height."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 3, 1),
    )


def cells(boxes: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The image, the row and the column of each box's centre."""
    images = torch.cat([torch.full((len(own),), number, device=own.device) for number, own in enumerate(boxes)])
    columns, rows = (torch.cat(boxes)[:, :2] * GRID).long().unbind(1)
    return images, rows, columns


def loss_fn(model: nn.Module, batch: Batch) -> Loss:
    """The summed loss of all boxes, with their number as the weight, so that all boxes count equally."""
    images, boxes = batch
    output = model(images)
    image, row, column = cells(boxes)
    centre = torch.zeros_like(output[:, 0])
    centre[image, row, column] = 1.0
    wrong = (centre - output[:, 0].sigmoid()).abs().square()  # the focal loss (Lin et al. 2017)
    focal = (wrong * F.binary_cross_entropy_with_logits(output[:, 0], centre, reduction="none")).sum()
    size = F.l1_loss(output[image, 1:, row, column], torch.cat(boxes)[:, 2:], reduction="sum")
    return Loss(focal + size, weight=len(image))


def recall(output: Tensor, batch: Batch) -> Loss:
    """The fraction of boxes whose centre was found."""
    image, row, column = cells(batch[1])
    return Loss((output[image, 0, row, column] > 0).sum(), weight=len(image))


def main() -> None:
    config = TrainerConfig.from_command_line(
        epochs=5, global_batch_size=24, log_every_steps=25, data={"collate_fn": collate}
    )
    trainer = Trainer(
        build(),
        lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        loss_fn,
        config,
        metrics={"recall": recall},
    )
    result = trainer.fit(Rectangles(800), Rectangles(200, seed=10_000))
    if trainer.world.is_main:
        print(f"boxes found: {result.metrics['recall']:.1%}")
        print(f"loss per box on unseen images: {result.metrics['loss']:.8f}")


if __name__ == "__main__":
    main()
