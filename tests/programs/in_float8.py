"""Run by test_float8.py at 2 ranks: trains with emulated fp8 under ddp, then under fsdp, killed in both if so told.

in_float8.py FOLDER STEP_TO_DIE_AFTER
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from toys import KillsLastRank, ResidualBlock, digest_of

from ddp_kit import Trainer, TrainerConfig
from ddp_kit.checkpoint.reader import load

ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
STEPS, MORE = 8, 10
NEWEST = f"step-{STEPS:08d}"
DATA = [(torch.randn(16, generator=torch.Generator().manual_seed(n)), torch.tensor(n % 5)) for n in range(25)]


def float8_trainer(folder: Path, parallel: str, dies_after: int, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    # The first layer of a block is large enough for fp8_layers="auto".
    blocks = [ResidualBlock(16, 1040, nn.LayerNorm, nn.functional.gelu) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(16, 5))

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    return Trainer(
        model,
        make if parallel == "fsdp" else make(model.parameters()),
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        TrainerConfig(
            # 12, 12 and 1 samples: rank 1 has none in each third step
            global_batch_size=12,
            accumulation_steps=2,
            max_grad_norm=0.5,
            log_every_steps=1,
            parallel=parallel,
            checkpoint={"dir": folder, "every_steps": 2},
            **settings,
        ),
        callbacks=[KillsLastRank(dies_after)],
    )


def main(folder: Path, after: int) -> None:
    for number, parallel in enumerate(("ddp", "fsdp")):
        trainer = float8_trainer(
            folder / parallel, parallel, after if number == ATTEMPT else 0, max_steps=STEPS, precision="fp8"
        )
        trainer.fit(DATA)
        loss = trainer.evaluate(DATA)["loss"]
        if trainer.world.is_main:
            converted = [name for name, each in trainer.model.named_modules() if "Float8" in type(each).__name__]
            state = load(folder / parallel / NEWEST)["model"]
            print("ended", parallel, digest_of(state.values()), *converted, *state, flush=True)
            print("loss", parallel, loss, flush=True)
    # The checkpoint of fsdp with fp8, in a model without.
    trainer = float8_trainer(folder / "fsdp", "ddp", 0, max_steps=MORE, precision="bf16")
    own = trainer.model.state_dict()
    same = all(torch.equal(own[name], each) for name, each in load(folder / "fsdp" / NEWEST)["model"].items())
    loss = trainer.evaluate(DATA)["loss"]
    steps = trainer.fit(DATA).steps
    if trainer.world.is_main:
        print("plain", same, loss, steps, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
