"""Buffers of a model in a pipeline: which ranks have the valid value of each one, and when they exchange it."""

import torch.distributed as dist
from torch import Tensor, nn

from ddp_kit.distributed.world import World
from ddp_kit.errors import LossError
from ddp_kit.parallel.pipeline.model import Chain
from ddp_kit.parallel.strategy import BUFFERS_HINT, Sizes, shared_buffers
from ddp_kit.texts import some
from ddp_kit.torch_internals import version_of

Versions = dict[str, tuple[Tensor, int]]
"""Buffers by name, each with autograd's count of the changes in place."""


class PipelineBuffers:
    """The buffers of a model, by what the first pass of a run has shown.

    changed by the first pass                   the first stage that changed one broadcasts it before each step
    others in a block, with a single replica    only one rank uses them, so later passes may change them
    others                                      equal on all ranks: a later pass that changes one raises an error

    Create it when all ranks have the same buffers.
    """

    def __init__(self, model: nn.Module, chain: Chain, sizes: Sizes, world: World) -> None:
        self._model = model
        self._sizes = sizes
        self._world = world
        self._kinds = {name: (buffer.shape, buffer.dtype) for name, buffer in model.named_buffers()}
        blocks = chain.blocks(model)
        self._block_stages: dict[str, int] = {}
        for stage, numbers in enumerate(chain.stages):
            for number in numbers:
                for name, _ in blocks[number].named_buffers(chain.names[number], remove_duplicate=False):
                    self._block_stages[name] = stage
        self._broadcasters: dict[str, int] = {}  # buffer that passes change -> stage
        self._constant: Versions = {}  # buffers that no pass may change

    def stage_of(self, name: str) -> int | None:
        """The stage with the valid value of a buffer; None if the value is valid on all ranks."""
        return self._broadcasters.get(name, self._block_stages.get(name))

    def versions(self) -> Versions:
        """The current versions of the buffers that are in the state_dict."""
        return {name: (buffer, version_of(buffer)) for name, buffer in shared_buffers(self._model).items()}

    def learn(self, changers: dict[str, list[int]]) -> None:
        """Set which stages changed each buffer in the first pass. `changers`: stages by name, for all buffers."""
        self._broadcasters = {name: stages[0] for name, stages in changers.items() if stages}
        variable = {*self._broadcasters}
        if self._sizes.data == 1:
            variable.update(self._block_stages)
        self._constant = {name: version for name, version in self.versions().items() if name not in variable}

    def sync(self) -> None:
        """Broadcast the buffers that passes change. A collective."""
        for name, stage in self._broadcasters.items():
            buffer = self._model.get_buffer(name)
            shape, dtype = self._kinds[name]
            if (buffer.shape, buffer.dtype) != (shape, dtype):
                raise LossError(
                    f"the shape of the buffer {name} changed from {tuple(shape)} {dtype} to {tuple(buffer.shape)} "
                    f"{buffer.dtype} on rank {self._world.rank}, but a pipeline broadcasts it before each step",
                    BUFFERS_HINT,
                )
            dist.broadcast(buffer, src=self._sizes.rank(stage, 0, 0, 0))

    def begin_passes(self) -> None:
        """Note the versions of the constant buffers: other code may change them between steps, equally on all ranks."""
        self._constant = {name: (buffer, version_of(buffer)) for name, (buffer, _) in self._constant.items()}

    def check_passes(self) -> None:
        """Raise `LossError` if a pass since `begin_passes` changed a buffer that the ranks do not synchronise."""
        changed = [name for name, (buffer, version) in self._constant.items() if version_of(buffer) != version]
        if changed:
            raise LossError(
                f"a pass changed {some(changed)}, which the first pass of the run did not change: a pipeline "
                "synchronises only buffers that change in the first pass",
                "update these buffers in place in every pass, including the first, even if the values stay the same; "
                "or update them in a callback, in the same way on all ranks",
            )


def changed_buffers(before: Versions, after: Versions) -> set[str]:
    """The names of buffers that were changed in place or replaced between two calls of `PipelineBuffers.versions`."""
    unchanged = {
        name
        for name, (buffer, version) in after.items()
        if name in before and buffer is before[name][0] and version == before[name][1]
    }
    return after.keys() - unchanged
