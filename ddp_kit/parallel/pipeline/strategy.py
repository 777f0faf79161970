"""The pipeline strategy: every rank of a pipeline holds and runs one stage of the model.

Every rank of a pipeline reads the same samples and runs the user's own loss function and forward pass, in which the
blocks of other stages are replaced by placeholders. Each pass of an optimizer step processes one micro-batch; a
schedule of torch.distributed.pipelining determines the order of the passes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ddp_kit.config.settings import ParallelConfig
from ddp_kit.distributed.world import World, host_group, random_states_kept, seed_pass
from ddp_kit.errors import LossError
from ddp_kit.model.names import refuse
from ddp_kit.parallel.fsdp import FsdpUnits, check_dtypes, equal_batches, fit_whole_on_all_ranks, shard_unit
from ddp_kit.parallel.pipeline.buffers import PipelineBuffers
from ddp_kit.parallel.pipeline.model import (
    Activation,
    Chain,
    Holders,
    StageBoundary,
    StageModel,
    chain_of,
    holders_before_first_pass,
    leaves_of,
    sharded_parameters,
    unusable_value,
)
from ddp_kit.parallel.pipeline.stage import Stage
from ddp_kit.parallel.shards import Shards, check_dense_gradients
from ddp_kit.parallel.strategy import (
    NO_OPTIONS,
    Options,
    Strategy,
    broadcast,
    shared_buffers,
    sizes_of,
    state_with_pieces,
    stored,
    total_norm,
    trained,
)
from ddp_kit.parallel.tensor import (
    is_divided,
    local_tensor,
    piece_of_dtensor,
    pieces_of_dtensors,
    reduced_gradient,
    split_layers,
    tensor_plan,
)
from ddp_kit.state_values import Piece
from ddp_kit.texts import some
from ddp_kit.torch_internals import is_extra_state, memory_of

T = TypeVar("T")

_BATCH_NORMS = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


class _StageRoot(nn.Module):
    """The root FSDP module of a stage's blocks. It lets FSDP gather a block while the previous block computes."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()


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

    def __init__(self, world: World, config: ParallelConfig, options: Options = NO_OPTIONS) -> None:
        super().__init__(world, config, options)
        self.sizes = sizes = sizes_of(config, world.world_size)
        # This rank's coordinates. The first one is the index of its stage.
        self._stage_index, self._replica, self._shard, self._tensor = sizes.coordinates(world.rank)
        self.data_ranks = sizes.data
        self.data_rank = self._replica * sizes.shard + self._shard
        self.contributes = self._stage_index == sizes.pipeline - 1 and self._tensor == 0
        self.replicas = tuple(
            [sizes.rank(stage, replica, shard, tensor) for replica in range(sizes.replicate)]
            for stage, shard, tensor in product(range(sizes.pipeline), range(sizes.shard), range(sizes.tensor))
        )
        self.optimizer_replicas = self.replicas
        self.equal_passes = sizes.shard > 1
        self.replaces_parameters = sizes.shard > 1 or sizes.tensor > 1
        # The model:
        self._chain: Chain
        self._stage_model: StageModel
        self._mesh: DeviceMesh
        self._root: _StageRoot | None = None  # if FSDP shards the blocks
        self._units: FsdpUnits | None = None  # likewise: this stage's blocks
        # Parameters:
        self._holders: Holders = {}  # the first stage that holds a parameter writes it to a checkpoint
        self._outer: list[nn.Parameter] = []  # trained weights whose users the first pass finds
        self._known: set[nn.Parameter] = set()  # the weights in `_outer` whose users are known
        self._shards = Shards({}, {})
        self._whole: dict[Tensor, nn.Parameter] = {}  # the optimizer's parameter -> the model's parameter
        self._sharded: set[nn.Parameter] = set()  # parameters sharded over `shard`
        self._split: set[nn.Parameter] = set()  # parameters split over `tensor`
        self._optimizer: Optimizer | None = None
        self.buffers: PipelineBuffers
        # Communication:
        self.stage: Stage
        self._replica_group: dist.ProcessGroup  # the ranks that hold one whole model between them
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        """Stages -> the ranks that hold the same weights, if only these stages hold these weights; None: one rank."""
        # Passes:
        self.learned = False
        """Whether the first pass has found the users of weights and buffers."""
        self._pass: tuple[int, Activation | None] | None = None  # number and input of the current pass of a step
        self._has_passes = False  # in the current step
        self._step_seed = 0
        self._calls_alone = 0  # forward passes outside of optimizer steps, since the last step

    # --- Setup --------------------------------------------------------------------------------------------------------

    def check(self, model: nn.Module) -> None:
        super().check(model)
        self._check_own_gpus("a pipeline: gloo cannot send tensors that are on a GPU")
        chain_of(model, self.config)
        refuse(
            [name for name, module in model.named_modules() if isinstance(module, _BATCH_NORMS)],
            "a pipeline cannot train BatchNorm, whose statistics depend on the micro-batches",
            "use LayerNorm, GroupNorm or RMSNorm, or parallel='ddp'",
        )
        check_dense_gradients(model, "a pipeline")

    def setup(self, model: nn.Module) -> None:
        self.model = model
        self._chain = chain = chain_of(model, self.config)
        if self.replaces_parameters:
            self._mesh = self.sizes.mesh(self.world.device.type, "pipeline", "replicate", "shard", "tensor")
        self._distribute(model)  # may replace parameters
        self._stage_model = StageModel(model, chain, self._stage_index)
        self._holders, self._outer = holders_before_first_pass(model, chain)
        self.parameters = trained(model.parameters())
        pieces = pieces_of_dtensors(model)
        self._shards = Shards(pieces, {parameter: name for name, parameter in model.named_parameters()})
        self._whole = {shard: whole for whole, shard in self._shards.of.items()}
        self._sharded = {parameter for parameter in pieces if is_divided(parameter, "shard")}
        self._split = {parameter for parameter in pieces if is_divided(parameter, "tensor")}
        self.buffers = PipelineBuffers(model, chain, self.sizes, self.world)
        self._make_groups()

    def _distribute(self, model: nn.Module) -> None:
        """Move and divide the model block by block, so that no rank ever holds all of it on its device."""
        chain = self._chain
        blocks = chain.blocks(model)
        stage_blocks = chain.stages[self._stage_index]
        holders, _ = holders_before_first_pass(model, chain)
        shared = {parameter for parameter, stages in holders.items() if len(stages) > 1}
        unsharded = {*model.parameters()} - sharded_parameters(model, chain).keys()
        plan = tensor_plan(model, self.config) if self.sizes.tensor > 1 else {}
        for number, (name, block) in enumerate(zip(chain.names, blocks, strict=True)):
            self._put_on_device([parameter for parameter in block.parameters() if parameter not in shared], holders)
            if number in stage_blocks and plan:
                split_layers(model, {*block.modules()}, plan, self._mesh["tensor"])
            if number in stage_blocks and self.sizes.shard > 1:
                check_dtypes(name, block, "remove parallel.shard", unsharded)
                shard_unit(name, block, self._mesh, "remove parallel.shard", ignored_params=unsharded)
        self._put_on_device([parameter for parameter in model.parameters() if parameter in shared], holders)
        if plan:
            inside = {module for block in blocks for module in block.modules()}
            split_layers(model, {*model.modules()} - inside, plan, self._mesh["tensor"])
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self.world.device)
        broadcast(model.buffers())
        if self.sizes.shard > 1:
            sharded = [parameter for parameter in model.parameters() if is_divided(parameter, "shard")]
            reshard = self.config.reshard_after_forward
            if reshard == "auto":
                reshard = not fit_whole_on_all_ranks(sharded, self.world)
            units: list[Any] = [blocks[number] for number in stage_blocks]
            self._root = _StageRoot(units)
            shard_unit("", self._root, self._mesh, "", ignored_params=unsharded)
            self._units = FsdpUnits(
                units,
                whole_gradients=fit_whole_on_all_ranks(trained(sharded), self.world),
                replicated=self.sizes.replicate > 1,
                gathered=not reshard,
            )

    @torch.no_grad()
    def _put_on_device(self, parameters: Sequence[nn.Parameter], holders: Holders) -> None:
        """Copy rank 0's values to all devices, and free the parameters that this rank does not hold."""
        for parameter in parameters:
            parameter.data = parameter.data.to(self.world.device)
        broadcast([parameter.detach() for parameter in parameters])
        for parameter in parameters:
            if self._stage_index not in holders[parameter]:
                _free(parameter)

    def _make_groups(self) -> None:
        """Create the process groups, and this rank's stage, which uses one of them."""
        sizes = self.sizes
        pipelines = [
            [sizes.rank(stage, *coordinates) for stage in range(sizes.pipeline)]
            for coordinates in product(range(sizes.replicate), range(sizes.shard), range(sizes.tensor))
        ]
        group = self._replica_group = _new_group(pipelines)
        host_group = _new_group(pipelines, backend="gloo")
        self.stage = Stage(group, host_group, self.world.device)
        if self.replaces_parameters:
            parts = [*product(range(sizes.pipeline), range(sizes.shard), range(sizes.tensor))]
            replicas = [
                [sizes.rank(stage, replica, shard, tensor) for stage, shard, tensor in parts]
                for replica in range(sizes.replicate)
            ]
            self._replica_group = _new_group(replicas)
        for stage in range(sizes.pipeline):
            self._make_groups_of_holders((stage,))
        # NCCL creates the communicator of a group in the group's first call, in which all of its ranks must take part.
        # The first sends and receives are between neighbours only, so with three or more stages they would hang.
        dist.all_reduce(torch.zeros(1, device=self.world.device), group=group)

    def _make_groups_of_holders(self, stages: tuple[int, ...]) -> None:
        """Create groups of the ranks that hold the same unsharded weights, for weights on exactly these stages."""
        if stages in self._groups:
            return
        data_ranks = [*product(stages, range(self.sizes.replicate), range(self.sizes.shard))]
        holders = [[self.sizes.rank(*rank, tensor) for rank in data_ranks] for tensor in range(self.sizes.tensor)]
        self._groups[stages] = _new_group(holders) if len(data_ranks) > 1 else None

    def setup_optimizer(self, optimizer: Optimizer) -> None:
        if self.replaces_parameters:
            self._shards.give_to(optimizer)
        self._optimizer = optimizer
        self._drop_optimizer_state()

    def _optimizer_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter that the optimizer holds in place of a parameter of the model."""
        return self._shards.of.get(parameter, parameter)

    def _model_parameters(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """The model's parameters that correspond to the parameters that an optimizer holds."""
        updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [self._whole.get(parameter, parameter) for parameter in updated]

    def _drop_optimizer_state(self) -> None:
        """Drop the optimizer state of weights that this rank does not hold."""
        for parameter, stages in self._holders.items():
            if self._optimizer is not None and self._stage_index not in stages:
                self._optimizer.state.pop(self._optimizer_parameter(parameter), None)

    def local_parameters(self) -> list[Tensor]:
        tensors = []
        for parameter, stages in self._holders.items():
            tensor = self._optimizer_parameter(parameter).detach()
            tensors.append(tensor if self._stage_index in stages else tensor.new_zeros(1))
        return tensors

    # --- Optimizer step -----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self.sync_buffers()
        self.buffers.begin_passes()
        # Between passes, all ranks of a pipeline have the same generator state, so all of them draw the same number.
        self._step_seed = int(torch.randint(2**31, (), device="cpu", generator=torch.default_generator))
        self._calls_alone = 0
        self._has_passes = False

    def sync_buffers(self) -> None:
        self.buffers.sync()

    def accumulating(self, *, last: bool) -> AbstractContextManager[object]:
        if self._units is not None:
            self._units.before_backward(last=last)
        return super().accumulating(last=last)

    @contextmanager
    def training_pass(self, number: int, received: Activation | None) -> Iterator[None]:
        """The context of a step's forward pass, in which `call` raises `StageBoundary` on stages other than the last.

        `number`: the number of the pass in the step. `received`: the input of this rank's stage.
        """
        self._pass = number, received
        try:
            yield
        finally:
            self._pass = None

    def _reshard(self) -> None:
        """Free the gathered weights of this stage, because they become outdated when the shards change."""
        if self._units is not None:
            self._units.reshard()

    def call(self, function: Callable[[nn.Module, T], Any], batch: T) -> Any:
        if self._pass is None:
            return self._call_alone(function, batch)
        number, received = self._pass
        self._has_passes = True
        try:
            value = self._run_stage(function, batch, received, (self._step_seed, number))
        except LossError:
            if not self.learned:  # in the first pass the ranks agree on errors, so the next stage must not wait
                self.stage.send_failure()
            raise
        if isinstance(value, Activation):
            raise StageBoundary(value)
        if not self.learned:  # check the first loss before the ranks agree on its errors
            leaves = leaves_of(getattr(value, "loss", value))
            self._check_foreign(parameter for parameter in self.parameters if parameter in leaves)
        return value

    def _call_alone(self, function: Callable[[nn.Module, T], Any], batch: T) -> Any:
        """Run a forward pass outside of an optimizer step."""
        self._calls_alone += 1
        seed = self._step_seed, -self._calls_alone  # drawing a new seed here would change later steps
        value = self._run_stage(function, batch, self.stage.receive(), seed)
        if not isinstance(value, Activation):
            return value
        self.stage.send(replace(value, tensor=value.tensor.detach()))
        return None

    def _run_stage(
        self,
        function: Callable[[nn.Module, T], Any],
        batch: T,
        received: Activation | None,
        seed: tuple[int, int],
    ) -> Any:
        """Call `function(model, batch)` on this stage; see `StageModel.call`."""
        before_blocks = partial(seed_pass, self.world, *seed, self._stage_index)
        call = partial(self._stage_model.call, function, batch, received, before_blocks)
        with random_states_kept(self.world):  # stages draw different amounts, which must not affect those of the data
            seed_pass(self.world, *seed)
            return call() if self._root is None else self._root(call)

    # --- Users of weights outside of the blocks -----------------------------------------------------------------------

    def learn(self, used: set[Tensor], changed: set[str]) -> None:
        """Find out which stages use each weight that is outside of the blocks, and which change each buffer.

        `used`: weights that the first pass used on this rank. `changed`: the names of buffers that it changed.
        A collective.
        """
        names = [*shared_buffers(self.model)]
        row = [parameter in used for parameter in self._outer] + [name in changed for name in names]
        table = torch.zeros(self.sizes.pipeline, len(row), dtype=torch.int32)
        table[self._stage_index] = torch.tensor(row, dtype=torch.int32)
        dist.all_reduce(table, op=dist.ReduceOp.MAX, group=host_group(self.world))
        users = [[stage for stage, uses in enumerate(column) if uses] for column in table.T.tolist()]
        self.learned = True
        for parameter, stages in zip(self._outer, users, strict=False):
            if parameter not in self._known:
                self._keep_on(parameter, tuple(stages) or (0,))
        self._drop_optimizer_state()
        self.buffers.learn(dict(zip(names, users[len(self._outer) :], strict=True)))
        for holders in sorted({self._holders[parameter] for parameter in self.parameters}):
            self._make_groups_of_holders(holders)

    def _keep_on(self, parameter: nn.Parameter, stages: tuple[int, ...]) -> None:
        """From now on, keep a weight that belongs to no block only on the ranks of these stages."""
        self._holders[parameter] = stages
        self._known.add(parameter)
        if self._stage_index not in stages:
            _free(parameter)
            _free(self._optimizer_parameter(parameter))

    # --- Gradients ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish_reduction(self) -> None:
        """Sum gradients over the ranks that hold the same weights."""
        self.stage.wait_for_headers()
        self._reshard()
        self.buffers.check_passes()
        self._check_foreign(parameter for parameter in self.parameters if parameter.grad is not None)
        missing: list[nn.Parameter] = []
        by_holders: dict[tuple[int, ...], list[Tensor]] = {}
        for parameter in self.parameters:
            if self._stage_index not in self._holders[parameter]:
                continue
            updated = self._optimizer_parameter(parameter)
            gradient = reduced_gradient(parameter.grad, parameter)
            if gradient is None:
                missing.append(parameter)
                gradient = torch.zeros_like(updated)
            updated.grad = gradient
            if parameter not in self._sharded:  # FSDP has reduced the others
                by_holders.setdefault(self._holders[parameter], []).append(gradient)
        for stages in sorted(by_holders):  # the same order on all ranks, because groups overlap
            group = self._groups[stages]
            if group is not None:
                for bucket in self._buckets(by_holders[stages]):
                    flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
                    dist.all_reduce(flat, group=group)
                    sums = torch.split(flat, [gradient.numel() for gradient in bucket])
                    for gradient, total in zip(bucket, sums, strict=True):
                        gradient.copy_(total.view_as(gradient))
        if self._has_passes:
            self._check_gradients(
                missing, "got no gradient in a step, but a pipeline needs the gradients of all trained parameters"
            )

    def _buckets(self, gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Yield the gradients in buckets. Each bucket has one dtype and a size of about `bucket_mb` MiB."""
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            bucket: list[Tensor] = []
            for gradient in gradients:
                if gradient.dtype == dtype:
                    bucket.append(gradient)
                    if sum(tensor.nbytes for tensor in bucket) >= self.config.bucket_mb * 2**20:
                        yield bucket
                        bucket = []
            if bucket:
                yield bucket

    def _check_foreign(self, used: Iterable[nn.Parameter]) -> None:
        """Raise `LossError` for weights that this rank has used but does not hold."""
        foreign = [parameter for parameter in used if self._stage_index not in self._holders[parameter]]
        if foreign:
            names = self.parameter_names()
            listed = some([names[id(parameter)] for parameter in foreign])
            raise LossError(
                f"stage {self._stage_index} (rank {self.world.rank}) used {listed}, which it does not hold: "
                "besides the weights of its own blocks, a stage has only those that it used in the run's first pass",
                "use weights only inside the model's blocks, and the same weights in every pass; or use "
                "parallel='fsdp', where every rank can use all weights",
            )

    @property
    def updated_parameters(self) -> list[nn.Parameter]:
        return [self._optimizer_parameter(parameter) for parameter in self.parameters]

    def grad_norm(self) -> Tensor:
        """The 2-norm of the gradients of a replica; each value counts once, however many ranks hold it."""
        counted = [self._optimizer_parameter(each) for each in self.parameters if self._is_first_holder(each)]
        exact = torch.promote_types(self.parameters[0].dtype, torch.float32)
        square = total_norm(counted, self.world.device).to(exact).square()
        dist.all_reduce(square, group=self._replica_group)
        return square.sqrt()

    def grad_norms(self) -> Tensor:
        counted = torch.tensor([self._is_first_holder(parameter) for parameter in self.parameters])
        squares = super().grad_norms().square() * counted.to(self.world.device)
        dist.all_reduce(squares, group=self._replica_group)
        return squares.sqrt()

    def _is_first_holder(self, parameter: nn.Parameter) -> bool:
        """Whether this rank is the first one in its replica that holds this part of the parameter."""
        return (
            self._holders[parameter][0] == self._stage_index
            and (self._shard == 0 or parameter in self._sharded)
            and (self._tensor == 0 or parameter in self._split)
        )

    # --- Evaluation and prediction ------------------------------------------------------------------------------------

    def evaluation(self, batches: Iterable[tuple[int, T]], filler_batch: Callable[[], T]) -> Iterator[tuple[int, T]]:
        if self.equal_passes:
            batches = equal_batches(batches, filler_batch, self.world)
        try:
            yield from batches
        finally:
            self._reshard()

    # --- State --------------------------------------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        return state_with_pieces(self.model, self._piece_in_model)

    def _piece_in_model(self, name: str, value: Tensor) -> Piece | None:
        if isinstance(value, nn.Parameter):
            return self._piece(value)
        stage = self.buffers.stage_of(name)
        if stage is None:
            return None
        return self._piece_on(value, value.shape, (stage,))

    def _piece(self, parameter: nn.Parameter) -> Piece:
        """The part of a parameter that this rank holds; an empty piece of the same dtype if it holds none."""
        part = piece_of_dtensor(parameter)
        if part is None or self._stage_index not in self._holders[parameter]:
            return self._piece_on(local_tensor(parameter).detach(), parameter.shape, self._holders[parameter])
        return replace(part, owned=self._replica == 0 and self._is_first_holder(parameter))

    def _piece_on(self, value: Tensor, shape: Sequence[int], stages: tuple[int, ...]) -> Piece:
        """A piece with the whole tensor on the ranks of these stages; an empty piece on other ranks."""
        if self._stage_index not in stages:
            value = value.new_empty((0, *shape[1:]) if len(shape) else ())
        owned = self._stage_index == stages[0] and (self._replica, self._shard, self._tensor) == (0, 0, 0)
        return Piece(value, tuple(shape), (0,) * len(shape), owned=owned)

    def parameter_names(self) -> dict[int, str]:
        return super().parameter_names() | self._shards.names

    def piece_of(self, parameter: Tensor) -> Piece | None:
        whole: Any = self._whole.get(parameter, parameter)
        if whole not in self._holders:
            return None
        return self._piece(whole)

    @torch.no_grad()
    def load_model_state(self, state: dict[str, Any]) -> None:
        tensors = {
            name: value
            for name, value in self.model.state_dict(keep_vars=True).items()
            if isinstance(value, Tensor) and not is_extra_state(name)
        }
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                is_here = self._stage_index in self._holders[tensor]
            else:
                is_here = self.buffers.stage_of(name) in (None, self._stage_index)
            if is_here and name in state:
                value = state[name]
                part = piece_of_dtensor(tensor)
                if part is not None:
                    value = part.of(value)
                elif isinstance(value, Piece):
                    value = value.tensor
                memory = stored(local_tensor(tensor))
                memory.copy_(value[tuple(slice(size) for size in memory.shape)])
        others = {name: value for name, value in state.items() if name not in tensors}
        self.model.load_state_dict(others, strict=False)

    def state_dict(self) -> dict[str, Any]:
        """The division into stages and, for each weight outside of the blocks, the stages that use it."""
        if not self.learned:
            return {}
        names = self.parameter_names()
        users = {names[id(parameter)]: list(self._holders[parameter]) for parameter in self._outer}
        return {"pipeline": {"stages": [*map(len, self._chain.stages)], "users": users}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = state.get("pipeline") or {}
        if self.learned or saved.get("stages") != [*map(len, self._chain.stages)]:
            return
        names = self.parameter_names()
        for parameter in self._outer:
            users = saved["users"].get(names[id(parameter)])
            if users is None:
                continue
            if not users or not set(users) <= set(range(self.sizes.pipeline)):
                raise ValueError("each weight must be assigned to one or more existing ranks of the pipeline")
            self._keep_on(parameter, tuple(users))
        self._drop_optimizer_state()

    def optimizer_form(self, optimizer: Optimizer) -> Any:
        forms: dict[str, Any] = {}
        for number, parameter in enumerate(self._model_parameters(optimizer)):
            updated = self._optimizer_parameter(parameter)
            values = optimizer.state.get(updated)
            if isinstance(values, dict) and self._is_first_holder(parameter) and self._replica == 0:
                forms[str(number)] = {name: _form(value, updated, parameter) for name, value in values.items()}
        return forms

    def optimizer_state(self, state: dict[int, Any], forms: Sequence[Any]) -> dict[int, Any]:
        assert self._optimizer is not None, "`setup_optimizer` was called"
        parameters = self._model_parameters(self._optimizer)
        all_forms = {int(number): form for of_rank in forms if of_rank for number, form in of_rank.items()}
        return {
            number: {
                name: self._state_piece(parameters[number], state, name, number, value) for name, value in form.items()
            }
            for number, form in sorted(all_forms.items())
        }

    def _state_piece(self, parameter: nn.Parameter, state: dict[int, Any], name: str, number: int, form: Any) -> Any:
        """The part on this rank of a value of an optimizer's state. `form`: the result of `_form`."""
        if "value" in form:
            return form["value"]
        stages = self._holders[parameter]
        if self._stage_index in stages:
            value = state[number][name]
            if isinstance(value, Piece):
                return value
        else:
            device = self.world.device if form["on_device"] else "cpu"
            value = torch.empty(0, dtype=getattr(torch, form["dtype"]), device=device)
        return self._piece_on(value, form["shape"], stages)

    def local_optimizer_state(self, state: dict[int, Any]) -> dict[int, Any]:
        assert self._optimizer is not None, "`setup_optimizer` was called"
        parameters = self._model_parameters(self._optimizer)
        return {
            number: values for number, values in state.items() if self._stage_index in self._holders[parameters[number]]
        }


def _form(value: Any, updated: Tensor, parameter: Tensor) -> dict[str, Any]:
    """Describe a value of the optimizer state, for ranks that do not have it.

    `updated`: this rank's part of `parameter`.
    """
    if not isinstance(value, Tensor):
        return {"value": value}
    dtype = str(value.dtype).removeprefix("torch.")
    shape = parameter.shape if value.shape == updated.shape else value.shape
    return {"dtype": dtype, "shape": list(shape), "on_device": not value.is_cpu}


def _new_group(groups_of_ranks: list[list[int]], backend: str | None = None) -> Any:
    """Create several groups without common ranks. Returns the one with this rank; None if there is none."""
    group, _ = dist.new_subgroups_by_enumeration(groups_of_ranks, backend=backend)  # type: ignore[no-untyped-call]
    return group


@torch.no_grad()
def _free(parameter: nn.Parameter) -> None:
    """Free a parameter's memory. The parameter keeps its shape, and its values become NaN to reveal accidental use."""
    part = memory_of(parameter)
    part.data = unusable_value(part).expand(part.shape)
