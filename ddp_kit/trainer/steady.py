"""What of a run's state only the optimizer changes.

A pass that writes to `weight.data` leaves no trace in the tensor. So the source is read of whatever a pass comes from:
where it gets at a tensor's memory past torch, or cannot be read, nothing counts as steady.
"""

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any
from warnings import catch_warnings

from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_kit.trainer.fitting import kept_by

# Of tensors: what gives their memory to whoever writes to it; and collectives, which write to it themselves.
_REACHES = {"data", "data_ptr", "storage", "untyped_storage", "all_reduce", "broadcast"}
_NOT_READ = {"torch", "numpy", "ddp_kit", *sys.stdlib_module_names} - {"__main__"}
_MOST = 300_000  # bytes of source, which take a quarter of a second
_INSTALLED = ("site-packages", "dist-packages")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class SteadyState:
    """Tells which tensors stay as they are from one optimizer step to the next."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, loss_fn: Callable[..., Any]) -> None:
        self._model, self._optimizer, self._loss_fn = model, optimizer, loss_fn
        self._known: bool | None = None

    def tensors(self) -> list[Tensor]:
        """The weights that the optimizer trains, and its own state; none where a pass may change them unseen."""
        if self._known is None:
            try:
                with catch_warnings(action="ignore"):  # of the syntax of others
                    self._known = not reaches_memory(self._model, self._loss_fn)
            except Exception:  # code of others is looked at, which may be of any kind
                self._known = False
        if not self._known:
            return []
        groups = self._optimizer.param_groups
        weights = [each for group in groups for each in group["params"] if each.requires_grad]
        return weights + [each for each in kept_by(self._optimizer) if not each.is_inference()]


def reaches_memory(model: nn.Module, loss_fn: Callable[..., Any]) -> bool:
    """Whether the source that a pass comes from has, anywhere but where weights are made, `.data` or the like.

    That is the files of the loss function, the model's classes and hooks, and what of the user's own they import.
    """
    modules = [*model.modules()]
    if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in model.parameters()):
        return True  # such as an optimizer for each weight
    hooks = [hook for module in modules for name in _HOOKS for hook in getattr(module, name).values()]
    hooks += [hook for each in model.parameters() for hook in (each._backward_hooks or {}).values()]
    left = {_home(each) for each in (loss_fn, *hooks)} | {type(module).__module__ for module in modules}
    seen: set[str] = set()
    read = 0
    while left:
        name = left.pop()
        if name in seen or name.partition(".")[0] in _NOT_READ:
            continue
        seen.add(name)
        source = _source(sys.modules[name])
        read += len(source)
        if read > _MOST:
            return True
        tree = ast.parse(source)
        if any(map(_reaches, _outside_of_making(tree))):
            return True
        if not _is_installed(name):
            left |= {other for other in _used_by(sys.modules[name], tree) if not _is_installed(other)}
    return False


def _source(module: ModuleType) -> bytes:
    file = getattr(module, "__file__", None)
    if file is None and hasattr(module, "__path__"):
        return b""  # a folder without an __init__.py
    return Path(file or "").read_bytes()


def _is_installed(name: str) -> bool:
    return any(folder in (getattr(sys.modules[name], "__file__", None) or "") for folder in _INSTALLED)


def _used_by(module: ModuleType, tree: ast.AST) -> set[str]:
    """The modules of all that it names, and of what it imports within its functions."""
    found = {_home(value) for value in vars(module).values()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(resolve_name("." * node.level + (node.module or ""), module.__package__))
    return found & sys.modules.keys()


def _home(value: Any) -> str:
    """The name of the module that it is from, or of its class."""
    while isinstance(value, partial):
        value = value.func
    if isinstance(value, ModuleType):
        return value.__name__
    if not (inspect.isroutine(value) or isinstance(value, type)):
        value = type(value)
    return str(getattr(inspect.unwrap(value), "__module__", None) or "builtins")


def _outside_of_making(tree: ast.AST) -> Iterator[ast.AST]:
    """All of it, apart from functions such as `__init__`, `init_weights` and `reset_parameters`."""
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef) and ("init" in node.name or node.name == "reset_parameters"):
            continue
        yield node
        left += ast.iter_child_nodes(node)


def _reaches(node: ast.AST) -> bool:
    """`x.data`, but neither `x.data = ...`, which leaves the memory alone, nor `torch.utils.data` or `self.data`."""
    if isinstance(node, ast.AugAssign):
        return isinstance(node.target, ast.Attribute) and node.target.attr in _REACHES
    if not isinstance(node, ast.Attribute) or node.attr not in _REACHES or not isinstance(node.ctx, ast.Load):
        return False
    of = node.value
    return not (isinstance(of, ast.Name) and of.id == "self") and not (
        isinstance(of, ast.Attribute) and of.attr == "utils"
    )
