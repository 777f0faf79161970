"""Sharding of weights, gradients and optimizer state over ranks, by torch's FSDP2 (`fully_shard`).

A unit is a module that FSDP shards. FSDP gathers all weights of a unit at once.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.optim import Optimizer

from ddp_kit.config.settings import ParallelConfig
from ddp_kit.distributed.barrier import wait_for_all
from ddp_kit.distributed.world import World, host_group
from ddp_kit.errors import ConfigError, LossError
from ddp_kit.model.blocks import repeated_blocks
from ddp_kit.model.names import full_name, matching, refuse
from ddp_kit.parallel.shards import Shards, check_dense_gradients, check_no_hooks
from ddp_kit.parallel.strategy import (
    NO_OPTIONS,
    Options,
    SharedBuffers,
    Strategy,
    broadcast,
    sizes_of,
    state_with_pieces,
    total_norm,
    trained,
    whole_gradients_fit,
    with_written_views,
)
from ddp_kit.parallel.tensor import (
    is_divided,
    is_dtensor,
    mesh_dimensions,
    piece_of_dtensor,
    pieces_of_dtensors,
    reduced_gradient,
    split_layers,
    tensor_plan,
)
from ddp_kit.parallel.writes import WriteCheck
from ddp_kit.state_values import Piece
from ddp_kit.structures import with_copied_containers
from ddp_kit.texts import some

T = TypeVar("T")


def shard_unit(name: str, unit: nn.Module, mesh: DeviceMesh, hint: str, **settings: Any) -> None:
    """Shard a module over the mesh dimension `shard`, and replicate it over `replicate` if that has several ranks.

    `mesh`: a mesh with both dimensions. `settings`: passed to `fully_shard`. `hint`: the hint of the `ConfigError` if
    `fully_shard` fails. Call `check_dtypes` first.
    """
    ignored = settings.get("ignored_params", ())
    # FSDP does not support other layouts, such as channels_last.
    for parameter in _own_parameters(unit, ignored).values():
        if not is_dtensor(parameter):
            parameter.data = parameter.data.contiguous()
    _watch_writes(name, unit, ignored)
    over = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
    try:
        fully_shard(unit, mesh=over, **settings)
    except (ValueError, RuntimeError, NotImplementedError, AssertionError) as error:
        raise ConfigError(f"FSDP cannot shard {name or 'the model'} ({type(unit).__name__}): {error}", hint) from None


def _own_parameters(unit: Any, ignored: Collection[nn.Parameter] = ()) -> dict[str, nn.Parameter]:
    """The parameters that a unit gathers, without the parameters of units inside it."""
    nested: list[Any] = [module for module in unit.modules() if module is not unit and isinstance(module, FSDPModule)]
    inside = {parameter for module in nested for parameter in module.parameters()}
    excluded = inside | {*ignored}
    return {name: parameter for name, parameter in unit.named_parameters() if parameter not in excluded}


def _watch_writes(name: str, unit: Any, ignored: Collection[nn.Parameter] = (), *, is_sharded: bool = False) -> None:
    """Check that the forward passes of a unit do not write its weights: FSDP would lose the changed values.

    `is_sharded`: whether the unit is sharded already.
    """
    own = {id(parameter) for parameter in _own_parameters(unit, ignored).values()}
    places = [
        (module, short_name, full_name(name, full_name(path, short_name)))
        for path, module in unit.named_modules()
        for short_name, parameter in module.named_parameters(recurse=False)
        if id(parameter) in own
    ]
    check = WriteCheck([weight for _, _, weight in places], "FSDP")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(*_hook: Any) -> None:
        if not torch.is_inference_mode_enabled():
            check.begin([getattr(module, short_name) for module, short_name, _ in places])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(*_hook: Any) -> None:
        if not torch.is_inference_mode_enabled():
            check.end()

    # Next to FSDP's own hooks, which gather and free the weights, so that other hooks of the unit run in between.
    unit.register_forward_pre_hook(before, prepend=not is_sharded)
    unit.register_forward_hook(after, prepend=is_sharded)


def check_dtypes(name: str, unit: Any, hint: str, ignored: Collection[nn.Parameter] = ()) -> None:
    """Raise `ConfigError` if a unit's trained parameters have several dtypes: FSDP would fail in its first pass.

    `hint`: another way to fix the error. "{}" in it is replaced with the names of the modules with the rarer dtype.
    """
    by_dtype: dict[torch.dtype, list[str]] = {}
    for short_name, parameter in _own_parameters(unit, ignored).items():
        if parameter.requires_grad:
            by_dtype.setdefault(parameter.dtype, []).append(full_name(name, short_name))
    if len(by_dtype) > 1:
        kinds = "; ".join(f"{dtype} in {some(names)}" for dtype, names in by_dtype.items())
        rarer = dict.fromkeys(weight.rpartition(".")[0] for weight in min(by_dtype.values(), key=len))
        raise ConfigError(
            f"FSDP gathers the trained parameters of {name or 'the model'} ({type(unit).__name__}) together, but they "
            f"have several dtypes: {kinds}",
            "convert them to one dtype before creating the Trainer, for example with model.to(torch.float32); or "
            + hint.format(some([*rarer])),
        )


class FsdpUnits:
    """FSDP units, with control over which backward passes of a step reduce (sum) gradients over the ranks."""

    def __init__(
        self, units: Iterable[FSDPModule], *, whole_gradients: bool, replicated: bool, gathered: bool = False
    ) -> None:
        """Set up the units.

        `whole_gradients`: accumulate unsharded gradients, and reduce them only in the last pass of a step; otherwise,
        each pass reduces its gradients to shards. `replicated`: whether there are several replicas; the shards are then
        reduced over the replicas only in the last pass of a step. `gathered`: keep weights gathered from the first
        forward pass to the last backward pass of a step.
        """
        self._units = [*units]
        self._whole_gradients = whole_gradients
        self._replicated = replicated
        self._gathered = gathered
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            if gathered:
                unit.set_reshard_after_forward(False, recurse=False)
        self._last = True  # as a unit is at first

    @property
    def add_up(self) -> bool:
        """Whether passes accumulate sharded gradients, and only the last pass of a step reduces them over replicas."""
        return self._replicated and not self._whole_gradients

    def before_backward(self, *, last: bool) -> None:
        """Prepare the units for a backward pass. `last`: whether this is the last backward pass of the step."""
        if last == self._last:
            return
        self._last = last
        for unit in self._units:
            if self._whole_gradients:
                unit.set_requires_gradient_sync(last, recurse=False)
            elif self.add_up:
                unit.set_requires_all_reduce(last, recurse=False)
            if self._gathered:
                unit.set_reshard_after_backward(last, recurse=False)

    def reduce_unused_units(self, units: Iterable[FSDPModule]) -> None:
        """Make the last backward pass also reduce the gradients of units that only earlier passes used.

        Gradients filled with zeros are added to these units, because torch reduces only units that have new gradients.
        """
        if not self.add_up:
            return
        for unit in units:
            unit.unshard()
            for parameter in _own_parameters(unit).values():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)

    def reshard(self) -> None:
        """Free gathered weights. FSDP itself frees the weights of the root only in a backward pass."""
        for unit in self._units:
            unit.reshard()


def fit_whole_on_all_ranks(parameters: Iterable[nn.Parameter], world: World) -> bool:
    """Whether the unsharded gradients of these parameters fit into memory on every rank. A collective."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    if world.device.type == "cuda":
        memory = torch.cuda.get_device_properties(world.device).total_memory
    else:
        import psutil

        memory = psutil.virtual_memory().total // world.local_world_size
    fits = torch.tensor(int(whole_gradients_fit(size, memory)))
    dist.all_reduce(fits, op=dist.ReduceOp.MIN, group=host_group(world))
    return bool(fits)


def equal_batches(
    batches: Iterable[tuple[int, T]], filler_batch: Callable[[], T], world: World
) -> Iterator[tuple[int, T]]:
    """Yield (number of samples, batch) for each batch, equally often on each rank. A collective.

    Ranks with fewer batches repeat their last batch as a batch of 0 samples. `filler_batch`: a function that returns a
    batch for a rank that has none.
    """
    iterator = iter(batches)
    filler: list[T] = []
    while True:
        item = next(iterator, None)
        more = torch.tensor(int(item is not None))
        dist.all_reduce(more, op=dist.ReduceOp.MAX, group=host_group(world))
        if not more:
            return
        if item is None:
            filler = filler or [filler_batch()]
            yield 0, with_copied_containers(filler[0])
        else:
            filler = [with_copied_containers(item[1])]
            yield item


# --- Order of units ---------------------------------------------------------------------------------------------------
# Each unit gathers its weights from all ranks. If one rank skips a unit that others run, the ranks' collectives no
# longer match: they hang, or silently gather the weights of another unit (pytorch#148334).
#
#     before each unit of a pass, and at the end of the model's forward pass:
#         the same unit as in the previous pass         -> continue, without communication
#         another unit, or the first pass               -> the monitored barrier
#             another rank is at another unit           -> WorldError
#             the timeout has passed, because other ranks wait in the collective of a skipped unit    -> WorldError


TIMEOUT_SECONDS = 120.0
"""Seconds that a rank waits for other ranks, except in the first pass, in which a rank may be compiling."""
_HINT = (
    "run the same modules on all ranks: choose them by values that are the same on all ranks, or multiply a module's "
    "result by 0 instead of skipping the module; different modules on different ranks need "
    'parallel={"strategy": "ddp", "find_unused_parameters": True}'
)


class UnitOrder:
    """Checks that all ranks run the units in the same order. `units`: modules by name; "" is the name of the model."""

    def __init__(self, world: World, units: Mapping[str, nn.Module]) -> None:
        self._world = world
        self._orders: dict[str, list[str]] = {}  # the order in the last pass of each kind
        self._expected: list[str] | None = None  # None: outside of a forward pass, as in recomputation
        self._kind = ""
        self._seen: list[str] = []
        self._at = 0  # the position in `_expected`
        self._passes = 0
        for name, unit in units.items():
            unit.register_forward_pre_hook(partial(self._before, name or "the model's start"), prepend=True)
            if not name:
                unit.register_forward_hook(partial(self._before, "the model's end"))

    @contextmanager
    def in_pass(self, kind: str) -> Iterator[list[str]]:
        """The context of one forward pass. Yields a list to which the names of units are appended as they run.

        `kind`: the kind of pass. Passes of one kind usually run the units in the same order. Raises `WorldError` if the
        ranks run the units in different orders.
        """
        self._kind = kind
        self._expected = expected = self._orders.get(kind, [])
        self._seen = []
        self._at = 0
        self._passes += 1
        try:
            yield self._seen
            if self._at < len(expected) or kind not in self._orders:
                self._compare("the end of the pass")
            self._orders[kind] = self._seen
        finally:
            self._expected = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, name: str, *_hook: Any) -> None:
        expected = self._expected
        if expected is None:
            return
        self._seen.append(name)
        if self._at < len(expected) and expected[self._at] == name:
            self._at += 1
            return
        self._compare(name)
        if name in expected[self._at :]:
            self._at = expected.index(name, self._at) + 1

    def _compare(self, place: str) -> None:
        """Wait until all ranks reach this point of the pass. Raises `WorldError` if a rank does not reach it."""
        place = f"{place} in {self._kind} {self._passes}"
        seconds = None
        if self._expected:
            seconds = TIMEOUT_SECONDS
            left = self._expected[self._at : self._at + 1]
            place += f", where the previous pass ran {left[0]}" if left else ", which the previous pass did not run"
        wait_for_all(self._world, place, seconds=seconds, hint=_HINT)


# --- FSDP strategy ----------------------------------------------------------------------------------------------------
# Every forward and backward pass gathers the weights of one unit after another, and each backward pass reduces the
# gradients, so all ranks must run the same number of passes: `equal_passes` makes data/feed.py add passes of weight 0.
# Gradients are sums over the ranks; the trainer scales them by the true weight of the global batch.


class FsdpStrategy(Strategy):
    """FSDP2 over `shard` ranks, with `replicate` replicas (HSDP if several), and layers split over `tensor` ranks."""

    equal_passes = True
    shards = True
    divides_weights = True
    replaces_parameters = True

    _accepts_parallelize = True

    def __init__(self, world: World, config: ParallelConfig, options: Options = NO_OPTIONS) -> None:
        super().__init__(world, config, options)
        self.sizes = sizes = sizes_of(config, world.world_size)
        _, self._replica, shard, self._tensor = sizes.coordinates(world.rank)
        self.data_ranks = sizes.data
        self.data_rank = self._replica * sizes.shard + shard
        self.contributes = self._tensor == 0
        parts = sizes.shard * sizes.tensor
        self.replicas = tuple(range(first, world.world_size, parts) for first in range(parts))
        self.optimizer_replicas = self.replicas
        self._mesh: DeviceMesh
        self._buffers: SharedBuffers
        self._units: FsdpUnits
        self._shards: Shards
        self._updated_parameters: list[nn.Parameter] = []
        self._split: set[nn.Parameter] = set()  # those that are divided over the ranks of a tensor group
        self._named_units: dict[str, Any] = {}
        self._order: UnitOrder
        self._last_pass = False
        self._used_units: set[str] = set()  # by the earlier passes of this step
        self._units_of_pass: list[str] = []

    # --- Setup --------------------------------------------------------------------------------------------------------

    def check(self, model: nn.Module) -> None:
        super().check(model)
        self._check_own_gpus("FSDP or tensor parallelism: gloo does not support their collectives on GPU tensors")
        if self.options.parallelize is not None and self.options.parameters_on_host:
            raise ConfigError(
                "memory.offload = 'all' has no effect on weights that parallelize=... shards",
                "omit it, and pass offload_policy=CPUOffloadPolicy() to fully_shard in your function",
            )
        check_dense_gradients(model, f"parallel.strategy={self.config.strategy!r}")
        check_no_hooks(model)
        refuse(
            [name for name, parameter in model.named_parameters() if parameter.ndim == 0],
            "FSDP cannot shard scalar parameters",
            "give them a dimension: nn.Parameter(torch.ones(1)) instead of nn.Parameter(torch.tensor(1.0))",
        )
        refuse(
            [name for name, parameter in model.named_parameters() if not parameter.numel()],
            "FSDP cannot shard parameters without values",
            "leave them out of the model, or use parallel='zero1' or 'ddp'",
        )

    def setup(self, model: nn.Module) -> None:
        self.model = model
        self._mesh = self.sizes.mesh(self.world.device.type, "replicate", "shard", "tensor")
        names = [name for name, _ in model.named_parameters()]
        if self.options.parallelize is None:
            self._spread(model)
        else:
            self._place(model)
            self.options.parallelize(model, self._mesh)
        self._named_units = {name: unit for name, unit in model.named_modules() if isinstance(unit, FSDPModule)}
        if self.options.parallelize is not None:
            self._check_spread(model)
            for name, unit in self._named_units.items():
                _watch_writes(name, unit, is_sharded=True)
        self.parameters = trained(model.parameters())
        self._buffers = SharedBuffers(self.world, model)
        fit = fit_whole_on_all_ranks(self.parameters, self.world)
        self._units = FsdpUnits(self._named_units.values(), whole_gradients=fit, replicated=self.sizes.replicate > 1)
        self._order = UnitOrder(self.world, self._named_units)
        self._shards = Shards(pieces_of_dtensors(model), dict(zip(model.parameters(), names, strict=True)))
        shards = {parameter: self._shards.of.get(parameter, parameter) for parameter in self.parameters}
        self._updated_parameters = [*shards.values()]
        self._split = {shard for parameter, shard in shards.items() if is_divided(parameter, "tensor")}
        self.parameters_on_host = self.options.parameters_on_host and bool(self._named_units)

    def _spread(self, model: nn.Module) -> None:
        """Move and shard the model unit by unit, so that no rank ever holds all of it on its device."""
        units: dict[str, nn.Module] = {**self._chosen_units(model), "": model}
        plan = tensor_plan(model, self.config) if self.sizes.tensor > 1 else {}
        for name, unit in units.items():
            self._place(unit)
            if plan:
                split_layers(model, {*unit.modules()}, plan, self._mesh["tensor"])
            if self.sizes.data > 1:
                self._shard_unit(name, unit)

    def _check_spread(self, model: nn.Module) -> None:
        """Raise `ConfigError` for parameters whose gradients are not, or cannot be, reduced over the ranks."""
        needed = {name for name in ("replicate", "shard") if getattr(self.sizes, name) > 1}
        missing = [
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and not needed.issubset(mesh_dimensions(parameter))
        ]
        if missing:
            raise ConfigError(
                f"after parallelize(model, mesh), {some(missing)} are not on the mesh dimensions {sorted(needed)}: "
                "each rank would train its own copy of these parameters",
                "end the function with fully_shard(model, mesh=mesh['shard']), or use mesh['replicate', 'shard']",
            )
        for name, unit in self._named_units.items():
            check_dtypes(name, unit, "call fully_shard on {} first in your function")

    def _chosen_units(self, model: nn.Module) -> dict[str, nn.Module]:
        """The FSDP units by module name, inner modules first.

        The root unit is not included. It shards all parameters that are in no other unit.
        """
        modules = dict(model.named_modules())
        modules.pop("")
        if self.config.fsdp_units == "auto":
            chosen = repeated_blocks(model)
        else:
            chosen = {
                name: modules[name]
                for pattern in self.config.fsdp_units
                for name in matching(pattern, modules, model, "parallel.fsdp_units")
            }
        _check_shared(model, chosen)
        return dict(sorted(chosen.items(), key=lambda item: -item[0].count(".")))

    def _place(self, unit: Any) -> None:
        """Move a unit's buffers and unsharded parameters to the device, and copy rank 0's values to all ranks."""
        device = self.world.device
        whole = [parameter for parameter in unit.parameters() if not is_dtensor(parameter)]
        for parameter in whole:
            parameter.data = parameter.data.to(device)
        for buffer in unit.buffers():
            buffer.data = buffer.data.to(device)
        broadcast([*(parameter.detach() for parameter in whole), *unit.buffers()])

    def _shard_unit(self, name: str, unit: nn.Module) -> None:
        check_dtypes(name, unit, "name {} in parallel.fsdp_units, in addition to the blocks, or use parallel='ddp'")
        settings: dict[str, Any] = {}
        if self.config.reshard_after_forward != "auto":
            settings["reshard_after_forward"] = self.config.reshard_after_forward
        if self.options.parameters_on_host:
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=self.world.device.type == "cuda")
        hint = "name other modules in parallel.fsdp_units, or use parallel='ddp'"
        shard_unit(name, unit, self._mesh, hint, **settings)

    def setup_optimizer(self, optimizer: Optimizer) -> None:
        self._shards.give_to(optimizer)

    def local_parameters(self) -> list[Tensor]:
        return [self._shards.of.get(parameter, parameter).detach() for parameter in self.model.parameters()]

    # --- Optimizer step -----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        # A call of the model outside of the Trainer may have left gathered weights, which callbacks such as EMA do not
        # change with the shards.
        self._units.reshard()
        self._shards.check_memory()
        self._used_units = set()
        self.sync_buffers()

    def sync_buffers(self) -> None:
        broadcast(self._buffers.checked())

    def call(self, function: Callable[[nn.Module, T], Any], batch: T) -> Any:
        kind = "training pass" if torch.is_grad_enabled() else "evaluation pass"
        with self._order.in_pass(kind) as self._units_of_pass:
            return function(self.model, batch)

    def accumulating(self, *, last: bool) -> AbstractContextManager[object]:
        self._last_pass = last
        return _sharding_errors_explained()

    def backward(self, loss: Tensor) -> None:
        self._units.before_backward(last=self._last_pass)
        if self._last_pass:
            unused = self._used_units.difference(self._units_of_pass)
            self._units.reduce_unused_units(unit for name, unit in self._named_units.items() if name in unused)
        self._used_units.update(self._units_of_pass)
        super().backward(loss)

    def finish_reduction(self) -> None:
        with torch.no_grad():
            for whole, shard in self._shards.trained:
                shard.grad = reduced_gradient(whole.grad, whole)
        missing = [parameter for parameter in self._updated_parameters if parameter.grad is None]
        when = "the last micro-batch of a step" if self._units.add_up else "a step"
        self._check_gradients(
            missing, f"got no gradient in {when}, but FSDP needs the gradients of all trained parameters"
        )

    # --- Gradients ----------------------------------------------------------------------------------------------------

    @property
    def updated_parameters(self) -> list[nn.Parameter]:
        return self._updated_parameters

    def grad_norm(self) -> Tensor:
        """The 2-norm of all gradients. Local sums of squares are added up over the ranks that hold different parts."""
        rest = [parameter for parameter in self._updated_parameters if parameter not in self._split]
        split = [parameter for parameter in self._updated_parameters if parameter in self._split]
        squares = torch.stack([total_norm(parameters, self.world.device).square() for parameters in (rest, split)])
        if self.sizes.shard > 1:
            dist.all_reduce(squares, group=self._mesh.get_group("shard"))
        if self.sizes.tensor > 1:  # other gradients are the same on all ranks of the tensor group
            dist.all_reduce(squares[1], group=self._mesh.get_group("tensor"))
        return squares.sum().sqrt()

    def grad_norms(self) -> Tensor:
        squares = super().grad_norms().square()
        if self.sizes.shard > 1:
            dist.all_reduce(squares, group=self._mesh.get_group("shard"))
        if self.sizes.tensor > 1:
            rows = [number for number, parameter in enumerate(self._updated_parameters) if parameter in self._split]
            sums = squares[rows]
            dist.all_reduce(sums, group=self._mesh.get_group("tensor"))
            squares[rows] = sums
        return squares.sqrt()

    # --- Evaluation and prediction ------------------------------------------------------------------------------------

    def evaluation(self, batches: Iterable[tuple[int, T]], filler_batch: Callable[[], T]) -> Iterator[tuple[int, T]]:
        self._units.reshard()  # as in begin_step
        try:
            yield from equal_batches(batches, filler_batch, self.world)
        finally:
            self._units.reshard()  # torch would keep the weights of the root unit gathered

    # --- State --------------------------------------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        return state_with_pieces(self.model, self._piece_in_model)

    def _piece_in_model(self, _name: str, value: Tensor) -> Piece | None:
        return self._with_owner(piece_of_dtensor(value), split=is_divided(value, "tensor"))

    def load_model_state(self, state: dict[str, Any]) -> None:
        local = self.model.state_dict()
        loaded = copy(state)  # also its _metadata, which has the versions of modules
        with torch.no_grad():
            for name, value in state.items():
                piece = piece_of_dtensor(local.get(name))
                if piece is not None:
                    piece.tensor.copy_(piece.of(value))
                    loaded[name] = local[name]
        self.model.load_state_dict(with_written_views(self.model, loaded))

    def parameter_names(self) -> dict[int, str]:
        return super().parameter_names() | self._shards.names

    def piece_of(self, parameter: Tensor) -> Piece | None:
        return self._with_owner(self._shards.pieces.get(id(parameter)), split=parameter in self._split)

    def _with_owner(self, piece: Piece | None, *, split: bool) -> Piece | None:
        """A copy of a piece, with `owned` set only on the first rank that holds it, which writes it to checkpoints."""
        if piece is None:
            return None
        return replace(piece, owned=self._replica == 0 and (split or self._tensor == 0))


def _check_shared(model: nn.Module, units: dict[str, nn.Module]) -> None:
    """Raise `ConfigError` if two units share a parameter, because both would gather and reduce it."""
    owners: dict[nn.Parameter, str] = {}
    for name, unit in units.items():
        for parameter in unit.parameters():
            other = owners.setdefault(parameter, name)
            if other != name and not (other.startswith(f"{name}.") or name.startswith(f"{other}.")):
                raise ConfigError(
                    f"the FSDP units {other} and {name} share a parameter, which cannot be gathered twice",
                    "name other modules in parallel.fsdp_units, such as one that contains both",
                )
    for name, module in model.named_modules():
        if any(name == unit or name.startswith(f"{unit}.") for unit in units):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter in owners:
                raise ConfigError(
                    f"{name or 'the model'} shares a parameter with the FSDP unit {owners[parameter]}",
                    "name other modules in parallel.fsdp_units: tied weights must be in one unit, or outside all units",
                )


@contextmanager
def _sharding_errors_explained() -> Iterator[None]:
    """A context that re-raises FSDP's errors about weights that it has sharded or freed as `LossError`."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "mixed torch.Tensor and DTensor" in text or "lazily initialized" in text or "root module first" in text:
            raise LossError(
                f"the loss function uses weights outside of the model's forward pass, where they are sharded: {text}",
                "call model(...) in the loss function, and use weights only inside the model's forward; or use "
                "parallel='ddp', which does not shard weights",
            ) from error
        if "setStorage" in text and "storage of size 0" in text:
            raise LossError(
                "a backward pass needs weights that FSDP has freed after an earlier backward pass through the same "
                f"modules, as second derivatives do (torch.autograd.grad(..., create_graph=True)): {text}",
                "use parallel='zero1' or 'ddp', which keep the weights and support second derivatives",
            ) from error
        raise
