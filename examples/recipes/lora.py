"""LoRA with peft: only the adapter is trained and saved, and its A and B matrices have different learning rates.

ddpkit launch --nproc-per-node 2 examples/recipes/lora.py
"""

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from ddp_kit import Loss, Trainer, TrainerConfig

VOCABULARY, LENGTH = 32, 16


class Chains(Dataset[Tensor]):
    """Synthetic text: each token determines the next one."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        self.samples, self.seed = samples, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        token = int(torch.randint(VOCABULARY, (), generator=torch.Generator().manual_seed(self.seed + index)))
        tokens = [token]
        while len(tokens) < LENGTH:
            tokens.append((5 * tokens[-1] + 3) % VOCABULARY)
        return torch.tensor(tokens)


def build() -> nn.Module:
    """A base model with random weights; for a pretrained one, use `AutoModelForCausalLM.from_pretrained(name)`."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=False,
        )
    )
    adapter = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model: nn.Module = get_peft_model(base, adapter)
    return model


def adapter_groups(model: nn.Module, rate: float) -> list[dict[str, object]]:
    """LoRA+ (Hayou et al. 2024): a higher learning rate for the B matrices, which are initialised to zero."""
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    return [
        {"params": [each for name, each in named if "lora_A" in name], "lr": rate},
        {"params": [each for name, each in named if "lora_B" in name], "lr": 8 * rate},
    ]


def loss_fn(model: PeftModel, tokens: Tensor) -> Loss:
    logits = model(input_ids=tokens).logits[:, :-1]
    targets = tokens[:, 1:].flatten()
    return Loss(F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum"), weight=targets.numel())


def main() -> None:
    config = TrainerConfig.from_command_line(
        max_steps=80,
        global_batch_size=32,
        log_every_steps=20,
        checkpoint={"dir": "lora", "every_steps": 20, "trainable_only": True},
    )
    model = build()
    trainer = Trainer(model, lambda _: torch.optim.AdamW(adapter_groups(model, rate=5e-3)), loss_fn, config)
    trainer.fit(Chains(1024))
    metrics = trainer.evaluate(Chains(200, seed=10_000))
    if trainer.world.is_main:
        trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
        print(f"{trained} of {sum(each.numel() for each in model.parameters())} weights are trained and saved")
        print(f"loss per token on unseen sequences: {metrics['loss']:.8f}")


if __name__ == "__main__":
    main()
