"""Checks that all ranks have the same model, settings and state."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, islice
from os.path import commonprefix
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_kit.config.settings import TrainerConfig, settings_equal_on_all_ranks
from ddp_kit.distributed.world import World, gathered, gathered_bytes, host_group, largest
from ddp_kit.errors import DataError, DdpKitError, LossError
from ddp_kit.masking import masked
from ddp_kit.torch_internals import pytree

# --- Checksums of weights and optimizer state -------------------------------------------------------------------------
# Compared between ranks, to check that replicas are bitwise identical.


_SMALL = 1 << 14
"""Tensors with fewer elements are concatenated before they are summed, to launch fewer kernels."""
_RATES = ("lr", "initial_lr", "momentum", "betas", "weight_decay")


def bits(tensors: Iterable[Tensor]) -> Tensor:
    """A checksum of tensors: an int64 scalar on the device of the first tensor. Does not wait for the device.

    Bytes are summed as integers, so the result does not depend on the order of summation.
    """
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    sums: list[Tensor] = []
    for tensor in tensors:
        dense: tuple[Tensor, ...] = (tensor.detach(),)
        if tensor.layout == torch.sparse_coo:
            coalesced = tensor.detach().coalesce()
            dense = coalesced.indices(), coalesced.values()
        elif tensor.layout != torch.strided:
            dense = (tensor.detach().to_dense(),)
        for part in dense:
            if part.numel() < _SMALL:
                small.setdefault((part.dtype, part.device), []).append(part.reshape(-1))
            else:
                sums += [numbers.sum() for numbers in _int64_parts(part.reshape(-1))]
    for (dtype, _), group in small.items():
        if count := sum(map(Tensor.numel, group)):
            padding = group[0].new_zeros(-count % max(1, 8 // dtype.itemsize))
            sums.append(_spread(torch.cat((*group, padding)).view(torch.int64)))
    if len(sums) == 1:
        return sums[0]
    if not sums:
        return torch.zeros((), dtype=torch.int64)
    return _spread(_stacked(sums, sums[0].device))


def _stacked(scalars: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.stack([scalar.to(device, non_blocking=device.type != "cpu") for scalar in scalars])


def _spread(numbers: Tensor) -> Tensor:
    """A weighted sum with a different factor for each position, so that a permutation changes it."""
    return (numbers * torch.arange(1, 2 * len(numbers), 2, device=numbers.device)).sum()


def _int64_parts(flat: Tensor) -> list[Tensor]:
    """The bytes of a tensor as int64 tensors, because summing eight bytes at a time is fastest.

    The last bytes, if fewer than eight are left, are padded with zeros.
    """
    flat = flat.contiguous()
    size = flat.element_size()
    rest = flat.numel() * size % 8 // size
    head = flat[: flat.numel() - rest]
    parts = []
    if head.storage_offset() * size % 8:
        head = head.clone()
    if head.numel():
        parts.append(head.view(torch.int64))
    if rest:
        parts.append(torch.cat((flat[-rest:], flat.new_zeros(8 // size - rest))).view(torch.int64))
    return parts


def facts_of_model(model: nn.Module) -> dict[str, int | str]:
    """Facts that must be equal on all ranks before the model is distributed: names, shapes and dtypes, not values."""
    sparse = [buffer for buffer in model.buffers() if buffer.layout != torch.strided]
    return {
        "the parameters of the model (names, shapes, dtypes, requires_grad)": repr(
            [(name, *_tensor_kind(weight), weight.requires_grad) for name, weight in model.named_parameters()]
        ),
        "the buffers of the model (names, shapes, dtypes)": repr(
            [(name, *_tensor_kind(buffer)) for name, buffer in model.named_buffers()]
        ),
        "the sparse buffers of the model": repr([bits([buffer]).item() for buffer in sparse]),
    }


def _tensor_kind(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.layout


def facts_of_weights(model: nn.Module, shards: Iterable[Tensor], world: World) -> dict[str, int | str]:
    """A checksum of each parameter, to compare between ranks that hold the same weights. Waits for the device.

    `shards`: the parts of the parameters of `model` that are on this rank, in the same order.
    """
    names = [name for name, _ in model.named_parameters()]
    numbers = _stacked([bits([shard]) for shard in shards], world.device).tolist()
    return {
        f"the weights of the model (first difference: {name})": repr(number)
        for name, number in zip(names, numbers, strict=True)
    }


def facts_of_optimizer(
    names: Mapping[int, str], stepped_optimizer: Optimizer, optimizer: Optimizer, world: World
) -> dict[str, int | str]:
    """The optimizer state of each parameter as text, to compare between ranks that hold the same state.

    Tensors are replaced by checksums. Waits for the device.
    `names`: id(parameter) -> name, for each parameter of `stepped_optimizer`. `optimizer`: the user's optimizer, which
    holds the state of these parameters, in the same order.
    """
    optimizers = stepped_optimizer, optimizer
    # If the user added a group to one of the two, their lengths differ, and the next step raises an error.
    pairs = zip(*(chain(*(group["params"] for group in one.param_groups)) for one in optimizers), strict=False)
    states = {}
    sums = []
    for model_parameter, parameter in pairs:
        state = states[names[id(model_parameter)]] = optimizer.state.get(parameter, {})
        tensors = [value for value in pytree.tree_leaves(state) if isinstance(value, Tensor)]
        zero = torch.zeros((), dtype=torch.int64, device=parameter.device)
        sums.append(sum((bits([tensor]).to(parameter.device) for tensor in tensors), zero))
    numbers = _stacked(sums, world.device).tolist()
    return {
        f"the state of the optimizer (first difference: {name})": f"{number} {plain(state)}"
        for (name, state), number in zip(states.items(), numbers, strict=True)
    }


def plain(value: Any) -> str:
    """Describe a value as text, so that equal values give equal text in every process.

    Numbers have full precision, and tensors are described by shape and dtype. Other objects are described by their name
    or the name of their class, because memory addresses differ between processes.
    """
    if isinstance(value, Tensor):
        return f"tensor {tuple(value.shape)} {value.dtype}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {plain(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(plain, value)) + "]"
    if value is None or isinstance(value, int | float | complex | str | bytes):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def settings_of(optimizer: Optimizer) -> str:
    """An optimizer's class and the options of its parameter groups as text; equal settings give equal text."""
    sizes = [{"params": len(group["params"])} for group in optimizer.param_groups]
    groups = [options | size for options, size in zip(options_of(optimizer), sizes, strict=True)]
    return f"{type(optimizer).__name__} {plain(groups)}"


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each parameter group of an optimizer, without its parameters; scalar tensors as numbers."""
    return [
        {name: _number(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]


def _number(value: Any) -> Any:
    """The number in a tensor with one element; other values as they are."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def schedule(scheduler: LRScheduler | None) -> str:
    """A scheduler's class and state, including the schedulers inside it, as text."""
    if scheduler is None:
        return "none"
    return f"{type(scheduler).__name__} {plain(scheduler.state_dict())}"


def rates(optimizer: Optimizer) -> int:
    """A hash, below 2**56, of the learning rates and other settings that schedulers change. Skips tensors on a GPU."""
    values = [
        tuple(_number(value) for value in map(group.get, _RATES) if not isinstance(value, Tensor) or value.is_cpu)
        for group in optimizer.param_groups
    ]
    return digest_of(repr(values).encode())


def row(verify: str, optimizer: Optimizer, weights: Iterable[Tensor], device: torch.device) -> Tensor:
    """The checksums that ranks compare with `differing` at a log point, as a 1-D tensor. Does not wait for the device.

    The tensor has dtype float64, and two elements per checksum.
    `verify`: the setting `verify_ranks`. `weights`: the parts of the weights that are on this rank.
    """
    sums = [torch.full((), rates(optimizer), dtype=torch.int64, device=device)]  # a copy from the host would wait
    if verify != "off":
        sums.append(bits(weights))
    if verify == "all":
        leaves = pytree.tree_leaves([*optimizer.state.values()])
        tensors = [leaf.to(device) if leaf.is_cpu else leaf for leaf in leaves if isinstance(leaf, Tensor)]
        sums.append(bits(tensors))
    return _stacked(sums, device).view(torch.int32).double()  # float64 holds 53 bits exactly


def first_ranks(groups: Iterable[Sequence[int]], ranks: int) -> NDArray[np.int64]:
    """For each rank, the first rank of its group, such as the ranks that hold the same weights; itself without one."""
    firsts = np.arange(ranks)
    for group in groups:
        firsts[group] = group[0]
    return firsts


def weights_checksum(rows: NDArray[np.float64], replicas: NDArray[np.int64]) -> str | None:
    """A checksum of the whole model's weights, as hexadecimal digits; None if `row` was called with "off".

    The arguments are as for `differing`. Of ranks that hold the same weights, one counts. If the weights are divided,
    the number of parts follows a slash, because the checksum depends on the division.
    """
    if rows.shape[1] < 4:
        return None
    parts = rows[replicas == np.arange(len(replicas)), 2:4]
    content = parts.tobytes()
    if len(parts) <= _FEW_PARTS:  # `repr` would take 10 ms for 8,192 parts
        content = repr([*map(tuple, parts.tolist())]).encode()
    checksum = f"{digest_of(content):014x}"
    return checksum if len(parts) == 1 else f"{checksum}/{len(parts)}"


_FEW_PARTS = 64


def differing(
    rows: NDArray[np.float64], replicas: NDArray[np.int64], optimizer_replicas: NDArray[np.int64]
) -> str | None:
    """The name of the first checksum that differs between ranks that must agree; None if all agree.

    `rows`: what `row` returned on each rank; may have no columns. `replicas`, `optimizer_replicas`: the `first_ranks`
    of the groups of ranks that hold the same weights, and of the groups that hold the same optimizer state.
    """
    names = {
        "the learning rates": np.zeros_like(replicas),
        "the weights of the model": replicas,
        "the state of the optimizer": optimizer_replicas,
    }
    for number, (name, firsts) in enumerate(islice(names.items(), rows.shape[1] // 2)):
        columns = rows[:, 2 * number : 2 * number + 2]
        if (columns != columns[firsts]).any():
            return name
    return None


# --- Agreement on facts -----------------------------------------------------------------------------------------------
# Checked before ranks train or evaluate together. Every rank runs the whole script: if one built different data or
# settings, the replicas would silently diverge, or the ranks would wait for each other forever.


Facts = dict[str, int | str]


class Shown(str):
    """A fact whose values an error names, with secrets masked. For other texts, it names only the ranks that differ."""

    __slots__ = ()


@dataclass(frozen=True)
class Difference:
    """A fact that is not the same on all ranks."""

    description: str
    """The name of the fact, and which ranks differ."""
    minority: tuple[int, ...] = ()
    """The ranks that differ from the majority; see the function `minority`."""

    def error(self, world: World, message: str, hint: str) -> DataError:
        """The error that all ranks raise. If a minority differs, only the lowest of its ranks reports the error."""
        error = DataError(message, hint)
        error.reported_elsewhere = bool(self.minority) and world.rank != self.minority[0]
        return error


def check_agreement(world: World, facts: Facts, groups: Sequence[Sequence[int]] = (), *, on_host: bool = False) -> None:
    """Raise `DataError` if the ranks' facts differ. A collective: all ranks call it with the same fact names.

    `facts`: name -> value; integers are exchanged as they are, strings as digests. `groups`, `on_host`: see
    `first_difference`.
    """
    difference = first_difference(world, facts, groups, on_host=on_host)
    if difference is None:
        return
    hint = (
        "every rank runs the whole script and must build the same data, model and settings: set the random seed before "
        "building them, load weights before creating the Trainer, and let the Trainer divide the data"
    )
    if difference.description.startswith(_SETTING):
        hint = "pass the same value on every rank: it must not depend on the rank, the host or the time"
    raise difference.error(world, f"the ranks do not agree on {difference.description}", hint)


def first_difference(
    world: World, facts: Facts, groups: Sequence[Sequence[int]] = (), *, on_host: bool = False
) -> Difference | None:
    """The first fact that differs between ranks; None if all are equal. A collective.

    The ranks compare a digest of all their facts, and exchange the facts themselves only if the digests differ.

    `groups`: groups of ranks to compare with each other; empty: compare all ranks. `on_host`: whether to exchange the
    facts in host memory, without waiting for the device.
    """
    hosts = host_group(world) if on_host else None
    numbers = [fact if isinstance(fact, int) else digest_of(fact.encode()) for fact in facts.values()]
    groups = [group for group in groups or [range(world.world_size)] if len(group) > 1]
    if not groups:
        return None
    digest = digest_of(repr(numbers).encode())
    own = [(digest, -digest) if world.rank in group else (-_MAX_DIGEST, -_MAX_DIGEST) for group in groups]
    bounds = largest(world, [*chain.from_iterable(own)], hosts)
    if bounds[::2] == [-negative for negative in bounds[1::2]]:  # the largest and the smallest digest of each group
        return None
    table = zip(*gathered(world, numbers, hosts), strict=True)
    for (name, fact), values in zip(facts.items(), table, strict=True):
        for group in groups:
            if len({values[rank] for rank in group}) == 1:
                continue
            by_rank = {rank: values[rank] for rank in group}
            if isinstance(fact, int):
                text = _numbers_by_rank(by_rank)
            elif isinstance(fact, Shown):
                shown = masked(f"{name.rpartition(' ')[2]}={fact}").partition("=")[2]
                texts = gathered_bytes(shown.encode(), world, hosts)
                text = _values_by_rank({rank: texts[rank].decode() for rank in group}, by_rank)
            else:
                text = which_differ(by_rank)
            return Difference(f"{name}: {text}", minority(by_rank))
    return None


def minority(values: Mapping[int, Hashable]) -> tuple[int, ...]:
    """The ranks that differ from the majority, which is more than half of the ranks; empty if there is no majority.

    `values`: rank -> value, in rank order.
    """
    ((most_common, count),) = Counter(values.values()).most_common(1)
    if 2 * count <= len(values):
        return ()
    return tuple(rank for rank, value in values.items() if value != most_common)


def which_differ(values: Mapping[int, Hashable]) -> str:
    """Text such as `rank 2 differs from ranks 0, 1`. Without a majority, ranks are compared with the first one."""
    first = next(iter(values))
    few = minority(values)
    others = [rank for rank in values if rank not in few]
    if not few:
        few = tuple(rank for rank, value in values.items() if value != values[first])
        others = [first]
    verb = "differs" if len(few) == 1 else "differ"
    return f"{_rank_names(few)} {verb} from {_rank_names(others)}"


def _numbers_by_rank(values: Mapping[int, int]) -> str:
    """Text such as `9 on rank 2; 8 on ranks 0, 1`; without a majority, the numbers in rank order."""
    few = minority(values)
    if not few:
        return f"{', '.join(map(str, values.values()))} on {_rank_names([*values])}"
    others = [rank for rank in values if rank not in few]
    rare = ", ".join(str(values[rank]) for rank in few)
    return f"{rare} on {_rank_names(few)}; {values[others[0]]} on {_rank_names(others)}"


def _values_by_rank(texts: Mapping[int, str], values: Mapping[int, Hashable]) -> str:
    """Text such as `'/b' on rank 2; '/a' on ranks 0, 1`, starting with the rarest value.

    `texts`: the value of each rank as text. `values`: what tells which of them are equal.
    """
    ranks: dict[Hashable, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    common = len(commonprefix([*texts.values()]))  # noqa: RUF071 - characters, not the parts of a path
    start = max(0, common - _BEFORE_DIFFERENCE)
    parts = [f"{_excerpt(texts[group[0]], start)} on {_rank_names(group)}" for group in sorted(ranks.values(), key=len)]
    return "; ".join(parts[:_MAX_VALUES]) + (f"; {len(parts) - _MAX_VALUES} more" * (len(parts) > _MAX_VALUES))


_BEFORE_DIFFERENCE = 30
_LONGEST_VALUE = 80
_MAX_VALUES = 8


def _excerpt(text: str, start: int) -> str:
    """The text, or its part from `start` if it is too long."""
    if len(text) <= _LONGEST_VALUE:
        return text
    end = start + _LONGEST_VALUE
    return "..." * (start > 0) + text[start:end] + "..." * (end < len(text))


def _rank_names(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and [*ranks] == [*range(ranks[0], ranks[-1] + 1)]:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}" + f" and {len(ranks) - 8} more" * (len(ranks) > 8)


def first_losses(world: World, kind: int, problem: DdpKitError | None) -> list[int]:
    """Exchange the kind of each rank's first loss; returns them in rank order. A collective: all ranks call it once.

    If any rank has a problem, all ranks raise an error; only the lowest rank that has a problem reports it.
    """
    everyone = gathered(world, [kind, problem is not None])
    troubled = [rank for rank, (_, trouble) in enumerate(everyone) if trouble]
    if problem is not None:
        problem.reported_elsewhere = world.rank != troubled[0]
        raise problem
    if troubled:
        error = LossError(f"rank {troubled[0]} cannot continue", f"fix the error that rank {troubled[0]} reports")
        error.reported_elsewhere = True
        raise error
    return [kind for kind, _ in everyone]


def facts_of_run(config: TrainerConfig, optimizer: Optimizer, metrics: Iterable[str]) -> Facts:
    """Facts about configuration, optimizer and metrics that must be the same on all ranks."""
    return facts_of_settings(config) | {
        "the optimizer and its settings": Shown(settings_of(optimizer)),
        "the names of the metrics": Shown(repr(list(metrics))),
    }


def facts_of_settings(config: TrainerConfig, group: str = "") -> Facts:
    """The settings that must be the same on all ranks. `group`: only the settings of this group, such as `parallel`."""
    settings = settings_equal_on_all_ranks(config)
    prefix = group and f"{group}."
    return {f"{_SETTING}{name}": Shown(repr(value)) for name, value in settings.items() if name.startswith(prefix)}


_SETTING = "the setting "


_DIGEST_BYTES = 7
_MAX_DIGEST = 1 << 8 * _DIGEST_BYTES


def digest_of(content: bytes) -> int:
    """A hash of `content`, below 2**56."""
    return int.from_bytes(blake2b(content, digest_size=_DIGEST_BYTES).digest())
