"""Leaving a loop over `Trainer.steps` before its end: what is due after that step is done first."""

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
"""For all ranks to leave the loop: they are at most in the same body of it."""
_loops = count()


Loop = Generator[Step, None, None]


def saved_when_left(steps: Loop, world: World, checkpoints: Checkpoints, run_state: RunState) -> Iterator[Step]:
    """The same steps; where the loop over them is left at one whose save is due, it is saved then. What is being saved
    is on the disk afterwards: a Trainer that is made next finds it.

    An exception that leaves the loop cannot be told from a `break` here. Where it leaves it on one rank alone, nothing
    is saved.
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
            except DdpKitError as error:  # what is raised while a generator is closed does not reach the script
                logger.error("a save was due or being written after step {}, and failed: {}", step.number, error)
            raise
