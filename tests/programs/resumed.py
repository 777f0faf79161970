"""Run by test_resume.py: trains with everything random, is killed at one step if told so, and prints what it ends with.

resumed.py FOLDER STEP_TO_DIE_AFTER WORKERS [WIDTH [PARALLEL [OFFLOAD]]]

PARALLEL: as JSON. OFFLOAD: the setting memory.offload.
"""

import json
import os
import sys
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from toys import KillsLastRank, Noisy, digest_of, mean_squared_error

from ddp_kit import EMA, Trainer, TrainerConfig

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
FIRST_ATTEMPT = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def main(folder: str, after: int, workers: int, width: int = 8, parallel: Any = None, offload: Any = None) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(width, 4), nn.GELU(), nn.Linear(4, 1))
    pipeline = "pipeline" in (parallel or {})
    norm = nn.LayerNorm(width) if pipeline else nn.BatchNorm1d(width)
    model = nn.Sequential(nn.Linear(4, width), norm, nn.Dropout(0.2), inner)
    ema = EMA(0.9)
    trainer = Trainer(
        model,
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        mean_squared_error,
        TrainerConfig(
            epochs=3,
            global_batch_size=12,
            accumulation_steps=2 if RANKS < 4 or pipeline else 1,  # BatchNorm needs two samples in each pass
            max_grad_norm=0.5,
            warmup_steps=3,
            data={"num_workers": workers},
            checkpoint={"dir": folder, "every_steps": 2},
            memory={"offload": offload},
            parallel=parallel or {"share_gpus": "RESUMED_SHARES_GPUS" in os.environ},
        ),
        scheduler=lambda optimizer: OneCycleLR(optimizer, 0.05, total_steps=60),
        callbacks=[ema, KillsLastRank(after if FIRST_ATTEMPT else 0)],
    )
    result = trainer.fit(Noisy(48))
    held = [*trainer.model_state().values(), *ema.model_state().values()]
    print(f"ended {trainer.world.rank} {result.steps} {result.samples} {digest_of(held)}\n", end="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), *map(json.loads, sys.argv[5:6]), *sys.argv[6:])
