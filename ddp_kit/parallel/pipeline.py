"""Pipeline: the blocks of a model divided into consecutive stages, each on a rank of its own.

Every rank of a pipeline reads the same samples and runs the user's own loss function and forward pass, in which the
blocks of other stages are left out: stages.py. The passes of an optimizer step are the micro-batches that
torch.distributed.pipelining's schedules put in order: stage_links.py.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.optim import Optimizer

from ddp_kit.config import ParallelConfig
from ddp_kit.errors import ConfigError, LossError, some
from ddp_kit.parallel.mesh import sizes_of
from ddp_kit.parallel.replicas import broadcast
from ddp_kit.parallel.stage_links import Links, Received, Stage, StageFailedError, move
from ddp_kit.parallel.stages import (
    Chain,
    StageModel,
    chain_of,
    holders_before_first_pass,
    leaves_of,
    places_of_stages,
)
from ddp_kit.parallel.strategy import PassedOn, Passes, Strategy
from ddp_kit.pieces import Piece
from ddp_kit.torch_internals import version_of
from ddp_kit.world import World, host_group

T = TypeVar("T")

_BATCH_NORMS = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


class PipelineStrategy(Strategy):
    """`pipeline` stages, in `replicate` pipelines that each train on samples of their own.

        the first pass of a run, alone: which weights outside of the blocks does each stage need? the rest is freed
        the other passes, and all passes of later steps, as the schedule orders them
        gradients: added up over the ranks that hold the same weights

    What is needed of a model: blocks in one ModuleList or Sequential, called in their order, each with the tensor that
    the one before returned (or with the first item of the tuple) as its first argument; a loss function that calls the
    model once. Everything outside of the blocks runs on every stage that comes to it, those before the first block on
    all, so these should be cheap, as embeddings are. Weights outside of the blocks may be used by several stages, and
    tied; frozen ones are kept on all of them. A rank keeps NaN, which takes no memory, in place of other weights.

    What is not seen: an attribute that a block sets for the loss function to read, such as the auxiliary loss of a
    mixture of experts; and statistics that an optimizer takes over all weights at once, which are those of one rank.
    """

    shards = True
    divides_weights = True

    def __init__(self, world: World, config: ParallelConfig, *, recoverable: bool = False) -> None:
        super().__init__(world, config, recoverable=recoverable)
        self.sizes = sizes_of(config, world.world_size)
        self._place, self._replica, _, _ = self.sizes.coordinates(world.rank)
        self._places = places_of_stages(config)  # of all stages
        self._stages = [stage for stage, place in enumerate(self._places) if place == self._place]  # of this rank
        self._chain: Chain
        self._models: dict[int, StageModel] = {}
        self._links: dict[int, Links] = {}
        self._optimizer: Optimizer | None = None
        self._holders: dict[nn.Parameter, tuple[int, ...]] = {}
        """The places in the pipeline that hold a parameter; the first of them writes it to checkpoints."""
        self._outer: list[nn.Parameter] = []  # trained weights of which the first pass shows who needs them
        self._known: set[nn.Parameter] = set()  # those of which that is known, from the first pass or a checkpoint
        self._owners: dict[str, int] = {}  # by the name of a buffer that passes change: the stage whose value counts
        self._group: Any = None  # of this pipeline
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._learned = False
        self._schedules: dict[int, tuple[list[Stage], Any]] = {}
        self._passes: Passes | None = None
        self._backwards_left = 0
        self._running = 0  # the stage that runs forward
        self._came: Received | None = None
        self._needed: set[Tensor] = set()  # weights
        self._changed: set[str] = set()  # buffers
        self._without_gradient: list[str] = []

    # --- which ranks share what -----------------------------------------------------------------------------------

    @property
    def data_ranks(self) -> int:
        return self.sizes.data

    @property
    def data_rank(self) -> int:
        return self._replica

    @property
    def contributes(self) -> bool:
        return self._is_last

    @property
    def replicas(self) -> tuple[Sequence[int], ...]:
        return tuple(self._ranks((stage,)) for stage in range(self.sizes.pipeline))

    @property
    def calls_per_pass(self) -> int:
        return len(self._stages)

    @property
    def _is_last(self) -> bool:
        return self._place == self._places[-1]

    def _ranks(self, stages: Iterable[int]) -> list[int]:
        """All ranks of these stages."""
        return [stage * self.sizes.replicate + replica for stage in stages for replica in range(self.sizes.replicate)]

    # --- set up ---------------------------------------------------------------------------------------------------

    def check(self, model: nn.Module) -> None:
        super().check(model)
        self._check_settings()
        chain_of(model, self.config)
        norms = [name for name, each in model.named_modules() if isinstance(each, _BATCH_NORMS)]
        if norms:
            raise ConfigError(
                f"a pipeline does not train BatchNorm, whose statistics depend on the micro-batches: {some(norms)}",
                "use LayerNorm, GroupNorm or RMSNorm, or parallel='ddp'",
            )
        embeddings = nn.Embedding | nn.EmbeddingBag
        sparse = [name for name, each in model.named_modules() if isinstance(each, embeddings) and each.sparse]
        if sparse:
            raise ConfigError(
                f"a pipeline does not reduce sparse gradients, such as those of {some(sparse)}",
                "leave out sparse=True, or use parallel='ddp'",
            )

    def _check_settings(self) -> None:
        config, sizes = self.config, self.sizes
        for name in ("static_graph", "find_unused_parameters", "compression"):
            if getattr(config, name):
                raise ConfigError(
                    f"parallel.{name} is a setting of DDP, and parallel.strategy is 'pipeline'", f"leave out {name}"
                )
        if sizes.pipeline == 1:
            raise ConfigError(
                "parallel.strategy is 'pipeline', and parallel.pipeline is 1", "set pipeline to the number of stages"
            )
        if sizes.shard > 1 or sizes.tensor > 1 or config.optimizer != "whole":
            raise ConfigError(
                f"a pipeline goes with replicate alone, but shard is {sizes.shard}, tensor is {sizes.tensor} and "
                f"optimizer is {config.optimizer!r}",
                "leave them out; replicate is then the ranks left over",
            )
        if config.share_gpus and self.world.device.type == "cuda":
            raise ConfigError(
                "parallel.share_gpus does not go with a pipeline: gloo does not send from the memory of a GPU",
                "start as many ranks as there are GPUs, or run on the CPU with CUDA_VISIBLE_DEVICES=''",
            )

    def check_recoverable(self) -> None:
        raise ConfigError(
            "micro_batch_size='auto' does not go together with parallel.pipeline: where one rank runs out of memory, "
            "the others wait for what it sends",
            "set micro_batch_size to a number",
        )

    def setup(self, model: nn.Module) -> None:
        self.model = model
        self._chain = chain = chain_of(model, self.config)
        blocks = chain.blocks(model)
        self._holders, self._outer = holders_before_first_pass(model, chain, self._places)
        shared = {each for each, held in self._holders.items() if len(held) > 1}
        # Block by block: no rank ever holds the whole model on its device.
        for block in blocks:
            self._put_on_device([each for each in block.parameters() if each not in shared])
        self._put_on_device([each for each in model.parameters() if each in shared])
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self.world.device)
        broadcast(model.buffers())
        self.parameters = tuple(parameter for parameter in model.parameters() if parameter.requires_grad)
        self._models = {stage: StageModel(model, chain, stage) for stage in self._stages}
        self._connect()

    @torch.no_grad()
    def _put_on_device(self, parameters: Sequence[nn.Parameter]) -> None:
        """To the device, as rank 0 has them; what belongs to other stages is freed."""
        for each in parameters:
            each.data = each.data.to(self.world.device)
        broadcast([each.detach() for each in parameters])
        for each in parameters:
            if self._place not in self._holders[each]:
                _free(each)

    def _connect(self) -> None:
        for replica in range(self.sizes.replicate):
            ranks = [stage * self.sizes.replicate + replica for stage in range(self.sizes.pipeline)]
            groups = dist.new_group(ranks), dist.new_group(ranks, backend="gloo")
            if replica == self._replica:
                self._group = groups[0]
                of_stages = [ranks[place] for place in self._places]
                self._links = {stage: Links(of_stages, stage, *groups, self.world.device) for stage in self._stages}
        for stage in range(self.sizes.pipeline):
            self._make_group((stage,))

    def _make_group(self, stages: tuple[int, ...]) -> None:
        ranks = self._ranks(stages)
        if stages not in self._groups:
            self._groups[stages] = dist.new_group(ranks) if len(ranks) > 1 else None

    def setup_optimizer(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._forget_state()

    def _forget_state(self) -> None:
        """Drop the optimizer state of other stages' weights."""
        for parameter, stages in self._holders.items():
            if self._optimizer is not None and self._place not in stages:
                self._optimizer.state.pop(parameter, None)

    def local_parameters(self) -> list[Tensor]:
        return [
            each.detach() if self._place in stages else each.detach().new_zeros(1)
            for each, stages in self._holders.items()
        ]

    # --- an optimizer step ----------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self.sync_buffers()

    def sync_buffers(self) -> None:
        for name, stage in self._owners.items():
            dist.broadcast(self.model.get_buffer(name), src=self._ranks((stage,))[0])

    def run_passes(self, passes: Passes) -> None:
        self._passes, first = passes, 0
        self._backwards_left = passes.count * len(self._stages)
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
        self._reduce(has_passes=passes.count > 0)

    def _run_alone(self, passes: Passes) -> None:
        """The first pass of a run: the ranks agree on the kind of loss after its forward pass."""
        before = {name: (each, version_of(each)) for name, each in self.model.named_buffers()}
        stages = self._new_stages()
        for stage in stages:
            try:
                move(stage.get_fwd_recv_ops(0))
            except StageFailedError:
                self._links[stage.stage_index].announce_failure()
                passes.without_loss()  # raises: the rank that has failed says so
                raise
            self._needed |= leaves_of(stage.forward_one_chunk(0))
            move(stage.get_fwd_send_ops(0))
        for name, each in self.model.named_buffers():
            buffer, version = before.get(name, (None, 0))
            if each is not buffer or version_of(each) != version:
                self._changed.add(name)
        if not self._is_last:
            passes.without_loss()
        self._learn()  # before the backward pass, in which ranks with a single pass begin to add up weights
        for stage in reversed(stages):
            move(stage.get_bwd_recv_ops(0))
            stage.backward_one_chunk(0)
            move(stage.get_bwd_send_ops(0))

    def _run_schedule(self, count: int, first: int) -> None:
        if count not in self._schedules:
            stages = self._new_stages()
            kind, several = _schedule_for(self.config.schedule, count, self.sizes.pipeline)
            schedule = kind(stages if several else stages[0], count, loss_fn=_the_loss_itself, scale_grads=False)
            self._schedules[count] = stages, schedule
        stages, schedule = self._schedules[count]
        for stage in stages:
            stage.first = first
        schedule.step(target=torch.arange(count), return_outputs=False)

    def _new_stages(self) -> list[Stage]:
        made = {number: Stage(self._links[number], len(self._places), self.world.device) for number in self._stages}
        for number, stage in made.items():
            stage.forward_pass, stage.backward_pass = self._forward, self._backward
            if number + 1 in made:
                stage.is_followed_by(made[number + 1])
        return [*made.values()]

    def _settle(self) -> None:
        for links in self._links.values():
            links.settle()

    def _forward(self, stage: int, number: int, came: Received | None) -> tuple[Tensor, int]:
        assert self._passes is not None, "called within `run_passes`"
        self._running, self._came = stage, came
        try:
            return self._passes.forward(number), -1
        except PassedOn as passed:
            return passed.tensor, passed.items
        finally:
            self._came = None

    def _backward(self, ends: Tensor | None, compute: Callable[[], None]) -> None:
        passes = self._passes
        assert passes is not None, "called within `run_passes`"
        if ends is not None:
            self._backwards_left -= 1
            if not self._backwards_left:
                passes.before_reduction(ends)
        compute()
        passes.after_backward()

    def call(self, function: Callable[[nn.Module, T], Any], batch: T) -> Any:
        if self._passes is None:
            return self._call_alone(function, batch)
        try:
            value = self._models[self._running].call(function, batch, self._came)
        except LossError:
            if not self._learned:  # the ranks agree on errors of the first pass: none may wait for another
                self._links[self._running].announce_failure()
            raise
        if not self._learned:  # the other ranks wait for what this one finds wrong with its first loss
            leaves = leaves_of(getattr(value, "loss", value))
            self._check_foreign(each for each in self.parameters if each in leaves)
        return value

    def _call_alone(self, function: Callable[[nn.Module, T], Any], batch: T) -> Any:
        """Outside of optimizer steps: through this rank's stages, one after another."""
        came: Received | None = None
        for stage in self._stages:
            links = self._links[stage]
            if stage > 0 and came is None:
                came = links.arriving()
                move([links.operation(dist.irecv, came.tensor.detach(), -1)])
            try:
                own = batch if stage == self._stages[-1] else copy.deepcopy(batch)  # functions may take batches apart
                return self._models[stage].call(function, own, came)
            except PassedOn as passed:
                sent = PassedOn(passed.tensor.detach(), passed.items)
            if stage + 1 in self._stages:
                came = Received(sent.tensor, sent.items)
                continue
            came = None
            links.announce(sent.tensor, sent.items)
            move([links.operation(dist.isend, sent.tensor.contiguous(), 1)])
            links.settle()
        raise sent

    # --- which weights outside of the blocks each stage needs -----------------------------------------------------

    def _learn(self) -> None:
        """After the first pass: who needs which weights outside of the blocks, and who changes which buffers."""
        buffers = [name for name, _ in self.model.named_buffers()]
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
        self._forget_state()
        for stages in sorted({self._holders[each] for each in self.parameters}):
            self._make_group(stages)

    def _hold(self, parameter: nn.Parameter, places: tuple[int, ...]) -> None:
        """From now on, a weight outside of the blocks is held there."""
        self._holders[parameter] = places
        self._known.add(parameter)
        if self._place not in places:
            _free(parameter)

    # --- gradients ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _reduce(self, *, has_passes: bool) -> None:
        """Add up gradients over the ranks that hold the same weights."""
        self._check_foreign(each for each in self.parameters if each.grad is not None)
        names = self.held_names()
        self._without_gradient = []
        by_group: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for each in self.parameters:
            if self._place in self._holders[each]:
                by_group.setdefault(self._holders[each], []).append(each)
                if each.grad is None:
                    self._without_gradient += [names[id(each)]] if has_passes else []
                    each.grad = torch.zeros_like(each)
        for stages in sorted(by_group):  # in one order on all ranks, whose groups overlap
            if (group := self._groups[stages]) is not None:
                for bucket in self._buckets(by_group[stages]):
                    flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
                    dist.all_reduce(flat, group=group)
                    for gradient, part in zip(
                        bucket, torch.split(flat, [each.numel() for each in bucket]), strict=True
                    ):
                        gradient.copy_(part.view_as(gradient))

    def _buckets(self, parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor]]:
        """Gradients of one type that together have `bucket_mb`."""
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
        """Raise `LossError` for weights that this stage has used and does not hold."""
        names = self.held_names()
        foreign = [names[id(each)] for each in used if self._place not in self._holders[each]]
        if foreign:
            raise LossError(
                f"rank {self._place} of the pipeline has used {some(foreign)}, which it does not hold: weights of "
                "other stages' blocks, or weights that it did not need in the first pass of the run",
                "compute what needs weights inside the model's blocks, and in every pass alike; parallel='fsdp' has "
                "all weights on all ranks",
            )

    def check_gradients(self) -> None:
        if self._without_gradient:
            raise LossError(
                f"{some(self._without_gradient)} got no gradient in a step, and a pipeline reduces those of all ranks",
                "let them take part in the loss, or freeze them (requires_grad=False) before the Trainer is made",
            )

    def grad_norm(self) -> Tensor:
        """Sums of squares, added up over the stages; each weight counts once, however many stages hold it."""
        own = [each.grad for each in self.parameters if each.grad is not None and self._holders[each][0] == self._place]
        exact = torch.promote_types(self.parameters[0].dtype, torch.float32)
        square = nn.utils.get_total_norm(own).to(self.world.device, exact).square()
        dist.all_reduce(square, group=self._group)
        return square.sqrt()

    # --- evaluation and prediction --------------------------------------------------------------------------------

    def evaluation(self, batches: Iterable[tuple[int, T]], spare: Callable[[], T]) -> Iterator[tuple[int, T]]:  # noqa: ARG002
        # A collective, by which it shows that an evaluation cannot be broken off on one rank alone.
        dist.all_reduce(torch.zeros((), device=self.world.device), group=self._group)
        yield from batches

    # --- state ------------------------------------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        state = self.model.state_dict(keep_vars=True)
        pieces: dict[int, Piece] = {}
        for name, value in state.items():
            if not isinstance(value, Tensor):
                continue
            if id(value) not in pieces and (stages := self._stages_of(name, value)) is not None:
                pieces[id(value)] = self._piece(value.detach(), value.shape, stages)
            state[name] = pieces.get(id(value), value.detach())  # tied weights are stored once
        return state

    def _stages_of(self, name: str, value: Tensor) -> tuple[int, ...] | None:
        """The stages that hold it; None: all do, and rank 0's counts."""
        if isinstance(value, nn.Parameter):
            return self._holders[value]
        return (self._owners[name],) if name in self._owners else None

    def _piece(self, value: Tensor, shape: Sequence[int], stages: tuple[int, ...]) -> Piece:
        """A whole tensor, on the stages that hold it; elsewhere nothing of it, of the same type."""
        if self._place not in stages:
            value = value.new_empty((0, *shape[1:]) if len(shape) else ())
        owned = self._place == stages[0] and self._replica == 0
        return Piece(value, tuple(shape), (0,) * len(shape), owned=owned)

    def piece_of(self, parameter: Tensor) -> Piece | None:
        stages = self._holders.get(parameter)  # type: ignore[call-overload]
        return None if stages is None else self._piece(parameter.detach(), parameter.shape, stages)

    @torch.no_grad()
    def load_model_state(self, state: dict[str, Any]) -> None:
        own = self.model.state_dict(keep_vars=True)
        for name, value in state.items():
            held = own.get(name)
            stages = self._stages_of(name, held) if isinstance(held, Tensor) else None
            if isinstance(held, Tensor) and (stages is None or self._place in stages):
                held.copy_(value.tensor if isinstance(value, Piece) else value)
        others = {name: value for name, value in state.items() if not isinstance(own.get(name), Tensor)}
        self.model.load_state_dict(others, strict=False)

    def state_dict(self) -> dict[str, Any]:
        """Who needs which weights outside of the blocks, and the division that this belongs to."""
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
                    raise ValueError("weights that no stage of the pipeline holds")
                self._hold(each, tuple(users))
        self._forget_state()

    def optimizer_form(self, optimizer: Optimizer) -> Any:
        numbers = self._owned_numbers(optimizer)
        return {
            str(numbers[parameter]): {name: _form(value) for name, value in kept.items()}
            for parameter, kept in optimizer.state.items()
            if parameter in numbers and isinstance(kept, dict)
        }

    def _owned_numbers(self, optimizer: Optimizer) -> dict[Tensor, int]:
        """The numbers, in an optimizer's state_dict, of the weights that this rank writes to checkpoints."""
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        return {
            each: number
            for number, each in enumerate(parameters)
            if self._holders[each][0] == self._place and self._replica == 0
        }

    def optimizer_state(self, state: dict[int, Any], forms: Sequence[Any]) -> dict[int, Any]:
        assert self._optimizer is not None, "`setup_optimizer` was called"
        parameters = [each for group in self._optimizer.param_groups for each in group["params"]]
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
        stages = self._holders[parameter]
        if self._place in stages:
            value = state[number][name]
            value = value.tensor if isinstance(value, Piece) else value
        else:
            device = self.world.device if form["on_device"] else torch.device("cpu")
            value = torch.empty(0, dtype=getattr(torch, form["dtype"]), device=device)
        return self._piece(value, form["shape"], stages)

    def own_optimizer_state(self, state: dict[int, Any]) -> dict[int, Any]:
        assert self._optimizer is not None, "`setup_optimizer` was called"
        parameters = [each for group in self._optimizer.param_groups for each in group["params"]]
        return {number: kept for number, kept in state.items() if self._place in self._holders[parameters[number]]}


def _schedule_for(name: str, passes: int, places: int) -> tuple[Any, bool]:
    """torch's class, and whether it takes a list of stages. 1F1B wants a pass for each stage, and its interleaved form
    the same number in each round; for other numbers, all forward passes come before all backward passes. That is also
    what GPipe does, but in torch 2.10 not for fewer passes than stages (pytorch#171462): breadth first takes any."""
    if name == "zbv":
        return ScheduleZBVZeroBubble, True
    if name == "interleaved":
        return (ScheduleLoopedBFS if passes % max(1, passes // places) else ScheduleInterleaved1F1B), True
    if passes < places:
        return ScheduleLoopedBFS, True
    return (Schedule1F1B if name == "1f1b" else ScheduleGPipe), False


def _the_loss_itself(output: Tensor, _target: Tensor) -> Tensor:
    return output


def _form(value: Any) -> dict[str, Any]:
    if not isinstance(value, Tensor):
        return {"value": value}
    dtype = str(value.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(value.shape), "on_device": not value.is_cpu}


@torch.no_grad()
def _free(parameter: nn.Parameter) -> None:
    """Free its memory; it keeps its shape and reads as NaN everywhere, so that accidental use shows."""
    kind = torch.nan if parameter.is_floating_point() else 0
    parameter.data = torch.full((), kind, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
