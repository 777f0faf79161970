"""causal_lm.py with Accelerate. Run it with `accelerate launch` and PYTHONPATH=examples/recipes."""

from contextlib import nullcontext
from itertools import islice

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from causal_lm import IGNORED, Progressions, build
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader


def token_losses(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    targets = batch["labels"][:, 1:]
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2).float(), targets, ignore_index=IGNORED, reduction="none")
    return losses, targets != IGNORED


def repeated(loader):
    while True:
        yield from loader


accelerator = Accelerator()
set_seed(0)
model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
scheduler = LinearLR(optimizer, 0.1, total_iters=10)
size = 32 // accelerator.num_processes // 2
loader = DataLoader(Progressions(2048), batch_size=size, shuffle=True)
test_loader = DataLoader(Progressions(200, seed=10_000), batch_size=size)
model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)

batches = repeated(loader)
for step in range(1, 151):
    step_batches = list(islice(batches, 2))
    tokens = sum((batch["labels"][:, 1:] != IGNORED).sum() for batch in step_batches)
    tokens, total = accelerator.reduce(tokens), 0.0
    for number, batch in enumerate(step_batches):
        with nullcontext() if number == 1 else accelerator.no_sync(model):
            loss = token_losses(model, batch)[0].sum()
            accelerator.backward(loss * accelerator.num_processes / tokens)
            total += loss.detach()
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step % 25 == 0:
        mean = accelerator.reduce(total) / tokens
        accelerator.print(f"step {step}: loss {mean:.4f}")

model.eval()
total, weight = 0.0, 0.0
for batch in test_loader:
    with torch.no_grad():
        losses, mask = accelerator.gather_for_metrics(token_losses(model, batch))
    total, weight = total + losses.sum().item(), weight + mask.sum().item()
accelerator.print(f"loss per token on unseen sequences: {total / weight:.8f}")
accelerator.end_training()
