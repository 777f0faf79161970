"""detection.py with Accelerate. Run it with `accelerate launch` and PYTHONPATH=examples/recipes."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from detection import Rectangles, build, cells, collate
from torch.utils.data import DataLoader


def box_losses(output, boxes):
    image, row, column = cells(boxes)
    centre = torch.zeros_like(output[:, 0])
    centre[image, row, column] = 1.0
    wrong = (centre - output[:, 0].sigmoid()).abs().square()
    focal = (wrong * F.binary_cross_entropy_with_logits(output[:, 0], centre, reduction="none")).sum()
    size = F.l1_loss(output[image, 1:, row, column], torch.cat(boxes)[:, 2:], reduction="sum")
    found = (output[image, 0, row, column] > 0).sum()
    return focal + size, torch.tensor(len(image), device=output.device), found


accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
set_seed(0)
model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
size = 24 // accelerator.num_processes
loader = DataLoader(Rectangles(800), batch_size=size, shuffle=True, collate_fn=collate, drop_last=True)
test_loader = DataLoader(Rectangles(200, seed=10_000), batch_size=size, collate_fn=collate)
model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)

step = 0
for epoch in range(5):
    model.train()
    for images, boxes in loader:
        loss, weight, _ = box_losses(model(images), boxes)
        total = accelerator.reduce(weight).clamp(min=1)
        accelerator.backward(loss * accelerator.num_processes / total)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 25 == 0:
            mean = accelerator.reduce(loss.detach()) / total
            accelerator.print(f"step {step}: loss {mean:.4f}")
    model.eval()
    sums = torch.zeros(3, device=accelerator.device)
    for images, boxes in test_loader:
        with torch.no_grad():
            sums += torch.stack(box_losses(accelerator.unwrap_model(model)(images), boxes))
    loss, weight, found = accelerator.reduce(sums).tolist()
    accelerator.print(f"epoch {epoch}: loss per box {loss / weight:.8f}, boxes found {found / weight:.1%}")
accelerator.end_training()
