"""A model in pipeline stages: its division, its forward pass on one stage, and the stages that hold each weight."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from ddp_kit.config.settings import ParallelConfig
from ddp_kit.errors import ConfigError, LossError
from ddp_kit.model.blocks import repeated_blocks, split_chain, work_of
from ddp_kit.model.names import full_name, unknown_name
from ddp_kit.texts import some

# --- Division into stages ---------------------------------------------------------------------------------------------


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
        return [full_name(self.prefix, key) for key in self.keys]

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The blocks, in call order."""
        parent = model.get_submodule(self.prefix)
        return [parent.get_submodule(key) for key in self.keys]


def chain_of(model: nn.Module, config: ParallelConfig) -> Chain:
    """Divide the model's blocks into stages. Raises `ConfigError` if they cannot be divided."""
    if config.pipeline_stages != "auto":
        return _named_chain(model, config.pipeline_stages, config.pipeline)
    names = [*repeated_blocks(model)]
    prefixes = {name.rpartition(".")[0] for name in names}
    if len(prefixes) != 1:
        blocks = f"repeated blocks in several places: {some(sorted(prefixes))}" if prefixes else "no repeated blocks"
        raise ConfigError(
            f"the model {type(model).__name__} cannot be divided into stages: it has {blocks}",
            "put consecutive layers into one nn.ModuleList or nn.Sequential, or set parallel.pipeline_stages to the "
            "names of the modules at which new stages begin",
        )
    (prefix,) = prefixes
    parent = model.get_submodule(prefix)
    keys = [key for key, _ in parent.named_children()]
    first, last = (keys.index(name.rpartition(".")[2]) for name in (names[0], names[-1]))
    keys = keys[first : last + 1]
    if len(keys) < config.pipeline:
        raise ConfigError(
            f"parallel.pipeline = {config.pipeline} makes {config.pipeline} stages, but the model "
            f"{type(model).__name__} has only {len(keys)} repeated blocks, in {prefix or 'its root'}",
            "set pipeline to at most the number of blocks",
        )
    work = [work_of(parent.get_submodule(key)) for key in keys]
    return Chain(prefix, tuple(keys), split_chain(work, work, [inf] * config.pipeline))


def _named_chain(model: nn.Module, names: Sequence[str], stages: int) -> Chain:
    """Divide the children of a module into stages that begin at the modules `names`."""
    if len(names) != stages - 1:
        raise ConfigError(
            f"parallel.pipeline_stages names {len(names)} modules, but {stages} stages need {stages - 1}",
            "for each stage except the first, name the module at which the stage begins",
        )
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            raise unknown_name(name, modules, model, "parallel.pipeline_stages")
    prefixes = {name.rpartition(".")[0] for name in names}
    parent = modules.get(next(iter(prefixes)))
    if len(prefixes) > 1 or not isinstance(parent, nn.ModuleList | nn.Sequential):
        raise ConfigError(
            f"the modules in parallel.pipeline_stages = {tuple(names)} do not belong to the same nn.ModuleList or "
            "nn.Sequential",
            "name modules of the nn.ModuleList or nn.Sequential that contains the consecutive layers",
        )
    keys = [key for key, _ in parent.named_children()]
    starts = [keys.index(name.rpartition(".")[2]) for name in names]
    if sorted(set(starts)) != starts:
        raise ConfigError(
            f"parallel.pipeline_stages = {tuple(names)} are not in the order of these modules in the model",
            "name each module once, in the order of the model",
        )
    if starts[0] == 0:
        raise ConfigError(
            f"parallel.pipeline_stages names {names[0]}, the first block, but the first stage always begins there",
            "name only the modules at which the other stages begin",
        )
    edges = [0, *starts, len(keys)]
    return Chain(next(iter(prefixes)), tuple(keys), tuple(map(range, edges, edges[1:])))


# --- Forward pass of a stage ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Activation:
    """The output of a stage, which the next stage gets."""

    tensor: Tensor
    items: int = -1
    """The length of the tuples that the blocks return; -1 if they return tensors."""


class StageBoundary(BaseException):
    """Raised to end the user's function at the end of a stage: there is no value on stages other than the last.

    Not an `Exception`, so that the model's own code does not handle it as an error.
    """

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        """The output of the stage."""


class StageModel:
    """The user's model, in which only the blocks of one stage run.

    code outside of the blocks         runs on every stage: masks and positions are computed from the real batch
    blocks of earlier stages           return NaN values of the right shape, which the model must not use; the last of
                                       these blocks returns the activation that the previous stage sent
    first block of the next stage      ends the call; its first argument is then sent to that stage
    """

    def __init__(self, model: nn.Module, chain: Chain, stage: int) -> None:
        self._model = model
        self._names = chain.names
        self._stage_blocks = chain.stages[stage]
        self._parent = model.get_submodule(chain.prefix)
        self._blocks = dict(zip(chain.keys, chain.blocks(model), strict=True))
        self._placeholders = {
            key: _Placeholder(block, partial(self._run_block, number, block))
            for number, (key, block) in enumerate(self._blocks.items())
        }
        # Of the current call:
        self._active = False
        self._next = 0  # the index of the block to be called next
        self._items = -1  # `Activation.items` of the last block's output
        self._received: Activation | None = None
        self._before_blocks: Callable[[], None]

    def call(
        self,
        function: Callable[[nn.Module, Any], Any],
        batch: Any,
        received: Activation | None = None,
        before_blocks: Callable[[], None] = lambda: None,
    ) -> Any:
        """Call `function(model, batch)`. Returns its value on the last stage, the `Activation` to send on the others.

        `received`: the activation from the previous stage; None on the first stage. `before_blocks`: a function that
        is called before the first block of this stage. Raises `LossError` if the model cannot run in stages.
        """
        self._next = 0
        self._items = -1
        self._received = received
        self._before_blocks = before_blocks
        self._active = True
        self._parent._modules.update(self._placeholders)
        try:
            value = function(self._model, batch)
        except StageBoundary as end:
            return end.activation
        finally:
            self._parent._modules.update(self._blocks)
            self._active = False
            self._received = None
        if self._next != len(self._names):
            raise LossError(
                f"the model ran {self._next} of its {len(self._names)} blocks, but a pipeline must run all of them",
                "the loss function must call model(...) exactly once, and the model must call all of its blocks",
            )
        return value

    def _run_block(self, number: int, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of the placeholder for a block."""
        if not self._active:  # activation checkpointing recomputes the block in the backward pass
            return block(*args, **kwargs)
        name = self._names[number]
        first = self._stage_blocks.start
        if number != self._next:
            expected = [*self._names, "no further block"][self._next]
            raise LossError(
                f"the model calls its blocks out of order: {name} was called where {expected} was expected",
                "a pipeline needs a model that calls each block once, in order, and a loss function that calls the "
                "model once; parallel='fsdp' needs neither",
            )
        if not args or not isinstance(args[0], Tensor):
            argument = f"a {type(args[0]).__name__}" if args else "nothing"
            raise LossError(
                f"{name} gets {argument} as its first argument, but the stages of a pipeline can only send tensors",
                "pass the output of the previous block to each block as the first positional argument",
            )
        if number == first and self._received is not None and args[0] is not self._received.tensor:
            raise LossError(
                f"the model changes the output of {self._names[number - 1]} before it calls {name}, where a new stage "
                "begins",
                "move this computation into one of the two blocks, or set parallel.pipeline_stages so that the stage "
                "begins at another block",
            )
        if number == self._stage_blocks.stop:
            raise StageBoundary(Activation(args[0], self._items))
        self._next += 1
        if number < first:
            return self._output_of_earlier_block(number)
        if number == first:
            self._before_blocks()
        output = block(*args, **kwargs)
        self._items = len(output) if isinstance(output, tuple | list) else -1
        return output

    def _output_of_earlier_block(self, number: int) -> Any:
        """The received activation for the block before this stage, NaN values for the blocks before that one.

        NaN makes any use of these values visible, and a backward pass through them raises an error.
        """
        assert self._received is not None, "only the first stage receives nothing"
        tensor = self._received.tensor
        if number < self._stage_blocks.start - 1:
            value = unusable_value(tensor)
            if value.is_floating_point():
                value.requires_grad_()
                value.register_hook(_raise_skipped_block)  # type: ignore[no-untyped-call]
            tensor = value.expand(tensor.shape)
        if self._received.items < 0:
            return tensor
        return tensor, *[None] * (self._received.items - 1)


def unusable_value(like: Tensor) -> Tensor:
    """A scalar of the same dtype and device as `like` that reveals accidental use: NaN; 0 for integers."""
    value = torch.nan if like.is_floating_point() else 0
    return torch.full((), value, dtype=like.dtype, device=like.device)


def _raise_skipped_block(_gradient: Tensor) -> None:
    raise LossError(
        "the loss depends directly on the output of a block of an earlier stage, not only through the next block",
        "a pipeline sends one tensor from each stage to the next: models with connections that skip blocks, and losses "
        "computed from the outputs of several blocks, need another strategy, such as parallel='fsdp'",
    )


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


# --- Placement of weights ---------------------------------------------------------------------------------------------


Holders = dict[nn.Parameter, tuple[int, ...]]
"""Parameter -> indices of the stages that hold it, in ascending order."""


def holders_before_first_pass(model: nn.Module, chain: Chain) -> tuple[Holders, list[nn.Parameter]]:
    """The stages that hold each parameter, and the parameters whose users are not known yet.

    The latter are the trained parameters outside of the blocks, or shared by blocks of different stages. All stages
    hold them until the first pass has shown which stages use them.
    """
    blocks = chain.blocks(model)
    users: dict[nn.Parameter, set[int]] = {}
    for stage, numbers in enumerate(chain.stages):
        for number in numbers:
            for parameter in blocks[number].parameters():
                users.setdefault(parameter, set()).add(stage)
    shared = {parameter for parameter, stages in users.items() if len(stages) > 1} | _outside(model, blocks)
    everywhere = tuple(range(len(chain.stages)))
    holders = {
        parameter: everywhere if parameter in shared else (*users[parameter],) for parameter in model.parameters()
    }
    return holders, [parameter for parameter in holders if parameter in shared and parameter.requires_grad]


def _outside(model: nn.Module, blocks: Sequence[nn.Module]) -> set[nn.Parameter]:
    """The parameters of modules that are not inside the blocks."""
    inside = {module for block in blocks for module in block.modules()}
    return {
        parameter
        for module in model.modules()
        if module not in inside
        for parameter in module.parameters(recurse=False)
    }


def sharded_parameters(model: nn.Module, chain: Chain) -> dict[nn.Parameter, str]:
    """The parameters that FSDP shards, each with the name of the block that uses it.

    Parameters that several blocks use are not sharded, nor are scalars. Parameters outside of the blocks are not
    sharded, because the stages that use them are known only after the first pass.
    """
    blocks = chain.blocks(model)
    uses = Counter(parameter for block in blocks for parameter in {*block.parameters()})
    outside = _outside(model, blocks)
    return {
        parameter: name
        for name, block in zip(chain.names, blocks, strict=True)
        for parameter in block.parameters()
        if uses[parameter] == 1 and parameter.ndim and parameter not in outside
    }


def holders_after_first_pass(
    model: nn.Module, config: ParallelConfig, function: Callable[[nn.Module, Any], Any], batch: Any
) -> Holders:
    """The stages that hold each parameter during training. To find them, this function runs all stages in this process.

    Raises `ConfigError` if the model cannot be divided, and `LossError` if a stage cannot run.
    """
    chain = chain_of(model, config)
    holders, outer = holders_before_first_pass(model, chain)
    users: dict[nn.Parameter, list[int]] = {parameter: [] for parameter in outer}
    received = None
    for stage in range(len(chain.stages)):
        value = StageModel(model, chain, stage).call(function, copy.deepcopy(batch), received)
        if isinstance(value, Activation):
            output = value.tensor
            received = Activation(output.detach().requires_grad_(output.requires_grad), value.items)
        else:
            output = getattr(value, "loss", value)
        for parameter in users.keys() & leaves_of(output):
            users[parameter].append(stage)
    return holders | {parameter: tuple(stages) or (0,) for parameter, stages in users.items()}


def leaves_of(root: Any) -> set[Tensor]:
    """The leaf tensors that a backward pass from `root` reaches."""
    leaves: set[Tensor] = set()
    seen: set[Any] = set()
    nodes = [getattr(root, "grad_fn", None)]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return leaves
