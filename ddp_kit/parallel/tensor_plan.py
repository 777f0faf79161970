"""Determines which layers tensor parallelism splits: the plan comes from the configuration or the model.

This module does not import DTensors.
"""

import fnmatch
from collections.abc import Mapping

from torch import nn

from ddp_kit.config.settings import ParallelConfig
from ddp_kit.errors import ConfigError, some, suggestion

_KINDS = {"colwise": "column", "rowwise": "row", "sequence_parallel": "sequence"}
"""The name of a kind in the plans of transformers models -> the name in ddpkit."""


def tensor_plan(model: nn.Module, config: ParallelConfig) -> dict[str, str]:
    """How each layer is split ("column", "row" or "sequence"), by module name, from the configuration or the model.

    Raises `ConfigError` if there is no plan, or if the model does not match it.
    """
    modules = dict(model.named_modules())
    patterns = _own_plan(model) if config.tensor_plan == "auto" else config.tensor_plan
    plan: dict[str, str] = {}  # module name -> kind
    for pattern, kind in patterns.items():
        names = fnmatch.filter(modules, pattern)
        if not names:
            raise ConfigError(
                f"parallel.tensor_plan names {pattern!r}, but the model {type(model).__name__} has no such module",
                suggestion(pattern, [module for module in modules if module], "modules"),
            )
        plan |= dict.fromkeys(names, kind)
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


def _own_plan(model: nn.Module) -> Mapping[str, str]:
    """The plan that the model itself defines, as models of the transformers library do."""
    for attribute in ("tp_plan", "_tp_plan", "base_model_tp_plan"):
        plan = getattr(model, attribute, None)
        if isinstance(plan, Mapping) and plan:
            unknown = {name: kind for name, kind in plan.items() if kind not in _KINDS}
            if not unknown:
                return {name: _KINDS[kind] for name, kind in plan.items()}
            raise ConfigError(
                f"the tensor-parallel plan of {type(model).__name__} has unsupported kinds of layers: {unknown}",
                "set parallel.tensor_plan to a plan with the kinds 'column', 'row' and 'sequence'",
            )
    raise ConfigError(
        f"parallel.tensor needs a plan of the layers to split, but {type(model).__name__} does not define one",
        'set parallel.tensor_plan, such as {"blocks.*.qkv": "column", "blocks.*.proj": "row"}',
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
            f"parallel.tensor_plan splits {name} ({kind!r}), but a {type(layer).__name__} cannot be split",
            "name only Linear and Embedding modules",
        )
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
    modules, dimensions = dict(model.named_modules()), {}
    for name, kind in tensor_plan(model, config).items():
        if kind == "sequence":
            continue
        layer = modules[name]
        # A Linear's weight is [outputs, inputs], an Embedding's [rows, columns].
        first = (kind == "column") == isinstance(layer, nn.Linear)
        for short_name, parameter in layer.named_parameters(recurse=False):
            if short_name == "weight":
                dimensions[parameter] = 0 if first else 1
            elif first:  # a bias belongs to the outputs
                dimensions[parameter] = 0
    return dimensions
