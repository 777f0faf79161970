"""A pass of a step that is repeated, for a check or to find a cause, without changing the run.

start = PassState(model)          # before the pass
...                               # the pass of the step
result, changed = repeat(context, batch, set_random, use, start=start, alone=True)

A forward pass may change more than buffers: frozen weights, such as a momentum encoder, and counters, lists and random
generators in attributes. What the loss function keeps outside of the model's modules cannot be seen.
"""

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from contextlib import ExitStack
from copy import copy
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ddp_kit.distributed.consistency import bits
from ddp_kit.distributed.world import random_states_kept
from ddp_kit.metrics import Loss, checked
from ddp_kit.parallel.strategy import stored
from ddp_kit.structures import with_copied_containers
from ddp_kit.texts import first_line
from ddp_kit.torch_internals import CommunicationError, WithoutCollectives, memory_of
from ddp_kit.trainer.context import TrainerContext

T = TypeVar("T")
ComparedWeights = Literal["none", "together", "each"]

# --- State of a model -------------------------------------------------------------------------------------------------


WEIGHTS = "weights of the model"
"""The name in `PassState.changed` of weights that are compared together."""
_LONGEST = 100_000  # entries of a container, and values of an array; longer ones are data, which is not copied
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS = frozenset({tuple, list, deque, dict, OrderedDict, defaultdict, Counter, set})
_GENERATORS: dict[type, Callable[[Any], Callable[[], object]]] = {
    torch.Generator: lambda generator: partial(generator.set_state, generator.get_state()),
    random.Random: lambda generator: partial(generator.setstate, generator.getstate()),
    np.random.RandomState: lambda generator: partial(generator.set_state, generator.get_state()),
    np.random.Generator: lambda generator: partial(
        setattr, generator.bit_generator, "state", generator.bit_generator.state
    ),
}
"""For each class of random generators, a function that returns how to restore a generator."""


class PassState:
    """A copy of what a forward pass may change in a model: buffers, attributes of modules, and tensors in `written`.

    Attributes are numbers, texts, containers of them, arrays and random generators. They include modules that are not
    registered, such as a teacher in a list. Containers are restored in place, because other objects may refer to them.
    Of other objects, only which object an attribute has is restored.

    Weights, and tensors in attributes, may be too large for a copy. `changed` names those that a pass has written:
    pass these names as `written` from then on.
    """

    def __init__(
        self,
        model: nn.Module,
        written: Collection[str] = (),
        *,
        beside: Sequence[nn.Module] = (),
        weights: ComparedWeights = "together",
        graphs: bool = True,
    ) -> None:
        """`written`: the names of weights, and of tensors in attributes, to copy. `beside`: loss and metric modules.

        `weights`: whether `changed` compares other weights, and names each; that takes up to a hundred times as long.
        `graphs`: whether to keep tensors that were computed from weights, which may hold the memory of activations.
        """
        self._restores: list[Callable[[], object]] = []
        self._versions: dict[str, tuple[Tensor, int]] = {}
        self._weights: dict[str, Tensor] = {}
        self._written = written
        self._graphs = graphs
        self._seen = set[int]()
        left: list[tuple[str, Any]] = [*((type(module).__name__, module) for module in beside), ("", model)]
        while left:
            name, value = left.pop()
            if self._is_new(value):
                left += self._add_module(name, value) if isinstance(value, nn.Module) else self._add(name, value)
        self._compared: dict[str, list[Tensor]] = {}
        if weights == "each":
            self._compared = {name: [weight] for name, weight in self._weights.items()}
        elif weights == "together":
            self._compared = {WEIGHTS: [*self._weights.values()]}
        self._sums = self._checksums()

    def changed(self) -> list[str]:
        """The names of tensors without a copy that were written since. Waits for the device."""
        tensors = [name for name, (tensor, version) in self._versions.items() if tensor._version != version]
        sums = zip(self._compared, self._sums, self._checksums(), strict=True)
        return [*tensors, *(name for name, before, now in sums if int(before) != int(now))]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything except what `changed` names."""
        for restore in self._restores:
            restore()

    def _checksums(self) -> list[Tensor]:
        return [bits(map(memory_of, weights)) for weights in self._compared.values()]

    def _is_new(self, value: object) -> bool:
        known = len(self._seen)
        self._seen.add(id(value))
        return len(self._seen) > known

    def _is_omitted(self, value: Any) -> bool:
        if self._graphs:
            return False
        items = (item for _, item in _entries(value))
        return any(isinstance(one, Tensor) and one.grad_fn is not None for one in (value, *items))

    def _add_module(self, name: str, module: nn.Module) -> list[tuple[str, Any]]:
        """Add a module. Returns the objects that it refers to, by name."""
        prefix = f"{name}." if name else ""
        attributes = vars(module)
        omitted = _INTERNAL | {key for key, value in attributes.items() if self._is_omitted(value)}
        kept = {key: value for key, value in attributes.items() if key not in omitted}
        self._restores.append(partial(_reset, attributes, kept, omitted))
        self._restores.append(partial(_reset, module._buffers, dict(module._buffers), frozenset()))
        for key, tensor in (*module._buffers.items(), *module._parameters.items()):
            if tensor is None or not self._is_new(tensor):
                continue
            if key in module._buffers or prefix + key in self._written:
                self._copy(tensor)
            else:
                self._weights[prefix + key] = tensor
        return [(prefix + key, value) for key, value in (*kept.items(), *module._modules.items())]

    def _copy(self, tensor: Tensor) -> None:
        values = stored(tensor.detach()).clone()
        self._restores.append(lambda: stored(tensor).copy_(values))

    def _add(self, name: str, value: Any) -> list[tuple[str, Any]]:
        """Add an object to which an attribute refers. Returns the objects that it contains, by name."""
        kind = type(value)
        if isinstance(value, Tensor):
            if name in self._written:
                self._copy(value)
            elif not value.is_inference():
                self._versions[name] = value, value._version
        elif self._is_omitted(value):
            return []
        elif kind in _CONTAINERS and len(value) <= _LONGEST:
            if kind is not tuple:
                self._restores.append(partial(_refill, value, copy(value)))
            return [(f"{name}[{key!r}]", item) for key, item in _entries(value)]
        elif kind is np.ndarray and value.size <= _LONGEST and value.flags.writeable:
            self._restores.append(partial(np.copyto, value, value.copy()))
        elif kind in _GENERATORS:
            self._restores.append(_GENERATORS[kind](value))
        return []


def _entries(value: Any) -> Iterable[tuple[object, Any]]:
    """The keys or indices of a container, each with its item; empty for a set, and for an object of another kind."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, list | tuple | deque):
        return enumerate(value)
    return ()


def _reset(attributes: dict[str, Any], before: dict[str, Any], omitted: Set[str]) -> None:
    for name in attributes.keys() - before.keys() - omitted:
        del attributes[name]
    attributes.update(before)


def _refill(container: Any, before: Any) -> None:
    container.clear()
    if isinstance(container, list | deque):
        container.extend(before)
    else:
        container.update(before)


# --- Repetition -------------------------------------------------------------------------------------------------------


class NotRepeatable(Exception):  # noqa: N818  # never shown: its text becomes a part of a message
    """Raised by `repeat` if a pass cannot be repeated, with the reason as text. `after`: the state after the pass."""

    def __init__(self, reason: str, after: PassState) -> None:
        super().__init__(reason)
        self.after = after


def repeat(
    context: TrainerContext,
    batch: Any,
    set_random: Callable[[], None],
    use: Callable[[Tensor | Loss], T],
    *,
    alone: bool,
    start: PassState | None = None,
    written: Collection[str] = (),
    weights: ComparedWeights = "together",
    eager: bool = False,
) -> tuple[T, list[str]]:
    """Call the loss function on a batch again, and return the result of `use`, a function of the loss.

    The model and the random states are then as they were, except for the tensors that the second result names; for
    `written` and `weights`, see `PassState`. `start`: the state to begin with; None: as it is now. `set_random`: a
    function that sets the random states to those before the pass.
    `alone`: whether the other ranks do not repeat a pass: then a collective raises `CommunicationError`.
    `eager`: whether to run compiled code as Python, so that the hooks of modules in it are called.
    Raises `NotRepeatable` for any exception, because it may come from the user's code.
    """
    after = PassState(context.model, written, beside=context.loss_modules, weights=weights)
    try:
        with random_states_kept(context.world), ExitStack() as stack:
            stack.callback(after.restore)
            # torch.compile does not support the dispatch mode of WithoutCollectives either.
            if (alone or eager) and "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if alone and context.world.world_size > 1:
                stack.enter_context(WithoutCollectives())  # type: ignore[no-untyped-call]
            if start is not None:
                start.restore()
            set_random()
            with context.precision.forward(), context.activations.forward_context(), context.logged.batch(0):
                value = context.strategy.call(context.loss_fn, with_copied_containers(batch))
                loss = checked(value, "the loss function")
            result = use(loss)
    except CommunicationError:
        raise NotRepeatable("the loss function communicates with other ranks", after) from None
    except Exception as error:
        raise NotRepeatable(first_line(error), after) from None
    return result, after.changed()
