"""How far a run is."""

from typing import Any

from ddp_kit.config import TrainerConfig
from ddp_kit.errors import DataError
from ddp_kit.loader import Mark
from ddp_kit.log import logger

Facts = dict[str, int | str]
RANKS = "the number of ranks"
"""Among an epoch's facts where the data is divided by the ranks themselves: then it may differ, with a warning."""
PER_RANK = ("the micro-batch", "data.num_workers")
"""Facts of such data that another number of ranks changes anyway."""


class Position:
    """What was consumed by optimizer steps: a checkpoint holds it, and the data continues from there."""

    def __init__(self) -> None:
        self.step = 0
        """Optimizer steps done."""
        self.epoch = 0
        """Epochs done."""
        self.steps_in_epoch = 0
        """Of the epoch that is begun."""
        self.epoch_length: int | None = None
        """In steps, of an epoch that is begun and not done, where it is known."""
        self.epoch_facts: Facts = {}
        """What decides which samples each step of the epoch that is begun has."""
        self.samples = 0
        """Trained on over all ranks."""
        self.micro_batches: dict[str, int] = {}
        """What a search for the largest micro-batch came to, by the number of ranks: a resumed run uses the same."""
        self.owes_evaluation = False
        """Whether the evaluation after this step was interrupted: a resumed run begins with it."""
        self.was_stopping = False
        """Whether it was to end with that one."""
        self.place: tuple[Mark, ...] = ()
        """Where this rank's stream stands in the epoch that is begun; a checkpoint holds it per rank."""
        self.evaluated = -1
        """The step whose evaluation the callbacks have heard of last."""

    def begin_epoch(self, facts: Facts) -> None:
        """Steps of this epoch follow, of the data with these facts."""
        self.epoch_facts = facts

    def advance(
        self, samples: int, steps_per_epoch: int | None, place: tuple[Mark, ...] = (), *, ends_epoch: bool
    ) -> None:
        """A step is done."""
        self.owes_evaluation = self.was_stopping = False
        self.step += 1
        self.samples += samples
        self.steps_in_epoch += 1
        self.epoch_length = steps_per_epoch
        self.place = place
        if ends_epoch:
            self.place = ()
            self.epoch += 1
            self.steps_in_epoch = 0
            self.epoch_length = None
            self.epoch_facts = {}

    def check(self, steps_per_epoch: int | None, facts: Facts) -> None:
        """Raise `DataError` where an epoch that is begun would continue with other samples than it was begun with."""
        if not self.steps_in_epoch:
            return
        found: list[tuple[str, object, object]] = [("the number of its steps", self.epoch_length, steps_per_epoch)]
        before = self.epoch_facts
        if RANKS in facts and before.get(RANKS, facts[RANKS]) != facts[RANKS]:
            logger.warning(
                "epoch {} was begun by {} ranks, and there are {}: each reads its own stream up to where the epoch was "
                "left, so samples may be left out or used twice in it, unless the dataset's division makes up for it",
                self.epoch,
                before[RANKS],
                facts[RANKS],
            )
            before = {name: value for name, value in before.items() if name not in PER_RANK}
        found += [(name, before[name], facts.get(name)) for name in before if name != RANKS]
        differ = [f"{name} was {old}, and is {new}" for name, old, new in found if old is not None and old != new]
        if differ:
            raise DataError(
                f"epoch {self.epoch} was left after {self.steps_in_epoch} steps, and its next ones would have other "
                f"samples: {'; '.join(differ)}",
                "continue with what the epoch was begun with; from the next epoch on it may change. To start afresh: "
                "another checkpoint.dir, checkpoint.resume=None, or a new Trainer",
            )

    def owe_evaluation(self, owes: bool, stopping: bool) -> None:
        """Note whether the evaluation after this step is still to be done. `stopping`: whether the run ends with it."""
        self.owes_evaluation = owes
        self.was_stopping = self.was_stopping or (owes and stopping)

    def ends_evaluated(self) -> bool:
        """Whether the run was to end here, now that what it owed may be done."""
        ends = self.was_stopping and not self.owes_evaluation
        self.was_stopping = self.was_stopping and self.owes_evaluation
        return ends

    def last_step(self, config: TrainerConfig, steps_per_epoch: int | None) -> int | None:
        """The optimizer step that ends the run; None where only the data will tell."""
        by_steps, epochs = config.max_steps, config.last_epoch
        if epochs is None or steps_per_epoch is None:
            return by_steps
        by_epochs = self.step + max(0, (epochs - self.epoch) * steps_per_epoch - self.steps_in_epoch)
        return by_epochs if by_steps is None else min(by_steps, by_epochs)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: what is the same on all ranks."""
        return {name: value for name, value in vars(self).items() if name != "place"}

    def set_state(self, state: dict[str, Any]) -> None:
        """What `state` gave."""
        vars(self).update(state)
