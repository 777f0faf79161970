"""Does a save that is due even if the body of a loop over `Trainer.steps` leaves the loop."""

from collections.abc import Generator, Iterator
from itertools import count

from ddp_kit.errors import DdpKitError
from ddp_kit.log import logger
from ddp_kit.records import Step
from ddp_kit.trainer.barrier import all_arrive
from ddp_kit.trainer.checkpoints import Checkpoints
from ddp_kit.trainer.run_state import RunState
from ddp_kit.world import World

_SECONDS = 10.0
"""The barrier timeout when a loop is left: ranks are at most one loop body apart."""
_loops = count()


Loop = Generator[Step, None, None]


def save_when_left(steps: Loop, world: World, checkpoints: Checkpoints, run_state: RunState) -> Iterator[Step]:
    """Yield the steps; if the loop is left after a step whose save is due, do that save.

    Waits until all saves are on disk, so that the next Trainer finds them. A generator cannot tell a `break` from an
    exception, so nothing is saved unless all ranks leave the loop.
    """
    number = next(_loops)
    for step in steps:
        loop = run_state.loop
        try:
            yield step
        except GeneratorExit:
            due = checkpoints.is_due and not checkpoints.is_saved and run_state.loop is loop
            place = f"the end of a loop over steps() after step {step.number}"
            due = due and all_arrive(world, place, f"left/{number}", _SECONDS)
            steps.close()
            try:
                (checkpoints.finish if due else checkpoints.settle)()
            except DdpKitError as error:  # Python may swallow an error raised while a generator is closed
                logger.error("the checkpoint after step {} could not be saved: {}", step.number, error)
            raise
