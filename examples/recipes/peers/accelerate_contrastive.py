"""contrastive.py with Accelerate. Run it with `accelerate launch` and PYTHONPATH=examples/recipes."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from contrastive import TwoTowers, compared, data
from torch.utils.data import DataLoader

accelerator = Accelerator()
set_seed(0)
model = TwoTowers()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
size = 64 // accelerator.num_processes
loader = DataLoader(data(1000, seed=1), batch_size=size, shuffle=True, drop_last=True)
test_loader = DataLoader(data(200, seed=2), batch_size=size)
model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)

step = 0
while step < 200:
    for batch in loader:
        image, text = model(batch)
        scale = accelerator.unwrap_model(model).scale
        loss = (compared(image, text, scale, size) + compared(text, image, scale, size)) / 2
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 50 == 0:
            mean = accelerator.reduce(loss.detach(), reduction="mean")
            accelerator.print(f"step {step}: loss {mean:.4f}")
        if step == 200:
            break

images, texts = [], []
for batch in test_loader:
    with torch.no_grad():
        image, text = accelerator.gather_for_metrics(model(batch))
    images.append(image)
    texts.append(text)
image, text = torch.cat(images), torch.cat(texts)
found = (image @ text.T).argmax(dim=1) == torch.arange(len(image), device=image.device)
accelerator.print(f"pairs found among 200 unseen ones: {found.float().mean():.1%}")
accelerator.print(f"mean distance within a pair: {(image - text).norm(dim=1).mean():.8f}")
accelerator.end_training()
