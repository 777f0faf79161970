"""Shards of parameters, for optimizers that update only a part of each parameter.

An optimizer gets this rank's shards in place of the model's parameters. A shard is a plain parameter that shares
memory with the model's parameter, so the optimizer's kernels run on plain tensors. The result is exact for elementwise
optimizers, which update each value independently; `check_elementwise` rejects others.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_kit.errors import ConfigError
from ddp_kit.model.names import refuse, trained_embeddings
from ddp_kit.parallel.optimizer_trial import check_elementwise
from ddp_kit.state_values import Piece
from ddp_kit.texts import some
from ddp_kit.torch_internals import has_gradient_hooks, storage_id


class Shards:
    """One rank's shards: for each parameter of the model, the parameter that the optimizer holds instead."""

    def __init__(self, pieces: Mapping[nn.Parameter, Piece], names: Mapping[nn.Parameter, str]) -> None:
        self.of: dict[nn.Parameter, nn.Parameter] = {
            whole: nn.Parameter(piece.tensor, requires_grad=whole.requires_grad) for whole, piece in pieces.items()
        }
        """The model's parameter -> the optimizer's parameter."""
        self.pieces = {id(self.of[whole]): piece for whole, piece in pieces.items()}
        """Pieces by the id of the optimizer's parameter."""
        self.names = {id(self.of[whole]): name for whole, name in names.items() if whole in self.of}
        self.trained = [(whole, shard) for whole, shard in self.of.items() if whole.requires_grad]
        self._storages = [storage_id(whole) for whole, _ in self.trained]

    def give_to(self, optimizer: Optimizer) -> None:
        """Make the optimizer hold the shards instead of the model's parameters. Existing state is sharded too.

        Some optimizers, such as Adagrad, create state in their constructor. Raises `ConfigError` if the optimizer or
        its state cannot be sharded.
        """
        check_elementwise(optimizer)
        for whole, shard in self.of.items():
            if whole in optimizer.state:
                optimizer.state[shard] = self._part_of_state(optimizer, whole)
                del optimizer.state[whole]
        for group in optimizer.param_groups:
            group["params"] = [self.of.get(whole, whole) for whole in group["params"]]

    def check_memory(self) -> None:
        """Raise `ConfigError` if a parameter of the model no longer shares memory with its shard.

        Takes 0.2 microseconds per parameter.
        """
        storages = [storage_id(whole) for whole, _ in self.trained]
        if storages == self._storages:
            return
        pairs = zip(self.trained, storages, self._storages, strict=True)
        replaced = [self.names[id(shard)] for (_, shard), storage, before in pairs if storage != before]
        raise ConfigError(
            f"the memory of weights was replaced after the Trainer was created: {some(replaced)}. The optimizer "
            "updates shards in the memory that they had",
            "write into the weights, as in weight.copy_(values) under torch.no_grad(), and not weight.data = values; "
            "convert and move the model before creating the Trainer; or use parallel='ddp'",
        )

    def _part_of_state(self, optimizer: Optimizer, whole: nn.Parameter) -> dict[str, Any]:
        """This rank's part of the optimizer state of the parameter `whole`. Scalars in the state are unchanged."""
        from ddp_kit.parallel.tensor import is_dtensor, local_tensor  # only needed here, and slow to import

        piece = self.pieces[id(self.of[whole])]
        part: dict[str, Any] = {}
        for name, value in optimizer.state[whole].items():
            if not isinstance(value, Tensor) or (value.ndim == 0 and whole.ndim > 0):
                part[name] = value
            elif value.shape != whole.shape:
                raise ConfigError(
                    f"the optimizer {type(optimizer).__name__} has state that cannot be sharded: {name} of "
                    f"{self.names[id(self.of[whole])]} has the shape {tuple(value.shape)}, but the "
                    f"parameter has the shape {tuple(whole.shape)}",
                    "pass a new optimizer that has no state yet, or use parallel='ddp', which does not shard",
                )
            else:
                local = local_tensor(value) if is_dtensor(value) else piece.of(value)
                part[name] = local.detach().clone()
        return part


def check_dense_gradients(model: nn.Module, setting: str, instead: str = "use parallel='ddp'") -> None:
    """Raise `ConfigError` for trained embeddings with sparse gradients, which a setting does not support.

    They cannot be sharded, and torch cannot add them up in float16. `instead`: the alternative, for the hint.
    """
    refuse(
        [name for name, layer in trained_embeddings(model).items() if layer.sparse],
        f"{setting} does not support modules with sparse gradients",
        f"leave out sparse=True, or {instead}",
    )


def check_no_hooks(model: nn.Module) -> None:
    """Raise `ConfigError` for parameters with hooks on their gradients, if these parameters will be replaced."""
    refuse(
        [name for name, parameter in model.named_parameters() if has_gradient_hooks(parameter)],
        "FSDP replaces the parameters of the model, so hooks on their gradients would not run",
        "change gradients in on_gradients of a Callback, which works with every strategy; or use parallel='ddp'",
    )
