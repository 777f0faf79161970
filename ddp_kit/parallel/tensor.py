"""Tensor parallelism: splits layers over the ranks of a group, which use the same samples.

    kind       layer                               each rank holds       communication
    column     Linear, Embedding                   some of the outputs   none, or a gather of the outputs
    row        Linear, Embedding                   some of the inputs    a sum of the outputs
    sequence   norms, which look at single tokens  the whole weight      none: it gets part of the tokens

A column layer passes its part of the outputs to a row layer in the same parent module. If there is none, as for the
head of a language model, its outputs are gathered. Source: Shoeybi et al. 2019, arXiv 1909.08053.
"""

from collections.abc import Mapping, Set
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

_TOKENS = 1  # the dimension of the sequence


def split_layers(model: nn.Module, inside: Set[nn.Module], plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Replace the parameters of the planned layers among the modules `inside` with this rank's part of them.

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
    return any(hasattr(each, "placements") for each in layer.parameters(recurse=False))


def _style(layer: nn.Module, kind: str, *, paired: bool, sequence: bool) -> ParallelStyle:
    """`paired`: a row layer takes the outputs; `sequence`: activations between such pairs are split by tokens."""
    between: Any = Shard(_TOKENS) if sequence else Replicate()
    embedding = isinstance(layer, nn.Embedding)
    if kind == "sequence":
        return SequenceParallel(sequence_dim=_TOKENS, use_local_output=True)
    if kind == "row":
        return RowwiseParallel(input_layouts=Replicate() if embedding else Shard(-1), output_layouts=between)
    if embedding:
        return ColwiseParallel(output_layouts=between)
    return ColwiseParallel(input_layouts=between, output_layouts=Shard(-1) if paired else Replicate())
