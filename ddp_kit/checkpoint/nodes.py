"""`as_on_rank_0`: the state to save if each node has a folder of its own, which is the state of rank 0 in all of them.

Any node may be the one from which the others get the state after a failure.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any, TypeVar

import torch
from torch import Tensor

from ddp_kit.checkpoint.lock import raised_on_all_ranks
from ddp_kit.checkpoint.packing import DTYPE_OF, DTYPES, Packed, Replicated, Stored
from ddp_kit.distributed.consistency import bits
from ddp_kit.distributed.world import World, broadcast_bytes, broadcast_tensors, largest

_SUMMED = 1 << 22  # elements of a tensor in one checksum, which needs as much memory again
_SPREAD = 1 << 13  # `bits` of several tensors with so few elements depends on the order of their elements

_Key = TypeVar("_Key")
_Item = tuple[str, str, str, tuple[int, ...]]
"""A tensor that may differ between ranks: part, name, dtype, shape."""


def as_on_rank_0(state: Callable[[], Packed], replicated: Replicated, world: World, *, first: bool) -> Packed:
    """This rank's state; on the first rank of each folder, with the values of rank 0. A collective.

    Ranks differ in buffers, such as those of batch norm, and in callbacks that keep something on one rank only. Only
    what differs is sent. `state`, `replicated`: as for `Saver.save`. `first`: whether this is the first rank with its
    folder. If `state` raises `CheckpointError` on any rank, all ranks do.
    """
    with raised_on_all_ranks(world):
        packed = state()
    own: dict[_Item, Stored] = {}
    texts: dict[str, str] = {}
    if first:
        own = {_item(stored): stored for stored in packed.tensors if _may_differ(stored, replicated)}
        texts = {part: json.dumps(value) for part, value in packed.text.items()}
    digests = {part: blake2b(text.encode(), digest_size=16).hexdigest() for part, text in texts.items()}
    sums = _checksums(own, world)
    content = json.dumps([digests, [*sums.items()]]).encode()
    digests_on_0, table = json.loads(broadcast_bytes(content, world))
    sums_on_0 = {(part, name, dtype, tuple(shape)): numbers for (part, name, dtype, shape), numbers in table}
    parts = _differing(digests, digests_on_0, world, first=first)
    changed = {part: texts[part] for part in parts if world.is_main}
    changed = json.loads(broadcast_bytes(json.dumps(changed).encode(), world))
    items = _differing(sums, sums_on_0, world, first=first)
    values = {item: _host_memory(item, own if world.is_main else {}) for item in items}
    broadcast_tensors([*values.values()], world)
    if world.is_main or not first:
        return packed
    received = {item: Stored(*item[:2], value.dtype, value.shape, None, value, value) for item, value in values.items()}
    tensors = [
        received.pop(_item(stored), stored)
        for stored in packed.tensors
        if not _may_differ(stored, replicated) or _item(stored) in sums_on_0
    ]
    text = {**packed.text, **{part: json.loads(content) for part, content in changed.items()}}
    return replace(packed, tensors=(*tensors, *received.values()), text=text)


def _differing(own: Mapping[_Key, Any], on_0: Mapping[_Key, Any], world: World, *, first: bool) -> list[_Key]:
    """The entries of rank 0 that differ on the first rank of any folder. A collective."""
    if not on_0:
        return []
    differs = [int(first and own.get(key) != value) for key, value in on_0.items()]
    return [key for key, at_any in zip(on_0, largest(world, differs), strict=True) if at_any]


def _may_differ(stored: Stored, replicated: Replicated) -> bool:
    return stored.piece is None and not replicated(stored.part, stored.name)


def _item(stored: Stored) -> _Item:
    return stored.part, stored.name, DTYPES[stored.dtype], tuple(stored.shape)


def _checksums(tensors: Mapping[_Item, Stored], world: World) -> dict[_Item, list[int]]:
    """Checksums of each tensor, which depend on the order of its elements. Waits for the device once."""
    chunks = {item: torch.split(stored.tensor.reshape(-1), _SUMMED) for item, stored in tensors.items()}
    sums = [bits(torch.split(chunk, _SPREAD)).to(world.device) for parts in chunks.values() for chunk in parts]
    numbers = iter(torch.stack(sums).tolist() if sums else ())
    return {item: [next(numbers) for _ in parts] for item, parts in chunks.items()}


def _host_memory(item: _Item, values: Mapping[_Item, Stored]) -> Tensor:
    """A contiguous tensor in host memory, with the item's values if they are in `values`."""
    if item in values:
        return values[item].tensor.detach().cpu().contiguous()
    _, _, dtype, shape = item
    return torch.empty(shape, dtype=DTYPE_OF[dtype])
