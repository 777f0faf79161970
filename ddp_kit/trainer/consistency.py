"""Checks that all ranks have the same model, data, settings and state."""

import time
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, get_worker_info

from ddp_kit.config.settings import DataConfig, TrainerConfig
from ddp_kit.data.collate import checked_batches
from ddp_kit.data.loading import ExposeUserDataset, loader_options
from ddp_kit.distributed.world import (
    World,
    gathered,
    host_group,
    mixed_seed,
    random_states,
    seed_generators,
    set_random_states,
)
from ddp_kit.errors import DataError, DdpKitError, LossError
from ddp_kit.parallel import Strategy
from ddp_kit.torch_internals import pytree
from ddp_kit.trainer.parts import Parts

# --- Checksums of weights and optimizer state -------------------------------------------------------------------------
# Compared between ranks, to check that replicas are bitwise identical.


_SMALL = 1 << 14
"""Tensors with fewer elements are concatenated before they are summed, to launch fewer kernels."""
_RATES = ("lr", "initial_lr", "momentum", "betas", "weight_decay")


def bits(tensors: Iterable[Tensor]) -> Tensor:
    """A checksum of tensors: an int64 scalar on the device of the first one. Does not wait for the device.

    Bytes are summed as integers, so the result does not depend on the order of summation.
    """
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    sums: list[Tensor] = []
    for tensor in tensors:
        for part in _dense(tensor.detach()):
            if part.numel() < _SMALL:
                small.setdefault((part.dtype, part.device), []).append(part.reshape(-1))
            else:
                sums += [numbers.sum() for numbers in _whole(part.reshape(-1))]
    for group in small.values():
        sums += [_spread(numbers) for numbers in _whole(torch.cat(group))]
    return _spread(_stacked(sums, sums[0].device)) if sums else torch.zeros((), dtype=torch.int64)


def _stacked(scalars: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.stack([each.to(device, non_blocking=device.type != "cpu") for each in scalars])


def _spread(numbers: Tensor) -> Tensor:
    """A weighted sum with a different factor for each position, so that a permutation changes it."""
    return (numbers * torch.arange(1, 2 * len(numbers), 2, device=numbers.device)).sum()


def _dense(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return tensor.indices(), tensor.values()
    if tensor.layout != torch.strided:
        return (tensor.to_dense(),)
    return (tensor,)


def _whole(flat: Tensor) -> list[Tensor]:
    """The bytes as int64 numbers, padded with zeros, because summing eight bytes at a time is fastest."""
    flat, size = flat.contiguous(), flat.element_size()
    rest = flat.numel() * size % 8 // size
    head, parts = flat[: flat.numel() - rest], []
    if head.numel():
        parts.append((head.clone() if head.storage_offset() * size % 8 else head).view(torch.int64))
    if rest:
        parts.append(torch.cat((flat[-rest:], flat.new_zeros(8 // size - rest))).view(torch.int64))
    return parts


def facts_of_model(model: nn.Module) -> dict[str, int | str]:
    """Facts that must be equal on all ranks before the model is distributed: names, shapes and dtypes, not values."""
    sparse = [each for each in model.buffers() if each.layout != torch.strided]
    return {
        "the parameters of the model (names, shapes, types, which require gradients)": repr(
            [(name, *_tensor_kind(each), each.requires_grad) for name, each in model.named_parameters()]
        ),
        "the buffers of the model (names, shapes, types)": repr(
            [(name, *_tensor_kind(each)) for name, each in model.named_buffers()]
        ),
        "the sparse buffers of the model": repr([bits([each]).item() for each in sparse]),
    }


def _tensor_kind(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.layout


def facts_of_weights(parts: Parts) -> dict[str, int | str]:
    """A checksum of each parameter, to compare between ranks that hold the same weights. Waits for the device."""
    names = [name for name, _ in parts.model.named_parameters()]
    numbers = _stacked([bits([each]) for each in parts.strategy.local_parameters()], parts.world.device).tolist()
    return {
        f"the weights of the model, first in {name}": repr(number) for name, number in zip(names, numbers, strict=True)
    }


def facts_of_optimizer(parts: Parts) -> dict[str, int | str]:
    """The optimizer state of each parameter as text, to compare between ranks that hold the same state.

    Tensors are replaced by checksums. Waits for the device.
    """
    names_held = parts.strategy.held_names()
    optimizers = parts.device_optimizer, parts.optimizer
    named, own = ([each for group in one.param_groups for each in group["params"]] for one in optimizers)
    held = {
        names_held[id(each)]: (kept, parts.optimizer.state.get(kept, {}))
        for each, kept in zip(named, own, strict=False)  # lengths differ if the user added a group; then a step raises
    }
    numbers = _stacked([_state_bits(*each) for each in held.values()], parts.world.device).tolist()
    return {
        f"the state of the optimizer, first in that of {name}": f"{number} {_plain(state)}"
        for (name, (_, state)), number in zip(held.items(), numbers, strict=True)
    }


def facts_of_progress(parts: Parts) -> dict[str, int | str]:
    """The states of scheduler and gradient scaler as text; must be equal on all ranks before a step."""
    return {
        "the scheduler and its state": schedule(parts.scheduler),
        "the state of the gradient scaling": repr(parts.precision.state()),
    }


def _state_bits(parameter: Tensor, state: Any) -> Tensor:
    tensors = [value for value in pytree.tree_leaves(state) if isinstance(value, Tensor)]
    zero = torch.zeros((), dtype=torch.int64, device=parameter.device)
    return sum((bits([each]).to(parameter.device) for each in tensors), zero)


def _plain(value: Any) -> str:
    """A text representation that is the same in every process: without addresses, with full precision."""
    if isinstance(value, Tensor):
        return f"tensor {tuple(value.shape)} {value.dtype}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_plain(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_plain, value)) + "]"
    if value is None or isinstance(value, int | float | complex | str | bytes):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def settings_of(optimizer: Optimizer) -> str:
    """An optimizer's class and the options of its groups, as text that is the same in every process."""
    groups = [
        {name: _number(value) for name, value in group.items() if name != "params"} | {"params": len(group["params"])}
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__} {_plain(groups)}"


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def schedule(scheduler: LRScheduler | None) -> str:
    """A scheduler's class and state, including the schedulers inside it, as text."""
    if scheduler is None:
        return "none"
    return f"{type(scheduler).__name__} {_plain(scheduler.state_dict())}"


def rates(optimizer: Optimizer) -> int:
    """A hash of learning rates and other values that schedulers change, below 2**56. Device tensors are skipped."""
    values = [
        tuple(
            value.item() if isinstance(value, Tensor) else value for value in map(group.get, _RATES) if _on_host(value)
        )
        for group in optimizer.param_groups
    ]
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=7).digest())


def _on_host(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.is_cpu


def row(parts: Parts) -> Tensor:
    """The checksums that ranks compare at a log point: float64 [n], for `differing`. Does not wait for the device."""
    device = parts.world.device
    own = [torch.tensor(rates(parts.optimizer), device=device)]
    if parts.config.verify_ranks != "off":
        own.append(bits(parts.strategy.local_parameters()))
    if parts.config.verify_ranks == "all":
        tensors = [each for each in pytree.tree_leaves([*parts.optimizer.state.values()]) if isinstance(each, Tensor)]
        own.append(bits(each.to(device) if each.is_cpu else each for each in tensors))
    whole = _stacked(own, device)
    return torch.stack((whole >> 32, whole & 0xFFFFFFFF), dim=1).double().flatten()  # float64 holds 53 bits exactly


def differing(rows: Sequence[Sequence[float]], strategy: Strategy) -> str | None:
    """The name of the first checksum that differs between ranks that must agree; None: all agree.

    `rows`: what `row` returned on each rank.
    """
    names = {
        "the learning rates": [range(len(rows))],
        "the weights of the model": strategy.replicas,
        "the state of the optimizer": strategy.optimizer_replicas,
    }
    for number, (name, groups) in enumerate(islice(names.items(), len(rows[0]) // 2 if rows else 0)):
        for group in groups:
            if len({tuple(rows[rank][2 * number : 2 * number + 2]) for rank in group}) > 1:
                return name
    return None


# --- Agreement on data and settings -----------------------------------------------------------------------------------
# Checked before ranks train or evaluate together. Every rank runs the whole script: if one built different data or
# settings, the replicas would silently diverge, or the ranks would wait for each other forever.


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
    """The ranks that differ from the majority, which is more than half of the ranks; empty if there is no majority.

    `values`: rank -> value, in rank order.
    """
    ((most_common, count),) = Counter(values.values()).most_common(1)
    return tuple(rank for rank, value in values.items() if value != most_common) if 2 * count > len(values) else ()


def which_differ(values: Mapping[int, Hashable]) -> str:
    """Text such as `rank 2 differs from ranks 0, 1`. Without a majority, ranks are compared with the first one."""
    first = next(iter(values))
    few = minority(values) or [rank for rank, value in values.items() if value != values[first]]
    others = [rank for rank in values if rank not in few] if minority(values) else [first]
    return f"{_ranks(few)} {'differs' if len(few) == 1 else 'differ'} from {_ranks(others)}"


def _numbers(values: Mapping[int, int]) -> str:
    """Text such as `9 on rank 2; 8 on ranks 0, 1`; without a majority, the numbers in rank order."""
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


# --- Agreement on datasets and their samples --------------------------------------------------------------------------
# Length, type, batching and a few samples are compared. Each rank uses its share of the same indices: if datasets
# differed in their order or in the split between training and evaluation, samples would silently be skipped, trained on
# twice, or used for both training and evaluation.


_PLAIN_SAMPLES = 16
"""The number of samples to compare if they are tensors or lists in memory, which are cheap to read."""
_MAX_SECONDS = 2.0
"""The time limit for fetching a dataset's samples; the remaining ones are not compared."""
_UNKNOWN = -1
_REPEATS = 2
"""How often a sample that differs is fetched again, to find out whether it is just nondeterministic."""


def facts_of_data(data: Mapping[str, object]) -> Facts:
    """Facts about data that must be the same on all ranks. `data`: role, such as "train_data" -> data."""
    facts: Facts = {}
    for role, given in data.items():
        loader = given if isinstance(given, DataLoader) else None
        dataset = given if loader is None else loader.dataset
        facts[f"the kind of {role}"] = f"{type(given).__name__} {_dataset_kind(dataset)}"
        facts[f"the number of samples in {role}"] = _length(dataset)
        facts[f"the samples that {role} is a subset of"] = repr(subset_indices(dataset))
        batches = getattr(loader, "batch_sampler", None)
        shuffling = type(getattr(batches, "sampler", None)).__name__
        facts[f"the batches of {role}"] = f"{getattr(batches, 'batch_size', '')} {getattr(batches, 'drop_last', '')}"
        facts[f"the shuffling of {role}"] = shuffling
    return facts


def subset_indices(dataset: object) -> list[list[Any]]:
    """The indices of a Subset and of the subsets inside it, outermost first; empty for other datasets."""
    found = []
    while isinstance(dataset, Subset):
        found.append([*dataset.indices])
        dataset = dataset.dataset
    return found


class SampleComparison:
    """Compares a few samples of a Trainer's data between ranks, as many as `data.compare_items`.

    for each of the samples, spread over the dataset:
        digest = hash of the sample, fetched with a random seed of its own
    gather the digests; fetch samples that differ again: `DataError` if each rank gets the same digests as before
    """

    def __init__(self, world: World, config: DataConfig, seed: int) -> None:
        self._world = world
        self._config = config
        self._seed = seed
        self._known: dict[int, tuple[Any, list[int]]] = {}  # dataset id -> (weak reference, digests)

    def compare(self, data: Mapping[str, object]) -> None:
        """Raise `DataError` if the ranks' samples differ. A collective: all ranks call it with the same roles."""
        for role, given in data.items():
            loader = given if isinstance(given, DataLoader) else None
            dataset = given if loader is None else loader.dataset
            keys = self._keys(dataset)
            if not keys:
                continue
            table = gathered(self._world, self._digests(dataset, keys, loader))
            differ = [number for number in range(len(keys)) if _differ(row[number] for row in table)]
            if differ and self._repeat(dataset, [keys[number] for number in differ], table, differ, loader):
                first = {rank: row[differ[0]] for rank, row in enumerate(table) if row[differ[0]] != _UNKNOWN}
                found = Difference(f"sample {keys[differ[0]]} of {role}: {which_differ(first)}", minority(first))
                raise found.error(
                    self._world,
                    f"the ranks do not agree on {found.description}"
                    f" ({len(differ)} of {len(keys)} samples that were compared differ)",
                    "every rank must build the same dataset in the same order: sort file listings, set the random seed "
                    "before splitting or shuffling, and let the Trainer divide the dataset over the ranks. If samples "
                    "differ on purpose, set data.compare_items=0",
                )

    def _keys(self, dataset: object) -> list[int]:
        """Indices evenly spread over the dataset, including the first and the last."""
        asked = self._config.compare_items
        wanted = _PLAIN_SAMPLES if asked and _in_memory(dataset) else asked
        length = _length(dataset)
        count = min(wanted, length)
        return [number * (length - 1) // max(1, count - 1) for number in range(count)]

    def _digests(self, dataset: Any, keys: Sequence[int], loader: "DataLoader[Any] | None") -> list[int]:
        reference, digests = self._known.get(id(dataset), (None, []))
        if reference is not None and reference() is dataset and len(digests) == len(keys):
            return digests
        digests = self._fetch(dataset, keys, loader)
        with suppress(TypeError):  # a list has no weak references, and is cheap to read again
            self._known[id(dataset)] = (weakref.ref(dataset), digests)
        return digests

    def _repeat(
        self,
        dataset: Any,
        keys: Sequence[int],
        table: list[list[int]],
        numbers: Sequence[int],
        loader: "DataLoader[Any] | None",
    ) -> bool:
        """Whether every rank gets the same samples as before when it fetches them again. A collective."""
        own = [table[self._world.rank][number] for number in numbers]
        # In one call, so in one process: a new DataLoader worker may repeat the random numbers of the last one.
        again = self._fetch(dataset, [*keys] * _REPEATS, loader)
        repeatable = all(one in (_UNKNOWN, other) for one, other in zip(again, own * _REPEATS, strict=True))
        return all(each for (each,) in gathered(self._world, [repeatable]))

    def _fetch(self, dataset: Any, keys: Sequence[int], loader: "DataLoader[Any] | None") -> list[int]:
        """A digest of each sample; `_UNKNOWN` for samples that have none, and after the time limit."""
        digests = [_UNKNOWN] * len(keys)
        began = time.perf_counter()
        for number, digest in enumerate(self._arriving(_Digests(dataset, self._seed), keys, loader)):
            digests[number] = digest
            if time.perf_counter() - began > _MAX_SECONDS:
                break
        return digests

    def _arriving(self, digests: "_Digests", keys: Sequence[int], loader: "DataLoader[Any] | None") -> Iterator[int]:
        options = loader_options(self._config, self._world, self._seed, loader)
        if not keys or not options["num_workers"] or _in_memory(digests.dataset):
            with _states_kept(self._world):
                yield from map(digests.__getitem__, keys)
            return
        # In a DataLoader worker, because training's workers must not inherit files that the dataset opens here.
        options |= {"num_workers": 1, "pin_memory": False, "persistent_workers": False, "generator": torch.Generator()}
        options["worker_init_fn"] = ExposeUserDataset(options.get("worker_init_fn"))
        loader = DataLoader(digests, sampler=keys, batch_size=None, collate_fn=_identity, **options)
        yield from checked_batches(loader)


class _Digests(Dataset[int]):
    """A dataset of sample hashes, with random states that depend only on the seed and the sample."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self._seed = seed

    def __getitem__(self, key: int) -> int:
        seed_generators(mixed_seed(self._seed, key))
        try:
            several = getattr(self.dataset, "__getitems__", None)
            return digest_of_sample(several([key])[0] if callable(several) else self.dataset[key])
        except Exception:  # the dataset has other keys, or training will raise the same error
            return _UNKNOWN


@contextmanager
def _states_kept(world: World) -> Iterator[None]:
    states = random_states(world) if get_worker_info() is None else None
    try:
        yield
    finally:
        if states is not None:
            set_random_states(states)


def digest_of_sample(sample: object) -> int:
    """A hash of a sample's tensors, arrays, numbers and strings; `_UNKNOWN` if it has none of them."""
    found = blake2b(digest_size=7)
    known = 0
    for piece in _pieces(sample):
        found.update(piece)
        known += 1
    return int.from_bytes(found.digest()) if known else _UNKNOWN


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        if value.layout is torch.strided and not value.is_quantized:
            dense = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
            yield f"{dense.dtype} {tuple(dense.shape)}".encode()
            yield dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, str | bytes | int | float | complex):
        yield repr(value).encode()
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield repr(key).encode()
            yield from _pieces(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _pieces(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from _pieces(getattr(value, each.name, None))
    elif hasattr(value, "__array_interface__"):  # numpy arrays and PIL images
        yield from _array(value)


def _array(value: Any) -> Iterator[bytes]:
    import numpy as np

    array = np.asarray(value)
    if not array.dtype.hasobject:  # object arrays contain addresses
        yield f"{array.dtype} {array.shape}".encode()
        yield array.tobytes()


def _identity(digest: Any) -> Any:
    return digest


def _differ(digests: Iterator[int]) -> bool:
    return len({digest for digest in digests if digest != _UNKNOWN}) > 1


def _in_memory(dataset: Any) -> bool:
    """Whether samples are in memory, so that reading them runs no user code."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) in (TensorDataset, Tensor, list, tuple)


def _dataset_kind(dataset: object) -> str:
    inner = f" of {_dataset_kind(dataset.dataset)}" if isinstance(dataset, Subset) else ""
    return type(dataset).__name__ + inner


def _length(dataset: object) -> int:
    """The length of a dataset; 0 for a stream, whose length may differ between ranks."""
    return len(dataset) if isinstance(dataset, Sized) and not isinstance(dataset, IterableDataset) else 0
