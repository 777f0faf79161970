"""Run by test_placements.py: trains to a step, from the newest checkpoint in the folder.

trains_to_step.py PARALLEL STEPS FOLDER [OFFLOAD]    PARALLEL: as JSON; OFFLOAD: the setting memory.offload
"""

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn
from toys import ResidualBlock

from ddp_kit import Trainer, TrainerConfig
from ddp_kit.checkpoint.reader import load


class OddHead(nn.Module):
    """Blocks, and a head that is odd to divide."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(4, 6, nn.LayerNorm) for _ in range(2))
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def main(parallel: object, steps: int, folder: str, offload: Any = None) -> None:
    torch.manual_seed(0)
    model = OddHead().double()
    data = [(torch.randn(4, dtype=torch.float64), torch.tensor(number % 5)) for number in range(31)]
    trainer = Trainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        TrainerConfig(
            max_steps=steps,
            global_batch_size=12,
            max_grad_norm=0.5,
            parallel=parallel,
            memory={"offload": offload},
            checkpoint={"dir": folder, "every_steps": 100},
        ),
    )
    trainer.fit(data)
    if trainer.world.is_main:
        state = load(f"{folder}/step-{steps:08d}")
        optimizer = [state["optimizer"]["state"][number] for number in sorted(state["optimizer"]["state"])]
        found = {
            "weights": torch.cat([each.flatten() for each in state["model"].values()]).tolist(),
            "state": torch.cat([each.double().flatten() for kept in optimizer for each in kept.values()]).tolist(),
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
