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
from ddp_kit.model.names import trained_embeddings
from ddp_kit.texts import some
from ddp_kit.torch_internals import memory_of, version_of


def check_no_max_norm(model: nn.Module) -> None:
    """Raise `ConfigError` for trained embeddings with `max_norm`: each rank would limit the rows of its own samples."""
    limited = [name for name, layer in trained_embeddings(model).items() if layer.max_norm is not None]
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
        if self._is_first:
            self._sums = self._checksums()

    def end(self) -> None:
        """Raise `LossError` if a weight was written since `begin`. Waits for the device only the first time."""
        pairs = zip(self._weights, self._versions, strict=True)
        written = [version_of(weight) != version for weight, version in pairs]
        if self._sums is not None:
            changed = (self._checksums() != self._sums).tolist()
            written = [one or other for one, other in zip(written, changed, strict=True)]
            self._sums = None
            self._is_first = False
        self._weights = ()
        if any(written):
            names = [name for name, is_written in zip(self._names, written, strict=True) if is_written]
            raise LossError(
                f"a forward or backward pass changes the weights {some(names)}, but with {self._strategy} each rank "
                "holds or updates only a part of the weights: the change would be lost",
                "compute the changed weight in forward without storing it, as torch.nn.utils.parametrize does; change "
                "weights in on_step of a Callback; or use parallel='ddp'",
            )

    def _checksums(self) -> Tensor:
        if not self._weights:
            return torch.zeros(0)
        sums = [bits([memory_of(weight.detach())]) for weight in self._weights]
        return torch.stack([each.to(sums[0].device) for each in sums])
