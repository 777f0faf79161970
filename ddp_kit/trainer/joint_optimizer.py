"""Adapters that present the optimizers and schedulers of several updates as one, to save, load and compare state."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class JointOptimizer(Optimizer):
    """Presents the optimizers of several updates as one optimizer, with the groups and state of all of them.

    `optimizers`: by the name of the update. It is never stepped; each update steps its own optimizer.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self.optimizers = dict(optimizers)
        self.defaults = {}

    @property
    def kind(self) -> str:
        """The name of each update and the class of its optimizer, as text."""
        return ", ".join(f"{name}: {type(each).__name__}" for name, each in self.optimizers.items())

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for each in self.optimizers.values() for group in each.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        return {key: value for each in self.optimizers.values() for key, value in each.state.items()}

    def state_dict(self) -> dict[str, Any]:
        """The state as if one optimizer held all groups: parameters are numbered consecutively."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for each in self.optimizers.values():
            own, first = each.state_dict(), sum(len(group["params"]) for group in groups)
            state |= {first + number: value for number, value in own["state"].items()}
            groups += [
                group | {"params": [first + number for number in group["params"]]} for group in own["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        groups, first = list(state_dict["param_groups"]), 0
        for each in self.optimizers.values():
            own, groups = groups[: len(each.param_groups)], groups[len(each.param_groups) :]
            size = sum(len(group["params"]) for group in own)
            each.load_state_dict(
                {
                    "state": {
                        number - first: value
                        for number, value in state_dict["state"].items()
                        if first <= number < first + size
                    },
                    "param_groups": [
                        group | {"params": [number - first for number in group["params"]]} for group in own
                    ],
                }
            )
            first += size

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Register the hook with each optimizer."""
        return [each.register_step_pre_hook(hook) for each in self.optimizers.values()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all optimizers."""
        for each in self.optimizers.values():
            each.zero_grad(set_to_none)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kind})"


def joint_scheduler(schedulers: Mapping[str, LRScheduler]) -> "JointScheduler | None":
    """The schedulers as one; None if there are none. `schedulers`: by the name of the update."""
    return JointScheduler(schedulers) if schedulers else None


def kind_of(optimizer: Optimizer) -> str:
    """The name of an optimizer's class; for a `JointOptimizer`, the names of all its optimizers' classes."""
    return optimizer.kind if isinstance(optimizer, JointOptimizer) else type(optimizer).__name__


class JointScheduler(LRScheduler):
    """Presents the schedulers of several updates as one, to save and compare state; each update steps its own."""

    def __init__(self, schedulers: Mapping[str, LRScheduler]) -> None:
        self.schedulers = list(schedulers.values())
        self._names = list(schedulers)

    @property
    def by_update(self) -> dict[str, LRScheduler]:
        """The schedulers by the names of their updates."""
        return dict(zip(self._names, self.schedulers, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """The state of each scheduler, by the name of its update."""
        return {name: each.state_dict() for name, each in self.by_update.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for name, each in self.by_update.items():
            each.load_state_dict(state_dict[name])
