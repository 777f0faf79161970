"""The frozen weights of a run, which `checkpoint.trainable_only` leaves out of checkpoints."""

from collections.abc import Mapping
from typing import Any

import torch

from ddp_kit.checkpoint.frozen import entry_of, fingerprint, frozen_weights_differ
from ddp_kit.pieces import Piece
from ddp_kit.trainer.exchange import gathered
from ddp_kit.trainer.fingerprint import bits
from ddp_kit.trainer.parts import Parts


class FrozenWeights:
    """The parameters that do not require gradients, by name. Methods are collectives unless they say otherwise.

    Their fingerprints are computed once; at each save, a faster checksum of this rank's part detects changes.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._entries: dict[str, Any] | None = None
        self._bits: list[int] = []

    def forget(self) -> None:
        """Discard the fingerprints, because the weights may have been replaced. Not a collective."""
        self._entries = None

    def unchanged(self) -> str | None:
        """The name of a weight that has changed on this rank since its fingerprint was computed; None: none has."""
        if self._entries is None:
            self.entries()
            return None
        names = [*self._held()]
        now = self._local_bits()
        return next((name for name, old, new in zip(names, self._bits, now, strict=True) if old != new), None)

    def entries(self) -> dict[str, Any]:
        """Name -> dtype, shape and fingerprint, as stored in a checkpoint; the same for every parallel strategy."""
        if self._entries is None:
            held = self._held()
            sums = [fingerprint(value).to(self._parts.world.device) for value in held.values()]
            own = torch.stack(sums).tolist() if sums else []
            pieces = [isinstance(value, Piece) for value in held.values()]
            counts = [not isinstance(value, Piece) or value.owned for value in held.values()]
            everyone = gathered(self._parts.world, [number * count for number, count in zip(own, counts, strict=True)])
            self._entries = {
                name: entry_of(value, sum(column) if is_piece else column[0])
                for (name, value), is_piece, *column in zip(held.items(), pieces, *everyone, strict=True)
            }
            self._bits = self._local_bits()
        return self._entries

    def compare(self, saved: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` unless the weights that a checkpoint left out are here, with the same values."""
        own = self.entries()
        if others := [name for name, entry in saved.items() if own.get(name) != entry]:
            raise frozen_weights_differ(others)

    def _held(self) -> dict[str, Any]:
        names = {
            name for name, each in self._parts.model.named_parameters(remove_duplicate=False) if not each.requires_grad
        }
        return {name: value for name, value in self._parts.strategy.model_state().items() if name in names}

    def _local_bits(self) -> list[int]:
        held = [value.tensor if isinstance(value, Piece) else value for value in self._held().values()]
        sums = [bits([each]).to(self._parts.world.device) for each in held]
        found: list[int] = torch.stack(sums).tolist() if sums else []
        return found
