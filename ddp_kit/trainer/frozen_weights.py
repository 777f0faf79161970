"""The frozen weights of a run, which checkpoints leave out with `checkpoint.trainable_only`."""

from collections.abc import Mapping
from typing import Any

import torch

from ddp_kit.checkpoint.frozen import differ, entry_of, fingerprint
from ddp_kit.pieces import Piece
from ddp_kit.trainer.exchange import gathered
from ddp_kit.trainer.fingerprint import bits
from ddp_kit.trainer.parts import Parts


class FrozenWeights:
    """The parameters that do not require gradients, by their names. Methods are collectives unless they say otherwise.

    Their fingerprints are computed once; a checksum of what this rank holds tells at each save whether they still hold.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._entries: dict[str, Any] | None = None
        self._bits: list[int] = []

    def forget(self) -> None:
        """They may be others now. Not a collective."""
        self._entries = None

    def unchanged(self) -> str | None:
        """The name of one that has changed on this rank since `entries` were made; None: they are as they were."""
        if self._entries is None:
            self.entries()
            return None
        names = [*self._held()]
        now = self._local_bits()
        return next((name for name, old, new in zip(names, self._bits, now, strict=True) if old != new), None)

    def entries(self) -> dict[str, Any]:
        """What a checkpoint has of each: dtype, shape, fingerprint. The same under every placement."""
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
        """Raise `CheckpointError` unless all that a checkpoint left out is here, with the same values."""
        own = self.entries()
        if others := [name for name, entry in saved.items() if own.get(name) != entry]:
            raise differ(others)

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
