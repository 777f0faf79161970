"""Packs nested state into named tensors and JSON, and assigns the tensors to writers, files and offsets."""

import base64
import hashlib
import json
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddp_kit.checkpoint.format import INDEX, PIECES, TENSORS, header
from ddp_kit.checkpoint.weight_files import WHOLE
from ddp_kit.checkpoint.writer import Region
from ddp_kit.errors import CheckpointError
from ddp_kit.state_values import Piece

# --- File layout ------------------------------------------------------------------------------------------------------
# The safetensors files of a writer are in one buffer, one after another.


# The dtypes that safetensors supports since 0.4.3; others are stored as bytes.
DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.uint16: "U16", torch.int16: "I16",
    torch.uint32: "U32", torch.int32: "I32", torch.uint64: "U64", torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float32: "F32", torch.float64: "F64",
}  # fmt: skip
DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}
_PAGE = 4096  # files begin at a multiple of this in memory, as direct I/O requires


class Stored(NamedTuple):
    """A tensor to write."""

    part: str
    name: str
    dtype: torch.dtype
    shape: torch.Size
    piece: Piece | None
    """The piece that is written; None if the whole tensor is written."""
    tensor: Tensor
    """The values to write, in a dtype that the file format supports; on any device, contiguous or not."""
    original: Tensor
    """The tensor in the state; differs from `tensor` if the file format does not support this tensor's dtype."""


@dataclass(frozen=True)
class TensorOffset:
    """The position of a tensor in the buffer."""

    number: int
    """The index of the tensor in the list passed to `lay_out`."""
    offset: int
    bytes: int


@dataclass(frozen=True)
class Layout:
    """The positions of files, headers and tensors in a buffer that holds the files one after another."""

    files: tuple[Region, ...]
    headers: Mapping[int, bytes]
    """Offset in the buffer -> the file header at that offset."""
    places: tuple[TensorOffset, ...]
    bytes: int
    """The size of the buffer, including padding between files."""


def lay_out(tensors: Sequence[Stored], aliases: Mapping[str, Mapping[str, str]], suffix: str = "") -> Layout:
    """Assign files and offsets to tensors.

    `aliases`: part -> {alias of a tensor -> the name under which the tensor is stored}. `suffix`: a suffix of each
    file name, before the extension.
    """
    parts: dict[str, list[int]] = {}
    for number, stored in enumerate(tensors):
        parts.setdefault(stored.part, []).append(number)
    files = []
    headers = {}
    places = []
    begin = 0
    for part, numbers in parts.items():
        # In descending order of element size, so that each tensor is aligned without padding.
        numbers.sort(key=lambda number: -tensors[number].dtype.itemsize)
        sizes = [tensors[number].tensor.nbytes for number in numbers]
        headers[begin] = _header([tensors[number] for number in numbers], aliases.get(part, {}))
        begins = [*accumulate(sizes, initial=begin + len(headers[begin]))]
        places += [TensorOffset(*place) for place in zip(numbers, begins[:-1], sizes, strict=True)]
        files.append(Region(f"{part}{suffix}{TENSORS}", begin, begins[-1] - begin))
        begin += -(-files[-1].bytes // _PAGE) * _PAGE
    return Layout(tuple(files), headers, tuple(places), begin)


def _header(tensors: Sequence[Stored], aliases: Mapping[str, str]) -> bytes:
    # transformers and safetensors.torch.load_model read the framework and the names of tied weights here.
    names = {stored.name for stored in tensors}
    metadata = {**{alias: name for alias, name in aliases.items() if name in names}, "format": "pt"}
    pieces: dict[str, dict[str, Any]] = {}
    for stored in tensors:
        if stored.piece is not None:
            pieces[stored.name] = {"shape": stored.piece.shape, "offsets": stored.piece.offsets}
            if stored.piece.flat:
                pieces[stored.name]["flat"] = True
    if pieces:
        metadata[PIECES] = json.dumps(pieces)
    table = ((stored.name, DTYPES[stored.dtype], stored.shape, stored.tensor.nbytes) for stored in tensors)
    return header(metadata, table)


# --- Packing ----------------------------------------------------------------------------------------------------------
# Nested state becomes named tensors, and JSON for everything else; `reader.unpack` restores it bit-exact.
#
#     {"model": {"weight": Tensor}, "scheduler": {"betas": (0.9, nan)}}    becomes
#     model.safetensors: "weight"
#     state.json: {"model": {"weight": {"$tensor": ["model", "weight"]}},
#                  "scheduler": {"betas": {"$tuple": [0.9, {"$float": "7ff8000000000000"}]}}}
#
# A value that JSON cannot express becomes an object whose first key begins with "$"; docs/checkpoints.md lists these.
# Training waits while a state is packed, so packing is written to take about a microsecond per tensor: names are built
# during the recursion, and the path of a value that cannot be stored is built only when its error is raised.


_PART = re.compile(r"\w[\w-]*", re.ASCII)
_LARGEST = 1 << 63  # larger integers are written in hexadecimal, because Python parses long decimals slowly
METADATA = "_metadata"
"""The attribute of a module's state_dict that holds the versions of its modules. `load_state_dict` reads it."""
DEEPEST = 200
"""The largest nesting depth."""
_LONG = 100  # for shorter lists, the check for a list of integers takes longer than it saves


@dataclass(frozen=True)
class Packed:
    """A state as returned by `pack`: named tensors, and JSON for everything else."""

    tensors: tuple[Stored, ...]
    aliases: Mapping[str, Mapping[str, str]]
    """Part -> {alias of a tensor -> the name under which the tensor is stored}."""
    text: Mapping[str, Any]
    """The content of state.json."""


def pack(state: Mapping[str, Any]) -> Packed:
    """Pack a state.

    `state`: part -> dicts, lists, tuples, numbers, strings, bytes, arrays, tensors and `Piece`s, in any nesting.
    Tensors with the same memory and shape are stored once, and loaded as the same tensor. Subclasses of tuple are
    loaded as tuples, parameters as tensors. Raises a `CheckpointError` that names the path of a value that cannot be
    stored.
    """
    packer = _Packer()
    text = {}
    for part, value in state.items():
        if not isinstance(part, str) or not _PART.fullmatch(part):
            raise CheckpointError(
                f"a part of the state is called {part!r}, which cannot be the name of a file",
                "use only letters, digits, _ and - in the name of a part",
            )
        try:
            text[part] = packer.pack_part(part, value)
        except _UnstorableError as error:
            raise _unstorable(part, value, error) from None
        except RecursionError:
            raise CheckpointError(
                f"the state is nested more than {DEEPEST} levels deep", "look for a container that contains itself"
            ) from None
    return Packed(tuple(packer.tensors), packer.aliases, text)


def unstorable_values(value: Any) -> list[Any]:
    """The first value inside a nested value that cannot be stored; empty if all can be stored."""
    try:
        _Packer().pack_part("value", value)
    except _UnstorableError as error:
        return [error.value]
    except RecursionError:
        return [value]
    return []


class _UnstorableError(Exception):
    def __init__(self, value: Any, *steps: Any) -> None:
        super().__init__()
        self.value = value
        self.steps = [*steps]
        """The keys and indices on the path from the value up to its part."""


class _Packer:
    def __init__(self) -> None:
        self.tensors: list[Stored] = []
        self.aliases: dict[str, dict[str, str]] = {}
        self._part = ""
        self._names: set[str] = set()  # in the current part
        # Address -> the tensors at it. They are held so that the memory of temporary tensors is not reused.
        self._seen: dict[int, list[Stored]] = {}
        self._kinds: dict[type, Callable[[Any, str, int], Any]] = {
            type(None): _same_value, bool: _same_value, str: _same_value,
            int: lambda value, *_: value if -_LARGEST <= value < _LARGEST else {"$int": hex(value)},
            float: lambda value, *_: value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()},
            complex: lambda value, *_: {"$complex": struct.pack(">dd", value.real, value.imag).hex()},
            bytes: lambda value, *_: {"$bytes": _encoded(value)},
            Tensor: self._tensor, Piece: self._piece, dict: self._dict, list: self._list, tuple: self._tuple,
            OrderedDict: self._ordered, Counter: self._counter,
            np.ndarray: self._array, torch.Size: self._tuple,
        }  # fmt: skip

    def pack_part(self, part: str, value: Any) -> Any:
        self._part = part
        self._names = {"__metadata__"}
        return self._pack(value, "", 1)

    def _pack(self, value: Any, name: str, depth: int) -> Any:
        """Pack a value. `name`: the path of the value in its part, such as `state.0.exp_avg`."""
        pack = self._kinds.get(type(value))
        if pack is not None:
            return pack(value, name, depth)
        if isinstance(value, torch.nn.Parameter) and not torch.nn.parameter.is_lazy(value):
            detached = value.detach()
            if type(detached) is not Tensor:
                raise _UnstorableError(value)
            return self._tensor(detached, name, depth)
        if isinstance(value, np.generic):
            return self._scalar(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._tuple(value, name, depth)
        raise _UnstorableError(value)

    def _list(self, value: Any, name: str, depth: int) -> Any:
        if len(value) > _LONG and set(map(type, value)) == {int} and min(value) >= -_LARGEST and max(value) < _LARGEST:
            return list(value)  # fast for the states of random generators, which have thousands of numbers
        packed: list[Any] = []
        prefix, depth = _below(name, depth)
        try:
            for one in value:
                packed.append(self._pack(one, f"{prefix}{len(packed)}", depth))
        except _UnstorableError as error:
            error.steps.append(len(packed))
            raise
        return packed

    def _tuple(self, value: Any, name: str, depth: int) -> Any:
        return {"$tuple": self._list(value, name, depth)}

    def _dict(self, value: Any, name: str, depth: int) -> Any:
        for key in value:
            if type(key) is not str or key[:1] == "$":
                return {"$dict": self._pairs(value, name, depth)}
        packed = {}
        prefix, depth = _below(name, depth)
        try:
            for key, one in value.items():
                packed[key] = self._pack(one, f"{prefix}{key}", depth)
        except _UnstorableError as error:
            error.steps.append(key)
            raise
        return packed

    def _ordered(self, value: Any, name: str, depth: int) -> Any:
        packed = {"$ordered": self._pairs(value, name, depth)}
        if vars(value).keys() - {METADATA}:
            raise _UnstorableError(value)
        if vars(value):
            packed["attributes"] = self._dict(vars(value), name, depth)
        return packed

    def _counter(self, value: Any, name: str, depth: int) -> Any:
        return {"$counter": self._pairs(value, name, depth)}

    def _pairs(self, value: Any, name: str, depth: int) -> Any:
        pairs = []
        prefix, depth = _below(name, depth)
        for key, one in value.items():
            if isinstance(key, Tensor):  # tensors as keys are compared by identity, which a checkpoint loses
                raise _UnstorableError(key)
            packed_key = key if type(key) is str else self._pack(key, f"{prefix}key", depth)
            try:
                pairs.append([packed_key, self._pack(one, f"{prefix}{key}", depth)])
            except _UnstorableError as error:
                error.steps.append(key)
                raise
        return pairs

    def _scalar(self, value: Any) -> Any:
        if value.dtype.hasobject or value.dtype.names:
            raise _UnstorableError(value)
        return {"$scalar": _encoded(value.tobytes()), "dtype": np.lib.format.dtype_to_descr(value.dtype)}

    def _array(self, value: Any, name: str, depth: int) -> Any:
        if value.dtype.hasobject or value.dtype.names:
            raise _UnstorableError(value)
        whole = np.array(value, order="C")  # writable and contiguous
        try:
            stored = torch.from_numpy(whole)
        except (TypeError, ValueError):  # a dtype that torch does not have
            stored = torch.frombuffer(bytearray(whole.tobytes()) or bytearray(1), dtype=torch.uint8)[: whole.nbytes]
        place = self._tensor(stored, name, depth)["$tensor"]
        return {"$array": place, "dtype": np.lib.format.dtype_to_descr(whole.dtype), "shape": list(whole.shape)}

    def _tensor(self, value: Tensor, name: str, _: int) -> Any:
        if value.layout is not torch.strided or value.is_quantized or value.is_nested or value.is_meta:
            raise _UnstorableError(value)
        name = name or self._part
        # An empty tensor has no address; its negated id is unique, and cannot be an address.
        address = value.data_ptr() or -id(value)
        for stored in self._seen.setdefault(address, []):
            if _same(stored.original, value):
                if stored.part == self._part and stored.name != name and name not in self._names:
                    self.aliases.setdefault(self._part, {})[name] = stored.name
                break
        else:
            stored = self._stored(value, name)
            self._seen[address].append(stored)
        packed: dict[str, Any] = {"$tensor": [stored.part, stored.name]}
        if stored.tensor is not value and value.dtype not in DTYPES:
            packed |= {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        if not value.is_cpu:
            packed["device"] = str(value.device)
        return packed

    def _piece(self, value: Piece, name: str, _: int) -> Any:
        if value.tensor.dtype not in DTYPES:
            raise _UnstorableError(value)
        name = name or self._part
        if id(value) not in self._seen:
            self._seen[id(value)] = [self._stored(value.tensor, name, value)]
        (stored,) = self._seen[id(value)]
        if name not in self._names:
            self.aliases.setdefault(self._part, {})[name] = stored.name
        packed: dict[str, Any] = {"$tensor": [stored.part, stored.name]}
        packed[WHOLE] = [DTYPES[value.tensor.dtype], [*value.shape]]
        if not value.tensor.is_cpu:
            packed["device"] = str(value.tensor.device)
        return packed

    def _stored(self, value: Tensor, path: str, piece: Piece | None = None) -> Stored:
        plain = value
        if value.dtype not in DTYPES:
            plain = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        name = path
        number = 1
        while name in self._names:
            number += 1
            name = f"{path}#{number}"
        self._names.add(name)
        stored = Stored(self._part, name, plain.dtype, plain.shape, piece, plain, value)
        self.tensors.append(stored)
        return stored


def _below(name: str, depth: int) -> tuple[str, int]:
    """The name prefix and the depth of the items in a container. Raises `RecursionError` if they are too deep."""
    if depth >= DEEPEST:
        raise RecursionError
    return f"{name}." if name else "", depth + 1


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors with the same address are views of the same values."""
    return (
        one.dtype is other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.device == other.device
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )


def _same_value(value: Any, *_: Any) -> Any:
    return value


def _encoded(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _unstorable(part: str, state: Any, error: _UnstorableError) -> CheckpointError:
    value = error.value
    path = [*reversed(error.steps)]
    place = part
    for step in path:
        if not isinstance(step, str):
            place += f"[{step!r}]"
        elif step not in ("", "entries"):  # the parts' own names, which users have not written
            place += f".{step}"
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if isinstance(value, Tensor):
        kind = f"{kind} ({value.layout}, {value.device})"
        storable = "a plain dense tensor, such as the result of to_dense(), dequantize() or full_tensor()"
    else:
        storable = "numbers, strings, bytes, tensors, arrays of numbers or text, or lists, tuples and dicts of them"
    return CheckpointError(
        f"{place} is a {kind}, which a checkpoint cannot store", _advice(part, state, path, storable)
    )


def _advice(part: str, state: Any, path: Sequence[Any], storable: str) -> str:
    """What the user of a value that cannot be stored can do. `path`: the keys and indices of the value in its part.

    `storable`: what can be stored instead.
    """
    class_name = part
    owner = state
    if part in ("callbacks", "scheduler") and path:
        owner = state[path[0]]
    if part == "callbacks" and len(path) > 1:
        class_name = owner[0]
    elif part in ("optimizer", "scheduler") and isinstance(owner, Mapping):
        class_name = owner.get("kind", part)
    convert = (
        f"override state_dict() in a subclass of {class_name} to return {storable} instead, and load_state_dict() to "
        "restore it"
    )
    match part, [*path[:2]]:
        case "optimizer", ["state", number]:
            return f"the {class_name} keeps it in its state of parameter {number}; {convert}"
        case "optimizer", ["param_groups" | "options", number]:
            return (
                f"parameter group {number} of the {class_name} has it; {convert}, or set it before creating the Trainer"
            )
        case (("optimizer" | "scheduler"), _):
            return f"state_dict() of the {class_name} returned it; {convert}"
        case "callbacks", _:
            return f"state_dict() of the callback {class_name} returned it: return {storable} instead"
        case (("model" | "modules"), _):
            return (
                "a module has it in its state_dict(): register the buffer with persistent=False and compute it again, "
                f"or return {storable} from get_extra_state()"
            )
    return f"return only {storable} from state_dict()"


# --- Division among writers -------------------------------------------------------------------------------------------
# Later saves reuse a division while the names, dtypes and shapes of the tensors remain the same.


BYTES_PER_WRITER = 16 << 20
"""The minimum bytes per writer. Small checkpoints use fewer writers; a single writer writes one file per part."""

Replicated = Callable[[str, str], bool]
"""A function: the part and the name of a tensor -> whether the tensor is identical on all writers."""


class Division:
    """The tensors of a packed state that one writer saves.

    Replicated tensors are divided among the writers; each writer saves the `Piece`s that it owns; writer 0 saves the
    rest. `writer`: the index of this writer. `writers`: the number of available writers.
    """

    def __init__(self, packed: Packed, replicated: Replicated, writer: int, writers: int) -> None:
        self._key = _key(packed)
        sizes: dict[int, int] = {}  # bytes of each replicated tensor
        pieces: dict[int, Piece] = {}
        for number, stored in enumerate(packed.tensors):
            if stored.piece is not None:
                pieces[number] = stored.piece
            elif replicated(stored.part, stored.name):
                sizes[number] = stored.tensor.nbytes
        self.writers = writers if pieces else active_writers(sum(sizes.values()), writers)
        """How many writers this state uses."""
        self.bytes = sum(stored.tensor.nbytes for stored in packed.tensors)
        """The total size of the tensors in this writer's state, including tensors that other writers save."""
        keys: list[tuple[Any, ...]] = [packed.tensors[number][:4] for number in sizes]
        keys += [(*packed.tensors[number][:3], piece.shape) for number, piece in pieces.items()]
        self.tensors = hashlib.sha256(repr(keys).encode()).hexdigest()
        """A hash of the names, dtypes and shapes of the divided tensors, which must be equal on all writers."""
        owners: list[int | None] = [0] * len(packed.tensors)
        load = [0] * self.writers
        for number in sorted(sizes, key=lambda number: -sizes[number]):  # largest first, to the least loaded
            least = load.index(min(load))
            owners[number] = least
            load[least] += sizes[number]
        for number, piece in pieces.items():
            owners[number] = writer if piece.owned else None
        numbers = [number for number, owner in enumerate(owners) if owner == writer]
        self.layout = lay_out([packed.tensors[number] for number in numbers], packed.aliases, self._suffix(writer))
        self.indexes: Mapping[str, bytes] = {}
        """The index files by name, which writer 0 writes: every writer computes the same division of whole tensors."""
        if writer == 0 and self.writers > 1:
            whole = {number: owner for number, owner in enumerate(owners) if number not in pieces and owner is not None}
            self.indexes = _indexes(packed.tensors, whole, self._suffix)
        self.numbers = [numbers[place.number] for place in self.layout.places]
        """The indices in `packed.tensors` of the tensors that this writer saves, in the order of their places."""
        self.replicated = [number in sizes for number in self.numbers]
        """For each tensor in `numbers`, whether it is replicated."""

    def _suffix(self, writer: int) -> str:
        """The suffix of a writer's file names, before the extension."""
        return f"-{writer + 1:05d}-of-{self.writers:05d}" if self.writers > 1 else ""

    def fits(self, packed: Packed) -> bool:
        """Whether this division can be reused for `packed`: its tensors must match in all but their values."""
        return self._key == _key(packed)


def _indexes(tensors: Sequence[Stored], owners: Mapping[int, int], suffix: Callable[[int], str]) -> dict[str, bytes]:
    """For each part with whole tensors in several files, an index of them, in Hugging Face's format.

    `owners`: the writer of each whole tensor. `suffix`: a function that returns the suffix of a writer's file names.
    """
    sizes: dict[str, int] = {}
    files: dict[str, dict[str, str]] = {}
    divided = set()
    for number, stored in enumerate(tensors):
        owner = owners.get(number)
        shape = stored.shape if stored.piece is None else stored.piece.shape
        sizes[stored.part] = sizes.get(stored.part, 0) + math.prod(shape) * stored.dtype.itemsize
        if owner is not None:
            files.setdefault(stored.part, {})[stored.name] = f"{stored.part}{suffix(owner)}{TENSORS}"
        if owner != 0:
            divided.add(stored.part)
    contents = {part: {"metadata": {"total_size": sizes[part]}, "weight_map": names} for part, names in files.items()}
    return {f"{part}{INDEX}": json.dumps(contents[part], indent=2).encode() for part in sorted(divided & files.keys())}


def active_writers(size: int, writers: int) -> int:
    """The number of writers to use for `size` bytes, out of `writers`."""
    return max(1, min(writers, size // BYTES_PER_WRITER))


def _key(packed: Packed) -> tuple[list[Any], ...]:
    """Everything that a layout depends on. This includes the order of aliases, because file headers keep that order."""
    pieces = [stored.piece for stored in packed.tensors]
    return (
        [stored[:4] for stored in packed.tensors],
        [piece and (piece.shape, piece.offsets, piece.flat, piece.owned) for piece in pieces],
        [(part, *names.items()) for part, names in packed.aliases.items()],
    )
