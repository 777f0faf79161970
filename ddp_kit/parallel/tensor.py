"""DTensors, and the split of layers by tensor parallelism."""

from collections.abc import Mapping, Set
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ddp_kit.pieces import Piece

# --- DTensors ---------------------------------------------------------------------------------------------------------


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor. Used for values whose static type does not show this, such as parameters."""
    return isinstance(value, DTensor)


def is_divided(value: Any, dimension: str) -> bool:
    """Whether a value is a DTensor that is divided among the ranks along this mesh dimension."""
    if not isinstance(value, DTensor):
        return False
    names = value.device_mesh.mesh_dim_names or ()
    return dimension in names and hasattr(value.placements[names.index(dimension)], "dim")


@torch.no_grad()
def local_part(value: Any) -> Tensor:
    """This rank's part of a DTensor, sharing memory with it; any other tensor is returned unchanged."""
    local: Tensor = value.to_local() if isinstance(value, DTensor) else value
    return local


def reduced_part(gradient: Any, parameter: Any) -> Tensor:
    """This rank's part of a gradient. A gradient that the backward pass has left unreduced is reduced first.

    A collective of the ranks that share the DTensor.
    """
    if is_dtensor(gradient) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_part(gradient)


def piece_of_dtensor(value: Any) -> Piece | None:
    """The part of a DTensor that this rank holds; None for anything else."""
    if not isinstance(value, DTensor):
        return None
    mesh, offsets, sizes = value.device_mesh, [0] * value.ndim, list(value.shape)
    # Tensor parallelism divided the tensor first, and FSDP then divided each rank's part, both as torch.chunk does.
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


# --- Split of the layers ----------------------------------------------------------------------------------------------
# The ranks of a group use the same samples.
#
#     kind       layer                               each rank holds       communication
#     column     Linear, Embedding                   some of the outputs   none, or a gather of the outputs
#     row        Linear, Embedding                   some of the inputs    a sum of the outputs
#     sequence   norms over single tokens            the whole weight      none: the layer gets part of the tokens
#
# A column layer passes its part of the outputs to a row layer in the same parent module. If there is no row layer, as
# for the head of a language model, the outputs are gathered. Source: Shoeybi et al. 2019, arXiv 1909.08053.


_TOKENS = 1  # the dimension of the sequence


def split_layers(model: nn.Module, inside: Set[nn.Module], plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Replace each parameter of the layers in `plan` with this rank's part of the parameter.

    `inside`: the modules to split; other layers in `plan` are unchanged. `plan`: module name -> kind of split.
    Every rank of `mesh` must hold the same whole parameters before the call.
    """
    layers = {name: module for name, module in model.named_modules() if name in plan}
    summed = {name.rpartition(".")[0] for name in plan if plan[name] == "row" and isinstance(layers[name], nn.Linear)}
    sequence = "sequence" in plan.values()
    for name, layer in layers.items():
        if layer in inside and not _is_split(layer):
            style = _style(layer, plan[name], paired=name.rpartition(".")[0] in summed, sequence=sequence)
            parallelize_module(layer, mesh, style, src_data_rank=None)


def _is_split(layer: nn.Module) -> bool:
    return any(hasattr(parameter, "placements") for parameter in layer.parameters(recurse=False))


def _style(layer: nn.Module, kind: str, *, paired: bool, sequence: bool) -> ParallelStyle:
    """The parallel style of a layer.

    `paired`: whether a row layer gets the outputs of this column layer, so that they need not be gathered. `sequence`:
    whether activations between pairs of layers are split along the sequence dimension.
    """
    between: Any = Shard(_TOKENS) if sequence else Replicate()
    embedding = isinstance(layer, nn.Embedding)
    if kind == "sequence":
        return SequenceParallel(sequence_dim=_TOKENS, use_local_output=True)
    if kind == "row":
        return RowwiseParallel(input_layouts=Replicate() if embedding else Shard(-1), output_layouts=between)
    if embedding:
        return ColwiseParallel(output_layouts=between)
    return ColwiseParallel(input_layouts=between, output_layouts=Shard(-1) if paired else Replicate())
