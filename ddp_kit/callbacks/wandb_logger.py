"""Runs for Weights & Biases."""

from typing import Any

from ddp_kit.callbacks.rows import RowLogger, numbers, require


class WandbLogger(RowLogger):
    """Logs train/loss, train/learning_rate, ..., eval/loss, ... as a run of Weights & Biases, on the main rank.

    `project` and `init`: what `wandb.init` takes, such as name, group or mode="offline". The TrainerConfig is the
    run's config; `config={...}` adds to it. Needs `pip install wandb`, and raises `ConfigError` without it.
    The run is finished at the end of `fit`; what is logged after that belongs to the same run, and so does a Trainer
    that resumes from a checkpoint. W&B takes no rows back: the steps that are done once more are there twice.
    """

    def __init__(self, project: str | None = None, **init: Any) -> None:
        require("wandb", "WandbLogger")
        self._init = {"project": project, **init}
        self._run: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Which run it is, on the rank that logs."""
        return {"id": self._init.get("id") if self._run is None else self._run.id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue that run, where this process has not begun one."""
        if state["id"] is not None and self._run is None and "id" not in self._init:
            self._init |= {"id": state["id"], "resume": "allow"}

    def on_fit_start(self, trainer: Any) -> None:
        """Start the run, so that it watches the machine from the first step."""
        if trainer.world.is_main and self._run is None:
            self._start(trainer)

    def write(self, trainer: Any, kind: str, step: int, values: dict[str, Any]) -> None:
        """Log the row."""
        if self._run is None:
            self._start(trainer)
        self._run.log({"step": step, **numbers(kind, values)})

    def on_fit_end(self, trainer: Any, result: Any) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()
            self._init |= {"id": self._run.id, "resume": "allow"}
            self._run = None

    def _start(self, trainer: Any) -> None:
        import wandb  # takes seconds; only the main rank needs it

        config = {**trainer.config.model_dump(mode="json"), **self._init.get("config", {})}
        self._run = wandb.init(**{**self._init, "config": config})
        # The steps are a metric of their own: W&B's count must not go back, but a row may come after a later one.
        self._run.define_metric("step")
        for curves in ("train/*", "eval/*"):
            self._run.define_metric(curves, step_metric="step")
