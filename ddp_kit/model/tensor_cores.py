"""Advice about layers whose sizes keep matrix products from the full speed of tensor cores.

Tensor cores work with any size, but are fastest if all sizes of a product are multiples of 16 bytes; float8 products
need multiples of 16. Source: NVIDIA, Matrix Multiplication Background User's Guide, "Tensor Core Requirements".
"""

from collections import defaultdict
from math import prod

import torch
from torch import nn

from ddp_kit.log import logger
from ddp_kit.texts import some

_MULTIPLES = {"bf16": 8, "fp16": 8, "bf16-true": 8, "fp8": 16}
_FEWEST_WEIGHTS = 1_000_000
"""Layers with fewer weights take little of a step's time."""
_SPECIAL = 4
"""Products with sizes up to this one have kernels of their own, such as for images with 3 channels."""


def advise_on_sizes(model: nn.Module, precision: str, device: torch.device) -> None:
    """Log a line of advice if the model runs on a GPU and sizes of its large layers slow the tensor cores down."""
    line = unaligned_layers(model, precision) if device.type == "cuda" else ""
    if line:
        logger.info("advice: {}", line)


def unaligned_layers(model: nn.Module, precision: str) -> str:
    """Linear layers and convolutions to pad, in one line; empty if there are none, and for 32-bit precisions.

    A weight that a linear layer shares with an embedding, such as the vocabulary of a language model, counts as the
    linear layer's.
    """
    multiple = _MULTIPLES.get(precision)
    if multiple is None:
        return ""
    names: dict[tuple[int, str], list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for size, what in _sizes(module):
            if size % multiple and size > _SPECIAL:
                names[size, what].append(name or type(module).__name__)
    if not names:
        return ""
    pads = [
        f"pad the {size:,} {what} of {some(of)} to {size + -size % multiple:,}" for (size, what), of in names.items()
    ]
    return f"in {precision}, tensor cores are fastest if sizes are multiples of {multiple}: {'; '.join(pads)}"


def _sizes(module: nn.Module) -> tuple[tuple[int, str], ...]:
    """Sizes of a layer's matrix product with their names; empty for other modules, and for layers with few weights."""
    if isinstance(module, nn.Linear):
        weights = module.in_features * module.out_features
        sizes = (module.in_features, "inputs"), (module.out_features, "outputs")
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        channels = module.in_channels // module.groups
        weights = channels * module.out_channels * prod(module.kernel_size)
        sizes = (channels, "input channels"), (module.out_channels, "output channels")
    else:
        return ()
    return sizes if weights >= _FEWEST_WEIGHTS else ()
