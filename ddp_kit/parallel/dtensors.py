"""The part of a DTensor that one rank holds, as fully_shard and tensor parallel divide it."""

from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ddp_kit.pieces import Piece


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """For values whose type says nothing of it, such as parameters."""
    return isinstance(value, DTensor)


def is_divided(value: Any, dimension: str) -> bool:
    """Whether the ranks along this dimension of the mesh hold different parts of it."""
    if not isinstance(value, DTensor):
        return False
    names = value.device_mesh.mesh_dim_names or ()
    return dimension in names and hasattr(value.placements[names.index(dimension)], "dim")


@torch.no_grad()
def local_part(value: Any) -> Tensor:
    """What this rank holds of a DTensor, in its memory; any other tensor itself."""
    found: Tensor = value.to_local() if isinstance(value, DTensor) else value
    return found


def reduced_part(gradient: Any, parameter: Any) -> Tensor:
    """This rank's part of a gradient; where tensor parallel has left sums to be taken, these are taken. A collective
    of the ranks that share the DTensor."""
    if is_dtensor(gradient) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_part(gradient)


def piece_of_dtensor(value: Any) -> Piece | None:
    """The part of a DTensor that this rank holds; None for anything else."""
    if not isinstance(value, DTensor):
        return None
    mesh, offsets, sizes = value.device_mesh, [0] * value.ndim, list(value.shape)
    # Tensor parallel has divided the tensor first, and FSDP has then divided what each rank had: as torch.chunk does.
    for number in reversed(range(mesh.ndim)):
        dimension = getattr(value.placements[number], "dim", None)
        if dimension is not None:
            share = -(-sizes[dimension] // mesh.size(number))
            begin = min(share * mesh.get_local_rank(number), sizes[dimension])
            offsets[dimension] += begin
            sizes[dimension] = min(share, sizes[dimension] - begin)
    local = local_part(value.detach())
    assert list(local.shape) == sizes, f"{value.placements} is not divided as expected"
    return Piece(local, tuple(value.shape), tuple(offsets))
