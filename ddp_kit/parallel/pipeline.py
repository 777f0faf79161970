"""Pipeline parallelism: the blocks of a model divided into consecutive stages on different ranks.

Every rank of a pipeline reads the same samples and runs the user's own loss function and forward pass, in which the
blocks of other stages are replaced by placeholders (stages.py). Each pass of an optimizer step processes one
micro-batch; a schedule of torch.distributed.pipelining determines the order of the passes.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.optim import Optimizer

from ddp_kit.config.settings import ParallelConfig
from ddp_kit.distributed.world import World, host_group, random_states, seed_pass, set_random_states
from ddp_kit.errors import ConfigError, LossError, some
from ddp_kit.parallel.fsdp import (
    FsdpUnits,
    check_dtypes,
    equal_batches,
    fit_whole_on_all_ranks,
    shard_unit,
)
from ddp_kit.parallel.shards import Shards
from ddp_kit.parallel.stages import (
    Chain,
    Links,
    Received,
    Stage,
    StageFailedError,
    StageModel,
    chain_of,
    holders_before_first_pass,
    leaves_of,
    move,
    places_of_stages,
    sharded_parameters,
)
from ddp_kit.parallel.strategy import (
    BUFFERS_HINT,
    Passes,
    StageBoundary,
    Strategy,
    broadcast,
    shared_buffers,
    sizes_of,
)
from ddp_kit.parallel.tensor import is_divided, local_part, piece_of_dtensor, reduced_part, split_layers
from ddp_kit.parallel.tensor_plan import tensor_plan
from ddp_kit.pieces import Piece
from ddp_kit.torch_internals import is_extra_state, memory_of, version_of

T = TypeVar("T")

_BATCH_NORMS = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


class _StageRoot(nn.Module):
    """The root FSDP module of a stage's blocks. It lets FSDP gather a block while the previous block computes."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, call: Callable[[], Any]) -> Any:
        """Return the result of `call`, or the `StageBoundary` that it raises: FSDP's hooks need a normal return."""
        try:
            return call()
        except StageBoundary as passed:
            return passed


class PipelineStrategy(Strategy):
    """Pipeline parallelism over `pipeline` ranks. Can be combined with tensor parallelism, FSDP and replication.

        in the first step, run one pass alone, and then free the weights outside of the blocks, except those that this
            rank used
        run the other passes, and all passes of later steps, in the order of the schedule
        sum gradients over the ranks that hold the same weights

    All ranks with the same `replicate` and `shard` coordinates train on the same samples. FSDP shards the blocks, and
    reduces their gradients. Weights outside of the blocks, and weights that several blocks share, are not sharded,
    because the stages that use them are known only after the first pass.

    Requirements: the model has blocks in one ModuleList or Sequential and calls them in order; the first argument of
    each block is the output of the previous block, or the first item of that output if it is a tuple; the loss function
    calls the model once.

    Code outside of the blocks runs on every stage that reaches it, and code before the first block runs on all stages,
    so it should be cheap, as embeddings are. Weights outside of the blocks may be tied, and may be used by several
    stages; if they are frozen, all stages keep them. Weights that a rank does not hold are NaN on that rank, and take
    no memory.

    Random numbers: code outside of the blocks draws the same numbers on each stage that runs it, whatever the order of
    the schedule. Blocks of different stages draw different numbers.

    Not supported, and not detected: an attribute that a block sets for the loss function to read, such as the auxiliary
    loss of a mixture of experts; an optimizer that computes statistics over all weights, because it sees only the
    weights of one rank.
    """

    shards = True
    divides_weights = True

    def __init__(self, world: World, config: ParallelConfig, *, recoverable: bool = False) -> None:
        super().__init__(world, config, recoverable=recoverable)
        self.sizes = sizes_of(config, world.world_size)
        self._place, self._replica, self._shard, self._tensor = self.sizes.coordinates(world.rank)
        self.equal_passes = self.sizes.shard > 1
        self.replaces_parameters = self.sizes.shard > 1 or self.sizes.tensor > 1
        self._places = places_of_stages(config)  # the place of each stage
        self._stages = [stage for stage, place in enumerate(self._places) if place == self._place]  # this rank's stages
        self._chain: Chain
        self._models: dict[int, StageModel] = {}
        self._roots: dict[int, Any] = {}  # by stage, if FSDP shards the blocks
        self._units: dict[int, FsdpUnits] = {}  # the sharded blocks of each stage
        self._mesh: DeviceMesh
        self._shards = Shards({}, {})
        self._whole: dict[Tensor, nn.Parameter] = {}  # the optimizer's parameter -> the model's parameter
        self._sharded: set[nn.Parameter] = set()  # parameters sharded over `shard`
        self._split: set[nn.Parameter] = set()  # parameters split over `tensor`
        self._links: dict[int, Links] = {}
        self._optimizer: Optimizer | None = None
        self._holders: dict[nn.Parameter, tuple[int, ...]] = {}
        """Parameter -> pipeline coordinates of the ranks that hold it. The first one writes it to a checkpoint."""
        self._outer: list[nn.Parameter] = []  # trained weights whose users the first pass finds
        self._known: set[nn.Parameter] = set()  # the weights in `_outer` whose users are known
        self._buffer_kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}  # as they were at the start
        self._owners: dict[str, int] = {}  # buffer that passes change -> the place with the valid value
        self._block_buffers: dict[str, int] = {}  # buffer in a block -> the place of the block
        self._constant: dict[str, tuple[Tensor, int]] = {}  # buffers that no pass may change: (buffer, version)
        self._group: Any = None  # the ranks of this pipeline
        self._replica_group: Any = None  # the ranks that hold one whole model between them
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._learned = False
        self._schedules: dict[int, tuple[list[Stage], Any]] = {}
        self._passes: Passes | None = None
        self._backwards_left: dict[int, int] = {}  # backward passes left in this step, by stage
        self._running = 0  # the stage of the current forward pass
        self._step_seed = 0
        self._pass_seed: tuple[int, ...] = ()  # of the current forward pass
        self._calls_alone = 0  # forward passes outside of optimizer steps, since the last step
        self._came: Received | None = None
        self._needed: set[Tensor] = set()  # weights that the first pass used
        self._changed: set[str] = set()  # buffers that the first pass changed
        self._without_gradient: list[str] = []

    # --- Data-parallel layout -----------------------------------------------------------------------------------------

    @property
    def data_ranks(self) -> int:
        return self.sizes.data

    @property
    def data_rank(self) -> int:
        return self._replica * self.sizes.shard + self._shard

    @property
    def contributes(self) -> bool:
        return self._is_last and self._tensor == 0

    @property
    def replicas(self) -> tuple[Sequence[int], ...]:
        sizes = self.sizes
        apart = product(range(sizes.pipeline), range(sizes.shard), range(sizes.tensor))
        return tuple(
            [sizes.rank(place, replica, shard, tensor) for replica in range(sizes.replicate)]
            for place, shard, tensor in apart
        )

    @property
    def calls_per_pass(self) -> int:
        return len(self._stages)

    @property
    def _is_last(self) -> bool:
        return self._place == self._places[-1]

    def _ranks(self, places: Iterable[int], tensor: int) -> list[int]:
        """The ranks with these pipeline and tensor coordinates, all of which hold the same unsharded weights."""
        data = range(self.sizes.replicate), range(self.sizes.shard)
        return [self.sizes.rank(place, *data_rank, tensor) for place in places for data_rank in product(*data)]

    # --- Setup --------------------------------------------------------------------------------------------------------

    def check(self, model: nn.Module) -> None:
        super().check(model)
        self._check_settings()
        chain_of(model, self.config)
        norms = [name for name, each in model.named_modules() if isinstance(each, _BATCH_NORMS)]
        if norms:
            raise ConfigError(
                f"a pipeline cannot train BatchNorm, whose statistics depend on the micro-batches: {some(norms)}",
                "use LayerNorm, GroupNorm or RMSNorm, or parallel='ddp'",
            )
        embeddings = nn.Embedding | nn.EmbeddingBag
        sparse = [name for name, each in model.named_modules() if isinstance(each, embeddings) and each.sparse]
        if sparse:
            raise ConfigError(
                f"a pipeline does not support modules with sparse gradients: {some(sparse)}",
                "leave out sparse=True, or use parallel='ddp'",
            )

    def _check_settings(self) -> None:
        config, sizes = self.config, self.sizes
        for name in ("static_graph", "find_unused_parameters", "compression"):
            if getattr(config, name):
                raise ConfigError(
                    f"parallel.{name} is a setting of DDP, but parallel.strategy is 'pipeline'", f"leave out {name}"
                )
        if sizes.pipeline == 1:
            raise ConfigError(
                "parallel.strategy is 'pipeline', but parallel.pipeline is 1", "set pipeline to the number of stages"
            )
        if sizes.shard > 1 and config.pipeline_schedule == "zbv":
            raise ConfigError(
                "parallel.pipeline_schedule = 'zbv' splits each backward pass in two, which FSDP does not "
                f"support, but parallel.shard is {sizes.shard}",
                "use the schedule '1f1b', 'interleaved' or 'gpipe'",
            )
        if sizes.shard > 1 and config.fsdp_units != "auto":
            raise ConfigError(
                f"parallel.fsdp_units = {config.fsdp_units} is not supported with a pipeline, in which each block is a "
                "unit",
                "leave it out",
            )
        if config.share_gpus and self.world.device.type == "cuda":
            raise ConfigError(
                "parallel.share_gpus is not supported with a pipeline: gloo cannot send tensors that are on a GPU",
                "start as many ranks as there are GPUs, or run on the CPU with CUDA_VISIBLE_DEVICES=''",
            )

    def check_recoverable(self) -> None:
        raise ConfigError(
            "micro_batch_size='auto' is not supported with parallel.pipeline: if one rank runs out of memory, the "
            "other ranks wait forever for the tensors that it should send",
            "set micro_batch_size to a number",
        )

    def setup(self, model: nn.Module) -> None:
        self.model = model
        self._chain = chain = chain_of(model, self.config)
        if self.replaces_parameters:
            sizes = {name: getattr(self.sizes, name) for name in ("pipeline", "replicate", "shard", "tensor")}
            self._mesh = init_device_mesh(self.world.device.type, (*sizes.values(),), mesh_dim_names=(*sizes,))
        self._spread(model)
        self._holders, self._outer = holders_before_first_pass(model, chain, self._places)
        self.parameters = tuple(parameter for parameter in model.parameters() if parameter.requires_grad)
        self._models = {stage: StageModel(model, chain, stage) for stage in self._stages}
        for stage, numbers in enumerate(chain.stages):
            for number in numbers:
                for name, _ in chain.blocks(model)[number].named_buffers(remove_duplicate=False):
                    self._block_buffers.setdefault(f"{chain.names[number]}.{name}", self._places[stage])
        pieces = {each: piece for each in model.parameters() if (piece := piece_of_dtensor(each)) is not None}
        self._shards = Shards(pieces, {each: name for name, each in model.named_parameters()})
        self._whole = {shard: whole for whole, shard in self._shards.of.items()}
        self._sharded = {each for each in pieces if is_divided(each, "shard")}
        self._split = {each for each in pieces if is_divided(each, "tensor")}
        self._connect()

    def _spread(self, model: nn.Module) -> None:
        """Move and divide the model block by block, so that no rank ever holds all of it on its device."""
        chain, sizes = self._chain, self.sizes
        blocks, own = chain.blocks(model), {number for stage in self._stages for number in chain.stages[stage]}
        plan = tensor_plan(model, self.config) if sizes.tensor > 1 else {}
        holders, _ = holders_before_first_pass(model, chain, self._places)
        shared = {each for each, held in holders.items() if len(held) > 1}
        unsharded = {*model.parameters()} - sharded_parameters(model, chain).keys()
        for number, (name, block) in enumerate(zip(chain.names, blocks, strict=True)):
            self._put_on_device([each for each in block.parameters() if each not in shared], holders)
            if number in own and plan:
                split_layers(model, {*block.modules()}, plan, self._mesh["tensor"])
            if number in own and sizes.shard > 1:
                check_dtypes(name, block, "leave out parallel.shard", unsharded)
                shard_unit(name, block, self._mesh, "leave out parallel.shard", ignored_params=unsharded)
        self._put_on_device([each for each in model.parameters() if each in shared], holders)
        if plan:
            inside = {module for block in blocks for module in block.modules()}
            split_layers(model, {*model.modules()} - inside, plan, self._mesh["tensor"])
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self.world.device)
        broadcast(model.buffers())
        self._buffer_kinds = {name: (each.shape, each.dtype) for name, each in model.named_buffers()}
        if sizes.shard > 1:
            self._unite_stages(blocks, unsharded)

    def _unite_stages(self, blocks: list[Any], unsharded: set[nn.Parameter]) -> None:
        held = [each for each in self.model.parameters() if is_divided(each, "shard")]
        reshard = self.config.reshard_after_forward
        gathered = fit_whole_on_all_ranks(held, self.world) if reshard == "auto" else not reshard
        whole_gradients = fit_whole_on_all_ranks([each for each in held if each.requires_grad], self.world)
        for stage in self._stages:
            own = [blocks[number] for number in self._chain.stages[stage]]
            self._roots[stage] = shard_unit("", _StageRoot(own), self._mesh, "", ignored_params=unsharded)
            self._units[stage] = FsdpUnits(
                own, whole_gradients=whole_gradients, replicated=self.sizes.replicate > 1, gathered=gathered
            )

    @torch.no_grad()
    def _put_on_device(self, parameters: Sequence[nn.Parameter], holders: dict[nn.Parameter, tuple[int, ...]]) -> None:
        """Copy rank 0's values to all devices, and free the parameters that this rank does not hold."""
        for each in parameters:
            each.data = each.data.to(self.world.device)
        broadcast([each.detach() for each in parameters])
        for each in parameters:
            if self._place not in holders[each]:
                _free(each)

    def _connect(self) -> None:
        sizes, own = self.sizes, (self._replica, self._shard, self._tensor)
        for each in product(range(sizes.replicate), range(sizes.shard), range(sizes.tensor)):
            ranks = [sizes.rank(place, *each) for place in range(sizes.pipeline)]
            groups = dist.new_group(ranks), dist.new_group(ranks, backend="gloo")
            if each == own:
                self._group = self._replica_group = groups[0]
                of_stages = [ranks[place] for place in self._places]
                self._links = {stage: Links(of_stages, stage, *groups, self.world.device) for stage in self._stages}
        for replica in range(sizes.replicate) if self.replaces_parameters else ():
            within = product(range(sizes.pipeline), range(sizes.shard), range(sizes.tensor))
            group = dist.new_group([sizes.rank(place, replica, *rest) for place, *rest in within])
            if replica == self._replica:
                self._replica_group = group
        for place in range(sizes.pipeline):
            self._make_group((place,))
        # NCCL creates the communicator of a group in the group's first call, in which all of its ranks must take part.
        # The first sends and receives are between neighbours only, so with three or more stages they would hang.
        dist.all_reduce(torch.zeros(1, device=self.world.device), group=self._group)

    def _make_group(self, places: tuple[int, ...]) -> None:
        if places in self._groups:
            return
        for tensor in range(self.sizes.tensor):
            ranks = self._ranks(places, tensor)
            group = dist.new_group(ranks) if len(ranks) > 1 else None
            if tensor == self._tensor:
                self._groups[places] = group

    def setup_optimizer(self, optimizer: Optimizer) -> None:
        if self.replaces_parameters:
            self._shards.give_to(optimizer)
        self._optimizer = optimizer
        self._forget_state()

    def _held(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter that the optimizer holds in place of a parameter of the model."""
        return self._shards.of.get(parameter, parameter)

    def _model_parameters(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """The model's parameters that correspond to the parameters that an optimizer holds."""
        return [self._whole.get(each, each) for group in optimizer.param_groups for each in group["params"]]

    def _forget_state(self) -> None:
        """Drop the optimizer state of weights that this rank does not hold."""
        for parameter, stages in self._holders.items():
            if self._optimizer is not None and self._place not in stages:
                self._optimizer.state.pop(self._held(parameter), None)

    def local_parameters(self) -> list[Tensor]:
        return [
            self._held(each).detach() if self._place in stages else self._held(each).detach().new_zeros(1)
            for each, stages in self._holders.items()
        ]

    # --- Optimizer step -----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self.sync_buffers()

    def sync_buffers(self) -> None:
        for name, stage in self._owners.items():
            buffer, (shape, dtype) = self.model.get_buffer(name), self._buffer_kinds[name]
            if (buffer.shape, buffer.dtype) != (shape, dtype):
                raise LossError(
                    f"the shape of the buffer {name} changed from {tuple(shape)} {dtype} to {tuple(buffer.shape)} "
                    f"{buffer.dtype} on rank {self.world.rank}, but a pipeline broadcasts it before each step",
                    BUFFERS_HINT,
                )
            dist.broadcast(buffer, src=self.sizes.rank(stage, 0, 0, 0))

    def run_passes(self, passes: Passes) -> None:
        self._passes, first = passes, 0
        # Between passes, all ranks of a pipeline have the same generator state, so all of them draw the same number.
        self._step_seed = int(torch.randint(2**31, (), device="cpu", generator=torch.default_generator))
        self._calls_alone = 0
        self._backwards_left = dict.fromkeys(self._stages, passes.count)
        self._constant = {name: (each, version_of(each)) for name, (each, _) in self._constant.items()}
        try:
            if not self._learned:
                first = min(1, passes.count)
                if passes.count:
                    self._run_alone(passes)
                else:
                    self._learn()
            if passes.count > first:
                self._run_schedule(passes.count - first, first)
        finally:
            self._passes = None
        if not passes.count:
            passes.before_reduction(torch.zeros((), device=self.world.device))
        self._settle()
        self._check_buffers()
        self._reduce(has_passes=passes.count > 0)

    def _run_alone(self, passes: Passes) -> None:
        """Run the first pass of a training run, without a schedule.

        In this pass, the ranks compare what the loss function returns, and learn which weights each stage uses.
        """
        before = {name: (each, version_of(each)) for name, each in shared_buffers(self.model).items()}
        stages = self._new_stages()
        for stage in stages:
            try:
                move(stage.get_fwd_recv_ops(0))
            except StageFailedError:
                self._links[stage.stage_index].announce_failure()
                passes.without_loss()  # raises, because the failed rank reports its error
                raise
            self._needed |= leaves_of(stage.forward_one_chunk(0))
            move(stage.get_fwd_send_ops(0))
        for name, each in shared_buffers(self.model).items():
            buffer, version = before.get(name, (None, 0))
            if each is not buffer or version_of(each) != version:
                self._changed.add(name)
        if not self._is_last:
            passes.without_loss()
        self._learn()  # before the backward pass, which starts to add up the loss weights if there is only one pass
        for stage in reversed(stages):
            move(stage.get_bwd_recv_ops(0))
            stage.backward_one_chunk(0)
            move(stage.get_bwd_send_ops(0))

    def _run_schedule(self, count: int, first: int) -> None:
        if count not in self._schedules:
            stages = self._new_stages()
            kind, several = _schedule_for(self.config.pipeline_schedule, count, self.sizes.pipeline)
            schedule = kind(stages if several else stages[0], count, loss_fn=_the_loss_itself, scale_grads=False)
            self._schedules[count] = stages, schedule
        stages, schedule = self._schedules[count]
        for stage in stages:
            stage.first = first
        schedule.step(target=torch.arange(count), return_outputs=False)

    def _new_stages(self) -> list[Stage]:
        made = {number: Stage(self._links[number], len(self._places), self.world.device) for number in self._stages}
        for number, stage in made.items():
            stage.forward_pass, stage.backward_pass = self._forward, partial(self._backward, number)
            if number + 1 in made:
                stage.is_followed_by(made[number + 1])
        return [*made.values()]

    def _settle(self) -> None:
        for links in self._links.values():
            links.settle()
        self._reshard()

    def _reshard(self) -> None:
        """Free the gathered weights of all stages, because they become outdated when the shards change."""
        for units in self._units.values():
            units.reshard()

    def _forward(self, stage: int, number: int, came: Received | None) -> tuple[Tensor, int]:
        assert self._passes is not None, "called within `run_passes`"
        self._running, self._came, self._pass_seed = stage, came, (self._step_seed, number)
        try:
            return self._passes.forward(number), -1
        except StageBoundary as passed:
            return passed.tensor, passed.items
        finally:
            self._came = None

    def _backward(self, stage: int, ends: Tensor | None, compute: Callable[[], None]) -> None:
        passes, left = self._passes, self._backwards_left
        assert passes is not None, "called within `run_passes`"
        if ends is not None:
            left[stage] -= 1
            if not any(left.values()):
                passes.before_reduction(ends)
        if stage in self._units:
            self._units[stage].before_backward(last=not left[stage])
        compute()
        passes.after_backward()

    def call(self, function: Callable[[nn.Module, T], Any], batch: T) -> Any:
        if self._passes is None:
            return self._call_alone(function, batch)
        try:
            value = self._run_stage(self._running, function, batch, self._came)
        except LossError:
            if not self._learned:  # in the first pass the ranks agree on errors, so the next stage must not wait
                self._links[self._running].announce_failure()
            raise
        if not self._learned:  # check the first loss before the ranks agree on its errors
            leaves = leaves_of(getattr(value, "loss", value))
            self._check_foreign(each for each in self.parameters if each in leaves)
        return value

    def result_of(self, forward: Callable[[], T]) -> tuple[T] | tuple[()]:
        try:
            return (forward(),)
        except StageBoundary:
            return ()

    def _run_stage(self, stage: int, function: Callable[[nn.Module, T], Any], batch: T, came: Received | None) -> Any:
        states = random_states(self.world)
        seed_pass(self.world, *self._pass_seed)
        before_blocks = partial(seed_pass, self.world, *self._pass_seed, stage)
        call = partial(self._models[stage].call, function, batch, came, before_blocks)
        try:
            found = self._roots[stage](call) if stage in self._roots else call()
        finally:  # stages draw different amounts of random numbers, which must not affect those of the data
            set_random_states(states)
        if isinstance(found, StageBoundary):
            raise found
        return found

    def _call_alone(self, function: Callable[[nn.Module, T], Any], batch: T) -> Any:
        """Run a forward pass outside of an optimizer step, through this rank's stages one after another."""
        came: Received | None = None
        self._calls_alone += 1
        self._pass_seed = self._step_seed, -self._calls_alone  # drawing a new seed here would change later steps
        for stage in self._stages:
            links = self._links[stage]
            if stage > 0 and came is None:
                came = links.arriving()
                move([links.operation(dist.irecv, came.tensor.detach(), -1)])
            try:
                own = batch if stage == self._stages[-1] else copy.deepcopy(batch)  # the function may modify it
                return self._run_stage(stage, function, own, came)
            except StageBoundary as passed:
                sent = StageBoundary(passed.tensor.detach(), passed.items)
            if stage + 1 in self._stages:
                came = Received(sent.tensor, sent.items)
                continue
            came = None
            links.announce(sent.tensor, sent.items)
            move([links.operation(dist.isend, sent.tensor.contiguous(), 1)])
            links.settle()
        raise sent

    # --- Users of weights outside of the blocks -----------------------------------------------------------------------

    def _learn(self) -> None:
        """Find out which pipeline ranks use each weight that is outside of the blocks, and which change each buffer.

        A collective.
        """
        buffers = [*shared_buffers(self.model)]
        own = [each in self._needed for each in self._outer] + [name in self._changed for name in buffers]
        table = torch.zeros(self.sizes.pipeline, len(own), dtype=torch.int32)
        table[self._place] = torch.tensor(own, dtype=torch.int32)
        dist.all_reduce(table, op=dist.ReduceOp.MAX, group=host_group(self.world))
        self._learned, self._needed, self._changed = True, set(), set()
        users = [tuple(stage for stage, uses in enumerate(column) if uses) for column in table.T.tolist()]
        for parameter, stages in zip(self._outer, users, strict=False):
            if parameter not in self._known:
                self._hold(parameter, stages or (0,))
        changed = zip(buffers, users[len(self._outer) :], strict=True)
        self._owners = {name: stages[0] for name, stages in changed if stages}
        alone = self._block_buffers if self.data_ranks == 1 else {}  # no other rank's value could differ
        self._constant = {
            name: (each, version_of(each))
            for name, each in shared_buffers(self.model).items()
            if name not in self._owners and name not in alone
        }
        self._forget_state()
        for stages in sorted({self._holders[each] for each in self.parameters}):
            self._make_group(stages)

    def _hold(self, parameter: nn.Parameter, places: tuple[int, ...]) -> None:
        """From now on, keep a weight that belongs to no block only on the ranks with these pipeline coordinates."""
        self._holders[parameter] = places
        self._known.add(parameter)
        if self._place not in places:
            _free(parameter)
            _free(self._held(parameter))

    # --- Gradients ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _reduce(self, *, has_passes: bool) -> None:
        """Sum gradients over the ranks that hold the same weights. A collective."""
        self._check_foreign(each for each in self.parameters if each.grad is not None)
        names = self.held_names()
        self._without_gradient = []
        by_group: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for each in self.parameters:
            if self._place in self._holders[each]:
                held = self._held(each)
                if each.grad is None:
                    self._without_gradient += [names[id(each)]] if has_passes else []
                    held.grad = torch.zeros_like(held)
                else:
                    held.grad = reduced_part(each.grad, each)
                if each not in self._sharded:  # FSDP has reduced the others
                    by_group.setdefault(self._holders[each], []).append(held)
        for stages in sorted(by_group):  # the same order on all ranks, because groups overlap
            if (group := self._groups[stages]) is not None:
                for bucket in self._buckets(by_group[stages]):
                    flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
                    dist.all_reduce(flat, group=group)
                    for gradient, part in zip(
                        bucket, torch.split(flat, [each.numel() for each in bucket]), strict=True
                    ):
                        gradient.copy_(part.view_as(gradient))

    def _buckets(self, parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor]]:
        """Yield the gradients in buckets. Each bucket has one dtype and a size of about `bucket_mb` MiB."""
        for dtype in dict.fromkeys(each.dtype for each in parameters):
            bucket: list[Tensor] = []
            for each in parameters:
                if each.dtype == dtype and each.grad is not None:
                    bucket.append(each.grad)
                    if sum(gradient.nbytes for gradient in bucket) >= self.config.bucket_mb * 2**20:
                        yield bucket
                        bucket = []
            if bucket:
                yield bucket

    def _check_foreign(self, used: Iterable[nn.Parameter]) -> None:
        """Raise `LossError` for weights that this rank has used but does not hold."""
        names = self.held_names()
        foreign = [names[id(each)] for each in used if self._place not in self._holders[each]]
        if foreign:
            raise LossError(
                f"rank {self._place} of the pipeline used {some(foreign)}, which it does not hold: besides the "
                "weights of its own blocks, a rank holds only those that it used in the first pass of the run",
                "use weights only inside the model's blocks, and the same weights in every pass; or use "
                "parallel='fsdp', where every rank can use all weights",
            )

    def _check_buffers(self) -> None:
        """Raise `LossError` if a pass changed a buffer that the ranks do not synchronise."""
        changed = [name for name, (each, version) in self._constant.items() if version_of(each) != version]
        if changed:
            raise LossError(
                f"a pass changed {some(changed)}, which the first pass of the run did not change: a pipeline "
                "synchronises only buffers that change in the first pass",
                "update these buffers in place in every pass, including the first, even if the values stay the same; "
                "or update them in a callback, in the same way on all ranks",
            )

    def check_gradients(self) -> None:
        if self._without_gradient:
            raise LossError(
                f"{some(self._without_gradient)} got no gradient in a step, but a pipeline needs the gradients of all "
                "trained parameters",
                "use these parameters in the loss, or freeze them (requires_grad=False) before creating the Trainer",
            )

    @property
    def updated(self) -> list[nn.Parameter]:
        return [self._held(each) for each in self.parameters]

    def grad_norm(self) -> Tensor:
        """The 2-norm of the gradients of a replica; each value counts once, however many ranks hold it."""
        own = [
            gradient
            for each in self.parameters
            if (gradient := self._held(each).grad) is not None and self._is_first_holder(each)
        ]
        exact = torch.promote_types(self.parameters[0].dtype, torch.float32)
        square = nn.utils.get_total_norm(own).to(self.world.device, exact).square()
        dist.all_reduce(square, group=self._replica_group)
        return square.sqrt()

    def grad_norms(self) -> Tensor:
        counted = torch.tensor([self._is_first_holder(each) for each in self.parameters]).to(self.world.device)
        squares = super().grad_norms().square() * counted
        dist.all_reduce(squares, group=self._replica_group)
        return squares.sqrt()

    def _is_first_holder(self, parameter: nn.Parameter) -> bool:
        """Whether this rank is the first one in its replica that holds this part of the parameter."""
        return (
            self._holders[parameter][0] == self._place
            and (self._shard == 0 or parameter in self._sharded)
            and (self._tensor == 0 or parameter in self._split)
        )

    # --- Evaluation and prediction ------------------------------------------------------------------------------------

    def evaluation(self, batches: Iterable[tuple[int, T]], spare: Callable[[], T]) -> Iterator[tuple[int, T]]:
        # Run a collective: a rank may end an evaluation alone only if it counts no collectives (trainer/evaluation.py).
        dist.all_reduce(torch.zeros((), device=self.world.device), group=self._replica_group)
        try:
            yield from equal_batches(batches, spare, self.world) if self.equal_passes else batches
        finally:
            self._reshard()

    # --- State --------------------------------------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        state = self.model.state_dict(keep_vars=True)
        pieces: dict[int, Piece] = {}
        for name, value in state.items():
            if not isinstance(value, Tensor):
                continue
            if id(value) not in pieces:
                if isinstance(value, nn.Parameter):
                    pieces[id(value)] = self._piece(value)
                elif (place := self._buffer_place(name)) is not None:
                    pieces[id(value)] = self._tensor_piece(value, value.shape, (place,))
            state[name] = pieces.get(id(value), value.detach())  # tied weights are stored once
        return state

    def _buffer_place(self, name: str) -> int | None:
        """The pipeline coordinate of the ranks with the valid value of a buffer; None if it is valid on all ranks."""
        return self._owners.get(name, self._block_buffers.get(name))

    def _piece(self, parameter: nn.Parameter) -> Piece:
        """The part of a parameter that this rank holds; an empty piece of the same dtype if it holds none."""
        part = piece_of_dtensor(parameter)
        if part is None or self._place not in self._holders[parameter]:
            return self._tensor_piece(local_part(parameter).detach(), parameter.shape, self._holders[parameter])
        return replace(part, owned=self._replica == 0 and self._is_first_holder(parameter))

    def _tensor_piece(self, value: Tensor, shape: Sequence[int], places: tuple[int, ...]) -> Piece:
        """A piece with the whole tensor on ranks with these pipeline coordinates; an empty piece on other ranks."""
        if self._place not in places:
            value = value.new_empty((0, *shape[1:]) if len(shape) else ())
        owned = self._place == places[0] and (self._replica, self._shard, self._tensor) == (0, 0, 0)
        return Piece(value, tuple(shape), (0,) * len(shape), owned=owned)

    def held_names(self) -> dict[int, str]:
        return super().held_names() | self._shards.names

    def piece_of(self, parameter: Tensor) -> Piece | None:
        whole = self._whole.get(parameter, parameter)
        return self._piece(whole) if whole in self._holders else None  # type: ignore[arg-type]

    @torch.no_grad()
    def load_model_state(self, state: dict[str, Any]) -> None:
        own = self.model.state_dict(keep_vars=True)
        for name, value in state.items():
            held = own.get(name)
            if not isinstance(held, Tensor) or is_extra_state(name):
                continue
            if isinstance(held, nn.Parameter):
                counts = self._place in self._holders[held]
            else:
                counts = self._buffer_place(name) in (None, self._place)
            if counts:
                part = piece_of_dtensor(held)
                saved = part.of(value) if part is not None else value.tensor if isinstance(value, Piece) else value
                local_part(held).copy_(saved)
        others = {
            name: value
            for name, value in state.items()
            if not isinstance(own.get(name), Tensor) or is_extra_state(name)
        }
        self.model.load_state_dict(others, strict=False)

    def state_dict(self) -> dict[str, Any]:
        """The division into stages and, for each weight outside of the blocks, the pipeline ranks that use it."""
        if not self._learned:
            return {}
        names = self.held_names()
        users = {names[id(each)]: list(self._holders[each]) for each in self._outer}
        return {"pipeline": {"stages": [*map(len, self._chain.stages)], "places": self.sizes.pipeline, "users": users}}

    def load_state_dict(self, state: dict[str, Any], steps: int) -> None:  # noqa: ARG002
        saved = state.get("pipeline") or {}
        division = [saved.get("stages"), saved.get("places")]
        if self._learned or division != [[*map(len, self._chain.stages)], self.sizes.pipeline]:
            return
        names = self.held_names()
        for each in self._outer:
            users = saved["users"].get(names[id(each)])
            if users is not None:
                if not users or not set(users) <= set(range(self.sizes.pipeline)):
                    raise ValueError("each weight must be assigned to one or more existing ranks of the pipeline")
                self._hold(each, tuple(users))
        self._forget_state()

    def optimizer_form(self, optimizer: Optimizer) -> Any:
        forms: dict[str, Any] = {}
        for number, parameter in enumerate(self._model_parameters(optimizer)):
            held = self._held(parameter)
            kept = optimizer.state.get(held)
            if isinstance(kept, dict) and self._is_first_holder(parameter) and self._replica == 0:
                forms[str(number)] = {name: _form(value, held, parameter) for name, value in kept.items()}
        return forms

    def optimizer_state(self, state: dict[int, Any], forms: Sequence[Any]) -> dict[int, Any]:
        assert self._optimizer is not None, "`setup_optimizer` was called"
        parameters = self._model_parameters(self._optimizer)
        every = {int(number): form for one in forms if one for number, form in one.items()}
        return {
            number: {
                name: self._state_piece(parameters[number], state, name, number, one) for name, one in form.items()
            }
            for number, form in sorted(every.items())
        }

    def _state_piece(self, parameter: nn.Parameter, state: dict[int, Any], name: str, number: int, form: Any) -> Any:
        if "value" in form:
            return form["value"]
        places = self._holders[parameter]
        if self._place in places:
            value = state[number][name]
            return value if isinstance(value, Piece) else self._tensor_piece(value, form["shape"], places)
        device = self.world.device if form["on_device"] else torch.device("cpu")
        value = torch.empty(0, dtype=getattr(torch, form["dtype"]), device=device)
        return self._tensor_piece(value, form["shape"], places)

    def own_optimizer_state(self, state: dict[int, Any]) -> dict[int, Any]:
        assert self._optimizer is not None, "`setup_optimizer` was called"
        parameters = self._model_parameters(self._optimizer)
        return {number: kept for number, kept in state.items() if self._place in self._holders[parameters[number]]}


def _schedule_for(name: str, passes: int, places: int) -> tuple[Any, bool]:
    """torch's class for the named schedule, and whether its constructor takes a list of stages.

    1F1B needs at least as many passes as stages, and interleaved 1F1B needs the same number of passes in each round.
    For other numbers of passes, all forward passes run before all backward passes, as in GPipe; `ScheduleLoopedBFS`
    does this, because in torch 2.10 `ScheduleGPipe` fails with fewer passes than stages (pytorch#171462).
    """
    if name == "zbv":
        return ScheduleZBVZeroBubble, True
    if name == "interleaved":
        return (ScheduleLoopedBFS if passes % max(1, passes // places) else ScheduleInterleaved1F1B), True
    if passes < places:
        return ScheduleLoopedBFS, True
    return (Schedule1F1B if name == "1f1b" else ScheduleGPipe), False


def _the_loss_itself(output: Tensor, _target: Tensor) -> Tensor:
    return output


def _form(value: Any, held: Tensor, parameter: Tensor) -> dict[str, Any]:
    """Describe a value of the optimizer state, for ranks that do not have it.

    `held`: this rank's part of `parameter`.
    """
    if not isinstance(value, Tensor):
        return {"value": value}
    dtype = str(value.dtype).removeprefix("torch.")
    shape = parameter.shape if value.shape == held.shape else value.shape
    return {"dtype": dtype, "shape": list(shape), "on_device": not value.is_cpu}


@torch.no_grad()
def _free(parameter: nn.Parameter) -> None:
    """Free a parameter's memory. The parameter keeps its shape, and its values become NaN to reveal accidental use."""
    part = memory_of(parameter)
    kind = torch.nan if part.is_floating_point() else 0
    part.data = torch.full((), kind, dtype=part.dtype, device=part.device).expand(part.shape)
