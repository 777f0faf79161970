"""Weights, gradients and optimizer state sharded over ranks, by torch's FSDP2 (`fully_shard`), with tensor parallel.

Every forward and backward pass gathers the weights of one unit after the other, and each backward pass reduces its
gradients: so all ranks run the same number of passes. Gradients are sums over the ranks; the trainer scales them by
the true weight of the global batch.
"""

import fnmatch
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ddp_kit.blocks import repeated_blocks
from ddp_kit.config import ParallelConfig
from ddp_kit.errors import ConfigError, LossError, nearest, some
from ddp_kit.parallel.dtensors import is_divided, is_dtensor, piece_of_dtensor, reduced_part
from ddp_kit.parallel.fsdp_units import (
    FsdpUnits,
    check_dtypes,
    equal_batches,
    fit_whole_on_all_ranks,
    shard_unit,
)
from ddp_kit.parallel.mesh import sizes_of
from ddp_kit.parallel.replicas import broadcast
from ddp_kit.parallel.shards import Shards, check_dense_gradients
from ddp_kit.parallel.strategy import Parallelize, Passes, Strategy
from ddp_kit.parallel.tensor import split_layers
from ddp_kit.parallel.tensor_plan import tensor_plan
from ddp_kit.parallel.unit_order import UnitOrder
from ddp_kit.pieces import Piece
from ddp_kit.world import World

T = TypeVar("T")


class FsdpStrategy(Strategy):
    """FSDP2 over `shard` ranks, in `replicate` groups (HSDP where there are several), of layers split over `tensor`."""

    equal_passes = True
    shards = True
    divides_weights = True
    replaces_parameters = True

    def __init__(self, world: World, config: ParallelConfig, *, recoverable: bool = False) -> None:
        super().__init__(world, config, recoverable=recoverable)
        self.sizes = sizes_of(config, world.world_size)
        _, self._replica, self._shard, self._tensor = self.sizes.coordinates(world.rank)
        self._mesh: DeviceMesh
        self._sharded: list[FSDPModule] = []
        self._units: FsdpUnits
        self._shards: Shards
        self._named_units: dict[str, Any] = {}
        self._order: UnitOrder
        self._parallelize: Parallelize | None = None
        self._offload: OffloadPolicy = OffloadPolicy()

    # --- which ranks share what -----------------------------------------------------------------------------------

    @property
    def data_ranks(self) -> int:
        return self.sizes.data

    @property
    def data_rank(self) -> int:
        return self._replica * self.sizes.shard + self._shard

    @property
    def contributes(self) -> bool:
        return self._tensor == 0

    @property
    def replicas(self) -> tuple[range, ...]:
        apart = self.sizes.shard * self.sizes.tensor
        return tuple(range(first, self.world.world_size, apart) for first in range(apart))

    # --- set up ---------------------------------------------------------------------------------------------------

    def check(self, model: nn.Module) -> None:
        super().check(model)
        for name in ("static_graph", "find_unused_parameters", "compression"):
            if getattr(self.config, name):
                raise ConfigError(
                    f"parallel.{name} is a setting of DDP, and parallel.strategy is {self.config.strategy!r}",
                    f"leave out {name}"
                    + (": FSDP needs each trained parameter in each step" if name == "find_unused_parameters" else "")
                    + ", or use parallel='ddp'",
                )
        if self.config.share_gpus and self.world.device.type == "cuda":
            raise ConfigError(
                "parallel.share_gpus is not supported with FSDP and tensor parallel: gloo lacks their collectives "
                "for the memory of a GPU",
                "start as many ranks as there are GPUs, or run on the CPU with CUDA_VISIBLE_DEVICES=''",
            )
        check_dense_gradients(model, self.config.strategy)
        scalars = [name for name, each in model.named_parameters() if each.ndim == 0]
        if scalars:
            raise ConfigError(
                f"FSDP cannot shard parameters without a dimension: {some(scalars)}",
                "give them one: nn.Parameter(torch.ones(1)) in place of nn.Parameter(torch.tensor(1.0))",
            )

    def check_recoverable(self) -> None:
        raise ConfigError(
            f"micro_batch_size='auto' is not supported with parallel.strategy={self.config.strategy!r}: it tries "
            "sizes until one does not fit, and where one rank runs out of memory, the others wait in the pass's "
            "collectives",
            "set micro_batch_size to a number; `ddpkit plan train.py` estimates what fits",
        )

    def setup(self, model: nn.Module) -> None:
        self.model = model
        sizes, device = self.sizes, self.world.device
        self._mesh = init_device_mesh(
            device.type, (sizes.replicate, sizes.shard, sizes.tensor), mesh_dim_names=("replicate", "shard", "tensor")
        )
        names = [name for name, _ in model.named_parameters()]
        if self._parallelize is None:
            self._spread(model)
        else:
            self._place(model)
            self._parallelize(model, self._mesh)
            self._sharded = [each for each in model.modules() if isinstance(each, FSDPModule)]
            self._check_spread(model)
        self.parameters = tuple(parameter for parameter in model.parameters() if parameter.requires_grad)
        fit = fit_whole_on_all_ranks(self.parameters, self.world)
        self._units = FsdpUnits(self._sharded, whole_gradients=fit, replicated=sizes.replicate > 1)
        sharded: list[Any] = self._sharded
        names_of = {module: name for name, module in model.named_modules()}
        self._named_units = {names_of[unit]: unit for unit in sharded}
        self._order = UnitOrder(self.world, self._named_units)
        pieces = {each: piece for each in model.parameters() if (piece := piece_of_dtensor(each)) is not None}
        self._shards = Shards(pieces, dict(zip(model.parameters(), names, strict=True)))
        held = [(each, self._shards.of.get(each, each)) for each in self.parameters]
        self._held = [shard for _, shard in held]
        self._split = [
            shard for whole, shard in held if is_divided(whole, "tensor")
        ]  # over the ranks of a tensor group

    def _spread(self, model: nn.Module) -> None:
        """Unit by unit: no rank ever holds the whole model on its device."""
        units: dict[str, nn.Module] = {**self._chosen_units(model), "": model}
        plan = tensor_plan(model, self.config) if self.sizes.tensor > 1 else {}
        for name, unit in units.items():
            self._place(unit)
            if plan:
                split_layers(model, {*unit.modules()}, plan, self._mesh["tensor"])
            if self.sizes.data > 1:
                self._shard_unit(name, unit)

    def use(self, parallelize: Parallelize) -> None:
        self._parallelize = parallelize

    def offload_parameters(self) -> None:
        if self._parallelize is not None:
            raise ConfigError(
                "memory.offload_parameters has no effect on weights that parallelize=... shards",
                "leave it out, and give offload_policy=CPUOffloadPolicy() to fully_shard in your function",
            )
        self._offload = CPUOffloadPolicy(pin_memory=self.world.device.type == "cuda")

    @property
    def parameters_on_host(self) -> bool:
        return isinstance(self._offload, CPUOffloadPolicy) and bool(self._sharded)

    def _check_spread(self, model: nn.Module) -> None:
        """Raise `ConfigError` for parameters whose gradients would not be reduced over the ranks, or cannot be."""
        needed = {name for name in ("replicate", "shard") if getattr(self.sizes, name) > 1}
        apart = [
            name
            for name, each in model.named_parameters()
            if each.requires_grad and needed - set(each.device_mesh.mesh_dim_names or () if is_dtensor(each) else ())
        ]
        if apart:
            raise ConfigError(
                f"after parallelize(model, mesh), {some(apart)} are not on the mesh dimensions {sorted(needed)}: each "
                "rank would train them by itself",
                "let the function end with fully_shard(model, mesh=mesh['shard']), or mesh['replicate', 'shard']",
            )
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                check_dtypes(name, module, "call fully_shard on {} first in the function")

    def _chosen_units(self, model: nn.Module) -> dict[str, nn.Module]:
        """The modules whose weights are gathered together, inner ones first; the rest belongs to the root."""
        modules = dict(model.named_modules())
        modules.pop("")
        if self.config.units == "auto":
            chosen = repeated_blocks(model)
        else:
            chosen = {}
            for pattern in self.config.units:
                found = fnmatch.filter(modules, pattern)
                if not found:
                    raise ConfigError(
                        f"parallel.units names {pattern!r}, and the model {type(model).__name__} has no such module",
                        f"nearest: {nearest(pattern, [*modules]) or some([*modules])}",
                    )
                chosen |= {name: modules[name] for name in found}
        _check_shared(model, chosen)
        return dict(sorted(chosen.items(), key=lambda one: -one[0].count(".")))

    def _place(self, unit: Any) -> None:
        """What of a unit is not sharded yet goes to the device, as rank 0 has it."""
        device = self.world.device
        whole = [each for each in unit.parameters() if not isinstance(each, DTensor)]
        for parameter in whole:
            parameter.data = parameter.data.to(device)
        for buffer in unit.buffers():
            buffer.data = buffer.data.to(device)
        broadcast([*(each.detach() for each in whole), *unit.buffers()])

    def _shard_unit(self, name: str, unit: nn.Module) -> None:
        reshard = None if self.config.reshard == "auto" else self.config.reshard
        hint = "name other modules in parallel.units, or use parallel='ddp'"
        check_dtypes(name, unit, "name {} in parallel.units, besides the blocks, or use parallel='ddp'")
        settings = {"reshard_after_forward": reshard, "offload_policy": self._offload}
        self._sharded.append(shard_unit(name, unit, self._mesh, hint, **settings))

    def setup_optimizer(self, optimizer: Optimizer) -> None:
        self._shards.give_to(optimizer)

    def local_parameters(self) -> list[Tensor]:
        return [self._shards.of.get(each, each).detach() for each in self.model.parameters()]

    # --- an optimizer step ----------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self.sync_buffers()

    def sync_buffers(self) -> None:
        broadcast(self.model.buffers())

    def run_passes(self, passes: Passes) -> None:
        ran: set[str] = set()
        for number in range(passes.count):
            last = number == passes.count - 1
            with _explained(), self._order.in_pass("training pass") as running:
                loss = passes.forward(number)
            ran.update(running)
            if passes.count > 1:
                self._units.before_backward(last=last)
            if last:
                left_out = ran.difference(running)
                self._units.reduce_too(unit for name, unit in self._named_units.items() if name in left_out)
                passes.before_reduction(loss)
            with _explained():
                loss.backward()  # type: ignore[no-untyped-call]
            passes.after_backward()
        with torch.no_grad():
            for whole, shard in self._shards.trained:
                shard.grad = None if whole.grad is None else reduced_part(whole.grad, whole)

    def check_gradients(self) -> None:
        missing = [self.held_names()[id(each)] for each in self._held if each.grad is None]
        if missing:
            when = "the last micro-batch of a step" if self._units.add_up else "a step"
            raise LossError(
                f"{some(missing)} got no gradient in {when}, and FSDP reduces those of all ranks together",
                "use them in the loss, or freeze them (requires_grad=False) before creating the Trainer",
            )

    # --- gradients ------------------------------------------------------------------------------------------------

    @property
    def updated(self) -> list[nn.Parameter]:
        return self._held

    def grad_norm(self) -> Tensor:
        """Local sums of squares, added up over the ranks that hold different parts."""
        split = set(map(id, self._split))
        rest = [each for each in self._held if id(each) not in split]
        squares = torch.stack([_norm(each, self.world.device).square() for each in (rest, self._split)])
        if self.sizes.shard > 1:
            dist.all_reduce(squares, group=self._mesh.get_group("shard"))
        if self.sizes.tensor > 1:  # what is not split is the same on all ranks of the group
            dist.all_reduce(squares[1], group=self._mesh.get_group("tensor"))
        return squares.sum().sqrt()

    # --- evaluation and prediction ----------------------------------------------------------------------------------

    def evaluation(self, batches: Iterable[tuple[int, T]], spare: Callable[[], T]) -> Iterator[tuple[int, T]]:
        try:
            for each in equal_batches(batches, spare, self.world):
                with self._order.in_pass("evaluation pass"):
                    yield each
        finally:
            # The next pass would use what is gathered, even if callbacks, such as EMA, have changed the weights since.
            self._units.reshard()

    # --- state ------------------------------------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        state = self.model.state_dict(keep_vars=True)
        pieces: dict[int, Piece] = {}
        for name, value in state.items():
            if id(value) in pieces:  # tied weights are stored once
                state[name] = pieces[id(value)]
            elif (piece := piece_of_dtensor(value)) is not None:
                state[name] = pieces[id(value)] = self._written(piece, split=is_divided(value, "tensor"))
            elif isinstance(value, Tensor):
                state[name] = value.detach()
        return state

    def load_model_state(self, state: dict[str, Any]) -> None:
        own, loaded = self.model.state_dict(), {}
        with torch.no_grad():
            for name, value in state.items():
                piece = piece_of_dtensor(own.get(name))
                if piece is None:
                    loaded[name] = value
                else:
                    piece.tensor.copy_(piece.of(value))
                    loaded[name] = own[name]
        self.model.load_state_dict(loaded)

    def held_names(self) -> dict[int, str]:
        return super().held_names() | self._shards.names

    def piece_of(self, parameter: Tensor) -> Piece | None:
        piece = self._shards.pieces.get(id(parameter))
        return None if piece is None else self._written(piece, split=any(each is parameter for each in self._split))

    def _written(self, piece: Piece, *, split: bool) -> Piece:
        """Of the ranks that hold the same piece, the first writes it."""
        return replace(piece, owned=self._replica == 0 and (split or self._tensor == 0))


def _norm(parameters: list[nn.Parameter], device: torch.device) -> Tensor:
    gradients = [each.grad for each in parameters if each.grad is not None]
    return nn.utils.get_total_norm(gradients).to(device) if gradients else torch.zeros((), device=device)


def _check_shared(model: nn.Module, units: dict[str, nn.Module]) -> None:
    """Raise `ConfigError` where a parameter is in two units: each would gather and reduce it for itself."""
    owners: dict[nn.Parameter, str] = {}
    for name, unit in units.items():
        for parameter in unit.parameters():
            other = owners.setdefault(parameter, name)
            if other != name and not (other.startswith(f"{name}.") or name.startswith(f"{other}.")):
                raise ConfigError(
                    f"the units {other} and {name} share a parameter, which FSDP cannot gather twice",
                    "name other modules in parallel.units, such as one that contains both",
                )
    inside = set(owners)
    for name, module in model.named_modules():
        if any(name == unit or name.startswith(f"{unit}.") for unit in units):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter in inside:
                raise ConfigError(
                    f"{name or 'the model'} shares a parameter with the unit {owners[parameter]}",
                    "name other modules in parallel.units: tied weights have to be in one unit, or outside of all",
                )


@contextmanager
def _explained() -> Iterator[None]:
    """What FSDP says when weights are used outside of the forward pass that gathers them."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "mixed torch.Tensor and DTensor" in text or "lazily initialized" in text or "root module first" in text:
            raise LossError(
                f"the loss function uses weights outside of the model's forward pass, where they are sharded: {text}",
                "call model(...) in the loss function, and compute what needs weights inside the model's forward; "
                "parallel='ddp' keeps weights whole everywhere",
            ) from error
        raise
