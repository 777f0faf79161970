"""The callback that keeps the weights of the best evaluation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_model
from torch import Tensor, nn

from ddp_kit.callbacks.callback import BestValue, Callback
from ddp_kit.checkpoint.weight_files import plain_name
from ddp_kit.config.settings import absolute
from ddp_kit.distributed.barrier import wait_for_all
from ddp_kit.errors import ConfigError
from ddp_kit.log import logger
from ddp_kit.pieces import Piece
from ddp_kit.state_values import whole_number

_NAME = "BestModel"


class BestModel(Callback):
    """Copies the weights and buffers of the best evaluation to host memory, to restore them after training.

    To keep the best weights on disk instead, set `checkpoint.best_metric` and load them with
    `ddp_kit.load_model(dir, model, which="best")`.

    It keeps the weights that were evaluated: the averaged weights if `EMA` is among the callbacks. Each rank keeps its
    own copy, so `restore` is not a collective. Checkpoints contain rank 0's copy.

    If `checkpoint.best_metric` is set, leave out `metric` and `mode`, or pass the same values as in
    `checkpoint.best_metric` and `checkpoint.best_mode`.

    Args:
        metric: "loss" or the name of one of the Trainer's metrics. None: `checkpoint.best_metric` if that is set and
            `mode` is None too, otherwise the loss.
        mode: "min" if lower values are better, "max" if higher values are better. None: `checkpoint.best_mode` if
            `metric` is None too, otherwise "min".
        path: A file that the main rank replaces atomically at each improvement. Read it with
            `safetensors.torch.load_model(model, path)`, which also restores tied weights. None: no file.
        restore_at_end: Whether to load the best weights into the model at the end of `fit`. The optimizer's state does
            not change.

    Raises:
        ConfigError: For an invalid mode; when training starts, if `metric` or `mode` contradicts
            `checkpoint.best_metric` or `checkpoint.best_mode`; at the first evaluation, if the metric is unknown, or if
            `path` is set but the weights are sharded.
    """

    def __init__(
        self,
        metric: str | None = None,
        mode: Literal["min", "max"] | None = None,
        path: str | Path | None = None,
        restore_at_end: bool = False,
    ) -> None:
        self._given = metric is not None or mode is not None
        self._best_value = BestValue(_NAME, metric or "loss", mode or "min")
        self.metrics_needed = () if metric is None else (metric,)
        self._path = None if path is None else absolute(path)
        self._restore_at_end = restore_at_end
        self._load: Callable[[dict[str, Any]], None] | None = None  # loads a state into the model
        self._state: dict[str, Any] = {}
        self.step: int | None = None
        """The optimizer step of the best evaluation; None before the first one."""
        self._resumed = False  # a checkpoint was loaded: the file may be from a later step

    @property
    def value(self) -> float | None:
        """The best value so far; None before the first evaluation."""
        return self._best_value.best

    def state_dict(self) -> dict[str, Any]:
        """The best value, its step and the weights."""
        return {"watched": self._best_value.state_dict(), "step": self.step, "weights": self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the best value, its step and the weights."""
        metric, mode = state["watched"]["metric"], state["watched"]["mode"]
        if not self._given and isinstance(metric, str) and mode in ("min", "max"):
            self._best_value = BestValue(_NAME, metric, mode)  # `_use_best_metric` compares it with the run's metric
        if self._best_value.load_state_dict(state["watched"]):
            self.step = None if state["step"] is None else whole_number(state["step"], "step")
            self._state = {plain_name(name): value for name, value in state["weights"].items()}
            self._resumed = True

    def on_fit_start(self, trainer: Any) -> None:
        """After a resume, rewrite the file `path` with the best weights from the checkpoint."""
        self._after_resume(trainer)

    def on_step(self, trainer: Any) -> None:
        """Do the work of `on_fit_start` in a loop over `steps()`, which does not call `on_fit_start`."""
        self._after_resume(trainer)

    def on_evaluate(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Copy the weights if they are the best so far."""
        self._after_resume(trainer)
        if not self._best_value.improved(metrics):
            return
        self.step, self._load = trainer.step, _loads_into(trainer)
        left_out = _frozen(trainer)
        state = trainer.model_state()
        self._state = {name: _copied(value) for name, value in state.items() if name not in left_out}
        if self._path is not None and any(isinstance(value, Piece) for value in self._state.values()):
            raise ConfigError(
                "BestModel(path=...) writes a whole model, but the weights of this run are sharded",
                "leave out path, set checkpoint.best_metric, and run `ddpkit export` on the best checkpoint",
            )
        if self._path is not None:
            if trainer.world.is_main:
                _write(trainer.model, self._path)
            wait_for_all(trainer.world, f"BestModel after step {self.step}")  # before any rank reads the file

    def on_fit_end(self, trainer: Any, result: Any) -> None:
        """Restore the best weights if `restore_at_end` is set and there has been a best evaluation."""
        if self._restore_at_end and self._load is not None:
            logger.info("restored the weights of step {}: {} {:.4g}", self.step, *self._named_value())
            self.restore()

    def restore(self) -> None:
        """Load the best weights into the model, in place.

        Raises:
            ConfigError: If there are no best weights yet.
        """
        if self._load is None:
            raise ConfigError(
                "BestModel has no weights to restore: there has been no evaluation yet, or the metric was always NaN",
                "pass eval_data to fit, or call evaluate",
            )
        self._load(self._state)

    def _use_best_metric(self, trainer: Any) -> None:
        """Use `checkpoint.best_metric`, if set. Raises `ConfigError` if the arguments contradict it."""
        settings = trainer.config.checkpoint
        if settings.best_metric is None:
            return
        own, run = (self._best_value.metric, self._best_value.mode), (settings.best_metric, settings.best_mode)
        if own == run:
            return
        if self._given:
            raise ConfigError(
                f"BestModel monitors {own[0]!r} ({own[1]}), but checkpoint.best_metric is {run[0]!r} ({run[1]})",
                "leave out BestModel's metric and mode: it then uses checkpoint.best_metric and best_mode",
            )
        if self._best_value.best is not None:
            logger.warning(
                "BestModel starts without a best value: it monitors {!r} ({}), but the best value in the checkpoint is "
                "for {!r} ({})",
                *run,
                *own,
            )
        self._best_value = BestValue(_NAME, *run)
        self.step, self._load, self._state, self._resumed = None, None, {}, False

    def _after_resume(self, trainer: Any) -> None:
        """Once after each load of a checkpoint, rewrite the file with the best weights in that checkpoint."""
        self._use_best_metric(trainer)
        if not self._resumed:
            return
        self._resumed = False
        if self.step is None:  # the checkpoint has no best evaluation
            return
        self._load = _loads_into(trainer)
        if self._path is not None and trainer.world.is_main:
            model: nn.Module = trainer.model
            now = {name: _copied(value) for name, value in model.state_dict().items()}
            try:
                self.restore()
                _write(model, self._path)
            finally:
                model.load_state_dict(now)

    def _named_value(self) -> tuple[str, float | None]:
        return self._best_value.metric, self.value


def _loads_into(trainer: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that loads a state dict into the model. Frozen weights missing from it keep their values."""
    strategy = trainer._parts.strategy  # not the Trainer, which refers to its callbacks: it would be a reference cycle

    def load(state: dict[str, Any]) -> None:
        whole = strategy.model_state()
        whole.update(state)
        strategy.load_model_state(whole)

    return load


def _frozen(trainer: Any) -> set[str]:
    """Names of weights to leave out of the state: the frozen ones if `checkpoint.trainable_only` is set, else none."""
    if not trainer.config.checkpoint.trainable_only:
        return set()
    named = trainer.model.named_parameters(remove_duplicate=False)
    return {name for name, each in named if not each.requires_grad}


def _copied(value: Any) -> Any:
    if isinstance(value, Piece):
        return value.with_tensor(_copied(value.tensor))
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _write(model: nn.Module, path: Path) -> None:
    """Write the model to a temporary file and rename it to `path`, so that readers always find a complete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")  # a fixed name: the next write overwrites what a killed run left
    save_model(model, str(part))
    part.replace(path)
