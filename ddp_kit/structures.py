"""Nested containers of tensors, such as samples and batches: their leaves, copies and hashes."""

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def with_copied_containers(batch: T) -> T:
    """Copy the containers of a batch, but not the leaves: a loss function may modify the dicts and lists it gets."""
    result: T = each_value(lambda leaf: leaf, batch)
    return result


def each_value(function: Callable[[Any], Any], batch: Any) -> Any:
    """Apply `function` to each leaf as `each_leaf` does, also to those inside containers with a `to` method.

    Such containers are Hugging Face's BatchEncoding and BatchFeature, torch's PackedSequence, and dataclasses.
    """

    def value(leaf: Any) -> Any:
        if isinstance(leaf, UserDict):
            clone = copy(leaf)
            clone.data = each_value(function, leaf.data)
            return clone
        known = isinstance(leaf, dict | list | tuple) or (is_dataclass(leaf) and not isinstance(leaf, type))
        return _filled(value, leaf) if known else function(leaf)

    return each_leaf(value, batch)


def each_leaf(function: Callable[[Any], Any], batch: Any) -> Any:
    """Apply `function` to each leaf of nested containers. Objects with a `to` method are leaves.

    User-defined mappings and dataclasses are copied, and the copies are filled, so that no constructor runs again.
    """
    if isinstance(batch, Tensor | str | bytes) or hasattr(batch, "to"):
        return function(batch)
    return _filled(function, batch)


def _filled(function: Callable[[Any], Any], batch: Any) -> Any:
    """A copy of a container whose leaves are the results of `function`; for another object, this result."""
    if type(batch) is list or type(batch) is tuple:  # nearly all batches
        return type(batch)([each_leaf(function, value) for value in batch])
    if type(batch) is dict:
        return {name: each_leaf(function, value) for name, value in batch.items()}
    inner = entries(batch)
    if inner is None:
        return function(batch)
    values = [each_leaf(function, value) for _, value in inner]
    if isinstance(batch, tuple) and hasattr(batch, "_make"):  # a named tuple
        return batch._make(values)
    if isinstance(batch, list | tuple):
        return type(batch)(values)
    filled: Any = {}
    put: Callable[[Any, Any], None] = filled.__setitem__
    if not isinstance(batch, Mapping):
        filled = copy(batch)
        put = partial(object.__setattr__, filled)  # works for frozen dataclasses too
    elif isinstance(batch, MutableMapping):
        filled = copy(batch)
        put = filled.__setitem__
    for (name, _), value in zip(inner, values, strict=True):
        put(name, value)
    return filled


def entries(value: Any) -> list[tuple[Any, Any]] | None:
    """The (key, value) pairs in a mapping, list, tuple or dataclass; None for other objects, which are leaves."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, Mapping):
        return [*value.items()]
    if isinstance(value, list | tuple):
        return [*enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value) if hasattr(value, field.name)]
    return None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a nested value: within mappings, lists, tuples and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    for _, inner in entries(value) or ():
        yield from tensors_in(inner)


UNKNOWN_DIGEST = -1
"""The digest of a value that contains nothing that `digest_of_value` can read."""


def digest_of_value(value: object) -> int:
    """A hash of the tensors, arrays, numbers and strings in a nested value, such as a sample, and of their keys."""
    digest = blake2b(digest_size=7)
    is_known = False
    for content in _contents(value):
        digest.update(content)
        is_known = True
    return int.from_bytes(digest.digest()) if is_known else UNKNOWN_DIGEST


def _contents(value: Any) -> Iterator[bytes]:
    """Yield the bytes of each tensor, array, number and string in a nested value, with dtypes, shapes and keys."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided and not value.is_quantized:
            dense = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
            yield f"{dense.dtype} {tuple(dense.shape)}".encode()
            yield dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, str | bytes | int | float | complex):
        yield repr(value).encode()
    elif (inner := entries(value)) is not None:
        for key, item in inner:
            if isinstance(value, Mapping):
                yield repr(key).encode()
            yield from _contents(item)
    elif hasattr(value, "__array_interface__"):  # numpy arrays and PIL images
        import numpy as np

        array = np.asarray(value)
        if not array.dtype.hasobject:  # object arrays contain addresses
            yield f"{array.dtype} {array.shape}".encode()
            yield array.tobytes()
