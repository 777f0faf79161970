"""The parameters of a run: the set, and which of them require gradients, are fixed when the Trainer is made."""

from torch import nn
from torch.optim import Optimizer

from ddp_kit.errors import ConfigError, some


class RunParameters:
    """The parameters of the model and of the optimizer at construction.

    Strategies reduce only the gradients of the parameters that they were given. A parameter unfrozen later would be
    trained on each rank separately.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, device_optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._own = tuple(model.parameters())
        self._held = _held_by(optimizer)
        self._learns = [parameter.requires_grad for parameter in self._own]
        self._all = tuple(dict.fromkeys(self._own + self._held + _held_by(device_optimizer)))

    def clear_gradients(self) -> None:
        """Set the gradients of all parameters of the model and the optimizers to None."""
        for parameter in self._all:
            parameter.grad = None

    @property
    def any_gradient(self) -> bool:
        """Whether a parameter of the model has a gradient."""
        return any(parameter.grad is not None for parameter in self._own)

    def check_frozen(self) -> None:
        """Raise `ConfigError` if any `requires_grad` has changed. Takes about 30 nanoseconds per parameter."""
        if [parameter.requires_grad for parameter in self._own] == self._learns:
            return
        changed = [
            name
            for (name, parameter), learned in zip(self._model.named_parameters(), self._learns, strict=False)
            if parameter.requires_grad != learned
        ]
        raise ConfigError(
            f"parameters were frozen or unfrozen (requires_grad) after the Trainer was created: {some(changed)}",
            "change requires_grad before creating the Trainer, or create a new one afterwards: a Trainer decides only "
            "once which gradients the ranks reduce",
        )

    def check(self) -> None:
        """`check_frozen`, and raise `ConfigError` if parameters were added or replaced. Walks over all modules."""
        self.check_frozen()
        for what, now, before in (
            ("the model", [*self._model.parameters()], self._own),
            ("the optimizer", _held_by(self._optimizer), self._held),
        ):
            if len(now) != len(before) or any(one is not other for one, other in zip(now, before, strict=True)):
                raise ConfigError(
                    f"the parameters of {what} were replaced after the Trainer was created: {len(before)} then, "
                    f"{len(now)} now",
                    "change the model first, then create a new optimizer and the Trainer",
                )


def _held_by(optimizer: Optimizer) -> tuple[nn.Parameter, ...]:
    return tuple(parameter for group in optimizer.param_groups for parameter in group["params"])
