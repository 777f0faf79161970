"""An average of the weights over the steps, which evaluations use."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ddp_kit.callbacks.callback import Callback
from ddp_kit.errors import ConfigError
from ddp_kit.pieces import Piece, whole_shape
from ddp_kit.torch_internals import copy_all, interpolate_all


class EMA(Callback):
    """Keeps an exponential moving average of the trained weights; evaluations use it instead of the weights.

        after the first step:   average = weights
        after each later one:   average = decay * average + (1 - decay) * weights

    That is `torch.optim.swa_utils.AveragedModel` with its `get_ema_multi_avg_fn`, without the moments in which the
    host waits for the device. Weights of 16 bits are averaged in float32, where the small changes do not get lost.
    Buffers, such as BatchNorm's statistics, are not averaged: they are the model's own.
    The average takes as much memory as the weights, and during an evaluation the weights set aside as much again.
    `apply_to(trainer.model)` at the end leaves the model with the averaged weights.
    From a checkpoint, `ddp_kit.load_model(path, model, ema=True)` and `ddpkit export --ema` take them.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"EMA got decay={decay!r}", "use a number from 0 to less than 1, such as 0.999")
        self._decay = decay
        self._model: nn.Module | None = None
        self._state: Callable[[], dict[str, Any]]  # of the model, as this rank holds it
        self._names: list[str] = []
        self._parameters: list[Tensor] = []
        self._places: list[Piece | None] = []  # of the parameters of which this rank holds a part
        self._average: list[Tensor] = []
        self._trained: list[Tensor] = []  # the trained weights, while the model has the averaged ones
        self._loaded: dict[str, Tensor] = {}  # from a checkpoint, until the model is known

    def state_dict(self) -> dict[str, Any]:
        """The average by parameter name; empty before the first step."""
        return {"average": self._loaded or dict(zip(self._names, self._placed(self._average), strict=True))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the average. The next event raises `ConfigError` if it is of other parameters."""
        self._swap_back()
        self._model, self._names, self._parameters, self._places, self._average = None, [], [], [], []
        self._loaded = dict(state["average"])

    def on_fit_start(self, trainer: Any) -> None:
        """Restore the average of a checkpoint, if one was loaded."""
        self._take_up(trainer)

    @torch.no_grad()
    def on_step(self, trainer: Any) -> None:
        """Add the weights to the average."""
        self._take_up(trainer)
        if trainer.model is not self._model:
            self._begin(trainer)
            return
        interpolate_all(self._average, _in_the_precision_of(self._average, self._parameters), 1 - self._decay)

    @torch.no_grad()
    def on_evaluate_start(self, trainer: Any) -> None:
        """Put the averaged weights into the model's own tensors, which DDP and the optimizer hold too."""
        self._swap_back()
        self._take_up(trainer)
        if trainer.model is self._model:
            self._trained = [parameter.detach().clone() for parameter in self._parameters]
            copy_all(self._parameters, self._average)

    def on_evaluate_end(self, trainer: Any) -> None:
        """Restore the trained weights."""
        self._swap_back()

    def on_fit_end(self, trainer: Any, result: Any) -> None:
        """Restore the trained weights, even after an error."""
        self._swap_back()

    def model_state(self) -> dict[str, Any]:
        """A state_dict of the model with the averaged weights, and its buffers as they are now; a copy.

        Raises `ConfigError` before the first step.
        """
        if self._model is None:
            raise ConfigError("EMA has no average before the first step", "train at least one step first")
        pairs = zip(self._parameters, self._placed(self._in_the_model_s_precision()), strict=True)
        averaged = {parameter.data_ptr(): average for parameter, average in pairs if parameter.numel()}
        state = self._state()
        return {name: _copied(averaged.get(_address(value), value)) for name, value in state.items()}

    def apply_to(self, model: nn.Module) -> None:
        """Give a model of the same structure the averaged weights, in place; `trainer.model` too. No collective."""
        self._swap_back()
        if model is self._model:
            with torch.no_grad():
                copy_all(self._parameters, self._in_the_model_s_precision())
        else:
            model.load_state_dict(self.model_state())

    def _begin(self, trainer: Any) -> None:
        self._swap_back()
        self._model, self._state = trainer.model, trainer.model_state
        trained = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
        held = trainer.model_state()
        self._names, self._places = trained, [held[name] if isinstance(held[name], Piece) else None for name in trained]
        self._parameters = [_tensor(held[name]) for name in trained]
        self._average = [
            parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            for parameter in self._parameters
        ]

    def _placed(self, tensors: list[Tensor]) -> list[Any]:
        """Tensors of the parameters' shapes, each as the piece of the whole that its parameter is."""
        return [
            each if place is None else place.with_tensor(each)
            for each, place in zip(tensors, self._places, strict=True)
        ]

    def _take_up(self, trainer: Any) -> None:
        """After a checkpoint was loaded: its average, for this model."""
        if not self._loaded:
            return
        self._begin(trainer)
        loaded, self._loaded = self._loaded, {}
        differ = sorted(set(loaded) ^ set(self._names)) or [
            name
            for name, place, own in zip(self._names, self._places, self._average, strict=True)
            if not isinstance(loaded[name], Tensor | Piece)
            or whole_shape(loaded[name]) != (tuple(own.shape) if place is None else place.shape)
        ]
        if differ:
            raise ConfigError(
                f"the checkpoint's EMA does not match the trained parameters of this model: {', '.join(differ[:8])}",
                "train the same parameters (requires_grad) as before, or leave out EMA",
            )
        self._average = [
            _of(place, loaded[name]).to(own.device, own.dtype, copy=place is not None)
            for name, own, place in zip(self._names, self._average, self._places, strict=True)
        ]

    @torch.no_grad()
    def _swap_back(self) -> None:
        if self._trained:
            copy_all(self._parameters, self._trained)
            self._trained = []

    def _in_the_model_s_precision(self) -> list[Tensor]:
        return _in_the_precision_of(self._parameters, self._average)


def _in_the_precision_of(pattern: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """The same tensors where the type is the same."""
    return [tensor.to(like.dtype) for like, tensor in zip(pattern, tensors, strict=True)]


def _tensor(held: Any) -> Tensor:
    """What this rank holds of a parameter."""
    found: Tensor = held.tensor if isinstance(held, Piece) else held
    return found


def _address(value: Any) -> int:
    return _tensor(value).data_ptr() if isinstance(value, Tensor | Piece) else 0


def _of(place: Piece | None, saved: Any) -> Tensor:
    found: Tensor = saved if place is None else place.of(saved)
    return found


def _copied(value: Any) -> Any:
    if isinstance(value, Piece):
        return value.with_tensor(value.tensor.clone())
    return value.detach().clone() if isinstance(value, Tensor) else value
