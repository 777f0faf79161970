"""One rank: nothing is shared with others."""

from ddp_kit.parallel.strategy import Passes, Strategy


class SingleRank(Strategy):
    """The whole model on one device, in one process."""

    def begin_step(self) -> None:
        pass

    def run_passes(self, passes: Passes) -> None:
        for number in range(passes.count):
            loss = passes.forward(number)
            if number == passes.count - 1:
                passes.before_reduction(loss)
            loss.backward()  # type: ignore[no-untyped-call]
            passes.after_backward()

    def sync_buffers(self) -> None:
        pass
