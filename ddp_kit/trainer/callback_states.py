"""The states of callbacks in a checkpoint: that of rank 0, or of every rank where a callback says so."""

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
from ddp_kit.trainer.fitting import fitting

_OWN = "ddp_kit."
_EVERY_RANK = "every_rank"


def own_states(callbacks: Sequence[Callback]) -> list[str | None]:
    """What this rank adds: the state, as text, of each callback that has one per rank; None for the others."""
    return [as_text(callback.state_dict()) if callback.state_per_rank else None for callback in callbacks]


def callback_states(callbacks: Sequence[Callback], of_ranks: Sequence[Sequence[str | None]]) -> list[Any]:
    """By class and order: a run may resume with others. `of_ranks`: every rank's `own_states`."""
    states: list[Any] = []
    for number, callback in enumerate(callbacks):
        everyone = [own[number] for own in of_ranks]
        state = {_EVERY_RANK: everyone} if callback.state_per_rank else callback.state_dict()
        states.append([type(callback).__name__, state])
    return states


def load_callbacks(path: Path, callbacks: Sequence[Callback], saved: list[Any], rank: int, ranks: int) -> None:
    """Give each callback what one of its class had, the first what the first had; warn of those that remain."""
    there: dict[str, deque[Any]] = defaultdict(deque)
    with fitting(path):
        for name, state in saved:
            there[name].append(state)
    without = []
    for callback in callbacks:
        name = type(callback).__name__
        if there[name]:
            own = type(callback).__module__.startswith(_OWN)  # an error of the user's code is shown as it is
            with fitting(path):
                state = (
                    _of_rank(there[name].popleft(), name, rank, ranks)
                    if callback.state_per_rank
                    else there[name].popleft()
                )
            with fitting(path) if own else nullcontext():
                callback.load_state_dict(state)
        elif type(callback).load_state_dict is not Callback.load_state_dict:
            without.append(name)
    gone = [name for name, states in there.items() for state in states if state]
    if without or gone:
        parts = [f"the checkpoint holds nothing for {', '.join(without)}: begun afresh"] if without else []
        parts += [f"what it holds for {', '.join(gone)} is not used: there is no such callback now"] if gone else []
        logger.warning("other callbacks than in the checkpoint: {}", "; ".join(parts))


def _of_rank(saved: Any, name: str, rank: int, ranks: int) -> Any:
    if not isinstance(saved, dict) or [*saved] != [_EVERY_RANK]:
        return saved  # by a version in which all had rank 0's
    everyone = saved[_EVERY_RANK]
    if len(everyone) != ranks:
        logger.warning(
            "{} has a state per rank: the checkpoint has {}, and there are {}: all get rank 0's",
            name,
            len(everyone),
            ranks,
        )
        rank = 0
    return from_text(everyone[rank])


def as_text(state: Any) -> str:
    """What a checkpoint can hold: JSON, and the tensors as the base64 of a safetensors file."""
    packed = pack({"state": state})
    tensors = {f"{number}": each.tensor.detach().contiguous().cpu() for number, each in enumerate(packed.tensors)}
    names = {each.name: f"{number}" for number, each in enumerate(packed.tensors)}
    content = base64.b64encode(safetensors.torch.save(tensors)).decode()
    return json.dumps({"text": packed.text, "names": names, "tensors": content})


def from_text(text: str) -> Any:
    """The inverse of `as_text`. Raises an error of any kind for what it has not given."""
    saved = json.loads(text)
    tensors = safetensors.torch.load(base64.b64decode(saved["tensors"]))
    if not all(tensor.dtype in DTYPES and not _is_odd(tensor) for tensor in tensors.values()):
        raise ValueError("a tensor that is not stored")
    return unpack(saved["text"], lambda _part, name, _: tensors[saved["names"][name]])["state"]


def _is_odd(tensor: torch.Tensor) -> bool:
    """Whether truth values are neither 0 nor 1."""
    return tensor.dtype == torch.bool and bool(tensor.numel()) and bool(tensor.view(torch.uint8).max() > 1)
