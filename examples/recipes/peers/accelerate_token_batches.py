"""token_batches.py with Accelerate. Run it with `accelerate launch` and PYTHONPATH=examples/recipes."""

from contextlib import nullcontext
from itertools import islice

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from token_batches import IGNORED, PASSES, Sums, Tagger, collate
from torch.utils.data import DataLoader, Sampler


class TokenBatches(Sampler):
    """Batches of sequences of similar length, with at most `tokens` tokens each, in a new order in each epoch."""

    def __init__(self, lengths, tokens):
        self.epoch = 0
        self.batches = [[]]
        for index in sorted(range(len(lengths)), key=lengths.__getitem__):
            if (len(self.batches[-1]) + 1) * lengths[index] > tokens:
                self.batches.append([])
            self.batches[-1].append(index)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        order = torch.randperm(len(self.batches), generator=torch.Generator().manual_seed(self.epoch))
        return (self.batches[number] for number in order.tolist())


def sum_and_weight(model, numbers, targets):
    logits = model(numbers).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, (targets != IGNORED).sum()


accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
set_seed(0)
passes = PASSES // accelerator.num_processes
train_data, test_data = Sums(2000), Sums(300, seed=1)
batches, test_batches = (TokenBatches(each.lengths, tokens=256) for each in (train_data, test_data))
loader = DataLoader(train_data, batch_sampler=batches, collate_fn=collate)
test_loader = DataLoader(test_data, batch_sampler=test_batches, collate_fn=collate)
model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)

step = 0
for epoch in range(6):
    batches.set_epoch(epoch)
    reader = iter(loader)
    for _ in range(len(batches) // PASSES):  # skip the last batches, which cannot be divided equally among ranks
        step_batches = list(islice(reader, passes))
        tokens, total = accelerator.reduce(sum((targets != IGNORED).sum() for _, targets in step_batches)), 0.0
        for number, (numbers, targets) in enumerate(step_batches, 1):
            with nullcontext() if number == passes else accelerator.no_sync(model):
                loss, _ = sum_and_weight(model, numbers, targets)
                accelerator.backward(loss * accelerator.num_processes / tokens)
                total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 25 == 0:
            mean = accelerator.reduce(total) / tokens
            accelerator.print(f"step {step}: loss {mean:.4f}")

model.eval()
sums = torch.zeros(2, device=accelerator.device)
for numbers, targets in test_loader:
    with torch.no_grad():
        sums += torch.stack(sum_and_weight(accelerator.unwrap_model(model), numbers, targets))
total, weight = accelerator.reduce(sums).tolist()
accelerator.print(f"loss per number on unseen sequences: {total / weight:.8f}")
accelerator.end_training()
