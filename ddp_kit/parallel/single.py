"""One rank: no communication."""

from collections.abc import Sequence
from typing import Self

from torch import nn

from ddp_kit.parallel.strategy import Passes, Strategy


class SingleRank(Strategy):
    """The whole model on one device, in one process."""

    def divided(self, parameters: Sequence[Sequence[nn.Parameter]]) -> list[Self]:
        return [self._of_update(each) for each in parameters]

    def begin_step(self) -> None:
        pass

    def run_passes(self, passes: Passes) -> None:
        self.accumulate(passes)

    def sync_buffers(self) -> None:
        pass
