"""Run by test_adapted.py: trains an adapter next to frozen layers, is killed at one step if told so.

adapted.py FOLDER STEP_TO_DIE_AFTER PARALLEL [SEED_OF_THE_FROZEN_LAYERS]
"""

import os
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from toys import KillsLastRank, digest_of, mean_squared_error

from ddp_kit import Trainer, TrainerConfig

WIDTH = 96
FIRST_ATTEMPT = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


class Adapted(nn.Module):
    """A frozen layer and a low-rank one next to it, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Any:
        return (self.base(x) + self.up(self.down(self.drop(x)))).tanh()


def adapted_model(seed: int = 0) -> nn.Module:
    """Three layers; `seed`: of the frozen weights."""
    torch.manual_seed(seed)
    made = nn.Sequential(Adapted(), Adapted(), Adapted())
    generator = torch.Generator().manual_seed(5)
    for each in made.parameters():
        if each.requires_grad:
            nn.init.normal_(each, std=0.1, generator=generator)
    return made


def main(folder: str, after: int, parallel: str, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, WIDTH, generator=generator), torch.randn(48, WIDTH, generator=generator))
    trainer = Trainer(
        adapted_model(seed),
        lambda parameters: torch.optim.Adam([each for each in parameters if each.requires_grad], lr=0.01),
        mean_squared_error,
        TrainerConfig(
            epochs=2,
            global_batch_size=8,
            checkpoint={"dir": folder, "every_steps": 3, "trainable_only": True},  # type: ignore[arg-type]
            parallel=parallel,  # type: ignore[arg-type]
        ),
        callbacks=[KillsLastRank(after if FIRST_ATTEMPT else 0)],
    )
    result = trainer.fit(data)
    digest = digest_of(trainer.model_state().values())
    print(f"ended {trainer.world.rank} {result.steps} {digest}\n", end="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:]))
