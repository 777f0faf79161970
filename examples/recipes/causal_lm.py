"""A causal language model from transformers, on sequences of different lengths; all tokens have equal weight.

ddpkit launch --nproc-per-node 2 examples/recipes/causal_lm.py
ddpkit launch --nproc-per-node 2 examples/recipes/causal_lm.py max_steps=20 parallel=fsdp
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from ddp_kit import Loss, Trainer, TrainerConfig

VOCABULARY, LENGTH, IGNORED = 32, 24, -100
Batch = dict[str, Tensor]


class Progressions(Dataset[Batch]):
    """Synthetic text: arithmetic progressions modulo the vocabulary size, of 4 to LENGTH tokens, then padding."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        self.samples, self.seed = samples, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(self.seed + index)
        start, rise, length = (int(torch.randint(*ends, (), generator=generator)) for ends in ENDS)
        tokens = (start + rise * torch.arange(LENGTH)) % VOCABULARY
        mask = torch.arange(LENGTH) < length
        return {
            "input_ids": tokens.where(mask, 0),
            "attention_mask": mask.long(),
            "labels": tokens.where(mask, IGNORED),
        }


ENDS = (0, VOCABULARY), (1, 6), (4, LENGTH + 1)  # the ranges of the first token, the difference and the length


def build() -> GPT2LMHeadModel:
    """A small model with random weights; for a pretrained one, use `AutoModelForCausalLM.from_pretrained(name)`."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=48,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def loss_fn(model: GPT2LMHeadModel, batch: Batch) -> Loss:
    """The summed loss of the real tokens, with their number as the weight, so that all tokens count equally."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    targets = batch["labels"][:, 1:].flatten()
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, ignore_index=IGNORED, reduction="sum")
    return Loss(loss, weight=(targets != IGNORED).sum())


def main() -> None:
    config = TrainerConfig.from_command_line(
        max_steps=150,
        global_batch_size=32,
        accumulation_steps=2,
        max_grad_norm=1.0,
        warmup_steps=10,
        log_every_steps=25,
    )
    trainer = Trainer(
        build(), lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01), loss_fn, config
    )
    trainer.fit(Progressions(2048))
    metrics = trainer.evaluate(Progressions(200, seed=10_000))
    if trainer.world.is_main:
        print(f"loss per token on unseen sequences: {metrics['loss']:.8f}")


if __name__ == "__main__":
    main()
