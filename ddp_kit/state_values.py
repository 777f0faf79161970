"""Values in the state of a run: checks of loaded values, copies, and comparison of saved values with the script's."""

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

# --- Checks -----------------------------------------------------------------------------------------------------------
# Without them, a wrong type in a checkpoint would cause an error only much later.

_MOST = 2**62
_LONGEST_TEXT = 60


def whole_number(value: Any, name: str, least: int = 0) -> int:
    """Return the value if it is an int of at least `least`; else raise `ValueError`."""
    if isinstance(value, int) and not isinstance(value, bool) and least <= value < _MOST:
        return value
    raise _not_a(f"whole number of at least {least}", value, name)


def real_number(value: Any, name: str) -> float:
    """Return the value if it is an int or a float; else raise `ValueError`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise _not_a("number", value, name)


def flag(value: Any, name: str) -> bool:
    """Return the value if it is a bool; else raise `ValueError`."""
    if isinstance(value, bool):
        return value
    raise _not_a("boolean", value, name)


def check_same_kind(value: Any, current: Any, name: str) -> None:
    """Raise `ValueError` unless `value` is of the same kind (number, list, ...) as `current`, which it replaces.

    If `current` is None, any value is accepted; None is accepted in place of a bool or a string.
    """
    if isinstance(current, bool):
        _ = value is None or flag(value, name)
    elif isinstance(current, int | float | Tensor):
        _ = isinstance(value, Tensor) or real_number(value, name)
    elif isinstance(current, str):
        if not isinstance(value, str | None):
            raise _not_a("string", value, name)
    elif isinstance(current, list | tuple):
        if not isinstance(value, list | tuple) or (isinstance(current, tuple) and len(value) != len(current)):
            raise _not_a(f"list of length {len(current)}", value, name)
        like = [*current, *current[-1:] * len(value)]  # additional items are like the last one
        for index, (item, current_item) in enumerate(zip(value, like, strict=False)):
            check_same_kind(item, current_item, f"{name}[{index}]")
    elif isinstance(current, Mapping):
        if not isinstance(value, Mapping):
            raise _not_a("dict", value, name)
        for key in current.keys() & value.keys():
            check_same_kind(value[key], current[key], f"{name}[{key!r}]")


def _not_a(kind: str, value: Any, name: str) -> ValueError:
    text = repr(value)
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_LONGEST_TEXT]}..."
    return ValueError(f"{name} is not a {kind}: {text}")


# --- Copies and comparison --------------------------------------------------------------------------------------------


def copied(value: Any) -> Any:
    """Copy the dicts, lists, tuples and tensors of a nested value. Other objects are not copied."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        clone = copy(value)  # also for a Counter or a defaultdict
        for name, item in value.items():
            clone[name] = copied(item)
        return clone
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    return value


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Copies of the options of each parameter group, such as `lr`. Tensors with several values are not options."""

    def is_option(name: str, value: Any) -> bool:
        return name not in ("params", "param_names") and not (isinstance(value, Tensor) and value.numel() > 1)

    return [
        {name: copied(value) for name, value in group.items() if is_option(name, value)}
        for group in optimizer.param_groups
    ]


def plain(value: Any) -> Any:
    """The value with tensors and arrays as numbers and tuples as lists."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def same_value(one: Any, other: Any) -> bool:
    """Whether two nested values are equal, regardless of how their numbers are stored. NaN equals NaN."""
    one = plain(one)
    other = plain(other)
    return one is other or repr(one) == repr(other) or bool(one == other)


@dataclass(frozen=True)
class Piece:
    """A piece of a tensor: a box (a slice in each dimension), or a range of the values in row-major order."""

    tensor: Tensor
    """The values of the piece. A box has as many dimensions as the whole tensor, a range has one."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    offsets: tuple[int, ...]
    """The start of the box in each dimension; for a range, the index of its first value among all values."""
    flat: bool = False
    """Whether the piece is a range."""
    owned: bool = True
    """Whether this rank writes the piece to checkpoints. If several ranks hold it, only one of them writes it."""

    def of(self, saved: "Tensor | Piece") -> Tensor:
        """The values of this piece in `saved`, which is either the whole tensor or the same piece.

        Raises `ValueError` if `saved` has another shape or is another piece.
        """
        if isinstance(saved, Piece):
            same = saved.shape == self.shape and saved.offsets == self.offsets and saved.flat == self.flat
            if not same or saved.tensor.shape != self.tensor.shape:
                raise ValueError(
                    "the piece that was read differs in shape or position from the piece that this rank holds"
                )
            return saved.tensor
        if tuple(saved.shape) != self.shape:
            raise ValueError(
                f"the tensor has shape {tuple(saved.shape)} in the checkpoint, but shape {self.shape} in this run"
            )
        if self.flat:
            return saved.reshape(-1)[self.offsets[0] : self.offsets[0] + self.tensor.numel()]
        box = tuple(slice(at, at + size) for at, size in zip(self.offsets, self.tensor.shape, strict=True))
        return saved[box]

    def with_tensor(self, tensor: Tensor) -> "Piece":
        """The same piece, with the values of `tensor`."""
        return replace(self, tensor=tensor)

    @property
    def numel(self) -> int:
        """The number of values of the whole tensor."""
        return math.prod(self.shape)


def whole_shape(value: "Tensor | Piece") -> tuple[int, ...]:
    """The shape of a tensor, or of the whole tensor that a `Piece` belongs to."""
    return value.shape if isinstance(value, Piece) else tuple(value.shape)
