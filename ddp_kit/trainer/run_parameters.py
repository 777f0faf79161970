"""The parameters of a run. Which exist, and which require gradients, is fixed when the Trainer is created."""

from torch import nn
from torch.optim import Optimizer

from ddp_kit.errors import ConfigError
from ddp_kit.texts import some
from ddp_kit.torch_internals import step_hooks
from ddp_kit.trainer.context import TrainerContext

# --- Parameters of a run ----------------------------------------------------------------------------------------------
# Which parameters exist, and which of them require gradients, is fixed when the Trainer is created.


class RunParameters:
    """The parameters that the model and the optimizer had when the Trainer was created, kept to detect changes.

    Strategies reduce only the gradients of parameters that required gradients at that time: if a parameter were
    unfrozen later, each rank would train it separately.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, stepped_optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._model_parameters = tuple(model.parameters())
        self._optimizer_parameters = _parameters_of(optimizer)
        self._required_grad = [parameter.requires_grad for parameter in self._model_parameters]
        self._all = tuple(
            dict.fromkeys(self._model_parameters + self._optimizer_parameters + _parameters_of(stepped_optimizer))
        )

    def clear_gradients(self) -> None:
        """Set the gradients of all parameters of the model and the optimizers to None."""
        for parameter in self._all:
            parameter.grad = None

    @property
    def any_gradient(self) -> bool:
        """Whether a parameter of the model has a gradient."""
        return any(parameter.grad is not None for parameter in self._model_parameters)

    def check_frozen(self) -> None:
        """Raise `ConfigError` if `requires_grad` of any parameter has changed. Takes about 30 ns per parameter."""
        if [parameter.requires_grad for parameter in self._model_parameters] == self._required_grad:
            return
        changed = [
            name
            for (name, parameter), required in zip(self._model.named_parameters(), self._required_grad, strict=False)
            if parameter.requires_grad != required
        ]
        raise ConfigError(
            f"parameters were frozen or unfrozen (requires_grad) after the Trainer was created: {some(changed)}",
            "change requires_grad before creating the Trainer, or create a new Trainer afterwards: a Trainer decides "
            "only once which gradients the ranks reduce",
        )

    def check(self) -> None:
        """Run `check_frozen`; also raise `ConfigError` if parameters were added or replaced. Walks all modules."""
        self.check_frozen()
        for what, now, before in (
            ("the model", [*self._model.parameters()], self._model_parameters),
            ("the optimizer", _parameters_of(self._optimizer), self._optimizer_parameters),
        ):
            if len(now) != len(before) or any(one is not other for one, other in zip(now, before, strict=True)):
                raise ConfigError(
                    f"the parameters of {what} were replaced, added or removed after the Trainer was created "
                    f"({len(before)} parameters then, {len(now)} now)",
                    "change the model first, then create a new optimizer and a new Trainer",
                )


def _parameters_of(optimizer: Optimizer) -> tuple[nn.Parameter, ...]:
    return tuple(parameter for group in optimizer.param_groups for parameter in group["params"])


def check_step_hooks(context: TrainerContext) -> None:
    """Raise `ConfigError` if an optimizer with hooks of its step does not hold the model's own, whole parameters.

    Such a hook would have no effect on the model, or compute with this rank's part of a tensor as if it were whole.
    """
    offloaded = context.stepped_optimizer is not context.optimizer
    if not context.strategy.shards and not offloaded:
        return
    hooks = [getattr(hook, "__qualname__", type(hook).__name__) for hook in step_hooks(context.optimizer)]
    if hooks:
        where = "copies of the weights in host memory" if offloaded else "parts of the weights"
        config = context.config
        setting = f"parallel.strategy={config.parallel.strategy!r}"
        if offloaded:
            setting = f"memory.offload={config.memory.offload!r}"
        raise ConfigError(
            f"the optimizer {type(context.optimizer).__name__} has hooks around its step ({some(hooks)}), but with "
            f"{setting} it updates {where}, so hooks cannot read or change whole gradients and weights of the model",
            "write a Callback instead, which works at every placement: on_gradients(trainer, gradients) before the "
            "step, on_step(trainer) after it; or use parallel='ddp' without offload",
        )
