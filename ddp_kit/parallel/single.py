"""One rank: no communication."""

from ddp_kit.parallel.strategy import Passes, Strategy


class SingleRank(Strategy):
    """The whole model on one device, in one process."""

    def begin_step(self) -> None:
        pass

    def run_passes(self, passes: Passes) -> None:
        self.accumulate(passes)

    def sync_buffers(self) -> None:
        pass
