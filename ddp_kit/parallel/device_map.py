"""Places the layers of one model on several devices of each rank.

    each module's weights and buffers are moved to its device in the map
    before a module that has a device: tensors in the module's inputs are moved to that device
    after the model: tensors in the model's output are moved to the device of its input

With several ranks, each rank has a replica on its own devices, and DDP averages the gradients. The devices of a rank
work one after another: a larger model fits, but steps are not faster.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, product
from operator import methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ddp_kit.config.settings import ParallelConfig
from ddp_kit.distributed.world import World
from ddp_kit.errors import ConfigError, suggestion
from ddp_kit.log import logger
from ddp_kit.model.blocks import required_blocks, split_chain, work_of
from ddp_kit.model.names import full_name
from ddp_kit.parallel.ddp import DdpStrategy
from ddp_kit.parallel.strategy import NO_OPTIONS, Options, SingleRank, Strategy
from ddp_kit.texts import plural, some
from ddp_kit.torch_internals import pytree

_RANGE = re.compile(r"(\d+)-(\d+)")
_STATES_PER_WEIGHT = 2  # assumes Adam, because the optimizer is created after the model is placed


class _DeviceMapped(Strategy):
    """A mixin for strategies that places the modules of a model on devices, according to a device map."""

    def __init__(self, world: World, config: ParallelConfig, options: Options = NO_OPTIONS) -> None:
        super().__init__(world, config, options)
        self._map: dict[str, int] | None = None  # module name -> device index; None until "auto" has chosen
        self._hooks: list[RemovableHandle] = []

    def check(self, model: nn.Module) -> None:
        super().check(model)
        device_map = self.config.device_map
        if isinstance(device_map, Mapping):
            self._map = expanded(model, device_map)
            for index in sorted(set(self._map.values())):
                device_at(index, self.world)
            indices_of(model, self._map)

    def _place(self, model: nn.Module) -> None:
        """Move the modules to their devices, and install the hooks. A collective if the map is "auto"."""
        if self._map is None:
            self._map = automatic_map(model, _capacities(model, self.world))
            logger.info("device_map: {}", map_text(self._map))
        for name, index in indices_of(model, self._map).items():
            _move_own_tensors(model.get_submodule(name), device_at(index, self.world))
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            model.get_submodule(name).register_forward_pre_hook(
                _InputsMove(device_at(index, self.world)), with_kwargs=True
            )
            for name, index in hooked_modules(model, self._map).items()
        ]
        output = _OutputMoves(self.world.device)
        self._hooks += [
            model.register_forward_pre_hook(output.before, with_kwargs=True, prepend=True),
            model.register_forward_hook(output.after),
        ]


class SingleRankDeviceMap(_DeviceMapped, SingleRank):
    """The strategy for a single rank with several devices."""


class DeviceMapStrategy(_DeviceMapped, DdpStrategy):
    """DDP for ranks with several devices each. Each of DDP's buckets holds gradients of only one device."""


# --- Devices ----------------------------------------------------------------------------------------------------------


def device_at(index: int, world: World) -> torch.device:
    """The device for an index in a map: this rank's GPU with that index.

    Without GPUs, every index means the CPU. A run on the CPU can show that a map is complete, and that training,
    reductions and checkpoints are bitwise identical to a run without a map. It cannot show that tensors are moved where
    necessary, because torch has only one CPU device.
    Raises `ConfigError` if there is no such GPU.
    """
    if world.device.type == "cpu" and not world.gpus:
        return world.device
    gpus = world.gpus or (world.device,)
    if index >= len(gpus):
        verb = "is" if len(gpus) == 1 else "are"
        raise ConfigError(
            f"parallel.device_map names device {index}, but there {verb} {plural(len(gpus), 'GPU')} for rank "
            f"{world.rank}: {', '.join(map(str, gpus))}",
            f"devices are numbered from 0 within each rank; to give each rank more GPUs, start with "
            f"`ddpkit launch --gpus-per-process {index + 1}`",
        )
    return gpus[index]


def _capacities(model: nn.Module, world: World) -> list[float]:
    """The bytes available for the model on each device, as the minimum over all ranks. A collective."""
    if world.device.type == "cpu":
        return [math.inf]
    gpus = world.gpus or (world.device,)
    of_model = {gpu: sum(tensor.nbytes for tensor in _tensors(model) if tensor.device == gpu) for gpu in gpus}
    free = torch.tensor([torch.cuda.mem_get_info(gpu)[0] + of_model[gpu] for gpu in gpus], device=world.device)
    if world.world_size > 1:
        dist.all_reduce(free, dist.ReduceOp.MIN)  # all ranks must choose the same map
    return [float(capacity) for capacity in free.tolist()]


# --- Module names -----------------------------------------------------------------------------------------------------


def expanded(model: nn.Module, device_map: Mapping[str, int]) -> dict[str, int]:
    """The map with each range replaced by module names. Raises `ConfigError` for unknown or repeated names."""
    modules = dict.fromkeys(name for name, _ in model.named_modules(remove_duplicate=False))
    indices: dict[str, int] = {}
    entries: dict[str, str] = {}
    for key, index in device_map.items():
        names = [key] if key in modules else _names(key)
        for name in names:
            if name not in modules:
                raise ConfigError(
                    f"parallel.device_map names {key!r}, but {type(model).__name__} has no module {name!r}",
                    suggestion(name, [module for module in modules if module], "modules"),
                )
            if name in indices:
                raise ConfigError(
                    f"parallel.device_map has {name!r} in two entries: {entries[name]!r} and {key!r}",
                    "put each module in only one entry",
                )
            indices[name] = index
            entries[name] = key
    return indices


def _names(key: str) -> Iterator[str]:
    """The module names for a key with ranges, such as `blocks.0-11`."""
    choices: list[Sequence[Any]] = []
    for part in key.split("."):
        choice: Sequence[Any] = [part]
        ends = _RANGE.fullmatch(part)
        if ends:
            choice = range(int(ends[1]), int(ends[2]) + 1)
        if not choice:
            raise ConfigError(
                f"parallel.device_map: the range {part} in {key!r} is empty", "put the smaller number first"
            )
        choices.append(choice)
    if math.prod(map(len, choices)) > 1_000_000:
        raise ConfigError(
            f"parallel.device_map: {key!r} expands to more than a million modules", "check the ends of the ranges"
        )
    yield from (".".join(map(str, parts)) for parts in product(*choices))


def indices_of(model: nn.Module, device_map: Mapping[str, int]) -> dict[str, int]:
    """The device index of each module that has its own weights or buffers, from the longest matching name in the map.

    Raises `ConfigError` for modules that no name covers, and for tensors that would be on two devices.
    """
    indices: dict[str, int] = {}
    missing: list[str] = []
    places: dict[int, tuple[int, str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if not tensors:
            continue
        entry = name
        while entry and entry not in device_map:
            entry = entry.rpartition(".")[0]
        if entry not in device_map:
            missing.append(name)
            continue
        indices[name] = index = device_map[entry]
        for short, tensor in tensors:
            full = full_name(name, short)
            other, first = places.setdefault(id(tensor), (index, full))
            if other != index:
                raise ConfigError(
                    f"{first} and {full} are tied (one tensor), but parallel.device_map puts them on devices "
                    f"{other} and {index}",
                    "put both modules on the same device; the modules between them may be on other devices",
                )
    if missing:
        uncovered = dict.fromkeys(_topmost(name, device_map) for name in missing)
        left_out = [some([repr(name) for name in uncovered if name])]
        if "" in uncovered:
            left_out.append("the parameters and buffers of the model itself ('' in the map)")
        raise ConfigError(
            f"parallel.device_map leaves out {' and '.join(filter(None, left_out))}",
            "add entries for them or for a parent module; '' matches every module without an entry",
        )
    return indices


def _topmost(name: str, device_map: Mapping[str, int]) -> str:
    """The outermost module that is or contains `name`, and that contains no module named in the map."""
    parent = name.rpartition(".")[0]
    while parent and not _contains(parent, device_map):
        name = parent
        parent = name.rpartition(".")[0]
    return name


def map_text(device_map: Mapping[str, int]) -> str:
    """The map as it would be written in a configuration, with ranges."""
    parts: list[tuple[str, int]] = []
    for (parent, index, is_block), group in groupby(device_map.items(), _siblings_on_device):
        names = [name.rpartition(".")[2] for name, _ in group]
        if is_block and len(names) > 1:
            names = [f"{names[0]}-{names[-1]}"]
        parts += [(f"{parent}{name}", index) for name in names]
    return "{" + ", ".join(f'"{name}": {index}' for name, index in parts) + "}"


def _siblings_on_device(entry: tuple[str, int]) -> tuple[str, int, bool]:
    parent, dot, last = entry[0].rpartition(".")
    return parent + dot, entry[1], last.isdecimal()


# --- Automatic map ----------------------------------------------------------------------------------------------------


def automatic_map(model: nn.Module, capacities: list[float]) -> dict[str, int]:
    """The map that minimises the work of the device with the most work.

    `capacities`: bytes of each device. The model is treated as a chain of its repeated blocks and the modules between
    them, in the order of registration. Modules that share a tied tensor stay together. The bytes of weights, gradients
    and Adam's optimizer state are counted; activations are unknown before the first batch. Work is estimated by
    `work_of`, because times are unknown too.
    Raises `ConfigError` if the model does not fit, or has no repeated blocks.
    """
    if len(capacities) == 1:
        return {"": 0}
    hint = "map the modules yourself: parallel={'device_map': {'encoder': 0, 'decoder': 1}}"
    units = tuple(required_blocks(model, "parallel.device_map='auto'", hint))
    links, sizes, work = _chain(model, units)
    ranges = split_chain(work, sizes, capacities[: len(links)])
    device_of: dict[str, int] = {}
    for index, links_on_device in enumerate(ranges):
        for link in links_on_device:
            device_of |= dict.fromkeys(links[link], index)
    order = [name for name, _ in model.named_modules(remove_duplicate=False) if name in device_of]
    return {name: device_of[name] for name in order}


def _chain(model: nn.Module, units: tuple[str, ...]) -> tuple[list[list[str]], list[float], list[float]]:
    """Return the links of the chain (each a list of module names), the bytes of each link and the work of each."""
    links: list[list[str]] = []
    sizes: list[float] = []
    work: list[float] = []
    link_of: dict[int, int] = {}  # by the id of a tensor
    for name, module in _chain_modules(model, "", units):
        whole = not _contains(name, units)
        tensors = _tensors(module, recurse=whole)
        links_of_tied = [link_of[id(tensor)] for tensor in tensors if id(tensor) in link_of]
        link = min(links_of_tied, default=len(links))
        if link == len(links):
            links.append([])
            sizes.append(0.0)
            work.append(0.0)
        links[link].append(name)
        work[link] += work_of(module, recurse=whole)
        for tensor in tensors:
            if id(tensor) not in link_of:
                link_of[id(tensor)] = link
                copies = 2 + _STATES_PER_WEIGHT if tensor.requires_grad else 1
                sizes[link] += tensor.nbytes * copies
    return links, sizes, work


def _chain_modules(module: nn.Module, name: str, units: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    """The blocks, the modules between blocks, and the modules that contain blocks and also have their own tensors."""
    if not _contains(name, units):
        if name in units or _tensors(module):
            yield name, module
        return
    if _tensors(module, recurse=False):
        yield name, module
    for child_name, child in module.named_children():
        yield from _chain_modules(child, full_name(name, child_name), units)


def _contains(name: str, others: Iterable[str]) -> bool:
    """Whether the module `name` contains one of the other modules; "" is the model."""
    return any(other.startswith(full_name(name, "")) for other in others)


def _tensors(module: nn.Module, *, recurse: bool = True) -> list[Tensor]:
    return [*module.parameters(recurse), *module.buffers(recurse)]


# --- Placement --------------------------------------------------------------------------------------------------------


def _move_own_tensors(module: nn.Module, device: torch.device) -> None:
    """Move a module's own tensors to a device, but not those of its children.

    As with `module.to(device)`, parameters stay the same objects.
    """
    childless = nn.Module()
    childless._parameters = module._parameters
    childless._buffers = module._buffers
    childless.to(device)


def hooked_modules(model: nn.Module, device_map: Mapping[str, int]) -> dict[str, int]:
    """The names of the modules whose inputs are moved, with the indices of the modules' devices.

    These are the modules named in the map, and the outermost modules whose tensors are all on one device.
    """
    indices = {**indices_of(model, device_map), **device_map}
    hooked: dict[str, int] = {}
    inside: dict[str, set[int]] = {}  # the devices of a module and its submodules
    for name, index in indices.items():
        for module_name in ("", *accumulate(name.split("."), full_name)):
            inside.setdefault(module_name, set()).add(index)

    def walk(name: str, module: nn.Module, within: bool) -> None:
        """Visit a module and its children.

        `within`: whether a module around this one is entirely on one device. If so, its hook already moves the inputs.
        """
        devices = inside.get(name, set())
        whole = len(devices) == 1 and not isinstance(module, nn.ModuleList | nn.ModuleDict)  # never called
        if name in device_map or (whole and not within):
            hooked[name] = indices.get(name, min(devices))
        for child_name, child in module.named_children():
            walk(full_name(name, child_name), child, within or whole)

    walk("", model, within=False)
    return hooked


class _InputsMove:
    """A forward pre-hook that moves the tensors in a module's inputs to the module's device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if _all_on(self._device, (args, kwargs)):
            return None
        return _moved((args, kwargs), self._device)  # type: ignore[no-any-return]


class _OutputMoves:
    """Forward hooks that move the tensors in the model's output to the device of the first tensor in its input.

    `default`: the device to use if the input has no tensor.
    """

    def __init__(self, default: torch.device) -> None:
        self._default = self._device = default

    def before(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        self._device = next((tensor.device for tensor in tensors), self._default)

    def after(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if _all_on(self._device, output):
            return output
        return _moved(output, self._device)


def _all_on(device: torch.device, values: Any) -> bool:
    return all(leaf.device == device for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))


def _moved(values: Any, device: torch.device) -> Any:
    # A GPU's stream orders copies to that GPU, but the host could read host memory before a copy to it is complete.
    move = methodcaller("to", device, non_blocking=device.type != "cpu")
    return pytree.tree_map_only(Tensor, move, values)
