"""Train a GPT of 7 billion parameters, from examples/gpt.py, which has to be in PYTHONPATH."""

import torch
from gpt import Gpt, loss_fn
from torch.utils.data import TensorDataset

from ddp_kit import Trainer, TrainerConfig

tokens = torch.randint(0, 32000, (64, 2049))
model = Gpt(32000, 2048, width=4096, heads=32, layers=32).to("cpu")
trainer = Trainer(
    model,
    torch.optim.AdamW(model.parameters(), lr=3e-4),
    loss_fn,
    TrainerConfig(max_steps=10, micro_batch_size=1, global_batch_size=64, precision="bf16"),
)
trainer.fit(TensorDataset(tokens[:, :-1], tokens[:, 1:]))
print("trained")
