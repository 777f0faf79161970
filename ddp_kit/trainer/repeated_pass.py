"""A pass of a step that is repeated, for a check or to find a cause, without changing the run.

start = PassState(model)          # before the pass
...                               # the pass of the step
after = PassState(model)
repeat(context, batch, set_random, use, start=start, after=after)
after.changed()                   # what could not be restored

A forward pass may change more than buffers: frozen weights, such as a momentum encoder, and counters, lists and random
generators in attributes. What the loss function keeps outside of the model's modules cannot be seen.
"""

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
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

# --- State of a model -------------------------------------------------------------------------------------------------


WEIGHTS = "weights of the model"
"""The name in `PassState.changed` of weights that are compared together."""
_LONGEST = 100_000  # entries of a container, and values of an array; longer ones are data, which is not copied
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}


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
        weights: Literal["none", "together", "each"] = "together",
        graphs: bool = True,
    ) -> None:
        """`written`: the names of weights, and of tensors in attributes, to copy. `beside`: modules beside the model.

        `weights`: whether `changed` compares other weights, and names each; that takes up to a hundred times as long.
        `graphs`: whether to keep tensors that were computed from weights, which may hold the memory of activations.
        """
        self._modules: list[tuple[dict[str, Any], dict[str, Any], set[str]]] = []
        """For each module: its attributes or buffers, a copy of them, and the names of those that are not copied."""
        self._restores: list[Callable[[], object]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._versions: dict[str, tuple[Tensor, int]] = {}
        self._written, self._graphs = written, graphs
        self._seen = set[int]()
        self._weights: dict[str, Tensor] = {}
        left: list[tuple[str, Any]] = [*((type(module).__name__, module) for module in beside), ("", model)]
        while left:
            name, value = left.pop()
            if id(value) not in self._seen:
                self._seen.add(id(value))
                left += self._add_module(name, value) if isinstance(value, nn.Module) else self._add(name, value)
        if weights == "none":
            self._weights = {}
        self._compared = {name: [weight] for name, weight in self._weights.items()}
        if weights == "together":
            self._compared = {WEIGHTS: [*self._weights.values()]} if self._weights else {}
        self._sums = self._checksums()

    def changed(self) -> list[str]:
        """The names of tensors without a copy that were written since. Waits for the device."""
        tensors = [name for name, (tensor, version) in self._versions.items() if tensor._version != version]
        sums = zip(self._compared, self._sums, self._checksums(), strict=True)
        return [*tensors, *(name for name, before, now in sums if int(before) != int(now))]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything except what `changed` names."""
        for attributes, before, omitted in self._modules:
            for name in attributes.keys() - before.keys() - omitted:
                del attributes[name]
            for name, value in before.items():
                attributes[name] = value
        for restore in self._restores:
            restore()
        for tensor, copy in self._copies:
            stored(tensor).copy_(copy)

    def _checksums(self) -> list[Tensor]:
        return [bits(map(memory_of, weights)) for weights in self._compared.values()]

    def _is_omitted(self, value: Any) -> bool:
        if self._graphs:
            return False
        within = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | deque) else ()
        return any(isinstance(one, Tensor) and one.grad_fn is not None for one in (value, *within))

    def _add_module(self, name: str, module: nn.Module) -> list[tuple[str, Any]]:
        """Add a module. Returns the objects that it refers to, by name."""
        prefix = f"{name}." if name else ""
        attributes = {key: value for key, value in vars(module).items() if key not in _INTERNAL}
        omitted = {key for key, value in attributes.items() if self._is_omitted(value)}
        kept = {key: value for key, value in attributes.items() if key not in omitted}
        self._modules.append((vars(module), kept, omitted | _INTERNAL))
        self._modules.append((module._buffers, dict(module._buffers.items()), set()))
        for tensor in module._buffers.values():
            if tensor is not None and id(tensor) not in self._seen:
                self._seen.add(id(tensor))
                self._copy(tensor)
        for key, weight in module._parameters.items():
            if weight is not None and id(weight) not in self._seen:
                self._seen.add(id(weight))
                if prefix + key in self._written:
                    self._copy(weight)
                else:
                    self._weights[prefix + key] = weight
        return [(prefix + key, value) for key, value in (*kept.items(), *module._modules.items())]

    def _copy(self, tensor: Tensor) -> None:
        self._copies.append((tensor, stored(tensor.detach()).clone()))

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
        elif kind is tuple:
            return [(f"{name}[{index}]", item) for index, item in enumerate(value)]
        elif kind in (list, deque) and len(value) <= _LONGEST:
            self._restores.append(partial(_refill, value, list(value)))
            return [(f"{name}[{index}]", item) for index, item in enumerate(value)]
        elif kind in (dict, OrderedDict, defaultdict, Counter) and len(value) <= _LONGEST:
            self._restores.append(partial(_refill, value, dict(value)))
            return [(f"{name}[{key!r}]", item) for key, item in value.items()]
        elif kind is set and len(value) <= _LONGEST:
            self._restores.append(partial(_refill, value, set(value)))
        elif kind is np.ndarray and value.size <= _LONGEST and value.flags.writeable:
            self._restores.append(partial(np.copyto, value, value.copy()))
        elif kind is torch.Generator:
            self._restores.append(partial(value.set_state, value.get_state()))
        elif kind is random.Random:
            self._restores.append(partial(value.setstate, value.getstate()))
        elif kind is np.random.Generator:
            self._restores.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif kind is np.random.RandomState:
            self._restores.append(partial(value.set_state, value.get_state()))
        return []


def _refill(container: Any, before: Any) -> None:
    container.clear()
    if isinstance(container, list | deque):
        container.extend(before)
    else:
        container.update(before)


# --- Repetition -------------------------------------------------------------------------------------------------------


class NotRepeatable(Exception):  # noqa: N818  # never shown: its text becomes a part of a message
    """Raised by `repeat` if a pass cannot be repeated, with the reason as text."""


def repeat(
    context: TrainerContext,
    batch: Any,
    set_random: Callable[[], None],
    use: Callable[[Tensor | Loss], T],
    *,
    after: PassState,
    start: PassState | None = None,
    alone: bool,
    eager: bool = False,
) -> T:
    """Call the loss function on a batch again, and return the result of `use`, a function of the loss.

    The model and the random states are then as they were: `after` is the state of the model now. `start`: the state to
    begin with; None: as it is now. `set_random`: a function that sets the random states to those before the pass.
    `alone`: whether the other ranks do not repeat a pass: then a collective raises `CommunicationError`.
    `eager`: whether to run compiled code as Python, so that the hooks of modules in it are called.
    Raises `NotRepeatable` for any exception, because it may come from the user's code.
    """
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
            return use(loss)
    except CommunicationError:
        raise NotRepeatable("the loss function communicates with other ranks") from None
    except Exception as error:
        raise NotRepeatable(first_line(error)) from None
