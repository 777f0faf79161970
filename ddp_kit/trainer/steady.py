"""What of a run's state only the optimizer changes.

A pass that writes to `weight.data` leaves no trace in the tensor, so the code that passes run is read: where a loss
function, a module's forward or a hook of theirs gets at a tensor's memory, nothing counts as steady.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import chain
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

_MEMORY = {"data", "data_ptr", "numpy", "storage", "untyped_storage", "__array__", "__dlpack__", "to_dlpack"}
_NOT_READ = {"torch", "ddp_kit", "numpy", *sys.stdlib_module_names}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")

_Methods = dict[str, list[Any]]


class SteadyState:
    """Tells which tensors stay as they are from one optimizer step to the next."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, loss_fn: Callable[..., Any]) -> None:
        self._optimizer = optimizer
        self._is_seen = cache(lambda: not reaches_memory(model, loss_fn))

    def tensors(self) -> list[Tensor]:
        """The weights that the optimizer trains, and its own state; none where a pass may change them unseen."""
        if not self._is_seen():
            return []
        groups, states = self._optimizer.param_groups, self._optimizer.state.values()
        weights = [each for group in groups for each in group["params"] if each.requires_grad]
        kept = [value for state in states if isinstance(state, dict) for value in state.values()]
        return weights + [each for each in kept if isinstance(each, Tensor) and not each.is_inference()]


def reaches_memory(model: nn.Module, loss_fn: Callable[..., Any]) -> bool:
    """Whether what a pass runs may get at a tensor's memory past torch: by `.data`, `.numpy()` and the like."""
    modules = [*model.modules()]
    hooks = [getattr(module, name) for module in modules for name in _HOOKS]
    hooks += [getattr(each, name, None) or {} for each in model.parameters() for name in _HOOKS_OF_PARAMETERS]
    begins = [loss_fn, *(module.forward for module in modules), *chain.from_iterable(each.values() for each in hooks)]
    return any(not _MEMORY.isdisjoint(code.co_names) for code in _codes(begins, _methods(modules)))


def _methods(modules: Iterable[nn.Module]) -> _Methods:
    """What `.name` may be in a method of any of them."""
    found: _Methods = {}
    kinds = {base for module in modules for base in type(module).__mro__}
    for names in chain(map(vars, kinds), map(vars, modules)):
        for name, value in names.items():
            found.setdefault(name, []).append(value)
    return found


def _codes(begins: Iterable[Any], methods: _Methods) -> Iterator[CodeType]:
    """What these functions may run, as far as names tell; that of torch and Python themselves is left out."""
    left, seen = [*begins], set[int]()
    while left:
        function = _plain(left.pop())
        if function is None or id(function) in seen or (function.__module__ or "").partition(".")[0] in _NOT_READ:
            continue
        seen.add(id(function))
        left += _nonlocals(function)
        for code in _with_inner(function.__code__):
            yield code
            known = [function.__globals__[name] for name in code.co_names if name in function.__globals__]
            modules = [vars(value) for value in known if isinstance(value, ModuleType)]
            left += known
            left += [names[name] for names in modules for name in code.co_names if name in names]
            left += chain.from_iterable(methods.get(name, ()) for name in code.co_names)


def _plain(value: Any) -> FunctionType | None:
    """The function that runs when `value` is called or, of a property, read; None where Python has none."""
    while isinstance(value, partial):
        value = value.func
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, MethodType | staticmethod | classmethod):
        value = value.__func__
    if not isinstance(value, FunctionType | type):
        value = getattr(type(value), "__call__", None)  # noqa: B004  # what it is, not whether
    return value if isinstance(value, FunctionType) else None


def _nonlocals(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # nothing is in it yet
            yield cell.cell_contents


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
