"""Loss and metric modules: loss functions and metrics that are modules, with buffers of their own.

As in a loop written by hand, each rank's buffers are its own, and no collective makes them equal. They are on the
rank's device, in evaluation mode in evaluations, and in the checkpoint.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ddp_kit.checkpoint.state import LONGEST_TEXT, SavedPart, StateMismatchError, as_text, of_rank, texts_of_entries
from ddp_kit.distributed.world import World, gathered_bytes
from ddp_kit.log import logger
from ddp_kit.metrics import MetricObject
from ddp_kit.storage.urls import Location

# --- Finding them -----------------------------------------------------------------------------------------------------


def modules_beside(model: nn.Module, functions: Mapping[str, Any]) -> dict[str, nn.Module]:
    """The modules that functions use besides the model, by the name of the function.

    A function may be a module, a method of one, or a `functools.partial` with one. Modules in closures and global
    variables are not found. `functions`: name -> loss function or metric.
    """
    found: dict[nn.Module, str] = {}
    inside = {*model.modules()}
    for name, function in functions.items():
        modules = [module for module in dict.fromkeys(_modules_in(function)) if module not in inside]
        for number, module in enumerate(modules, 1):
            found.setdefault(module, f"{name} ({number})" if len(modules) > 1 else name)
    return {name: module for module, name in found.items()}


def _modules_in(function: Any) -> Iterator[nn.Module]:
    if isinstance(function, nn.Module):
        yield function
    elif isinstance(function, MethodType):
        yield from _modules_in(function.__self__)
    elif isinstance(function, partial):
        for value in (function.func, *function.args, *function.keywords.values()):
            yield from _modules_in(value)
    elif isinstance(function, MetricObject):
        for value in function.functions:
            yield from _modules_in(value)


def move_beside(module: nn.Module, model: nn.Module, device: torch.device) -> None:
    """Move a module to the device, except for the model, which it may contain."""
    inside = {*model.modules()}
    if inside.isdisjoint(module.modules()):
        module.to(device)
        return
    of_model = _ids_of_tensors(model)
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if id(tensor) not in of_model:
            tensor.data = tensor.data.to(device)
    for child in module.children():
        if child not in inside:
            move_beside(child, model, device)


def _ids_of_tensors(module: nn.Module) -> set[int]:
    return {id(tensor) for tensor in (*module.parameters(), *module.buffers())}


def _own_tensors(module: nn.Module, model: nn.Module) -> dict[str, Any]:
    """The entries of a module's `state_dict()` that are not the model's, which the module may contain."""
    inside = {*model.modules()}
    contained = tuple(f"{name}." for name, each in module.named_modules(remove_duplicate=False) if each in inside)
    of_model = _ids_of_tensors(model)
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    shared = {name for name, tensor in tensors if id(tensor) in of_model}
    state = module.state_dict()
    return {name: value for name, value in state.items() if name not in shared and not name.startswith(contained)}


# --- Checkpoint -------------------------------------------------------------------------------------------------------


class ModulesPart(SavedPart):
    """The states of the loss and metric modules, by name: one for all ranks, or each rank's if they differ."""

    name = "modules"
    required = False

    def __init__(self, world: World, model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
        self._world = world
        self._model = model
        self._modules = modules
        self._states: dict[str, Any] = {}  # of the save that has begun

    def rank_state(self) -> Any:
        """This rank's states as text, of the modules whose states differ between ranks. A collective."""
        self._states = {name: _own_tensors(module, self._model) for name, module in self._modules.items()}
        if not self._states:
            return None
        texts = [
            json.loads(text)
            for text in gathered_bytes(json.dumps(texts_of_entries(self._states)).encode(), self._world)
        ]
        return {
            name: as_text(state)
            for name, state in self._states.items()
            if any(text[name] != texts[0][name] for text in texts)
        }

    def state_dict(self, ranks: Sequence[Any]) -> Any:
        saved: dict[str, dict[str, Any]] = {}
        for name, state in self._states.items():
            each = [states[name] for states in ranks if name in states]
            if state or each:
                saved[name] = {"kind": type(self._modules[name]).__name__}
                saved[name] |= {"every_rank": each} if each else {"state": state}
        return saved

    def check(self, state: Any) -> str | None:
        for name, saved in state.items():
            module = self._modules.get(name)
            if module is None:
                continue
            current = module.state_dict()
            for key, value in self._of_this_rank(name, saved).items():
                if isinstance(value, Tensor) and isinstance(current.get(key), Tensor):
                    shape = tuple(value.shape)
                    now = tuple(current[key].shape)
                    if shape != now and type(module).load_state_dict is nn.Module.load_state_dict:
                        return f"{key} of the module {name} has shape {shape} in the checkpoint, but {now} in this run"
        return None

    def load_state_dict(self, state: Any, path: Location) -> None:  # noqa: ARG002
        for name, module in self._modules.items():
            if name in state:
                current = module.state_dict(keep_vars=True)
                own = _own_tensors(module, self._model)
                of_model = {key: value for key, value in current.items() if key not in own}
                try:
                    module.load_state_dict({**of_model, **self._of_this_rank(name, state[name])})
                except Exception as error:
                    raise StateMismatchError(
                        f"the state of the module {name} cannot be loaded: {str(error)[:LONGEST_TEXT]}"
                    ) from None
            elif _own_tensors(module, self._model):
                logger.warning("the checkpoint has no state of the module {}, which keeps the script's", name)
        ignored = [name for name in state if name not in self._modules]
        if ignored:
            logger.warning(
                "the state of {} is ignored, because this run has no such module beside the model", ", ".join(ignored)
            )

    def load_nothing(self) -> None:
        self.load_state_dict({}, Path())

    def _of_this_rank(self, name: str, saved: Any) -> dict[str, Any]:
        if "state" in saved:
            return dict(saved["state"])
        return dict(of_rank(saved["every_rank"], f"the module {name}", self._world.rank, self._world.world_size))
