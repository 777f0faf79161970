"""`Series`: the checkpoints in one folder, and the ranks that write them together."""

from itertools import takewhile

from ddp_kit.checkpoint.format import StoredCheckpoint
from ddp_kit.checkpoint.lock import raised_on_all_ranks
from ddp_kit.checkpoint.places import place_of
from ddp_kit.checkpoint.reader import other_format_error
from ddp_kit.checkpoint.saver import Saver
from ddp_kit.distributed.world import World, gathered
from ddp_kit.errors import CheckpointError
from ddp_kit.log import logger
from ddp_kit.storage.urls import Location

_COMPARED = 32  # nodes with separate folders compare this many of their newest checkpoints, to find a common one
_NOT_LISTED = -2  # in place of steps: another rank lists this rank's folder
_MARK = ".mark-"  # the name prefix of a file that shows whether two nodes see the same folder


class Series:
    """The checkpoints in one folder, which several ranks write together. Each node may have a folder of its own."""

    def __init__(self, world: World, folder: Location, ranks: list[int], run: str, saver: Saver) -> None:
        """`ranks`: the ranks with the same folder, this rank included. `run`: a text that no other Trainer has.

        `saver`: this rank's; its index among the writers is that of this rank in `ranks`.
        """
        self.folder = folder
        self.place = place_of(folder)
        self.saver = saver
        self.is_first = ranks[0] == world.rank
        """Whether this rank completes the checkpoints in its folder, and lists them for the other ranks."""
        self.is_shared = len(ranks) == world.world_size
        """Whether all ranks have the same folder."""
        self.first_rank = ranks[0] if self.is_shared else None
        """The only rank that completes checkpoints; None: there is one for each folder."""
        self._world = world
        self._run = run
        self._saves = 0  # started so far; equal on all ranks

    def begin(self, step: int) -> str:
        """Begin a checkpoint, and return its token for `Saver.save`. Other ranks may save after the next collective."""
        self._saves += 1
        token = f"{self._run[:8]}{self._saves:x}"  # not from another rank, so that no rank has to send it
        if self.is_first:
            self.saver.begin(step, token)
        return token

    def listed(self, wait_seconds: float) -> list[StoredCheckpoint]:
        """The checkpoints in this rank's folder, newest first, if this rank is its first one. A collective.

        Logs a warning for each damaged checkpoint that is newer than the newest complete one. `wait_seconds`: how long
        to wait for a process that is still writing one. Raises `CheckpointError`.
        """
        saved: list[StoredCheckpoint] = []
        with raised_on_all_ranks(self._world):
            if self.is_first:  # one rank per folder, because the files of a checkpoint grow with the number of ranks
                saved = self.place.listed(wait_seconds)
            for checkpoint in takewhile(lambda checkpoint: not checkpoint.whole, saved):
                if checkpoint.has_other_format:
                    raise other_format_error(checkpoint)
                logger.warning("checkpoint skipped: {}", checkpoint)
        return saved

    def common_steps(self, saved: list[StoredCheckpoint]) -> "CommonSteps":
        """The steps of the complete checkpoints in the folders of all nodes. A collective. `saved`: from `listed`."""
        own = [_NOT_LISTED]
        if self.is_first:
            own = [checkpoint.step for checkpoint in saved if checkpoint.whole][:_COMPARED]
        rows = gathered(self._world, own + [-1] * (_COMPARED - len(own)))
        return CommonSteps(
            {rank: [step for step in row if step >= 0] for rank, row in enumerate(rows) if row[0] != _NOT_LISTED}
        )


class CommonSteps:
    """The steps of complete checkpoints that all nodes with any checkpoints have.

    A node without any, which has taken the place of another one, gets the state from one that has it.
    """

    def __init__(self, of_ranks: dict[int, list[int]]) -> None:
        """`of_ranks`: the steps in the folder of each rank that lists one."""
        self._of_ranks = of_ranks
        having = [set(steps) for steps in of_ranks.values() if steps]
        self.steps = sorted(set.intersection(*having), reverse=True) if having else []
        """Newest first."""
        self.source: int | None = None
        """The lowest rank with checkpoints, if a node has none; None if all nodes have them, or none has."""
        if 0 < len(having) < len(of_ranks):
            self.source = next(rank for rank, steps in of_ranks.items() if steps)

    def check_difference(self, folder: Location) -> None:
        """Raise `CheckpointError` if nodes have checkpoints, but no common ones. `folder`: its name on all nodes."""
        if self.steps or not any(self._of_ranks.values()):
            return
        seen = "; ".join(
            f"rank {rank} sees {', '.join(map(str, steps)) or 'none'}" for rank, steps in self._of_ranks.items()
        )
        raise CheckpointError(
            f"no checkpoint in {folder} is complete on every node; steps of complete checkpoints: {seen}",
            "set checkpoint.dir to a folder that all nodes share, or checkpoint.resume=None to start from step 0",
        )


def ranks_with_same_folder(folder: Location, run: str, world: World) -> list[int]:
    """The ranks, including this one, that use the same folder as this rank. A collective. Raises `CheckpointError`.

    All ranks see the same object storage.

    A rank that sees rank 0's folder shares it with all other ranks that see it. Any other rank shares a folder with
    the ranks of its node. `run`: a text that no other Trainer has; equal on all ranks.
    """
    if isinstance(folder, str):
        return [*range(world.world_size)]
    mark = folder / f"{_MARK}{run}"
    if world.rank == 0:
        for old in folder.glob(f"{_MARK}*"):  # left by a run that was killed at this point
            old.unlink(missing_ok=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            raise CheckpointError(
                f"checkpoint.dir = {str(folder)!r} cannot be written to: {error.strerror or error}",
                "choose a folder that this process may write to",
            ) from None
    gathered(world, [0])  # a barrier: the mark exists
    first = 0 if mark.exists() else world.rank - world.local_rank
    firsts = [row[0] for row in gathered(world, [first])]  # also a barrier: all ranks have checked
    if world.rank == 0:
        mark.unlink(missing_ok=True)
    return [rank for rank, other in enumerate(firsts) if other == first]
