"""Runs that resume end as those that were never interrupted, at several ranks. A line for each: same, or other."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_kit import Callback, Trainer, TrainerConfig

STEPS = 5
SMALL = {"bucket_mb": 0.0001}


class BucketsNetwork(nn.Module):
    """Several buckets' worth of parameters; `rotates`: one of them is complex."""

    def __init__(self, rotates: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 1)
        self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64)) if rotates else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.inner:
            x = layer(torch.tanh(x))
        found: Tensor = self.last(torch.tanh(x) if self.turn is None else (x * self.turn).abs())
        return found


class Notes(Callback):
    """Of this rank: the sum of the samples that it has seen."""

    state_per_rank = True

    def __init__(self) -> None:
        self.rank, self.seen = -1, torch.zeros(3, dtype=torch.float64)

    def note(self, batch: Any) -> None:
        self.seen += batch[0].double().sum(dim=0)

    def on_step(self, trainer: Any) -> None:
        self.rank = trainer.world.rank

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "seen": self.seen.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rank, self.seen = state["rank"], state["seen"]


def weights_and_samples(folder: Path | None, steps: int, rotates: bool, settings: dict[str, Any]) -> list[Tensor]:
    data = TensorDataset(torch.randn(96, 3, generator=torch.Generator().manual_seed(0)))
    notes = Notes()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        notes.note(batch)
        found: Tensor = model(batch[0]).square().mean() * 100
        return found

    trainer = Trainer(
        BucketsNetwork(rotates),
        lambda parameters: torch.optim.Adam(parameters, lr=0.05),
        loss,
        TrainerConfig(global_batch_size=12, max_steps=steps, checkpoint={"dir": folder}, **settings),
        callbacks=[notes],
    )
    assert notes.rank in (-1, trainer.world.rank)
    trainer.fit(data)
    return [*(each.detach().clone() for each in trainer.model.parameters()), notes.seen]


def main(root: Path) -> None:
    kinds: dict[str, tuple[bool, dict[str, Any]]] = {
        "plain": (False, {"parallel": SMALL}),
        "accumulated": (False, {"parallel": SMALL, "accumulation_steps": 2}),
        "complex": (True, {"parallel": SMALL}),
    }
    for name, (rotates, settings) in kinds.items():
        whole = weights_and_samples(None, STEPS, rotates, settings)
        for left_at in (1, 2, 3):
            folder = root / f"{name}-{left_at}"
            weights_and_samples(folder, left_at, rotates, settings)
            resumed = weights_and_samples(folder, STEPS, rotates, settings)
            same = all(map(torch.equal, whole, resumed))
            print(f"{name} left after {left_at}: {'same' if same else 'other'}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
