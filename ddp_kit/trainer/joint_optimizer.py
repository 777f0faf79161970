"""The optimizers of several updates as one, and their schedulers, for what saves, loads and compares state."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class JointOptimizer(Optimizer):
    """The optimizers of several updates as one: their groups and state, one after another."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self.optimizers = dict(optimizers)
        self.defaults = {}

    @property
    def kind(self) -> str:
        """The names of the updates, with those of their optimizers' classes."""
        return ", ".join(f"{name}: {type(each).__name__}" for name, each in self.optimizers.items())

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for each in self.optimizers.values() for group in each.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        return {key: value for each in self.optimizers.values() for key, value in each.state.items()}

    def state_dict(self) -> dict[str, Any]:
        """As if one optimizer held all groups: parameters are numbered through."""
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
        """Before each optimizer's step."""
        return [each.register_step_pre_hook(hook) for each in self.optimizers.values()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of all optimizers."""
        for each in self.optimizers.values():
            each.zero_grad(set_to_none)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kind})"


def joint_scheduler(schedulers: Mapping[str, LRScheduler]) -> "JointScheduler | None":
    """Those of the updates that have one, by the update's name."""
    return JointScheduler(schedulers) if schedulers else None


def kind_of(optimizer: Optimizer) -> str:
    """The name of its class, or those of all that it joins."""
    return optimizer.kind if isinstance(optimizer, JointOptimizer) else type(optimizer).__name__


class JointScheduler(LRScheduler):
    """The schedulers of several updates, for what saves and compares their state; each update ticks its own."""

    def __init__(self, schedulers: Mapping[str, LRScheduler]) -> None:
        self.schedulers = list(schedulers.values())
        self._names = list(schedulers)

    @property
    def by_update(self) -> dict[str, LRScheduler]:
        """The schedulers by the names of their updates."""
        return dict(zip(self._names, self.schedulers, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """By the update's name."""
        return {name: each.state_dict() for name, each in self.by_update.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for name, each in self.by_update.items():
            each.load_state_dict(state_dict[name])
