"""Whether a checkpoint is of this run's model, optimizer, scheduler and callbacks."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_kit.errors import CheckpointError, DdpKitError
from ddp_kit.trainer.optimizer_state import load_optimizer_state
from ddp_kit.trainer.parts import Parts

_SHOWN = 8
_LONGEST_TEXT = 300


def kinds(parts: Parts) -> dict[str, Any]:
    """What the states are of: torch takes up that of another optimizer or scheduler without a word."""
    names = {id(parameter): name for name, parameter in parts.model.named_parameters()}
    groups = parts.optimizer.param_groups
    return {
        "optimizer": type(parts.optimizer).__name__,
        "groups": [[names[id(parameter)] for parameter in group["params"]] for group in groups],
        "scheduler": None if parts.scheduler is None else _kind(parts.scheduler),
    }


def check(path: Path, state: dict[str, Any], parts: Parts) -> None:
    """Raise `CheckpointError` where the state in `path` is of another model, optimizer or scheduler."""
    _check_model(path, state["model"], parts.model.state_dict())
    own = kinds(parts)
    saved = state.get("kinds", own)
    for what in ("optimizer", "scheduler"):
        if saved[what] != own[what]:
            raise _of_another_run(path, f"its {what} is {_shown(saved[what])}, that of this run is {_shown(own[what])}")
    if len(saved["groups"]) != len(own["groups"]):
        there, here = len(saved["groups"]), len(own["groups"])
        raise _of_another_run(path, f"its optimizer has {there} groups of parameters, that of this run has {here}")
    for number, (theirs, ours) in enumerate(zip(saved["groups"], own["groups"], strict=True)):
        if theirs != ours:
            differ = sorted(set(theirs) ^ set(ours)) or ["their order"]
            what = ", ".join(differ[:_SHOWN])
            raise _of_another_run(path, f"group {number} of its optimizer has other parameters: {what} differ")


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Within: what the checkpoint says is put to use. What is wrong with it is a `CheckpointError`."""
    try:
        yield
    except DdpKitError:
        raise
    except Exception as error:  # the content of a file may be anything, and fail anywhere
        raise CheckpointError(
            f"the checkpoint {path} cannot be used: {type(error).__name__}: {str(error)[:_LONGEST_TEXT]!r}",
            "was it written by another version of ddpkit, or changed since? take another checkpoint",
        ) from error


def load_optimizer(path: Path, state: dict[str, Any], parts: Parts) -> None:
    """Load the optimizer's state, exactly where the run's precision is that of the checkpoint.

    Raises `CheckpointError` where it does not fit.
    """
    model, own = state["model"], {**dict(parts.model.named_parameters()), **dict(parts.model.named_buffers())}
    saved = {name: model[name] for name in own if name in model}
    as_saved = all(tensor.dtype == own[name].dtype for name, tensor in saved.items())
    same_device = all(tensor.device == own[name].device for name, tensor in saved.items())
    try:
        load_optimizer_state(parts.optimizer, state["optimizer"], keep_types=as_saved, keep_devices=same_device)
    except Exception as error:
        raise _of_another_run(path, f"its optimizer does not fit: {str(error)[:_LONGEST_TEXT]}") from None


def _kind(scheduler: LRScheduler) -> str:
    """Its class, with those of the schedulers in it."""
    inner = ", ".join(map(_kind, _inner(scheduler)))
    return type(scheduler).__name__ + (f"({inner})" if inner else "")


def _inner(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    for value in vars(scheduler).values():
        several = value if isinstance(value, list | tuple) else [value]
        yield from (one for one in several if isinstance(one, LRScheduler))


def _shown(kind: str | None) -> str:
    return "none" if kind is None else kind


def _check_model(path: Path, saved: dict[str, Any], own: dict[str, Any]) -> None:
    problems = [f"{name} is missing in it" for name in own if name not in saved]
    problems += [f"{name} is not in the model" for name in saved if name not in own]
    problems += [
        f"{name} has shape {tuple(saved[name].shape)}, in the model {tuple(own[name].shape)}"
        for name in own
        if name in saved and isinstance(own[name], Tensor) and saved[name].shape != own[name].shape
    ]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise _of_another_run(path, "; ".join(problems[:_SHOWN]) + more)


def _of_another_run(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {path} is of another model, optimizer or scheduler: {what}",
        "give the folder of this run, or another one to start afresh (or checkpoint.resume=None); the weights alone "
        "are in its model.safetensors, for safetensors.torch.load_model",
    )


def kept_by(optimizer: Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's own state, whose entries may also be of another kind than torch's."""
    states = [state.values() for state in optimizer.state.values() if isinstance(state, dict)]
    return [value for value in chain(*states) if isinstance(value, Tensor)]


def size(parts: Parts) -> int:
    """Bytes of a run's weights and optimizer state, which are most of its checkpoint."""
    kept = [each for each in kept_by(parts.optimizer) if each.layout is torch.strided]
    return sum(each.nbytes for each in (*parts.model.parameters(), *kept))
