"""A loop in the manner of nanoGPT: random batches without a DataLoader, one ckpt.pt, and the random states in it."""

import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WORDS, BLOCK, BATCH, ACCUMULATED, ITERATIONS, SAVED_EVERY = 20, 12, 4, 2, 60, 10

out_dir = Path(sys.argv[1])
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1337 + rank)
data = torch.randint(WORDS, (2000,), generator=torch.Generator().manual_seed(0))


def get_batch() -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - BLOCK - 1, (BATCH,))
    inputs, targets = (torch.stack([data[s + k : s + k + BLOCK] for s in starts.tolist()]) for k in (0, 1))
    return inputs, targets


def learning_rate(iteration: int) -> float:
    if iteration < 5:
        return 1e-2 * (iteration + 1) / 6
    return 1e-3 + 0.5 * (1 + math.cos(math.pi * iteration / ITERATIONS)) * 9e-3


class NanoGpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        logits = self.head(self.block(self.words(inputs), src_mask=mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


raw_model = NanoGpt()
optimizer = torch.optim.AdamW(raw_model.parameters(), lr=1e-2, betas=(0.9, 0.95))
iteration = 0
state = None
if (out_dir / "ckpt.pt").exists():
    checkpoint = torch.load(out_dir / "ckpt.pt")
    raw_model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iteration = checkpoint["iteration"]
    state = checkpoint["random"][rank] if len(checkpoint["random"]) == ranks else None
model = DistributedDataParallel(raw_model)
if state is not None:
    torch.set_rng_state(state)
inputs, targets = get_batch() if state is None else (checkpoint["inputs"][rank], checkpoint["targets"][rank])

while iteration < ITERATIONS:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(iteration)
    for micro_step in range(ACCUMULATED):
        model.require_backward_grad_sync = micro_step == ACCUMULATED - 1
        loss = model(inputs, targets) / ACCUMULATED
        inputs, targets = get_batch()  # the next one, while the model computes
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iteration += 1
    if iteration % SAVED_EVERY == 0:
        with torch.no_grad():
            raw_model(*get_batch())
        everyone: list = [None] * ranks
        dist.all_gather_object(everyone, (torch.get_rng_state(), inputs, targets))
        if rank == 0:
            out_dir.mkdir(parents=True, exist_ok=True)
            content = {
                "model": raw_model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "iteration": iteration,
                "random": [state for state, _, _ in everyone],
                "inputs": [batch for _, batch, _ in everyone],
                "targets": [batch for _, _, batch in everyone],
            }
            torch.save(content, out_dir / "ckpt.tmp")
            (out_dir / "ckpt.tmp").replace(out_dir / "ckpt.pt")
dist.barrier()
dist.destroy_process_group()
