"""Tensor parallel: layers split over the ranks of a group, which share their samples.

    kind       layer                               each rank holds       communication
    column     Linear, Embedding                   some of the outputs   none, or a gather of the outputs
    row        Linear, Embedding                   some of the inputs    a sum of the outputs
    sequence   norms, which look at single tokens  the whole weight      none: it gets part of the tokens

A column layer passes its part of the outputs on to a row layer in the same parent module; where there is none, as for
the head of a language model, its outputs are gathered. Source of the scheme: Shoeybi et al. 2019, arXiv 1909.08053.
"""

import fnmatch
from collections.abc import Mapping
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

from ddp_kit.config import ParallelConfig
from ddp_kit.errors import ConfigError, nearest, some

_KINDS = {"colwise": "column", "rowwise": "row", "sequence_parallel": "sequence"}
"""What the plans that models of the transformers library bring along call the kinds."""
_TOKENS = 1  # the dimension of the sequence


def tensor_plan(model: nn.Module, config: ParallelConfig) -> dict[str, str]:
    """Module names and their kinds, as the configuration or the model itself says. Raises `ConfigError`."""
    modules = dict(model.named_modules())
    patterns = _own_plan(model) if config.tensor_plan == "auto" else config.tensor_plan
    plan: dict[str, str] = {}  # of module names
    for pattern, kind in patterns.items():
        found = fnmatch.filter(modules, pattern)
        if not found:
            raise ConfigError(
                f"parallel.tensor_plan names {pattern!r}, and the model {type(model).__name__} has no such module",
                f"nearest: {nearest(pattern, [*modules]) or some([*modules][1:])}",
            )
        plan |= dict.fromkeys(found, kind)
    for name, kind in plan.items():
        _check_layer(name, modules[name], kind, config.tensor)
    return plan


def _own_plan(model: nn.Module) -> Mapping[str, str]:
    """The plan that a model brings along, as those of the transformers library do."""
    for attribute in ("tp_plan", "_tp_plan", "base_model_tp_plan"):
        plan = getattr(model, attribute, None)
        if isinstance(plan, Mapping) and plan:
            unknown = {name: kind for name, kind in plan.items() if kind not in _KINDS}
            if not unknown:
                return {name: _KINDS[kind] for name, kind in plan.items()}
            raise ConfigError(
                f"the tensor-parallel plan of {type(model).__name__} has kinds that are not known here: {unknown}",
                "give parallel.tensor_plan yourself",
            )
    raise ConfigError(
        f"parallel.tensor splits layers, and {type(model).__name__} does not say which",
        'give parallel.tensor_plan, such as {"blocks.*.qkv": "column", "blocks.*.proj": "row"}',
    )


def _check_layer(name: str, layer: nn.Module, kind: str, ranks: int) -> None:
    if kind == "sequence":
        return
    if isinstance(layer, nn.Linear):
        width, what = (layer.out_features, "outputs") if kind == "column" else (layer.in_features, "inputs")
    elif isinstance(layer, nn.Embedding):
        width, what = (layer.embedding_dim, "columns") if kind == "column" else (layer.num_embeddings, "rows")
    else:
        raise ConfigError(
            f"parallel.tensor_plan makes {name} a {kind} layer, and it is a {type(layer).__name__}",
            "name Linear and Embedding modules",
        )
    if width % ranks:
        raise ConfigError(
            f"{name} has {width} {what}, which parallel.tensor={ranks} does not divide",
            f"use {width - width % ranks} or {width + ranks - width % ranks} {what}, another number of ranks, or leave "
            "the layer out of parallel.tensor_plan",
        )


def split_layers(model: nn.Module, unit: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Replace the parameters of the planned layers in a unit of the model by the part that each rank of `mesh` holds.

    Every rank holds the same whole parameters before.
    """
    layers = {name: module for name, module in model.named_modules() if name in plan}
    summed = {name.rpartition(".")[0] for name in plan if plan[name] == "row" and isinstance(layers[name], nn.Linear)}
    sequence = "sequence" in plan.values()
    inside = set(unit.modules())
    for name, layer in layers.items():
        if layer in inside and not _is_split(layer):
            style = _style(layer, plan[name], paired=name.rpartition(".")[0] in summed, sequence=sequence)
            parallelize_module(layer, mesh, style, src_data_rank=None)


def _is_split(layer: nn.Module) -> bool:
    return any(hasattr(each, "placements") for each in layer.parameters(recurse=False))


def _style(layer: nn.Module, kind: str, *, paired: bool, sequence: bool) -> ParallelStyle:
    """`paired`: a row layer next to this one takes its outputs; `sequence`: activations between pairs are split."""
    between: Any = Shard(_TOKENS) if sequence else Replicate()
    embedding = isinstance(layer, nn.Embedding)
    if kind == "sequence":
        return SequenceParallel(sequence_dim=_TOKENS, use_local_output=True)
    if kind == "row":
        return RowwiseParallel(input_layouts=Replicate() if embedding else Shard(-1), output_layouts=between)
    if embedding:
        return ColwiseParallel(output_layouts=between)
    return ColwiseParallel(input_layouts=between, output_layouts=Shard(-1) if paired else Replicate())
