"""Float8 matrix products in linear layers, with torchao, for precision="fp8".

    output          = input * weight^T           input and weight in e4m3
    input's grad    = output's grad * weight     the output's gradient in e5m2
    weight's grad   = output's grad^T * input

Before each product, both matrices are scaled by their largest absolute values and cast to float8. Weights, their
gradients and the optimizer's state keep their dtypes. Source: Micikevicius et al. 2022, arXiv 2209.05433, except
that scales are computed from the current tensors ("dynamic scaling").
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ddp_kit.env import emulates_fp8
from ddp_kit.errors import ConfigError
from ddp_kit.log import logger
from ddp_kit.model.blocks import repeated_blocks
from ddp_kit.model.names import matching
from ddp_kit.texts import some

_CAPABILITY = (8, 9)  # the compute capability of the first GPUs with float8 products
_MULTIPLE = 16  # float8 products need sizes that are multiples of this number
# Layers of at most these sizes are slower in float8. The limits are torchao's, measured on an H100.
_SMALL_INPUT = 4096
_SMALL_OUTPUT = 1024


def convert_linear_layers(model: nn.Module, layers: str | Sequence[str], device: torch.device) -> None:
    """Replace linear layers of a model with torchao's float8 layers, which hold the same parameter objects.

    `layers`: names or patterns of linear layers; "auto": all linear layers in repeated blocks, except small layers,
    which float8 does not speed up. Layers are not converted if their input or output size is not a multiple of 16.

    Raises `ConfigError` if the device does not support float8 products, torchao is missing, or no layer can be
    converted.
    """
    emulated = emulates_fp8()
    if not emulated:
        _check_device(device)
    float8 = _torchao()
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    named = _named_layers(model, linear, layers)
    chosen: set[nn.Module] = set()
    unconverted: dict[str, list[str]] = {}  # reason -> the names of the layers that are not converted
    for name, layer in linear.items():
        reason = _why_not(name, layer, named, layers == "auto")
        if reason is None:
            chosen.add(layer)
        else:
            unconverted.setdefault(reason, []).append(name or "the model")
    problems = tuple(f"{some(unconverted[reason])}: {reason}" for reason in sorted(unconverted))
    if not chosen:
        found = ":" if problems else ", which has no linear layers"
        raise ConfigError(
            f"precision='fp8' found no linear layer to convert in the model {type(model).__name__}{found}",
            "set fp8_layers to linear layers whose sizes are multiples of 16, or use precision='bf16'",
            problems,
        )
    float8.convert_to_float8_training(
        model,
        module_filter_fn=lambda module, _name: module in chosen,
        # A weight's gradient is a product over all rows of a batch. Rows are padded, because their number is arbitrary.
        config=float8.Float8LinearConfig(emulate=emulated, pad_inner_dim=True),
    )
    logger.info(
        "fp8: converted {} of {} linear layers{}", len(chosen), len(linear), "".join(f"; {text}" for text in problems)
    )


def _check_device(device: torch.device) -> None:
    name = "the CPU"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= _CAPABILITY:
            return
        name = f"{torch.cuda.get_device_name(device)}, which has {'.'.join(map(str, capability))}"
    needed = ".".join(map(str, _CAPABILITY))
    raise ConfigError(
        f"precision='fp8' needs a GPU of compute capability {needed} or higher, such as L4 or H100; found: {name}",
        "use precision='bf16'",
    )


def _torchao() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchao warns about its own source code, which users cannot change
            import torchao.float8
    except ImportError as error:
        raise ConfigError(
            f"precision='fp8' needs torchao, which cannot be imported: {error}", "run: pip install 'ddpkit[fp8]'"
        ) from None
    return torchao.float8


def _named_layers(model: nn.Module, linear: dict[str, nn.Linear], layers: str | Sequence[str]) -> set[str]:
    """The names of the linear layers that `layers` selects. Raises `ConfigError` for a pattern without a match."""
    if layers == "auto":
        inside = {module for block in repeated_blocks(model).values() for module in block.modules()}
        return {name for name, layer in linear.items() if layer in inside}
    return {name for pattern in layers for name in matching(pattern, linear, model, "fp8_layers", "linear layer")}


def _why_not(name: str, layer: nn.Linear, named: set[str], automatic: bool) -> str | None:
    """The reason why a layer is not converted, or None if it is converted."""
    if not name:
        return "the model itself is this layer, and cannot be replaced"
    if name not in named:
        return "outside of the repeated blocks" if automatic else "not named in fp8_layers"
    # A converted layer would lose its hooks, such as those of torch's older weight_norm.
    has_hooks = any(hooks for attribute, hooks in vars(layer).items() if attribute.endswith("_hooks"))
    if type(layer) is not nn.Linear or "forward" in vars(layer) or has_hooks:
        return "not a plain nn.Linear (a subclass, or with hooks or its own forward)"
    if layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE:
        return f"a size is not a multiple of {_MULTIPLE}"
    if automatic and layer.in_features <= _SMALL_INPUT and layer.out_features <= _SMALL_OUTPUT:
        return f"too small to become faster (at most {_SMALL_INPUT} inputs and {_SMALL_OUTPUT} outputs)"
    return None
