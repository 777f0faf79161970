"""Pipeline stages: how a model is divided into stages, and how the stages communicate and run."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.distributed.pipelining import PipelineStage

from ddp_kit.config.settings import ParallelConfig
from ddp_kit.errors import ConfigError, LossError, some, suggestion
from ddp_kit.parallel.strategy import StageBoundary
from ddp_kit.structures import repeated_blocks, split_chain, work_of

# --- Split backward pass ----------------------------------------------------------------------------------------------
# For zero-bubble schedules (arXiv 2401.10241): first compute the gradient of a stage's input, which the previous stage
# waits for, then the gradients of the stage's weights.
# torch.distributed.pipelining implements this in private functions, which differ between versions and fail if layers of
# a stage share weights ("backward through the graph a second time", torch 2.10 and 2.13). This code uses only public
# functions.


Gradients = tuple[Tensor | None, ...]


@dataclass(eq=False)
class _Group:
    """A group of autograd nodes, and the leaves, such as weights, that only the nodes of this group reach."""

    nodes: list[Node] = field(default_factory=list)
    leaves: dict[Tensor, None] = field(default_factory=dict)


def backward_to_input(output: Tensor, gradient: Tensor | None, received: Tensor | None) -> Callable[[], None]:
    """Compute the gradient of a stage's input, and return a function that computes the gradients of all other leaves.

    `gradient`: the gradient of `output`; None: `output` is a scalar loss. `received`: the stage's input, whose `.grad`
    is set. If it is None, or requires no gradient because nothing before this stage is trained, the returned function
    runs the whole backward pass. Each weight's gradient is computed once. If several layers of a stage share weights,
    the backward pass between these layers is computed twice.
    """
    if output.grad_fn is None:  # the output is the input
        torch.autograd.backward(output, gradient)
        return lambda: None
    path = {} if received is None or not received.requires_grad else _path(output.grad_fn, received)
    if received is None or not path:
        return partial(torch.autograd.backward, output, gradient)
    groups = _groups(path)
    reached: dict[Node, Gradients] = {}
    hooks = [node.register_prehook(partial(_note, reached, node)) for group in groups for node in group.nodes]
    try:
        (received.grad,) = torch.autograd.grad(output, received, gradient, retain_graph=True)
    finally:
        for hook in hooks:
            hook.remove()
    return partial(_backward_to_leaves, groups, reached)


def _note(reached: dict[Node, Gradients], node: Node, gradients: Gradients) -> None:
    # Copy these gradients, because the gradient of a broadcast weight can be a view of them: the next pass would add to
    # it in place while the same memory is still being sent to the previous stage.
    reached[node] = tuple(None if each is None else each.clone() for each in gradients)


def _backward_to_leaves(groups: list[_Group], reached: dict[Node, Gradients]) -> None:
    for group in groups:
        edges, gradients = list[GradientEdge](), list[Tensor]()
        for node in group.nodes:
            for number, gradient in enumerate(reached.get(node, ())):
                if gradient is not None:
                    edges.append(GradientEdge(node, number))
                    gradients.append(gradient)
        # A node may get gradients from another node of its group, but `reached` includes these gradients already.
        hooks = [
            node.register_prehook(lambda _gradients, whole=reached[node]: whole)
            for node in group.nodes
            if node in reached
        ]
        try:
            if edges:
                # Retain the graph, because another group may need the nodes between the nodes of this one.
                torch.autograd.backward(edges, gradients, retain_graph=True, inputs=[*group.leaves])
        finally:
            for hook in hooks:
                hook.remove()
    groups.clear()  # frees the graph
    reached.clear()


def _path(root: Node, received: Tensor) -> dict[Node, None]:
    """The autograd nodes from which a backward pass reaches `received`.

    The order of the nodes is the same in every run, because gradients are added in this order.
    """
    before: dict[Node, list[Node]] = {root: []}
    ahead, path = [root], dict[Node, None]()
    back = list[Node]()
    while ahead:
        node = ahead.pop()
        if getattr(node, "variable", None) is received:
            back.append(node)
        for following, _ in node.next_functions:
            if following is not None:
                if following not in before:
                    before[following] = []
                    ahead.append(following)
                before[following].append(node)
    while back:
        node = back.pop()
        if node not in path:
            path[node] = None
            back += before[node]
    return path


def _groups(path: dict[Node, None]) -> list[_Group]:
    """Divide nodes into groups, such that nodes that share a leaf are in one group.

    The second half of a split backward pass, which computes the gradients of the leaves, processes one group at a time.
    """
    of_leaf: dict[Tensor, _Group] = {}
    for node in path:
        group = _Group([node], _leaves_beside(node, path))
        for other in dict.fromkeys(of_leaf[leaf] for leaf in group.leaves if leaf in of_leaf):
            group.nodes += other.nodes
            group.leaves |= other.leaves
        of_leaf.update(dict.fromkeys(group.leaves, group))
    return [*dict.fromkeys(of_leaf.values())]


def _leaves_beside(node: Node, path: dict[Node, None]) -> dict[Tensor, None]:
    """The leaves, such as weights, that `node` reaches through nodes that are not in `path`."""
    seen, leaves = set[Node](), dict[Tensor, None]()
    ahead = [node]
    while ahead:
        for following, _ in ahead.pop().next_functions:
            if following is not None and following not in path and following not in seen:
                seen.add(following)
                ahead.append(following)
                if hasattr(following, "variable"):
                    leaves[following.variable] = None
    return leaves


# --- Communication between stages -------------------------------------------------------------------------------------


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
_DIMENSIONS = 12
_FAILED = -2  # sent instead of `Received.items`


class StageFailedError(Exception):
    """The previous stage has raised a `LossError` in the first pass of a run."""


@dataclass(frozen=True)
class Received:
    """The activation that the previous stage sent for one pass."""

    tensor: Tensor
    items: int
    """The length of the tuples that the blocks return; -1 if they return tensors."""


class Links:
    """The connections of one stage to the previous and the next stage. `ranks`: the rank of each stage, in order.

    Before each activation, a header with the activation's shape is sent through host memory: passes may therefore
    differ in shape, and the host does not wait for a device. Gradients have the shapes of the activations.
    """

    def __init__(self, ranks: list[int], stage: int, group: Any, host_group: Any, device: torch.device) -> None:
        self.ranks = ranks
        self.stage = stage
        self.group = group
        self._host_group = host_group
        self._device = device
        self._pending_headers: list[tuple[Any, Tensor]] = []

    def arriving(self) -> Received:
        """Receive the header of the previous stage's next activation, and allocate memory for the activation.

        Waits until the previous stage has computed the activation. Raises `StageFailedError` if that stage failed.
        """
        header = torch.zeros(4 + _DIMENSIONS, dtype=torch.int64)
        dist.recv(header, src=self._rank(self.stage - 1), group=self._host_group, tag=self.stage)
        items, trained, kind, dimensions, *sizes = header.tolist()
        if items == _FAILED:
            raise StageFailedError
        tensor = torch.empty(sizes[:dimensions], dtype=_DTYPES[kind], device=self._device)
        return Received(tensor.requires_grad_(bool(trained)), items)

    def announce(self, tensor: Tensor, items: int) -> None:
        """Send the header of an activation to the next stage. Raises `LossError` if the activation cannot be sent."""
        if tensor.dtype not in _DTYPES or tensor.ndim > _DIMENSIONS:
            raise LossError(
                f"a pipeline stage cannot send a tensor of dtype {tensor.dtype} with {tensor.ndim} dimensions",
                "make the blocks return tensors of dtype float32, float64, bfloat16, float16, int64 or int32, with at "
                f"most {_DIMENSIONS} dimensions",
            )
        self._send([items, int(tensor.requires_grad), _DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape])

    def announce_failure(self) -> None:
        """Make the next stage raise `StageFailedError` instead of waiting."""
        if self.stage + 1 < len(self.ranks) and self._rank(self.stage + 1) != self._rank(self.stage):
            self._send([_FAILED])

    def _send(self, values: list[int]) -> None:
        header = torch.zeros(4 + _DIMENSIONS, dtype=torch.int64)
        header[: len(values)] = torch.tensor(values)
        following = self.stage + 1
        work = dist.isend(header, dst=self._rank(following), group=self._host_group, tag=following)
        self._pending_headers.append((work, header))

    def operation(self, kind: Callable[..., Any], tensor: Tensor, offset: int) -> dist.P2POp:
        """Create a send or receive operation with the previous stage (`offset` -1) or the next stage (`offset` 1)."""
        # Gloo matches messages between two ranks by tag; NCCL by order, which the schedule determines.
        peer = self.stage + offset
        return dist.P2POp(kind, tensor, self._rank(peer), self.group, max(self.stage, peer))

    def _rank(self, stage: int) -> int:
        return self.ranks[stage]

    def settle(self) -> None:
        """Wait until all headers are sent."""
        for work, _ in self._pending_headers:
            work.wait()
        self._pending_headers.clear()


Forward = Callable[[int, int, Received | None], tuple[Tensor, int]]
"""Runs a pass of a stage. Returns the loss on the last stage, else the activation to send, and its `Received.items`."""
Backward = Callable[[Tensor | None, Callable[[], None]], None]
"""Runs its second argument. Its first argument is a tensor if the call completes a pass's backward pass, else None."""


class Stage(PipelineStage):
    """A pipeline stage for torch's schedules that supports passes with different shapes.

    `PipelineStage` needs the same shape in all passes, so this class overrides the methods that send, receive and
    compute. torch's schedule calls these methods. The number of a pass is the schedule's chunk number plus `first`.
    """

    def __init__(self, links: Links, stages: int, device: torch.device) -> None:
        unused = torch.empty(1, device="meta")  # without it, torch runs a hidden pass to infer the shapes
        super().__init__(
            nn.Identity(), links.stage, stages, device, input_args=unused, output_args=unused, group=links.group
        )
        self._links = links
        self.forward_pass: Forward
        self.backward_pass: Backward
        self.first = 0
        self._received: dict[int, Received] = {}
        self._outputs: dict[int, tuple[Tensor, int]] = {}
        self._gradients: dict[int, Tensor] = {}
        self._weight_backward: dict[int, Callable[[], None]] = {}  # the second half of split backward passes
        self._previous: Stage | None = None  # the neighbours, if they are on this rank: nothing is sent then
        self._next: Stage | None = None

    def is_followed_by(self, following: "Stage") -> None:
        """Connect to the next stage, which is on this rank too. `set_local_...` methods pass tensors between them."""
        self._next, following._previous = following, self

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # With "zbv", torch 2.10 (but not 2.13) would send from the middle rank to itself, which gloo does not support.
        return [each for each in super()._get_init_p2p_neighbors_ops() if each.group_peer != self.group_rank]

    def clear_runtime_states(self) -> None:
        """Clear the state of the last step. torch's schedules call this method before each step."""
        for kept in (self._received, self._outputs, self._gradients, self._weight_backward):
            kept.clear()

    # --- Forward ------------------------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The operation that receives a pass's activation."""
        if self.is_first or self._previous is not None:
            return []
        received = self._received[fwd_chunk_id] = self._links.arriving()
        return [self._links.operation(dist.irecv, received.tensor.detach(), -1)]

    def forward_one_chunk(self, fwd_chunk_id: int, *_args: Any, **_kwargs: Any) -> Tensor:
        """Run a forward pass. Returns the loss on the last stage, and the activation to send on other stages."""
        output = self.forward_pass(self._links.stage, fwd_chunk_id + self.first, self._received.get(fwd_chunk_id))
        self._outputs[fwd_chunk_id] = output
        return output[0]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The operation that sends a pass's activation; its header is sent first."""
        if self.is_last:
            return []
        tensor, items = self._outputs[fwd_chunk_id]
        if self._next is not None:
            self._next.set_local_fwd_input(tensor, fwd_chunk_id)
            return []
        self._links.announce(tensor, items)
        return [self._links.operation(dist.isend, tensor.detach().contiguous(), 1)]

    def set_local_fwd_input(self, prev_stage_outputs: Tensor, mb_index: int) -> None:
        """Take the activation of a pass from the previous stage, which is on this rank too."""
        assert self._previous is not None, "called without a previous stage on this rank"
        tensor = prev_stage_outputs.detach().requires_grad_(prev_stage_outputs.requires_grad)
        self._received[mb_index] = Received(tensor, self._previous._outputs[mb_index][1])

    # --- Backward -----------------------------------------------------------------------------------------------------

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The operation that receives the gradient of the sent activation, if the activation requires a gradient."""
        if self.is_last or self._next is not None or not self._outputs[bwd_chunk_id][0].requires_grad:
            return []
        sent = self._outputs[bwd_chunk_id][0]
        gradient = self._gradients[bwd_chunk_id] = torch.empty(sent.shape, dtype=sent.dtype, device=sent.device)
        return [self._links.operation(dist.irecv, gradient, 1)]

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,  # noqa: ARG002
        full_backward: bool = True,
        last_backward: bool = False,  # noqa: ARG002
    ) -> None:
        """Compute gradients. Without `full_backward`, compute only the one that the previous stage needs."""
        tensor, _ = self._outputs.pop(bwd_chunk_id)
        gradient, received = self._gradients.pop(bwd_chunk_id, None), self._received.get(bwd_chunk_id)

        def compute() -> None:
            if tensor.requires_grad and full_backward:
                torch.autograd.backward(tensor, gradient)
            elif tensor.requires_grad:
                self._weight_backward[bwd_chunk_id] = backward_to_input(
                    tensor, gradient, None if received is None else received.tensor
                )

        self.backward_pass(tensor if full_backward else None, compute)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:  # noqa: ARG002
        """Run the second half of a split backward pass, which computes the gradients of the weights."""
        # Pass an unused tensor: this half starts inside the graph, so no hook on the output would run.
        self.backward_pass(torch.empty(0), self._weight_backward.pop(bwd_chunk_id, lambda: None))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The operation that sends the gradient of the received activation."""
        (gradient,) = self.get_local_bwd_output(bwd_chunk_id)
        if self._previous is not None:
            self._previous.set_local_bwd_input((gradient,), bwd_chunk_id)
        if gradient is None or self._previous is not None:
            return []
        return [self._links.operation(dist.isend, gradient.contiguous(), -1)]

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        """The gradient of the received activation; zeros if the loss does not depend on it."""
        received = self._received.pop(mb_index, None)
        if received is None or not received.tensor.requires_grad:
            return (None,)
        return (torch.zeros_like(received.tensor) if received.tensor.grad is None else received.tensor.grad,)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take the gradient of a pass's output from the next stage, which is on this rank too."""
        (gradient,) = next_stage_bwd_outputs
        if gradient is not None:
            self._gradients[mb_index] = gradient

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: the strategy reduces gradients over the ranks that hold the same weights."""


def move(operations: list[dist.P2POp]) -> None:
    """Run sends and receives, and wait until they are complete."""
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


# --- Division of a model into stages ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """The blocks of a model, called in order, each with the output of the previous one as its first argument."""

    prefix: str
    """The name of the ModuleList or Sequential that contains the blocks; "" for the model itself."""
    keys: tuple[str, ...]
    """The names of the blocks within that ModuleList or Sequential."""
    stages: tuple[range, ...]
    """The indices of the blocks of each stage."""

    @property
    def names(self) -> list[str]:
        """The names of the blocks in the model."""
        return [f"{self.prefix}.{key}" if self.prefix else key for key in self.keys]

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The blocks, in call order."""
        parent = model.get_submodule(self.prefix)
        return [parent.get_submodule(key) for key in self.keys]


def chain_of(model: nn.Module, config: ParallelConfig) -> Chain:
    """Divide the model's blocks into stages. Raises `ConfigError` if they cannot be divided."""
    stages = config.pipeline * stages_per_rank(config)
    if config.pipeline_stages != "auto":
        return _named_chain(model, config.pipeline_stages, stages)
    names = [*repeated_blocks(model)]
    prefixes = {name.rpartition(".")[0] for name in names}
    if len(prefixes) != 1:
        what = "no repeated blocks" if not prefixes else f"repeated blocks in several places: {some(sorted(prefixes))}"
        raise ConfigError(
            f"the model {type(model).__name__} cannot be divided into stages: it has {what}",
            "put consecutive layers into one nn.ModuleList or nn.Sequential, or set parallel.pipeline_stages to the "
            "names of the modules at which new stages begin",
        )
    (prefix,) = prefixes
    parent = model.get_submodule(prefix)
    keys, own = [key for key, _ in parent.named_children()], {name.rpartition(".")[2] for name in names}
    places = [number for number, key in enumerate(keys) if key in own]
    chosen = keys[places[0] : places[-1] + 1]
    if len(chosen) < stages:
        raise ConfigError(
            f"parallel.pipeline = {config.pipeline} with pipeline_schedule = {config.pipeline_schedule!r} makes "
            f"{stages} stages, but the model {type(model).__name__} has only {len(chosen)} repeated blocks, in "
            f"{prefix or 'its root'}",
            "set pipeline to at most the number of blocks" if stages == config.pipeline else "use the schedule '1f1b'",
        )
    sizes = [work_of(parent.get_submodule(key)) for key in chosen]
    return Chain(prefix, tuple(chosen), split_chain(sizes, sizes, [inf] * stages))


def stages_per_rank(config: ParallelConfig) -> int:
    """The number of stages on each rank. Interleaved and V-shaped schedules use several."""
    if config.pipeline_schedule == "zbv":
        return 2
    if config.pipeline_schedule != "interleaved":
        return 1
    return 2 if config.pipeline_stages == "auto" else max(1, (len(config.pipeline_stages) + 1) // config.pipeline)


def places_of_stages(config: ParallelConfig) -> tuple[int, ...]:
    """The pipeline coordinate of each stage's rank: round-robin, or V-shaped (forward and back) for "zbv"."""
    places = tuple(range(config.pipeline))
    return (*places, *reversed(places)) if config.pipeline_schedule == "zbv" else places * stages_per_rank(config)


def _named_chain(model: nn.Module, names: Sequence[str], stages: int) -> Chain:
    if len(names) != stages - 1:
        raise ConfigError(
            f"parallel.pipeline_stages names {len(names)} modules, but {stages} stages need {stages - 1}",
            "for each stage except the first, name the module at which the stage begins",
        )
    known = dict(model.named_modules())
    for name in names:
        if name not in known:
            raise ConfigError(
                f"parallel.pipeline_stages names {name!r}, but the model {type(model).__name__} has no such module",
                suggestion(name, [each for each in known if each], "modules"),
            )
    prefixes = {name.rpartition(".")[0] for name in names}
    parent = known.get(next(iter(prefixes)))
    if len(prefixes) > 1 or not isinstance(parent, nn.ModuleList | nn.Sequential):
        raise ConfigError(
            f"the modules in parallel.pipeline_stages = {tuple(names)} do not belong to the same nn.ModuleList or "
            "nn.Sequential",
            "name modules of the nn.ModuleList or nn.Sequential that contains the consecutive layers",
        )
    keys = [key for key, _ in parent.named_children()]
    begins = [keys.index(name.rpartition(".")[2]) for name in names]
    if sorted(set(begins)) != begins:
        raise ConfigError(
            f"parallel.pipeline_stages = {tuple(names)} are not in the order of these modules in the model",
            "name each module once, in the order of the model",
        )
    if begins[0] == 0:
        raise ConfigError(
            f"parallel.pipeline_stages names {names[0]}, the first block, but the first stage always begins there",
            "name only the modules at which the other stages begin",
        )
    edges = [0, *begins, len(keys)]
    return Chain(next(iter(prefixes)), tuple(keys), tuple(map(range, edges, edges[1:])))


class _Placeholder(nn.Module):
    """A placeholder for a block during a forward pass.

    It has the block's weights and attributes, so that code that iterates over the model's weights finds all of them.
    """

    def __init__(self, block: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["_block"] = block  # not registered as a child
        self.__dict__["_run"] = run
        del self.__dict__["training"]
        for members in ("_parameters", "_buffers", "_modules"):
            self.__dict__[members] = block.__dict__[members]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_run"](*args, **kwargs)


class StageModel:
    """The user's model, in which only the blocks of one stage run.

    code outside of the blocks         runs on every stage: masks and positions are computed from the real batch
    blocks of earlier stages           return NaN values of the right shape, which the model must not use; the last of
                                       these blocks returns the activation that the previous stage sent
    first block of the next stage      raises `StageBoundary` with its first argument, which is then sent
    """

    def __init__(self, model: nn.Module, chain: Chain, stage: int) -> None:
        self.model = model
        self._own, self._stage = chain.stages[stage], stage
        self._parent = model.get_submodule(chain.prefix)
        self._names = chain.names
        self._blocks = dict(zip(chain.keys, chain.blocks(model), strict=True))
        self._placeholders = {
            key: _Placeholder(block, self._placeholder_call(number, block))
            for number, (key, block) in enumerate(self._blocks.items())
        }
        self._active = False
        self._next = 0  # the index of the block to be called next
        self._items = -1  # `Received.items` of the last block's output
        self._received: Tensor | None = None
        self._received_items = -1
        self._before_blocks: Callable[[], None]

    def call(
        self,
        function: Callable[[nn.Module, Any], Any],
        batch: Any,
        came: Received | None = None,
        before_blocks: Callable[[], None] = lambda: None,
    ) -> Any:
        """Call `function(model, batch)`, and return its value on the last stage; other stages raise `StageBoundary`.

        `came`: the activation from the previous stage; None on the first stage. `before_blocks`: a function that
        is called before the first block of this stage.
        """
        self._before_blocks = before_blocks
        self._next, self._items = 0, -1
        self._received, self._received_items = (None, -1) if came is None else (came.tensor, came.items)
        with self._placeholders_in_place():
            value = function(self.model, batch)
        if self._next != len(self._names):
            raise LossError(
                f"the model ran {self._next} of its {len(self._names)} blocks, but a pipeline must run all of them",
                "the loss function must call model(...) exactly once, and the model must call all of its blocks",
            )
        return value

    @contextmanager
    def _placeholders_in_place(self) -> Iterator[None]:
        modules = self._parent._modules
        modules.update(self._placeholders)
        self._active = True
        try:
            yield
        finally:
            self._active = False
            modules.update(self._blocks)
            self._received = None

    def _placeholder_call(self, number: int, block: nn.Module) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._active:  # activation checkpointing recomputes the block in the backward pass
                return block(*args, **kwargs)
            self._check(number, args)
            if number == self._own.stop:
                raise StageBoundary(args[0], self._items)
            self._next += 1
            if number == self._own.start:
                self._before_blocks()
            if number < self._own.start:
                return self._returned(is_sent=number == self._own.start - 1)
            output = block(*args, **kwargs)
            self._items = len(output) if isinstance(output, tuple | list) else -1
            return output

        return run

    def _check(self, number: int, args: tuple[Any, ...]) -> None:
        name = self._names[number]
        if number != self._next:
            expected = self._names[self._next] if self._next < len(self._names) else "no further block"
            raise LossError(
                f"the model calls its blocks out of order: {name} was called where {expected} was expected",
                "a pipeline needs a model that calls each block once, in order, and a loss function that calls the "
                "model once; parallel='fsdp' needs neither",
            )
        if not args or not isinstance(args[0], Tensor):
            raise LossError(
                f"{name} gets {f'a {type(args[0]).__name__}' if args else 'nothing'} as its first argument, but "
                "the stages of a pipeline can only send tensors",
                "pass the output of the previous block to each block as the first positional argument",
            )
        if number == self._own.start and self._received is not None and args[0] is not self._received:
            raise LossError(
                f"the model changes the output of {self._names[number - 1]} before it calls {name}, where a new stage "
                "begins",
                "move this computation into one of the two blocks, or set parallel.pipeline_stages so that the stage "
                "begins at another block",
            )

    def _returned(self, *, is_sent: bool) -> Any:
        """The output of a placeholder for a block of an earlier stage: the received activation if `is_sent`, else NaN.

        NaN makes any use of the output visible, and a backward pass through it raises an error.
        """
        assert self._received is not None, "only the first stage receives nothing"
        whole = self._received
        if not is_sent:
            real = whole.is_floating_point()
            value = torch.full((), torch.nan if real else 0, dtype=whole.dtype, device=whole.device)
            if real:
                value.requires_grad_()
                value.register_hook(_refuse)  # type: ignore[no-untyped-call]
            whole = value.expand(whole.shape)
        return whole if self._received_items < 0 else (whole, *[None] * (self._received_items - 1))


def _refuse(_gradient: Tensor) -> None:
    raise LossError(
        "the loss depends directly on the output of a block of an earlier stage, not only through the next block",
        "a pipeline sends one tensor from each stage to the next: models with connections that skip blocks, and losses "
        "computed from the outputs of several blocks, need another strategy, such as parallel='fsdp'",
    )


# --- Placement of weights ---------------------------------------------------------------------------------------------


def holders_before_first_pass(
    model: nn.Module, chain: Chain, places: Sequence[int]
) -> tuple[dict[nn.Parameter, tuple[int, ...]], list[nn.Parameter]]:
    """The pipeline coordinates of the ranks that hold each parameter, and the parameters whose ranks are not known yet.

    The latter are the trained parameters outside of the blocks, or shared by blocks of different ranks. All ranks hold
    them until the first pass has shown which ranks use them. `places`: the pipeline coordinate of each stage.
    """
    blocks = chain.blocks(model)
    inside: dict[nn.Parameter, set[int]] = {}
    for stage, numbers in enumerate(chain.stages):
        for number in numbers:
            for each in blocks[number].parameters():
                inside.setdefault(each, set()).add(places[stage])
    shared = {each for each, held in inside.items() if len(held) > 1} | _outside(model, blocks)
    held = {each: tuple(sorted(set(places))) if each in shared else tuple(inside[each]) for each in model.parameters()}
    return held, [each for each in model.parameters() if each in shared and each.requires_grad]


def _outside(model: nn.Module, blocks: Sequence[nn.Module]) -> set[nn.Parameter]:
    of_blocks = {module for block in blocks for module in block.modules()}
    return {each for module in model.modules() if module not in of_blocks for each in module.parameters(recurse=False)}


def sharded_parameters(model: nn.Module, chain: Chain) -> dict[nn.Parameter, str]:
    """The parameters that FSDP shards, each with the name of the block that uses it.

    Parameters that several blocks use are not sharded, nor are scalars. Parameters outside of the blocks are not
    sharded, because the stages that use them are known only after the first pass.
    """
    blocks = chain.blocks(model)
    uses = Counter(each for block in blocks for each in {*block.parameters()})
    apart = _outside(model, blocks)
    return {
        each: name
        for name, block in zip(chain.names, blocks, strict=True)
        for each in block.parameters()
        if uses[each] == 1 and each.ndim and each not in apart
    }


def holders_after_first_pass(
    model: nn.Module, config: ParallelConfig, function: Callable[[nn.Module, Any], Any], batch: Any
) -> dict[nn.Parameter, tuple[int, ...]]:
    """For each parameter, the pipeline coordinates of the ranks that hold it during training.

    To find them, this function runs all stages in this process.

    Raises `ConfigError` if the model cannot be divided, and `LossError` if a stage cannot run.
    """
    chain = chain_of(model, config)
    places = places_of_stages(config)
    held, outer = holders_before_first_pass(model, chain, places)
    users: dict[nn.Parameter, set[int]] = {each: set() for each in outer}
    came = None
    for stage in range(len(chain.stages)):
        try:
            value = StageModel(model, chain, stage).call(function, copy.deepcopy(batch), came)
            end = getattr(value, "loss", value)
        except StageBoundary as passed:
            end = passed.tensor
            came = Received(end.detach().requires_grad_(end.requires_grad), passed.items)
        for each in users.keys() & leaves_of(end):
            users[each].add(places[stage])
    return held | {each: tuple(sorted(stages)) or (0,) for each, stages in users.items()}


def leaves_of(root: Any) -> set[Tensor]:
    """The leaf tensors that a backward pass from `root` reaches."""
    found: set[Tensor] = set()
    seen: set[Any] = set()
    ahead = [root.grad_fn] if isinstance(root, Tensor) else []
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(node.variable)
        ahead += [following for following, _ in node.next_functions]
    return found
