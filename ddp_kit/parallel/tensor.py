"""Tensor parallelism: the plan of the layers to split, from the configuration or the model, and their split. DTensors.

Importing DTensors takes half a second, so modules that every run needs import this module where they need it.
"""

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

from ddp_kit.config.settings import ParallelConfig
from ddp_kit.errors import ConfigError
from ddp_kit.model.names import matching
from ddp_kit.state_values import Piece
from ddp_kit.texts import some

# --- DTensors ---------------------------------------------------------------------------------------------------------


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor. Used for values whose static type does not show this, such as parameters."""
    return isinstance(value, DTensor)


def mesh_dimensions(value: Any) -> tuple[str, ...]:
    """The names of the mesh dimensions of a DTensor; none for anything else."""
    if not isinstance(value, DTensor):
        return ()
    return value.device_mesh.mesh_dim_names or ()


def is_divided(value: Any, dimension: str) -> bool:
    """Whether a value is a DTensor that is divided among the ranks along this mesh dimension."""
    names = mesh_dimensions(value)
    return dimension in names and hasattr(value.placements[names.index(dimension)], "dim")


@torch.no_grad()
def local_tensor(value: Any) -> Tensor:
    """This rank's part of a DTensor, sharing memory with it; any other tensor is returned unchanged."""
    if isinstance(value, DTensor):
        value = value.to_local()
    return value  # type: ignore[no-any-return]


def reduced_gradient(gradient: Any, parameter: Any) -> Any:
    """This rank's part of a gradient, if any. A gradient that the backward pass has left unreduced is reduced first.

    A collective of the ranks that share the DTensor.
    """
    if is_dtensor(gradient) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_tensor(gradient)


def piece_of_dtensor(value: Any) -> Piece | None:
    """The part of a DTensor that this rank holds; None for anything else."""
    if not isinstance(value, DTensor):
        return None
    mesh = value.device_mesh
    offsets = [0] * value.ndim
    sizes = list(value.shape)
    # Tensor parallelism divided the tensor first, and FSDP then divided each rank's part, both as torch.chunk does.
    for number in reversed(range(mesh.ndim)):
        dimension = getattr(value.placements[number], "dim", None)
        if dimension is not None:
            share = -(-sizes[dimension] // mesh.size(number))
            begin = min(share * mesh.get_local_rank(number), sizes[dimension])
            offsets[dimension] += begin
            sizes[dimension] = min(share, sizes[dimension] - begin)
    local = local_tensor(value.detach())
    assert list(local.shape) == sizes, f"{value.placements} is not divided as expected"
    return Piece(local, tuple(value.shape), tuple(offsets))


def pieces_of_dtensors(model: nn.Module) -> dict[nn.Parameter, Piece]:
    """The pieces of a model's parameters that are DTensors."""
    pieces = {parameter: piece_of_dtensor(parameter) for parameter in model.parameters()}
    return {parameter: piece for parameter, piece in pieces.items() if piece is not None}


# --- Plan -------------------------------------------------------------------------------------------------------------

_KINDS = {"colwise": "column", "rowwise": "row", "sequence_parallel": "sequence"}
"""The name of a kind in the plans of transformers models -> the name in ddpkit."""


def tensor_plan(model: nn.Module, config: ParallelConfig) -> dict[str, str]:
    """How each layer is split ("column", "row" or "sequence"), by module name, from the configuration or the model.

    Raises `ConfigError` if there is no plan, or if the model does not match it.
    """
    modules = dict(model.named_modules())
    patterns: Mapping[str, str] = config.tensor_plan if config.tensor_plan != "auto" else _plan_of_model(model)
    plan: dict[str, str] = {}  # module name -> kind
    for pattern, kind in patterns.items():
        plan |= dict.fromkeys(matching(pattern, modules, model, "parallel.tensor_plan"), kind)
    users: dict[nn.Parameter, list[str]] = {}
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            users.setdefault(parameter, []).append(name)
    for name, kind in plan.items():
        _check_layer(name, modules[name], kind, config.tensor)
        tied = {other for parameter in modules[name].parameters(recurse=False) for other in users[parameter]} - {name}
        if tied:  # splitting would untie them
            raise ConfigError(
                f"parallel.tensor_plan names {name}, which shares a weight with {some(sorted(tied))}",
                "leave these modules out of parallel.tensor_plan, or give each its own weight",
            )
    return plan


def _plan_of_model(model: nn.Module) -> Mapping[str, str]:
    """The plan that the model itself defines, as models of the transformers library do."""
    for attribute in ("tp_plan", "_tp_plan", "base_model_tp_plan"):
        plan = getattr(model, attribute, None)
        if isinstance(plan, Mapping) and plan:
            unknown = {name: kind for name, kind in plan.items() if kind not in _KINDS}
            if unknown:
                raise ConfigError(
                    f"the tensor-parallel plan of {type(model).__name__} has unsupported kinds of layers: {unknown}",
                    "set parallel.tensor_plan to a plan with the kinds 'column', 'row' and 'sequence'",
                )
            return {name: _KINDS[kind] for name, kind in plan.items()}
    raise ConfigError(
        f"parallel.tensor needs a plan of the layers to split, but {type(model).__name__} does not define one",
        'set parallel.tensor_plan, such as {"blocks.*.qkv": "column", "blocks.*.proj": "row"}',
    )


def _check_layer(name: str, layer: nn.Module, kind: str, ranks: int) -> None:
    if kind == "sequence":
        return
    if isinstance(layer, nn.Linear):
        widths = {"column": (layer.out_features, "outputs"), "row": (layer.in_features, "inputs")}
    elif isinstance(layer, nn.Embedding):
        widths = {"column": (layer.embedding_dim, "columns"), "row": (layer.num_embeddings, "rows")}
    else:
        raise ConfigError(
            f"parallel.tensor_plan splits {name} ({kind!r}), but a {type(layer).__name__} cannot be split",
            "name only Linear and Embedding modules",
        )
    width, what = widths[kind]
    if width % ranks:
        raise ConfigError(
            f"{name} has {width} {what}, which is not divisible by parallel.tensor={ranks}",
            f"use {width - width % ranks} or {width + ranks - width % ranks} {what}, another number of ranks, or leave "
            "the layer out of parallel.tensor_plan",
        )


def split_dimensions(model: nn.Module, config: ParallelConfig) -> dict[nn.Parameter, int]:
    """The dimension along which each parameter in the plan is split; other parameters stay whole on each rank.

    Raises `ConfigError` like `tensor_plan`.
    """
    modules = dict(model.named_modules())
    dimensions: dict[nn.Parameter, int] = {}
    for name, kind in tensor_plan(model, config).items():
        if kind == "sequence":
            continue
        layer = modules[name]
        # A Linear's weight is [outputs, inputs], an Embedding's [rows, columns].
        first = (kind == "column") == isinstance(layer, nn.Linear)
        for short_name, parameter in layer.named_parameters(recurse=False):
            if first:  # a bias belongs to the outputs
                dimensions[parameter] = 0
            elif short_name == "weight":
                dimensions[parameter] = 1
    return dimensions


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
        is_split = any(is_dtensor(parameter) for parameter in layer.parameters(recurse=False))
        if layer in inside and not is_split:
            style = _style(layer, plan[name], paired=name.rpartition(".")[0] in summed, sequence=sequence)
            parallelize_module(layer, mesh, style, src_data_rank=None)


def _style(layer: nn.Module, kind: str, *, paired: bool, sequence: bool) -> ParallelStyle:
    """The parallel style of a layer.

    `paired`: whether a row layer gets the outputs of this column layer, so that they need not be gathered. `sequence`:
    whether activations between pairs of layers are split along the sequence dimension.
    """
    between: Any = Shard(_TOKENS) if sequence else Replicate()
    if kind == "sequence":
        return SequenceParallel(sequence_dim=_TOKENS, use_local_output=True)
    if isinstance(layer, nn.Embedding):
        if kind == "row":
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        return ColwiseParallel(output_layouts=between)
    if kind == "row":
        return RowwiseParallel(input_layouts=Shard(-1), output_layouts=between)
    return ColwiseParallel(input_layouts=between, output_layouts=Shard(-1) if paired else Replicate())
