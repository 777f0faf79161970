"""The logger for Weights & Biases."""

from typing import Any

from ddp_kit.callbacks.rows import RowLogger, numbers, require


class WandbLogger(RowLogger):
    """Logs train/loss, train/learning_rate, ..., eval/loss, ... to a Weights & Biases run, on the main rank.

    `project` and `init`: arguments of `wandb.init`, such as name, group or mode="offline". The TrainerConfig is the
    run's config; `config={...}` adds to it.

    The run is finished at the end of `fit`. Later evaluations, and a Trainer that resumes from a checkpoint, log to the
    same run. W&B cannot delete rows: steps that are repeated after a resume appear twice. Needs `pip install wandb`;
    raises `ConfigError` if it is not installed.
    """

    def __init__(self, project: str | None = None, **init: Any) -> None:
        require("wandb", "WandbLogger")
        self._init = {"project": project, **init}
        self._run: Any = None

    def state_dict(self) -> dict[str, Any]:
        """The id of the run, on the rank that logs."""
        return {"id": self._init.get("id") if self._run is None else self._run.id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the checkpoint's run, unless this process has already started one."""
        if state["id"] is not None and self._run is None and "id" not in self._init:
            self._init |= {"id": state["id"], "resume": "allow"}

    def on_fit_start(self, trainer: Any) -> None:
        """Start the run now, so that its system metrics begin with the first step."""
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
        import wandb  # imported only on the main rank, because it takes seconds

        config = {**trainer.config.model_dump(mode="json"), **self._init.get("config", {})}
        self._run = wandb.init(**{**self._init, "config": config})
        # Log the optimizer step as a metric of its own: W&B's step counter cannot go back, as it must after a resume.
        self._run.define_metric("step")
        for curves in ("train/*", "eval/*"):
            self._run.define_metric(curves, step_metric="step")
