"""The states of callbacks in a checkpoint: rank 0's, or every rank's for callbacks that set `state_per_rank`."""

import base64
import json
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from ddp_kit.callbacks import Callback
from ddp_kit.checkpoint.layout import DTYPES
from ddp_kit.checkpoint.packing import pack
from ddp_kit.checkpoint.unpacking import unpack
from ddp_kit.log import logger
from ddp_kit.trainer.load_errors import explained_load_errors

_OWN = "ddp_kit."
_EVERY_RANK = "every_rank"


def per_rank_states(callbacks: Sequence[Callback]) -> list[str | None]:
    """For each callback: this rank's state as text if it sets `state_per_rank`, else None."""
    return [as_text(callback.state_dict()) if callback.state_per_rank else None for callback in callbacks]


def callback_states(callbacks: Sequence[Callback], of_ranks: Sequence[Sequence[str | None]]) -> list[Any]:
    """[class name, state] of each callback, for the checkpoint. `of_ranks`: every rank's `per_rank_states`."""
    states: list[Any] = []
    for number, callback in enumerate(callbacks):
        everyone = [own[number] for own in of_ranks]
        state = {_EVERY_RANK: everyone} if callback.state_per_rank else callback.state_dict()
        states.append([type(callback).__name__, state])
    return states


def load_callbacks(path: Path, callbacks: Sequence[Callback], saved: list[Any], rank: int, ranks: int) -> None:
    """Load saved states into callbacks of the same class, in order; log a warning about those without a counterpart.

    `path`: of the checkpoint, for messages. `saved`: what `callback_states` returned. Raises `CheckpointError`, and
    whatever a user's callback raises.
    """
    there: dict[str, deque[Any]] = defaultdict(deque)
    with explained_load_errors(path):
        for name, state in saved:
            there[name].append(state)
    without = []
    for callback in callbacks:
        name = type(callback).__name__
        if there[name]:
            own = type(callback).__module__.startswith(_OWN)  # errors in the user's callbacks are shown unchanged
            with explained_load_errors(path):
                state = (
                    _of_rank(there[name].popleft(), name, rank, ranks)
                    if callback.state_per_rank
                    else there[name].popleft()
                )
            with explained_load_errors(path) if own else nullcontext():
                callback.load_state_dict(state)
        elif type(callback).load_state_dict is not Callback.load_state_dict:
            without.append(name)
    gone = [name for name, states in there.items() for state in states if state]
    if without or gone:
        parts = [f"the checkpoint has no state for {', '.join(without)}, which starts without one"] if without else []
        parts += [f"the state for {', '.join(gone)} is ignored, because there is no such callback"] if gone else []
        logger.warning("the callbacks differ from those in the checkpoint: {}", "; ".join(parts))


def _of_rank(saved: Any, name: str, rank: int, ranks: int) -> Any:
    if not isinstance(saved, dict) or [*saved] != [_EVERY_RANK]:
        return saved  # from an older version, which saved rank 0's only
    everyone = saved[_EVERY_RANK]
    if len(everyone) != ranks:
        logger.warning(
            "{} has a state per rank; the checkpoint has {} ranks, this run {}: all ranks load the state of rank 0",
            name,
            len(everyone),
            ranks,
        )
        rank = 0
    return from_text(everyone[rank])


def as_text(state: Any) -> str:
    """A nested state as JSON text, with its tensors as a base64-encoded safetensors file."""
    packed = pack({"state": state})
    tensors = {f"{number}": each.tensor.detach().contiguous().cpu() for number, each in enumerate(packed.tensors)}
    names = {each.name: f"{number}" for number, each in enumerate(packed.tensors)}
    content = base64.b64encode(safetensors.torch.save(tensors)).decode()
    return json.dumps({"text": packed.text, "names": names, "tensors": content})


def from_text(text: str) -> Any:
    """The inverse of `as_text`. Other text may raise any error."""
    saved = json.loads(text)
    tensors = safetensors.torch.load(base64.b64decode(saved["tensors"]))
    if not all(tensor.dtype in DTYPES and not _is_odd(tensor) for tensor in tensors.values()):
        raise ValueError("a tensor has an unsupported dtype")
    return unpack(saved["text"], lambda _part, name, _: tensors[saved["names"][name]])["state"]


def _is_odd(tensor: torch.Tensor) -> bool:
    """Whether it is a bool tensor with bytes other than 0 and 1, which is undefined behaviour in torch."""
    return tensor.dtype == torch.bool and bool(tensor.numel()) and bool(tensor.view(torch.uint8).max() > 1)
