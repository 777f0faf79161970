"""Checks that all ranks use the same data and settings before they train or evaluate together.

Every rank runs the whole script. If one rank built different data or settings, the replicas would silently diverge, or
the ranks would wait for each other forever.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from torch.optim import Optimizer

from ddp_kit.config import TrainerConfig
from ddp_kit.errors import DataError, DdpKitError, LossError
from ddp_kit.trainer.exchange import gathered
from ddp_kit.trainer.fingerprint import settings_of
from ddp_kit.world import World, host_group

Facts = dict[str, int | str]


@dataclass(frozen=True)
class Difference:
    """A fact that is not the same on all ranks."""

    description: str
    """The name of the fact, and the ranks that differ."""
    minority: tuple[int, ...] = ()
    """See `minority`."""

    def error(self, world: World, message: str, hint: str) -> DataError:
        """The error that all ranks raise. If a minority differs, its lowest rank reports it: the cause is there."""
        error = DataError(message, hint)
        error.reported_elsewhere = bool(self.minority) and world.rank != self.minority[0]
        return error


_MAY_DIFFER = {"num_workers", "pin_memory", "prefetch_batches"}  # these do not change which batches are fetched


def check_agreement(world: World, facts: Facts, groups: Sequence[Sequence[int]] = (), *, on_host: bool = False) -> None:
    """Raise `DataError` if the ranks' facts differ. A collective: all ranks call it with the same fact names.

    `facts`: name -> value; integers are exchanged as they are, strings as digests. `groups`, `on_host`: see
    `first_difference`.
    """
    found = first_difference(world, facts, groups, on_host=on_host)
    if found is not None:
        raise found.error(
            world,
            f"the ranks do not agree on {found.description}",
            "every rank runs the whole script and must build the same data, model and settings: set the random seed "
            "before building them, load weights before creating the Trainer, and let the Trainer divide the data",
        )


def first_difference(
    world: World, facts: Facts, groups: Sequence[Sequence[int]] = (), *, on_host: bool = False
) -> Difference | None:
    """The first fact that differs between ranks; None: all are equal. A collective.

    `groups`: compare ranks only within each group; empty: compare all ranks. `on_host`: do not wait for the device.
    """
    numbers = [fact if isinstance(fact, int) else digest_of(fact.encode()) for fact in facts.values()]
    table = zip(*gathered(world, numbers, host_group(world) if on_host else None), strict=True)
    for (name, fact), values in zip(facts.items(), table, strict=True):
        for group in groups or [range(world.world_size)]:
            if len({values[rank] for rank in group}) > 1:
                own = {rank: values[rank] for rank in group}
                shown = _numbers(own) if isinstance(fact, int) else which_differ(own)
                return Difference(f"{name}: {shown}", minority(own))
    return None


def minority(values: Mapping[int, Hashable]) -> tuple[int, ...]:
    """The ranks without the value that more than half of the ranks have; empty: there is no such value.

    `values`: rank -> value, in rank order.
    """
    ((most_common, count),) = Counter(values.values()).most_common(1)
    return tuple(rank for rank, value in values.items() if value != most_common) if 2 * count > len(values) else ()


def which_differ(values: Mapping[int, Hashable]) -> str:
    """`rank 2 differs from ranks 0, 1`: a minority from the others, else all from the first one."""
    first = next(iter(values))
    few = minority(values) or [rank for rank, value in values.items() if value != values[first]]
    others = [rank for rank in values if rank not in few] if minority(values) else [first]
    return f"{_ranks(few)} {'differs' if len(few) == 1 else 'differ'} from {_ranks(others)}"


def _numbers(values: Mapping[int, int]) -> str:
    """`9 on rank 2; 8 on ranks 0, 1`, or the numbers in rank order if there is no majority."""
    few = minority(values)
    if not few:
        return f"{', '.join(map(str, values.values()))} on {_ranks([*values])}"
    others = [rank for rank in values if rank not in few]
    return f"{', '.join(str(values[rank]) for rank in few)} on {_ranks(few)}; {values[others[0]]} on {_ranks(others)}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and [*ranks] == [*range(ranks[0], ranks[-1] + 1)]:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def first_losses(world: World, facts: tuple[int, int], problem: DdpKitError | None) -> list[tuple[int, int]]:
    """Exchange facts about each rank's first loss; returns them in rank order. A collective: all ranks call it once.

    If any rank has a problem, all ranks raise an error; only the lowest rank with a problem reports its own.
    """
    everyone = gathered(world, [*facts, problem is not None])
    troubled = [rank for rank, (*_, trouble) in enumerate(everyone) if trouble]
    if problem is not None:
        problem.reported_elsewhere = world.rank != troubled[0]
        raise problem
    if troubled:
        error = LossError(f"rank {troubled[0]} cannot continue", f"fix the error that rank {troubled[0]} reports")
        error.reported_elsewhere = True
        raise error
    return [(first, second) for first, second, _ in everyone]


def facts_of_run(config: TrainerConfig, optimizer: Optimizer, metrics: Iterable[str]) -> Facts:
    """Facts about configuration, optimizer and metrics that must be the same on all ranks."""
    settings = config.model_dump(mode="json", exclude={"data": _MAY_DIFFER})
    facts: Facts = {f"the setting {name}": repr(value) for name, value in settings.items()}
    return facts | {
        "the optimizer and its settings": settings_of(optimizer),
        "the names of the metrics": repr(list(metrics)),
    }


def digest_of(content: bytes) -> int:
    """A hash of `content`, below 2**63."""
    return int.from_bytes(blake2b(content, digest_size=7).digest())
