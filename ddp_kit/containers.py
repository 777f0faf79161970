"""Batches are nested containers: of tuples, lists, mappings and dataclasses."""

from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


def with_copied_containers(batch: T) -> T:
    """The batch with the same leaves in copied containers, because loss functions may modify dicts and lists."""
    copied: T = each_leaf(_own, batch)
    return copied


def _own(leaf: Any) -> Any:
    if not isinstance(leaf, UserDict):
        return leaf
    copied = copy(leaf)  # it has a `to` method, as Hugging Face's BatchEncoding has
    copied.data = with_copied_containers(leaf.data)
    return copied


def each_leaf(function: Callable[[Any], Any], batch: Any) -> Any:
    """Apply `function` to each leaf of nested containers. Objects with a `to` method are leaves.

    User-defined mappings and dataclasses are copied and filled, so that their constructors do not run again.
    """
    if isinstance(batch, Tensor | str | bytes) or hasattr(batch, "to"):
        return function(batch)
    if type(batch) is list or type(batch) is tuple:  # nearly all batches
        return type(batch)([each_leaf(function, value) for value in batch])
    if isinstance(batch, MutableMapping) and type(batch) is not dict:
        clone = copy(batch)
        for name, value in batch.items():
            clone[name] = each_leaf(function, value)
        return clone
    if isinstance(batch, Mapping):
        return {name: each_leaf(function, value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_make"):  # a named tuple
        return batch._make(each_leaf(function, value) for value in batch)
    if isinstance(batch, list | tuple):
        return type(batch)(each_leaf(function, value) for value in batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        filled = copy(batch)
        for name in (field.name for field in fields(batch) if hasattr(batch, field.name)):
            object.__setattr__(filled, name, each_leaf(function, getattr(batch, name)))  # frozen ones too
        return filled
    return function(batch)
