"""Run by test_hooks.py: changes of gradients and weights around the optimizer step, at each placement.

Each rank prints nothing; rank 0 prints one line of JSON per placement and change: the predictions after the run, or the
error.
"""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from toys import ResidualBlock

from ddp_kit import Callback, ConfigError, Gradients, Trainer, TrainerConfig
from ddp_kit.state_values import Piece

STEPS, FROZEN_STEPS, LIMIT = 4, 2, 0.3
PLAN = {"blocks.*.up": "column", "blocks.*.down": "row"}
PARALLEL: dict[str, Any] = {
    "ddp": "ddp",
    "zero1": "zero1",
    "fsdp": "fsdp",
    "tensor": {"tensor": 2, "tensor_plan": PLAN},
    "pipeline": {"pipeline": 2},
    "device_map": {"device_map": {"": 0, "blocks.1": 1}},
}
COMBINED: dict[str, Any] = {
    "replicate x shard": {"replicate": 2, "shard": 2},
    "replicate x tensor": {"replicate": 2, "tensor": 2, "tensor_plan": PLAN},
    "shard x tensor": {"shard": 2, "tensor": 2, "tensor_plan": PLAN},
    "replicate x pipeline": {"replicate": 2, "pipeline": 2},
    "shard x pipeline": {"shard": 2, "pipeline": 2},
    "tensor x pipeline": {"tensor": 2, "tensor_plan": PLAN, "pipeline": 2},
}
"""Placements of four ranks."""
MEMORY: dict[str, dict[str, str]] = {
    "": {},
    "memory.offload='optimizer'": {"offload": "optimizer"},
    "memory.offload='all'": {"offload": "all"},
}


class LastLayerModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(4, 8) for _ in range(2))
        self.last_layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.last_layer(x)
        return found


def model_and_data() -> tuple[LastLayerModel, list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    xs, ys = (torch.randn(8, size, dtype=torch.float64, generator=generator) for size in (4, 3))
    torch.manual_seed(0)
    return LastLayerModel().double(), [*zip(xs, ys, strict=True)]


def tenfold_error(model: Any, batch: Any) -> Tensor:
    loss: Tensor = (model(batch[0]) - batch[1]).square().mean() * 10
    return loss


def optimizer_for(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


# --- changes --------------------------------------------------------------------------------------------------------
# Each one in the words of torch, for the reference in one process, and in those of a Callback.


Change = Callable[[Any, int], None]  # of named parameters with gradients, at the step from 0


def halve(parameters: Mapping[str, nn.Parameter], _step: int) -> None:
    for name, each in parameters.items():
        if "up" in name and each.grad is not None:
            each.grad.mul_(0.1)


def zero(parameters: Mapping[str, nn.Parameter], _step: int) -> None:
    for name, each in parameters.items():
        if "blocks.0" in name and each.grad is not None:
            each.grad.zero_()


def skip(parameters: Mapping[str, nn.Parameter], _step: int) -> None:
    for name, each in parameters.items():
        if "up" in name:
            each.grad = None


def dino(parameters: Mapping[str, nn.Parameter], step: int) -> None:
    """As facebookresearch/dino does: clip_gradients and cancel_gradients_last_layer."""
    for each in parameters.values():
        if each.grad is not None:
            coefficient = LIMIT / (each.grad.norm(2) + 1e-6)
            if coefficient < 1:
                each.grad.mul_(coefficient)
    for name, each in parameters.items():
        if "last_layer" in name and step < FROZEN_STEPS:
            each.grad = None


def clamp(parameters: Mapping[str, nn.Parameter], _step: int) -> None:
    with torch.no_grad():
        for each in parameters.values():
            each.clamp_(-0.3, 0.3)


class Halve(Callback):
    def on_gradients(self, trainer: Trainer, gradients: Gradients) -> None:
        for name, gradient in gradients.items():
            if "up" in name:
                gradient.mul_(0.1)


class HalveReplaced(Callback):
    def on_gradients(self, trainer: Trainer, gradients: Gradients) -> None:
        for name in gradients:
            if "up" in name:
                gradients[name] = gradients[name] * 0.1


class Zero(Callback):
    def on_gradients(self, trainer: Trainer, gradients: Gradients) -> None:
        for name, gradient in gradients.items():
            if "blocks.0" in name:
                gradient.zero_()


class Skip(Callback):
    def on_gradients(self, trainer: Trainer, gradients: Gradients) -> None:
        for name in gradients:
            if "up" in name:
                gradients[name] = None


class SkipOnTheModel(Callback):
    """Refused where the optimizer holds parts of the model's parameters."""

    def on_gradients(self, trainer: Trainer, gradients: Gradients) -> None:
        skip(dict(trainer.model.named_parameters()), 0)


class Dino(Callback):
    def on_gradients(self, trainer: Trainer, gradients: Gradients) -> None:
        for name, norm in gradients.norms().items():
            gradients[name].mul_((LIMIT / (norm + 1e-6)).clamp(max=1.0))
        for name in gradients:
            if "last_layer" in name and trainer.epoch < FROZEN_STEPS:
                del gradients[name]


class Clamp(Callback):
    @torch.no_grad()
    def on_step(self, trainer: Trainer) -> None:
        for value in trainer.model_state().values():
            (value.tensor if isinstance(value, Piece) else value).clamp_(-0.3, 0.3)


CALLBACKS: dict[str, tuple[Change | None, Change | None, type[Callback]]] = {
    "halved in place": (halve, None, Halve),
    "halved, replaced": (halve, None, HalveReplaced),
    "zeroed": (zero, None, Zero),
    "skipped": (skip, None, Skip),
    "skipped on the model": (skip, None, SkipOnTheModel),
    "DINO": (dino, None, Dino),
    "clamped weights": (None, clamp, Clamp),
}
HOOKS: dict[str, tuple[Change | None, Change | None]] = {
    "pre hook halves": (halve, None),
    "pre hook zeroes": (zero, None),
    "pre hook skips": (skip, None),
    "pre hook as in DINO": (dino, None),
    "post hook clamps": (None, clamp),
}


def names(ranks: int) -> list[str]:
    """The changes that are tried with this number of ranks."""
    return ["skipped on the model", "DINO", "pre hook skips"] if ranks == 4 else [*CALLBACKS, *HOOKS]


def reference(before: Change | None, after: Change | None) -> list[list[float]]:
    """The predictions of the loop written by hand, in one process."""
    model, data = model_and_data()
    optimizer, parameters = optimizer_for(model.parameters()), dict(model.named_parameters())
    batch = tuple(torch.stack(each) for each in zip(*data, strict=True))
    for step in range(STEPS):
        optimizer.zero_grad()
        tenfold_error(model, batch).backward()
        if before is not None:
            before(parameters, step)
        optimizer.step()
        if after is not None:
            after(parameters, step)
    predicted: list[list[float]] = model(batch[0]).tolist()
    return predicted


def predictions_after(parallel: Any, memory: dict[str, bool], name: str) -> list[list[float]]:
    model, data = model_and_data()
    config = TrainerConfig(epochs=STEPS, global_batch_size=8, parallel=parallel, memory=memory, seed=0)
    callbacks = [CALLBACKS[name][2]()] if name in CALLBACKS else []
    trainer = Trainer(model, optimizer_for, tenfold_error, config, callbacks=callbacks)
    for change, register in zip(
        HOOKS.get(name, ()),
        (trainer.optimizer.register_step_pre_hook, trainer.optimizer.register_step_post_hook),
        strict=False,
    ):
        if change is not None:
            parameters = dict(trainer.model.named_parameters())
            register(lambda *_, change=change, parameters=parameters: change(parameters, trainer.step))  # type: ignore[misc]
    trainer.fit(data)
    predicted: list[list[float]] = trainer.predict(data, lambda model, batch: model(batch[0])).tolist()
    return predicted


if __name__ == "__main__":
    is_main, ranks = os.environ.get("RANK") == "0", int(os.environ.get("WORLD_SIZE", "1"))
    for strategy, parallel in (COMBINED if ranks == 4 else PARALLEL).items():
        for offload, memory in MEMORY.items():
            for name in ("", *names(ranks)):
                found: Any
                try:
                    found = predictions_after(parallel, memory, name)
                except ConfigError as error:
                    found = str(error)
                if is_main:
                    os.write(1, f"{json.dumps([strategy, offload, name, found])}\n".encode())
                if not name and isinstance(found, str):
                    break  # the settings cannot be combined, or need more ranks
