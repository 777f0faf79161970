"""Whether what was to stay as it is while it is copied did so."""

from collections.abc import Sequence

import torch

from ddp_kit.checkpoint.copying import Pair


class Steady:
    """Tensors that nothing is to change for a while, with their copies: has it?

    What torch changes in place counts up in the tensor's version. `tensor.data` has a version of its own, and so have
    fused optimizers and collectives: there only a look at the values helps.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = pairs
        self._versions = self._found()

    def untouched(self) -> bool:
        """Whether no operation is known to have changed them since."""
        return self._versions == self._found()

    def as_copied(self) -> bool:
        """Whether they are still what was copied; False where that cannot be told. Takes as long as copying."""
        try:
            return self.untouched() and all(torch.equal(copied, tensor.cpu()) for copied, tensor in self._pairs)
        except RuntimeError:  # of memory, or of the device
            return False

    def _found(self) -> list[int]:
        return [tensor._version for _, tensor in self._pairs]
