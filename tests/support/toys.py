"""Tiny data, networks, losses, optimizers and Trainers, for tests that train in the process of pytest.

    trainer = trainer_for(tmp_path, EMA(0.5), model=small_network(hidden=5), max_steps=6)
    trainer.fit(regression_data(32))

Networks have the same weights, and data the same values, each time they are made.
"""

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset, TensorDataset

from ddp_kit import Callback, Loss, Trainer, TrainerConfig
from ddp_kit.checkpoint.format import checkpoints
from ddp_kit.config.settings import CheckpointConfig
from ddp_kit.distributed.world import World

MakesOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

# --- Data -------------------------------------------------------------------------------------------------------------


def input_data(samples: int = 32, width: int = 3, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Samples `(x,)` with normally distributed values."""
    return TensorDataset(torch.randn(samples, width, generator=torch.Generator().manual_seed(0), dtype=dtype))


def regression_data(samples: int = 32, width: int = 3, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Samples `(x, y)`: the x of `input_data`, and the sum of its values."""
    (x,) = input_data(samples, width, dtype).tensors
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def counting_data(samples: int) -> Tensor:
    """Sample i is the tensor [i]."""
    return torch.arange(float(samples)).reshape(-1, 1)


class SampleStream(IterableDataset[Any]):
    """The given samples as a stream, which has no length."""

    def __init__(self, samples: Iterable[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter([*self.samples])


class TensorEncoding(UserDict[str, Any]):
    """A mapping like Hugging Face's BatchEncoding: it is no dict, and its method `to` takes only a device."""

    def to(self, device: Any) -> "TensorEncoding":
        return TensorEncoding({name: value.to(device) for name, value in self.items()})


# --- Networks, losses, optimizers -------------------------------------------------------------------------------------


def linear_layer(inputs: int = 3, outputs: int = 1) -> nn.Linear:
    """One layer."""
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs)


def small_network(inputs: int = 3, hidden: int = 4, *between: nn.Module) -> nn.Sequential:
    """Two layers with one output; `between`: the modules between them, a tanh by default."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, hidden), *(between or [nn.Tanh()]), nn.Linear(hidden, 1))


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    """The mean square of the outputs for x, where the batch is x or `(x, ...)`."""
    return model(batch if isinstance(batch, Tensor) else batch[0]).square().mean()


def squared_error(model: nn.Module, batch: Any) -> Tensor:
    """The mean squared error for a batch `(x, y, ...)`."""
    return F.mse_loss(model(batch[0]), batch[1])


def weighted_error(model: nn.Module, batch: Any) -> Loss:
    """The squared error for a batch `(x, y)`, with a weight that the device computes: the number of values."""
    return Loss(F.mse_loss(model(batch[0]), batch[1], reduction="sum"), weight=(batch[1] > -9).sum())


def sgd(lr: float = 0.1, **options: Any) -> MakesOptimizer:
    """A function from parameters to their SGD optimizer."""
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **options)


def adam(lr: float = 0.01, **options: Any) -> MakesOptimizer:
    """A function from parameters to their Adam optimizer."""
    return lambda parameters: torch.optim.Adam(parameters, lr=lr, **options)


# --- Trainers and what they leave -------------------------------------------------------------------------------------


def trainer_for(
    folder: Path | str | None = None,
    *callbacks: Callback,
    model: nn.Module | Callable[[], nn.Module] = small_network,
    loss_fn: Any = squared_error,
    optimizer: Any = sgd(),  # noqa: B008  # makes a new one each time
    checkpoint: Mapping[str, Any] | None = None,
    **named: Any,
) -> Trainer:
    """A Trainer with global batches of 8, which waits for its saves.

    Args:
        folder: where it saves checkpoints.
        callbacks: its callbacks.
        model: the model, or a function that makes it.
        loss_fn: its loss function.
        optimizer: its optimizer, or a function that makes it.
        checkpoint: settings of `TrainerConfig.checkpoint`.
        named: other settings of `TrainerConfig` or of its `checkpoint`, and other arguments of `Trainer`.
    """
    torch.manual_seed(0)
    if not isinstance(model, nn.Module):
        model = model()
    saving = {name: named.pop(name) for name in [*named] if name in CheckpointConfig.model_fields}
    settings = {name: named.pop(name) for name in [*named] if name in TrainerConfig.model_fields}
    saving = {"dir": folder, "save": "blocking", **saving, **(checkpoint or {})}
    config = TrainerConfig(**{"global_batch_size": 8, **settings}, checkpoint=saving)
    return Trainer(model, optimizer, loss_fn, config, callbacks=callbacks, **named)


class LearningRates(Callback):
    """Keeps the learning rate of the first parameter group after each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step(self, trainer: Trainer) -> None:
        self.seen.append(float(trainer.optimizer.param_groups[0]["lr"]))


def parameters_of(model: nn.Module) -> list[Tensor]:
    """Copies of the parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def state_of(model: nn.Module) -> dict[str, Any]:
    """A copy of the model's state."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in model.state_dict().items()}


def same_state(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two states have the same names and equal values."""
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        for name, value in one.items()
    )


def saved_steps(folder: Path) -> list[int]:
    """The steps of the undamaged checkpoints, the newest first."""
    return [found.step for found in checkpoints(folder, hashes=True) if found.whole]


def world_of_cpus(rank: int = 0, ranks: int = 1, gpus: tuple[torch.device, ...] = ()) -> World:
    """The world of one rank on a machine where all ranks compute on the CPU."""
    return World(rank, ranks, rank, ranks, 0, torch.device("cpu"), gpus)
