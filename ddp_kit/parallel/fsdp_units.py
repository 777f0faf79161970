"""The modules that FSDP2 shards, each gathered as a whole: what fsdp.py and pipeline.py share."""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ddp_kit.containers import with_copied_containers
from ddp_kit.errors import ConfigError, some
from ddp_kit.parallel.dtensors import is_dtensor
from ddp_kit.parallel.mesh import whole_gradients_fit
from ddp_kit.world import World, host_group

T = TypeVar("T")


def shard_unit(name: str, unit: nn.Module, mesh: DeviceMesh, hint: str, **settings: Any) -> FSDPModule:
    """Shard a module over `shard`, and replicate it over `replicate` if that has several ranks. `mesh`: has both.

    `settings`: of `fully_shard`. Raises `ConfigError` with this hint. Call `check_dtypes` first.
    """
    own = _own_parameters(unit, settings.get("ignored_params") or ())
    for each in own.values():  # FSDP takes no other layout, such as channels_last
        if not is_dtensor(each):
            each.data = each.data.contiguous()
    over = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
    try:
        sharded: Any = fully_shard(unit, mesh=over, **settings)
    except (ValueError, RuntimeError, NotImplementedError, AssertionError) as error:
        raise ConfigError(f"FSDP cannot shard {name or 'the model'} ({type(unit).__name__}): {error}", hint) from None
    found: FSDPModule = sharded
    return found


def _own_parameters(unit: Any, ignored: Collection[nn.Parameter] = ()) -> dict[str, nn.Parameter]:
    """The parameters that a unit gathers: without those of units inside of it."""
    nested: list[Any] = [each for each in unit.modules() if each is not unit and isinstance(each, FSDPModule)]
    inside = {parameter for each in nested for parameter in each.parameters()}
    return {name: each for name, each in unit.named_parameters() if each not in inside and each not in ignored}


def check_dtypes(name: str, unit: Any, hint: str, ignored: Collection[nn.Parameter] = ()) -> None:
    """Raise `ConfigError` where FSDP would raise an `AssertionError` in the first forward pass.

    `hint`: what to do instead of a conversion, with "{}" for the names of the modules that have the rarer dtype.
    """
    by_dtype: dict[torch.dtype, list[str]] = {}
    for each, parameter in _own_parameters(unit, ignored).items():
        if parameter.requires_grad:
            by_dtype.setdefault(parameter.dtype, []).append(f"{name}.{each}" if name else each)
    if len(by_dtype) > 1:
        kinds = "; ".join(f"{dtype} in {some(names)}" for dtype, names in by_dtype.items())
        rarer = dict.fromkeys(each.rpartition(".")[0] for each in min(by_dtype.values(), key=len))
        raise ConfigError(
            f"FSDP gathers the trained parameters of {name or 'the model'} ({type(unit).__name__}) together, and they "
            f"have several dtypes: {kinds}",
            "convert them to one before creating the Trainer, such as model.to(torch.float32)"
            + (f"; or {hint.format(some([*rarer]))}" if hint else ""),
        )


class FsdpUnits:
    """Units whose gradients are reduced to sums; an optimizer step may have several backward passes."""

    def __init__(
        self, units: Iterable[FSDPModule], *, whole_gradients: bool, replicated: bool, gathered: bool = False
    ) -> None:
        """`whole_gradients`: gradients stay whole until the last pass, and are reduced once per step. `replicated`:
        without that, shards add up, and are reduced over the replicas once. `gathered`: weights stay gathered from the
        first forward pass of a step to its last backward pass."""
        self._units = [*units]
        self._whole_gradients = whole_gradients
        self._replicated = replicated
        self._gathered = gathered
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            if gathered:
                unit.set_reshard_after_forward(False, recurse=False)

    @property
    def add_up(self) -> bool:
        """Whether shards add up, and only the last backward pass of a step reduces them over the replicas."""
        return self._replicated and not self._whole_gradients

    def before_backward(self, *, last: bool) -> None:
        """To be called before each backward pass. `last`: of the step."""
        for unit in self._units:
            if self._whole_gradients:
                unit.set_requires_gradient_sync(last, recurse=False)
            elif self.add_up:
                unit.set_requires_all_reduce(last, recurse=False)
            if self._gathered:
                unit.set_reshard_after_backward(last, recurse=False)

    def reduce_too(self, units: Iterable[FSDPModule]) -> None:
        """To be called before the last backward pass, which does not run these units: reduce what earlier ones have
        added up. Gradients of 0 make torch do so."""
        for unit in units if self.add_up else ():
            unit.unshard()
            for parameter in _own_parameters(unit).values():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)

    def reshard(self) -> None:
        """Free gathered weights: only a backward pass does so for what the root has gathered."""
        for unit in self._units:
            unit.reshard()


def fit_whole_on_all_ranks(parameters: Iterable[nn.Parameter], world: World) -> bool:
    """The same on all ranks: it decides which collectives run."""
    size = sum(each.numel() * each.element_size() for each in parameters)
    if world.device.type == "cuda":
        memory = torch.cuda.get_device_properties(world.device).total_memory
    else:
        import psutil

        memory = psutil.virtual_memory().total // world.local_world_size
    fits = torch.tensor(int(whole_gradients_fit(size, memory)))
    dist.all_reduce(fits, op=dist.ReduceOp.MIN, group=host_group(world))
    return bool(fits)


def equal_batches(batches: Iterable[tuple[int, T]], spare: Callable[[], T], world: World) -> Iterator[tuple[int, T]]:
    """As many batches on each rank: those of a rank that has fewer are followed by batches of 0 samples."""
    arriving, kept = iter(batches), None
    while True:
        own = next(arriving, None)
        more = torch.tensor(int(own is not None))
        dist.all_reduce(more, op=dist.ReduceOp.MAX, group=host_group(world))
        if not more:
            return
        if own is None:
            kept = [spare()] if kept is None else kept
            yield 0, with_copied_containers(kept[0])
        else:
            kept = [with_copied_containers(own[1])]
            yield own
