"""Leaving a loop over `Trainer.steps` early: a save that is due after that step is still done."""

from collections.abc import Generator, Iterator
from itertools import count

from ddp_kit.errors import DdpKitError
from ddp_kit.log import logger
from ddp_kit.records import Step
from ddp_kit.trainer.barrier import all_come
from ddp_kit.trainer.checkpoints import Checkpoints
from ddp_kit.trainer.run_state import RunState
from ddp_kit.world import World

_SECONDS = 10.0
"""The timeout for all ranks to leave the loop: they are at most one loop body apart."""
_loops = count()


Loop = Generator[Step, None, None]


def saved_when_left(steps: Loop, world: World, checkpoints: Checkpoints, run_state: RunState) -> Iterator[Step]:
    """The same steps; if the loop is left at a step whose save is due, save it. Waits until all saves are on disk, so
    that a Trainer made next finds them.

    A `break` and an exception look the same here. If only one rank leaves the loop, nothing is saved.
    """
    number = next(_loops)
    for step in steps:
        loop = run_state.loop
        try:
            yield step
        except GeneratorExit:
            due = checkpoints.is_due and not checkpoints.is_saved and run_state.loop is loop
            place = f"the end of a loop over steps() after step {step.number}"
            due = due and all_come(world, place, f"left/{number}", _SECONDS)
            steps.close()
            try:
                (checkpoints.finish if due else checkpoints.settle)()
            except DdpKitError as error:  # an error raised while a generator is closed may not reach the script
                logger.error("the checkpoint after step {} could not be saved: {}", step.number, error)
            raise
