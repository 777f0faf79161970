"""The stages of a pipeline: how a model is cut, and how its own forward pass runs on one of them."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from ddp_kit.blocks import repeated_blocks, work_of
from ddp_kit.config import ParallelConfig
from ddp_kit.errors import ConfigError, LossError, nearest, some
from ddp_kit.parallel.split import split_chain
from ddp_kit.parallel.stage_links import Received
from ddp_kit.parallel.strategy import PassedOn


@dataclass(frozen=True)
class Chain:
    """The blocks that are called one after another, each with the output of the one before as its first argument."""

    prefix: str
    """The name of the ModuleList or Sequential that they are in; "" for the model itself."""
    keys: tuple[str, ...]
    """Their names in it."""
    stages: tuple[range, ...]
    """The numbers of the blocks of each stage."""

    @property
    def names(self) -> list[str]:
        """The names of the blocks in the model."""
        return [f"{self.prefix}.{key}" if self.prefix else key for key in self.keys]

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The blocks, in call order."""
        parent = model.get_submodule(self.prefix)
        return [parent.get_submodule(key) for key in self.keys]


def chain_of(model: nn.Module, config: ParallelConfig) -> Chain:
    """How the model is cut into stages. Raises `ConfigError` where it cannot be."""
    stages = config.pipeline * stages_per_rank(config)
    if config.stages != "auto":
        return _named_chain(model, config.stages, stages)
    names = [*repeated_blocks(model)]
    prefixes = {name.rpartition(".")[0] for name in names}
    if len(prefixes) != 1:
        what = "no repeated blocks" if not prefixes else f"repeated blocks in several places: {some(sorted(prefixes))}"
        raise ConfigError(
            f"the model {type(model).__name__} cannot be cut into stages: it has {what}",
            "put the layers that follow one another into one nn.ModuleList or nn.Sequential, or name in "
            "parallel.stages the modules of one at which new stages begin",
        )
    (prefix,) = prefixes
    parent = model.get_submodule(prefix)
    keys, own = [key for key, _ in parent.named_children()], {name.rpartition(".")[2] for name in names}
    places = [number for number, key in enumerate(keys) if key in own]
    chosen = keys[places[0] : places[-1] + 1]
    if len(chosen) < stages:
        raise ConfigError(
            f"parallel.pipeline = {config.pipeline} with schedule = {config.schedule!r} makes {stages} stages, and the "
            f"model {type(model).__name__} has {len(chosen)} repeated blocks, in {prefix or 'its root'}",
            "set pipeline to fewer stages than that" if stages == config.pipeline else "use the schedule '1f1b'",
        )
    sizes = [work_of(parent.get_submodule(key)) for key in chosen]
    return Chain(prefix, tuple(chosen), split_chain(sizes, sizes, [inf] * stages))


def stages_per_rank(config: ParallelConfig) -> int:
    """Several where the schedule interleaves them: a rank then has one from each part of the model."""
    if config.schedule == "zbv":
        return 2
    if config.schedule != "interleaved":
        return 1
    return 2 if config.stages == "auto" else max(1, (len(config.stages) + 1) // config.pipeline)


def places_of_stages(config: ParallelConfig) -> tuple[int, ...]:
    """Of each stage, its place among the ranks of a pipeline: in turn, or there and back as a V for "zbv"."""
    places = tuple(range(config.pipeline))
    return (*places, *reversed(places)) if config.schedule == "zbv" else places * stages_per_rank(config)


def _named_chain(model: nn.Module, names: Sequence[str], stages: int) -> Chain:
    if len(names) != stages - 1:
        raise ConfigError(
            f"parallel.stages names {len(names)} modules, and {stages} stages need {stages - 1}",
            "name one module for each stage but the first: the one at which it begins",
        )
    known = dict(model.named_modules())
    for name in names:
        if name not in known:
            raise ConfigError(
                f"parallel.stages names {name!r}, and the model {type(model).__name__} has no such module",
                f"nearest: {nearest(name, [*known]) or some([*known])}",
            )
    prefixes = {name.rpartition(".")[0] for name in names}
    parent = known.get(next(iter(prefixes)))
    if len(prefixes) > 1 or not isinstance(parent, nn.ModuleList | nn.Sequential):
        raise ConfigError(
            f"parallel.stages = {tuple(names)} are not modules of one nn.ModuleList or nn.Sequential",
            "name modules of the one that holds the layers which follow one another",
        )
    keys = [key for key, _ in parent.named_children()]
    begins = [keys.index(name.rpartition(".")[2]) for name in names]
    if sorted(set(begins)) != begins:
        raise ConfigError(
            f"parallel.stages = {tuple(names)} are not in the order in which the modules follow one another",
            "name each once, in that order",
        )
    if begins[0] == 0:
        raise ConfigError(
            f"parallel.stages names {names[0]}, the first of the blocks, where the first stage begins in any case",
            "name the modules at which the stages after the first begin",
        )
    edges = [0, *begins, len(keys)]
    return Chain(next(iter(prefixes)), tuple(keys), tuple(map(range, edges, edges[1:])))


class _StandIn(nn.Module):
    """Takes the place of a block during a forward pass, and shows the block's own weights and attributes: whoever
    walks over the model's weights finds all of them, by their names."""

    def __init__(self, block: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["_block"] = block  # not registered: it is not a child
        self.__dict__["_run"] = run
        del self.__dict__["training"]
        for members in ("_parameters", "_buffers", "_modules"):
            self.__dict__[members] = block.__dict__[members]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_run"](*args, **kwargs)


class StageModel:
    """The user's model, of whose blocks only those of one stage run.

    everything outside of the blocks runs, on every stage: masks and positions are computed from the real batch
    blocks of earlier stages         return NaN of the right shape, which nothing may use,
                                     and the last of them what the stage before has sent
    the first block of the next one  raises `PassedOn` with its first argument, which is what is sent
    """

    def __init__(self, model: nn.Module, chain: Chain, stage: int) -> None:
        self.model = model
        self._own, self._stage = chain.stages[stage], stage
        self._parent = model.get_submodule(chain.prefix)
        self._names = chain.names
        self._blocks = dict(zip(chain.keys, chain.blocks(model), strict=True))
        self._stand_ins = {
            key: _StandIn(block, self._standing_in(number, block))
            for number, (key, block) in enumerate(self._blocks.items())
        }
        self._active = False
        self._next = 0  # number of the block that is to be called next
        self._items = -1  # of the output of the last block that was called
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
        """What `function(model, batch)` returns on the last stage; the others raise `PassedOn`.

        `came`: from the stage before; None on the first. `before_blocks`: called before the first block of this stage.
        """
        self._before_blocks = before_blocks
        self._next, self._items = 0, -1
        self._received, self._received_items = (None, -1) if came is None else (came.tensor, came.items)
        with self._standing():
            value = function(self.model, batch)
        if self._next != len(self._names):
            raise LossError(
                f"a call of the model ran {self._next} of its {len(self._names)} blocks in a pipeline",
                "let the loss function call model(...) once, each time; and the model call all of its blocks",
            )
        return value

    @contextmanager
    def _standing(self) -> Iterator[None]:
        modules = self._parent._modules
        modules.update(self._stand_ins)
        self._active = True
        try:
            yield
        finally:
            self._active = False
            modules.update(self._blocks)
            self._received = None

    def _standing_in(self, number: int, block: nn.Module) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._active:  # in a backward pass: what an activation checkpoint computes once more
                return block(*args, **kwargs)
            self._check(number, args)
            if number == self._own.stop:
                raise PassedOn(args[0], self._items)
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
            expected = self._names[self._next] if self._next < len(self._names) else "none"
            raise LossError(
                f"the model calls its blocks out of order: {name}, where the next one is {expected}",
                "a pipeline needs a model that calls its blocks in their order, each once, and a loss function that "
                "calls the model once; parallel='fsdp' needs neither",
            )
        if not args or not isinstance(args[0], Tensor):
            raise LossError(
                f"{name} gets {f'a {type(args[0]).__name__}' if args else 'nothing'} as its first argument, and the "
                "stages of a pipeline send tensors",
                "let each block get the output of the one before as its first positional argument",
            )
        if number == self._own.start and self._received is not None and args[0] is not self._received:
            raise LossError(
                f"the model changes what {self._names[number - 1]} returns before {name} gets it, where a new stage "
                "begins",
                "move that into one of the two blocks, or name in parallel.stages another block to begin with",
            )

    def _returned(self, *, is_sent: bool) -> Any:
        """What a block of an earlier stage returns: NaN shows where it is used, and raises where it is trained."""
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
        "the loss depends on what a block of an earlier stage returned, past the block that follows it",
        "a pipeline sends one tensor from each stage to the next: a model with connections that skip blocks, or whose "
        "loss takes the outputs of all of them, needs another strategy, such as parallel='fsdp'",
    )


# --- which stages hold which weights ----------------------------------------------------------------------------------


def holders_before_first_pass(
    model: nn.Module, chain: Chain, places: Sequence[int]
) -> tuple[dict[nn.Parameter, tuple[int, ...]], list[nn.Parameter]]:
    """The places in the pipeline that hold each parameter; and the trained ones that all places hold until the first
    pass has shown which of them need each. `places`: of each stage."""
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
    """What FSDP shards, with the names of the blocks: the parameters that one block alone has. Those outside of the
    blocks stay whole, since the first pass alone shows who needs them; and those without a dimension."""
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
    """The places in the pipeline that hold each parameter while it trains. All stages run in this process, one after
    another. Raises `ConfigError` where the model cannot be cut, and `LossError` where a stage cannot run."""
    chain = chain_of(model, config)
    places = places_of_stages(config)
    held, outer = holders_before_first_pass(model, chain, places)
    users: dict[nn.Parameter, set[int]] = {each: set() for each in outer}
    came = None
    for stage in range(len(chain.stages)):
        try:
            value = StageModel(model, chain, stage).call(function, copy.deepcopy(batch), came)
            end = getattr(value, "loss", value)
        except PassedOn as passed:
            end = passed.tensor
            came = Received(end.detach().requires_grad_(end.requires_grad), passed.items)
        for each in users.keys() & leaves_of(end):
            users[each].add(places[stage])
    return held | {each: tuple(sorted(stages)) or (0,) for each, stages in users.items()}


def leaves_of(root: Any) -> set[Tensor]:
    """The leaves that a backward pass from a tensor reaches."""
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
