"""Keeping the weights of the best evaluation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_model
from torch import Tensor, nn

from ddp_kit.callbacks.best_value import Watched
from ddp_kit.callbacks.callback import Callback
from ddp_kit.config import absolute
from ddp_kit.errors import ConfigError
from ddp_kit.log import logger
from ddp_kit.pieces import Piece
from ddp_kit.state_values import whole_number

_NAME = "BestModel"


class BestModel(Callback):
    """Keeps the weights and buffers of the best evaluation in memory, and gives them back in the same process.

    A run with `checkpoint.keep_best` has its best on the disk: `ddp_kit.load_model(dir, model, which="best")`.
    `metric`: "loss" or the name of one of the Trainer's metrics; `mode`: "min" or "max", what better means. Without
    them, the best is the one of `checkpoint.keep_best` and `best_mode`, or else the least loss; they may not differ.
    `path`: a file that the main rank writes at each improvement, whole or not at all; read it with
    `safetensors.torch.load_model(model, path)`, which also ties again what the model has tied.
    `restore_at_end`: leave the model with its best weights at the end of `fit`. The optimizer's state stays.
    Each rank keeps a copy of its own in host memory, so restoring is no collective; a checkpoint holds one of them.
    What it keeps is what was evaluated: with an `EMA` among the callbacks, the averaged weights.
    Raises `ConfigError`; for an unknown metric at the first evaluation.
    """

    def __init__(
        self,
        metric: str | None = None,
        mode: Literal["min", "max"] | None = None,
        path: str | Path | None = None,
        restore_at_end: bool = False,
    ) -> None:
        self._given = metric is not None or mode is not None
        self._watched = Watched(_NAME, metric or "loss", mode or "min")
        self.metrics_needed = () if metric is None else (metric,)
        self._path = None if path is None else absolute(path)
        self._restore_at_end = restore_at_end
        self._load: Callable[[dict[str, Any]], None] | None = None  # into the model
        self._state: dict[str, Any] = {}
        self.step: int | None = None
        """The optimizer steps that had been done at the best evaluation."""
        self._taken_up = False  # a checkpoint was loaded: the file may be from a later step

    @property
    def value(self) -> float | None:
        """The best value so far; None before the first evaluation."""
        return self._watched.best

    def state_dict(self) -> dict[str, Any]:
        """The best value, its step and its weights."""
        return {"watched": self._watched.state_dict(), "step": self.step, "weights": self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the best so far."""
        metric, mode = state["watched"]["metric"], state["watched"]["mode"]
        if not self._given and isinstance(metric, str) and mode in ("min", "max"):
            self._watched = Watched(_NAME, metric, mode)  # `_watch` compares it with the run's own
        if self._watched.load_state_dict(state["watched"]):
            self.step = None if state["step"] is None else whole_number(state["step"], "step")
            self._state = dict(state["weights"])
            self._taken_up = True

    def on_fit_start(self, trainer: Any) -> None:
        """After a resume, rewrite the file with the checkpoint's best weights."""
        self._take_up(trainer)

    def on_step(self, trainer: Any) -> None:
        """The same, in a loop over steps()."""
        self._take_up(trainer)

    def on_evaluate(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Copy the weights if they are the best so far."""
        self._take_up(trainer)
        if not self._watched.improved(metrics):
            return
        self.step, self._load = trainer.step, _loads_into(trainer)
        left_out = _frozen(trainer)
        state = trainer.model_state()
        self._state = {name: _copied(value) for name, value in state.items() if name not in left_out}
        if self._path is not None and any(isinstance(value, Piece) for value in self._state.values()):
            raise ConfigError(
                "BestModel(path=...) writes a whole model, but the weights of this run are sharded",
                "leave out path; set checkpoint.keep_best, and run `ddpkit export` on that checkpoint",
            )
        if self._path is not None and trainer.world.is_main:
            _write(trainer.model, self._path)

    def on_fit_end(self, trainer: Any, result: Any) -> None:
        """Restore, where that was asked for and an evaluation came to a number."""
        if self._restore_at_end and self._load is not None:
            logger.info("restored the weights of step {}: {} {:.4g}", self.step, *self._named_value())
            self.restore()

    def restore(self) -> None:
        """Put the best weights back into the model, in place. Raises `ConfigError` where there are none yet."""
        if self._load is None:
            raise ConfigError(
                "BestModel has no weights to restore: no evaluation has returned a number yet",
                "pass eval_data to fit, or call evaluate",
            )
        self._load(self._state)

    def _watch(self, trainer: Any) -> None:
        """Look at what `checkpoint.keep_best` names: a run has one best."""
        settings = trainer.config.checkpoint
        if settings.keep_best is None:
            return
        own, run = (self._watched.metric, self._watched.mode), (settings.keep_best, settings.best_mode)
        if own == run:
            return
        if self._given:
            raise ConfigError(
                f"BestModel monitors {own[0]!r} ({own[1]}), but checkpoint.keep_best {run[0]!r} ({run[1]})",
                "leave out metric and mode of BestModel: it then uses those of keep_best",
            )
        if self._watched.best is not None:
            logger.warning(
                "BestModel starts without a best value: it monitors {!r} ({}), in the checkpoint {!r} ({})", *run, *own
            )
        self._watched = Watched(_NAME, *run)
        self.step, self._load, self._state, self._taken_up = None, None, {}, False

    def _take_up(self, trainer: Any) -> None:
        self._watch(trainer)
        if not self._taken_up:
            return
        self._taken_up = False
        if self.step is None:  # there was no best yet
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
        return self._watched.metric, self.value


def _loads_into(trainer: Any) -> Callable[[dict[str, Any]], None]:
    """Load a state in which frozen weights may be left out: those stay."""

    def load(state: dict[str, Any]) -> None:
        whole = trainer.model_state()
        whole.update(state)
        trainer.load_model_state(whole)

    return load


def _frozen(trainer: Any) -> set[str]:
    """The names of weights that no checkpoint holds: this callback's state is in checkpoints too."""
    if not trainer.config.checkpoint.trainable_only:
        return set()
    named = trainer.model.named_parameters(remove_duplicate=False)
    return {name for name, each in named if not each.requires_grad}


def _copied(value: Any) -> Any:
    if isinstance(value, Piece):
        return value.with_tensor(_copied(value.tensor))
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _write(model: nn.Module, path: Path) -> None:
    """Write a temporary file, then rename it: readers of `path` always find a complete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")  # always the same: what a killed run has left is overwritten
    save_model(model, str(part))
    part.replace(path)
