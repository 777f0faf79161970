"""Optimizers with entries of their own in state_dict(): saved and resumed under each placement; prints what arrives.

own_state.py FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_kit import EMA, CheckpointError, Trainer, TrainerConfig, Update

PLACEMENTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"parallel": "zero1"},
    "fsdp": {"parallel": "fsdp"},
    "offload": {"memory": {"offload": "optimizer"}},
    "EMA": {},
    "updates": {},
}
DATA = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)))


def is_bias(parameter: torch.Tensor) -> bool:
    return parameter.ndim == 1


class CountingAdamW(torch.optim.AdamW):
    """Counts its steps, in entries of every plain kind, and in a state that belongs to no parameter."""

    done = 0

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            group["filter"] = is_bias

    def step(self, closure: Any = None) -> Any:
        self.done += 1
        self.state["counters"] = {"steps": self.done}
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        own = {"text": "a", "list": [self.done, 0.5], "dict": {"none": None}, "tensor": torch.tensor([self.done, 2])}
        return {**super().state_dict(), "done": self.done, **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]
        arrived = [state[name] for name in ("text", "list", "dict")] + state["tensor"].tolist()
        assert arrived == ["a", [self.done, 0.5], {"none": None}, self.done, 2], arrived
        super().load_state_dict(state)


class Differs(CountingAdamW):
    """Has an entry of its own that is another one on each rank."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rank": torch.tensor(torch.distributed.get_rank())}


def train_at(folder: Path, steps: int, placement: str, kind: Any = CountingAdamW) -> Trainer:
    torch.manual_seed(0)
    config = TrainerConfig(
        max_steps=steps,
        global_batch_size=8,
        checkpoint={"dir": folder / placement, "save": "blocking"},
        **PLACEMENTS[placement],
    )
    model = nn.ModuleDict({"one": nn.Linear(4, 4), "other": nn.Linear(4, 2)})

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        return model["other"](model["one"](batch[0])).square().mean()

    if placement == "updates":
        updates = [Update(name, loss_fn, kind(part.parameters())) for name, part in model.items()]
        trainer = Trainer(model, updates=updates, config=config)
    else:

        class Whole(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.parts = model

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.parts["other"](self.parts["one"](x))

        callbacks = [EMA(0.5)] if placement == "EMA" else []
        trainer = Trainer(
            Whole(), kind, lambda whole, batch: whole(batch[0]).square().mean(), config, callbacks=callbacks
        )
    trainer.fit(DATA)
    return trainer


folder = Path(sys.argv[1])
for placement in PLACEMENTS:
    train_at(folder, 2, placement)
    optimizer: Any = train_at(folder, 5, placement).optimizer
    for each in getattr(optimizer, "optimizers", {"": optimizer}).values():
        kept = all(group["filter"] is is_bias for group in each.param_groups)
        print(f"{placement}: {each.done} {each.state['counters']} {kept}", flush=True)
for placement in ("ddp", "fsdp"):
    try:
        train_at(folder / "differs", 2, placement, Differs)
    except CheckpointError as error:
        print(f"differs: {error.message}", flush=True)
