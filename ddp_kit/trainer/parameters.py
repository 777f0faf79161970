"""The parameters of a run. The Trainer fixes which ones there are, and which require gradients, when it is created."""

from torch import nn
from torch.optim import Optimizer

from ddp_kit.errors import ConfigError, some


class RunParameters:
    """The parameters of the model and the optimizer when the Trainer was created, to detect changes.

    Strategies reduce only the gradients of parameters that required gradients then: a parameter unfrozen later would be
    trained on each rank separately.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, device_optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._own = tuple(model.parameters())
        self._held = _parameters_of(optimizer)
        self._required_grad = [parameter.requires_grad for parameter in self._own]
        self._all = tuple(dict.fromkeys(self._own + self._held + _parameters_of(device_optimizer)))

    def clear_gradients(self) -> None:
        """Set the gradients of all parameters of the model and the optimizers to None."""
        for parameter in self._all:
            parameter.grad = None

    @property
    def any_gradient(self) -> bool:
        """Whether a parameter of the model has a gradient."""
        return any(parameter.grad is not None for parameter in self._own)

    def check_frozen(self) -> None:
        """Raise `ConfigError` if any `requires_grad` has changed. Takes about 30 ns per parameter."""
        if [parameter.requires_grad for parameter in self._own] == self._required_grad:
            return
        changed = [
            name
            for (name, parameter), required in zip(self._model.named_parameters(), self._required_grad, strict=False)
            if parameter.requires_grad != required
        ]
        raise ConfigError(
            f"parameters were frozen or unfrozen (requires_grad) after the Trainer was created: {some(changed)}",
            "change requires_grad before creating the Trainer, or create a new one afterwards: a Trainer decides only "
            "once which gradients the ranks reduce",
        )

    def check(self) -> None:
        """Like `check_frozen`, and also raise `ConfigError` if parameters were added or replaced. Walks all modules."""
        self.check_frozen()
        for what, now, before in (
            ("the model", [*self._model.parameters()], self._own),
            ("the optimizer", _parameters_of(self._optimizer), self._held),
        ):
            if len(now) != len(before) or any(one is not other for one, other in zip(now, before, strict=True)):
                raise ConfigError(
                    f"the parameters of {what} were replaced after the Trainer was created: {len(before)} then, "
                    f"{len(now)} now",
                    "change the model first, then create a new optimizer and the Trainer",
                )


def _parameters_of(optimizer: Optimizer) -> tuple[nn.Parameter, ...]:
    return tuple(parameter for group in optimizer.param_groups for parameter in group["params"])
