"""What the ranks have to agree on before they train or evaluate together, and the check that they do.

Every rank runs the whole script. Where one builds other data, or other settings, the ranks would train apart without
a word, or wait for each other for ever.
"""

from collections.abc import Iterable, Mapping, Sized
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Subset

from ddp_kit.config import TrainerConfig
from ddp_kit.errors import DataError
from ddp_kit.world import World

Facts = dict[str, int | str]

_MAY_DIFFER = {"num_workers", "pin_memory", "prefetch_batches"}  # how batches are fetched, not which
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_agreement(world: World, facts: Facts) -> None:
    """Raise `DataError` where the ranks do not agree. A collective: all ranks call it, with facts of the same names.

    Facts travel as numbers; text as a digest.
    """
    numbers = [fact if isinstance(fact, int) else _digest(fact) for fact in facts.values()]
    own = torch.tensor(numbers, dtype=torch.int64, device=world.device)
    everyone = [torch.empty_like(own) for _ in range(world.world_size)]
    dist.all_gather(everyone, own)
    table = zip(*(one.tolist() for one in everyone), strict=True)
    for (name, fact), values in zip(facts.items(), table, strict=True):
        if len(set(values)) > 1:
            shown = f": {', '.join(map(str, values))} on ranks 0 to {len(values) - 1}" if isinstance(fact, int) else ""
            raise DataError(
                f"the ranks do not agree on {name}{shown}",
                "every rank runs the whole script and has to build the same data, model and settings: set the random "
                "seed before building them, load weights before the Trainer is made, leave dividing the data to it",
            )


def facts_of_run(config: TrainerConfig, optimizer: Optimizer, metrics: Iterable[str]) -> Facts:
    """What must be the same whatever the data."""
    settings = config.model_dump(mode="json", exclude={"data": _MAY_DIFFER})
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    facts: Facts = {f"the setting {name}": repr(value) for name, value in settings.items()}
    return facts | {
        "the optimizer and its settings": f"{type(optimizer).__name__} {groups}",
        "the names of the metrics": repr(list(metrics)),
    }


def facts_of_data(data: Mapping[str, object]) -> Facts:
    """What must be the same of each of the data, by the name of its part: how many samples, and how batched."""
    facts: Facts = {}
    for role, given in data.items():
        loader = given if isinstance(given, DataLoader) else None
        dataset = given if loader is None else loader.dataset
        facts[f"the kind of {role}"] = f"{type(given).__name__} {type(dataset).__name__}"
        facts[f"the number of samples in {role}"] = len(dataset) if isinstance(dataset, Sized) else 0
        facts[f"the samples that {role} is a subset of"] = repr(
            [*dataset.indices] if isinstance(dataset, Subset) else []
        )
        batches = getattr(loader, "batch_sampler", None)
        shuffling = type(getattr(batches, "sampler", None)).__name__
        facts[f"the batches of {role}"] = f"{getattr(batches, 'batch_size', '')} {getattr(batches, 'drop_last', '')}"
        facts[f"the shuffling of {role}"] = shuffling
    return facts


def fact_of_weights(model: nn.Module, world: World) -> Facts:
    """The weights, summed up as whole numbers: their bits count, and the order of the sum does not."""
    total = torch.zeros((), dtype=torch.int64, device=world.device)
    for parameter in model.parameters():
        bits = parameter.detach().contiguous().flatten().view(_SAME_SIZE[min(8, parameter.element_size())])
        total += bits.sum(dtype=torch.int64)
    return {"the weights of the model": repr(total.item())}


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest())
