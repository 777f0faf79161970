"""Writes to weights in forward and backward passes, which a strategy would lose.

A module may write its own weights, such as `self.weight.clamp_(-1, 1)` under `torch.no_grad()`. With sharded weights
the write is lost, or reaches only a part. Version counters of autograd find such writes without waiting for the device,
except those through `.data`, which checksums find in the first pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp_kit.distributed.consistency import bits
from ddp_kit.errors import ConfigError, LossError
from ddp_kit.texts import some
from ddp_kit.torch_internals import memory_of, version_of


def check_no_max_norm(model: nn.Module) -> None:
    """Raise `ConfigError` for trained embeddings with `max_norm`: each rank would limit the rows of its own samples."""
    embeddings = [
        (name or "the model", layer)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.weight.requires_grad
    ]
    limited = [name for name, layer in embeddings if layer.max_norm is not None]
    if limited:
        raise ConfigError(
            f"embeddings with max_norm are not supported with several ranks: {some(limited)}. Their forward pass "
            "limits the norms of the rows that it uses, and other ranks use other rows",
            "leave out max_norm, and limit the norms of all rows in on_step of a Callback; or of the rows that forward "
            "uses: rows * (max_norm / rows.norm(dim=-1, keepdim=True)).clamp(max=1)",
        )


class WriteCheck:
    """Finds weights that are written between `begin` and `end`.

    `names`: the names of the weights. `strategy`: the name of the strategy in the error.
    """

    def __init__(self, names: Sequence[str], strategy: str) -> None:
        self._names = names
        self._strategy = strategy
        self._weights: Sequence[Any] = ()
        self._versions: list[int] = []
        self._sums: Tensor | None = None
        self._is_first = True

    def begin(self, weights: Sequence[Any]) -> None:
        """Note the versions of the weights, in the order of the names; the first time also their values."""
        self._weights = weights
        self._versions = [version_of(weight) for weight in weights]
        self._sums = self._checksums() if self._is_first else None

    def end(self) -> None:
        """Raise `LossError` if a weight was written since `begin`. Waits for the device only the first time."""
        weights, before = self._weights, self._versions
        self._weights = ()
        written = [version_of(weight) != version for weight, version in zip(weights, before, strict=True)]
        if self._sums is not None:
            self._weights = weights
            changed = (self._checksums() != self._sums).tolist()
            written = [one or other for one, other in zip(written, changed, strict=True)]
            self._weights, self._sums, self._is_first = (), None, False
        if any(written):
            names = [name for name, is_written in zip(self._names, written, strict=True) if is_written]
            raise LossError(
                f"a forward or backward pass changes the weights {some(names)}, but with {self._strategy} each rank "
                "holds or updates only a part of the weights: the change would be lost",
                "compute the changed weight in forward without storing it, as torch.nn.utils.parametrize does; change "
                "weights in on_step of a Callback; or use parallel='ddp'",
            )

    def _checksums(self) -> Tensor:
        sums = [bits([memory_of(weight.detach())]) for weight in self._weights]
        return torch.stack([each.to(sums[0].device) for each in sums]) if sums else torch.zeros(0)
