"""The callback that keeps an exponential moving average of the weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ddp_kit.callbacks.callback import Callback, creation_error
from ddp_kit.errors import ConfigError
from ddp_kit.state_values import Piece, whole_shape
from ddp_kit.torch_internals import compiled_module, copy_all, interpolate_all


class EMA(Callback):
    """Keeps an exponential moving average of the trainable weights, and uses it in evaluations.

        after the first step:       average = weights
        after each later step:      average = decay * average + (1 - decay) * weights

    `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn` uses the same formula, but here the host never
    waits for the device. 16-bit weights are averaged in float32, because 16-bit rounding would lose small changes.
    Buffers, such as BatchNorm's statistics, are not averaged.

    The average needs as much device memory as the trainable weights in float32. During an evaluation, a copy of the
    trained weights needs additional memory.

    To get the averaged weights, call `apply_to(trainer.model)` after training. To get them from a checkpoint, use
    `ddp_kit.load_model(path, model, ema=True)` or `ddpkit export --ema`.

    Args:
        decay: The factor of the previous average in the formula above, at least 0 and less than 1; or a function of the
            number of optimizer steps done (from 1) that returns it, such as
            `lambda step: min(0.999, (1 + step) / (10 + step))`. A function may return 1, which keeps the average.

    Raises:
        ConfigError: For an invalid decay; when training starts, if a checkpoint's average does not match the model.
    """

    def __init__(self, decay: float | Callable[[int], float] = 0.999) -> None:
        if not callable(decay) and not 0.0 <= decay < 1.0:
            raise creation_error(
                f"EMA got an invalid argument: decay={decay!r}",
                "use a number from 0 to less than 1, such as 0.999, or a function of the step",
            )
        self._decay = decay
        self._model: nn.Module | None = None
        self._state: Callable[[], dict[str, Any]]  # returns the model's state_dict as this rank holds it
        self._names: list[str] = []
        self._parameters: list[Tensor] = []
        self._held: list[Tensor | Piece] = []  # each parameter, as the model's state has it
        self._average: list[Tensor] = []
        self._trained: list[Tensor] = []  # the trained weights, while the model holds the averaged ones
        self._loaded: dict[str, Tensor] = {}  # the average from a checkpoint, until the model is known
        self._may_move = False  # whether the first step may still change which weights this rank holds

    def state_dict(self) -> dict[str, Any]:
        """The average, by parameter name; empty before the first step."""
        return {"average": self._loaded or dict(zip(self._names, self._placed(self._average), strict=True))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the average. If it does not match the model's parameters, the next event raises `ConfigError`."""
        self._swap_back()
        self._model = None
        self._names = []
        self._held = []
        self._parameters = []
        self._average = []
        self._loaded = dict(state["average"])

    def on_fit_start(self, trainer: Any) -> None:
        """Start from the averaged weights in the checkpoint, if one was loaded."""
        self._use_loaded(trainer)

    @torch.no_grad()
    def on_step(self, trainer: Any) -> None:
        """Update the average."""
        self._use_loaded(trainer)
        if trainer.model is not self._model:
            self._begin(trainer)
            return
        if self._may_move:
            self._take_weights(trainer)
        decay = self._decay
        if callable(decay):
            decay = float(decay(trainer.step))
            if not 0.0 <= decay <= 1.0:
                raise ConfigError(
                    f"the decay of EMA is {decay!r} after step {trainer.step}",
                    "return a number from 0 to 1 for every step",
                )
        interpolate_all(self._average, _with_dtypes_of(self._average, self._parameters), 1 - decay)

    @torch.no_grad()
    def on_evaluate_start(self, trainer: Any) -> None:
        """Copy the averaged weights into the model's own tensors, which DDP and the optimizer also refer to."""
        self._swap_back()
        self._use_loaded(trainer)
        if trainer.model is self._model:
            self._trained = [parameter.detach().clone() for parameter in self._parameters]
            copy_all(self._parameters, self._average)

    def on_evaluate_end(self, trainer: Any) -> None:
        """Restore the trained weights."""
        self._swap_back()

    def on_fit_end(self, trainer: Any, result: Any) -> None:
        """Restore the trained weights, if the model still holds the averaged ones."""
        self._swap_back()

    def model_state(self) -> dict[str, Any]:
        """A copy of the model's state_dict, with the averaged weights and the current buffers.

        Raises:
            ConfigError: Before the first step.
        """
        if self._model is None:
            raise ConfigError("EMA has no average before the first step", "train at least one step first")
        pairs = zip(self._parameters, self._placed(self._average_in_model_dtypes()), strict=True)
        averaged = {parameter.data_ptr(): average for parameter, average in pairs if parameter.numel()}
        copies: dict[str, Any] = {}
        for name, value in self._state().items():
            if isinstance(value, Tensor | Piece):
                value = averaged.get(_tensor(value).data_ptr(), value)
            if isinstance(value, Piece):
                value = value.with_tensor(value.tensor.clone())
            elif isinstance(value, Tensor):
                value = value.detach().clone()
            copies[name] = value
        return copies

    def apply_to(self, model: nn.Module) -> None:
        """Load the averaged weights into a model, in place. Not a collective.

        Args:
            model: `trainer.model`, or another model of the same structure.

        Raises:
            ConfigError: Before the first step.
        """
        self._swap_back()
        model = compiled_module(model) or model
        if model is self._model:
            with torch.no_grad():
                copy_all(self._parameters, self._average_in_model_dtypes())
        else:
            model.load_state_dict(self.model_state())

    def _begin(self, trainer: Any) -> None:
        self._swap_back()
        # Not trainer.model_state, because the Trainer refers to its callbacks: it would be a reference cycle.
        self._model = trainer.model
        self._state = trainer._run.strategy.model_state
        self._names = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
        self._take_weights(trainer)
        self._average = [
            parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            for parameter in self._parameters
        ]

    def _take_weights(self, trainer: Any) -> None:
        """Update the references to this rank's weights, and drop the averages of weights that it no longer holds."""
        state = trainer.model_state()
        self._held = [state[name] for name in self._names]
        self._parameters = [*map(_tensor, self._held)]
        for number, (average, parameter) in enumerate(zip(self._average, self._parameters, strict=False)):
            if average.shape != parameter.shape:
                self._average[number] = average.new_empty(parameter.shape)
        self._may_move = False

    def _placed(self, tensors: list[Tensor]) -> list[Any]:
        """Return `tensors`, one per parameter, with those of sharded parameters wrapped in a `Piece`."""
        return [
            held.with_tensor(tensor) if isinstance(held, Piece) else tensor
            for tensor, held in zip(tensors, self._held, strict=True)
        ]

    def _use_loaded(self, trainer: Any) -> None:
        """Once after each load of a checkpoint, continue from the averaged weights in that checkpoint."""
        if not self._loaded:
            return
        self._begin(trainer)
        self._may_move = True  # a pipeline determines in its first pass which ranks need which weights
        loaded = self._loaded
        self._loaded = {}
        differ = sorted(set(loaded) ^ set(self._names)) or [
            name
            for name, held in zip(self._names, self._held, strict=True)
            if not isinstance(loaded[name], Tensor | Piece) or whole_shape(loaded[name]) != whole_shape(held)
        ]
        if differ:
            raise ConfigError(
                f"the checkpoint's EMA does not match the trained parameters of this model: {', '.join(differ[:8])}",
                "train the same parameters (requires_grad) as before, or leave out EMA",
            )
        for number, (name, held) in enumerate(zip(self._names, self._held, strict=True)):
            own = self._average[number]
            if isinstance(held, Piece):
                self._average[number] = held.of(loaded[name]).to(own.device, own.dtype, copy=True)
            else:
                self._average[number] = loaded[name].to(own.device, own.dtype)

    @torch.no_grad()
    def _swap_back(self) -> None:
        if self._trained:
            copy_all(self._parameters, self._trained)
            self._trained = []

    def _average_in_model_dtypes(self) -> list[Tensor]:
        return _with_dtypes_of(self._parameters, self._average)


def _with_dtypes_of(pattern: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Convert each tensor to the dtype of its counterpart in `pattern`. A tensor that has this dtype is not copied."""
    return [tensor.to(like.dtype) for like, tensor in zip(pattern, tensors, strict=True)]


def _tensor(held: Any) -> Tensor:
    """The tensor that this rank holds: `held` itself, or the tensor inside a `Piece`."""
    found: Tensor = held.tensor if isinstance(held, Piece) else held
    return found
