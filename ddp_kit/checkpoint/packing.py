"""Nested state -> tensors by name, and JSON for all else; `unpacking` gives the same values back, bit-exact.

    {"model": {"weight": Tensor}, "scheduler": {"betas": (0.9, nan)}}    becomes
    model.safetensors: "weight"
    state.json: {"model": {"weight": {"$tensor": ["model", "weight"]}},
                 "scheduler": {"betas": {"$tuple": [0.9, {"$float": "7ff8000000000000"}]}}}

What JSON has no word for is an object whose first key begins with "$"; docs/checkpoints.md lists them.
"""

import base64
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_kit.checkpoint.layout import DTYPES, Stored
from ddp_kit.errors import CheckpointError

_PART = re.compile(r"\w[\w-]*", re.ASCII)
_LARGEST = 1 << 63  # an int beyond is written in hexadecimal: decimals of any length take Python too long
DEEPEST = 200
"""Containers in containers, at most."""
_LONG = 100  # shorter lists are not worth a look at what they hold
FACTORIES: Mapping[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool)
}
"""Of a defaultdict."""
_Path = tuple[Any, ...]


@dataclass(frozen=True)
class Packed:
    """State, taken apart."""

    tensors: tuple[Stored, ...]
    aliases: Mapping[str, Mapping[str, str]]
    """Part -> another name of a tensor -> the name that it is stored under."""
    text: Mapping[str, Any]
    """What becomes state.json."""


def pack(state: Mapping[str, Any]) -> Packed:
    """Take a state apart: part -> nested dicts, lists, tuples, sets, numbers, strings, arrays, tensors.

    Tensors of the same memory and shape are stored once, and come back as one. Named tuples come back as tuples,
    parameters as tensors. Raises `CheckpointError` that names the place of what cannot be stored.
    """
    packer = _Packer()
    for part in state:
        if not isinstance(part, str) or not _PART.fullmatch(part):
            raise CheckpointError(
                f"a part of the state is called {part!r}",
                "name it with letters, digits, _ and -: it becomes the name of a file",
            )
    try:
        text = {part: packer.pack(value, (part,)) for part, value in state.items()}
    except RecursionError:
        raise CheckpointError(
            "the state is nested too deeply to be stored", "look for a container that contains itself"
        ) from None
    return Packed(tuple(packer.tensors), packer.aliases, text)


# Taking apart --------------------------------------------------------------------------------------------------------


class _Packer:
    def __init__(self) -> None:
        self.tensors: list[Stored] = []
        self.aliases: dict[str, dict[str, str]] = {}
        self._names: set[tuple[str, str]] = set()
        # By address. The tensors are held: the memory of one made on the way is not another's before all is done.
        self._seen: dict[int, list[tuple[Tensor, tuple[str, str]]]] = {}
        self._kinds: dict[type, Callable[[Any, _Path], Any]] = {
            **PLAIN, bytes: _bytes, complex: _complex, torch.dtype: _dtype, torch.device: _device,
            np.ndarray: self._array,
            torch.Size: lambda value, _: {"$size": list(value)},
            list: self._list, tuple: self._tuple, dict: self._dict, OrderedDict: self._ordered,
            Counter: self._counter, defaultdict: self._default, deque: self._deque,
            set: self._set, frozenset: self._set, Tensor: self._tensor,
        }  # fmt: skip

    def pack(self, value: Any, path: _Path) -> Any:
        if len(path) > DEEPEST:
            raise RecursionError
        kind = self._kinds.get(type(value))
        if kind is not None:
            return kind(value, path)
        if isinstance(value, torch.nn.Parameter) and not torch.nn.parameter.is_lazy(value):
            return self.pack(value.detach(), path)
        if isinstance(value, np.generic):
            return self._scalar(value, path)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._tuple(value, path)
        raise _unstorable(value, path)

    def _list(self, value: Any, path: _Path) -> Any:
        if len(value) > _LONG and set(map(type, value)) == {int} and min(value) >= -_LARGEST and max(value) < _LARGEST:
            return list(value)  # the states of random generators are thousands of numbers
        return [self.pack(one, (*path, number)) for number, one in enumerate(value)]

    def _tuple(self, value: Any, path: _Path) -> Any:
        return {"$tuple": self._list(value, path)}

    def _set(self, value: Any, path: _Path) -> Any:
        return {f"${type(value).__name__}": sorted(self._list(value, path), key=repr)}

    def _deque(self, value: Any, path: _Path) -> Any:
        return {"$deque": self._list(value, path), "maxlen": value.maxlen}

    def _dict(self, value: Any, path: _Path) -> Any:
        if all(type(key) is str and key[:1] != "$" for key in value):
            return {key: self.pack(one, (*path, key)) for key, one in value.items()}
        return {"$dict": self._pairs(value, path)}

    def _ordered(self, value: Any, path: _Path) -> Any:
        packed = {"$ordered": self._pairs(value, path)}
        if vars(value):  # a state_dict's _metadata: the versions of its modules
            packed["attributes"] = self._dict(vars(value), path)
        return packed

    def _counter(self, value: Any, path: _Path) -> Any:
        return {"$counter": self._pairs(value, path)}

    def _default(self, value: Any, path: _Path) -> Any:
        factory = value.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if factory is not None and FACTORIES.get(str(name)) is not factory:
            raise _unstorable(factory, (*path, "default_factory"))
        return {"$default": self._pairs(value, path), "factory": name}

    def _pairs(self, value: Any, path: _Path) -> Any:
        pairs = []
        for key, one in value.items():
            if isinstance(key, Tensor):  # a key by its identity, which does not last
                raise _unstorable(key, path)
            pairs.append([self.pack(key, (*path, "key")), self.pack(one, (*path, key))])
        return pairs

    def _scalar(self, value: Any, path: _Path) -> Any:
        if value.dtype.hasobject:
            raise _unstorable(value, path)
        return {"$scalar": _encoded(value.tobytes()), "dtype": np.lib.format.dtype_to_descr(value.dtype)}

    def _array(self, value: Any, path: _Path) -> Any:
        if value.dtype.hasobject:
            raise _unstorable(value, path)
        whole = np.array(value, order="C")  # writable, without gaps; and the same when it is stored
        try:
            stored = torch.from_numpy(whole)
        except (TypeError, ValueError):  # a type that torch has not
            stored = torch.frombuffer(bytearray(whole.tobytes()) or bytearray(1), dtype=torch.uint8)[: whole.nbytes]
        place = self._tensor(stored, path)["$tensor"]
        return {"$array": place, "dtype": np.lib.format.dtype_to_descr(whole.dtype), "shape": list(whole.shape)}

    def _tensor(self, value: Tensor, path: _Path) -> Any:
        if value.layout is not torch.strided or value.is_quantized or value.is_nested or value.is_meta:
            raise _unstorable(value, path)
        seen = self._seen.setdefault(address(value), [])
        known = next((place for other, place in seen if _same(other, value)), None) if seen else None
        if known is None:
            known = self._stored(value, path)
            seen.append((value, known))
        else:
            name = _flat(path)
            if known[0] == path[0] and known[1] != name and (path[0], name) not in self._names:
                self.aliases.setdefault(path[0], {})[name] = known[1]
        packed: dict[str, Any] = {"$tensor": list(known)}
        if value.dtype not in DTYPES:
            packed |= {"dtype": _name(value.dtype), "shape": list(value.shape)}
        if not value.is_cpu:
            packed["device"] = str(value.device)
        return packed

    def _stored(self, value: Tensor, path: _Path) -> tuple[str, str]:
        if value.dtype not in DTYPES:
            value = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        part, name, number = path[0], _flat(path), 1
        while (part, name) in self._names or name == "__metadata__":
            number += 1
            name = f"{_flat(path)}#{number}"
        self._names.add((part, name))
        self.tensors.append(Stored(part, name, value))
        return part, name


def address(tensor: Tensor) -> int:
    """Where a tensor begins. An empty one has no memory of its own: it goes by its id, below zero, for no address."""
    return tensor.data_ptr() or -id(tensor)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors that begin at the same address are the same."""
    return (
        one.dtype is other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.device == other.device
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )


def _as_it_is(value: Any, _: _Path) -> Any:
    return value


def _int(value: int, _: _Path) -> Any:
    return value if -_LARGEST <= value < _LARGEST else {"$int": hex(value)}


def _float(value: float, _: _Path) -> Any:
    return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}


PLAIN: Mapping[type, Callable[[Any, _Path], Any]] = {
    type(None): _as_it_is, bool: _as_it_is, str: _as_it_is, int: _int, float: _float,
}  # fmt: skip
"""Kinds of values that never change, and what becomes of them."""


def _complex(value: complex, _: _Path) -> Any:
    return {"$complex": struct.pack(">dd", value.real, value.imag).hex()}


def _bytes(value: bytes, _: _Path) -> Any:
    return {"$bytes": _encoded(value)}


def _dtype(value: torch.dtype, _: _Path) -> Any:
    return {"$dtype": _name(value)}


def _device(value: torch.device, _: _Path) -> Any:
    return {"$device": str(value)}


def _encoded(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _flat(path: _Path) -> str:
    """The name of a tensor in its part's file, such as `0.exp_avg`."""
    return ".".join(map(str, path[1:])) or path[0]


def _place(path: _Path) -> str:
    """Where a value is, such as `scheduler.lr_lambdas[0]`."""
    inner = (f".{step}" if isinstance(step, str) else f"[{step!r}]" for step in path[1:])
    return f"{path[0]}{''.join(inner)}"


def _unstorable(value: Any, path: _Path) -> CheckpointError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if isinstance(value, Tensor):
        hint = "store a plain dense tensor instead: .to_dense(), .dequantize(), .full_tensor()"
        kind = f"{kind} ({value.layout}, {value.device})"
    elif callable(value):
        hint = "leave it out of the state_dict(), and make it anew before the state is loaded"
    else:
        hint = "let state_dict() give numbers, strings, tensors, arrays, and lists, tuples, dicts and sets of them"
    return CheckpointError(f"{_place(path)} is a {kind}, which a checkpoint cannot store", hint)
