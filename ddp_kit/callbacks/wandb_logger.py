"""The logger for Weights & Biases."""

from typing import Any

from ddp_kit.callbacks.rows import RunLogger, require


class WandbLogger(RunLogger):
    """Logs train/loss, train/learning_rate, ..., eval/loss, ... to a Weights & Biases run, on the main rank.

    The run is finished at the end of `fit`. Later evaluations, and a Trainer that resumes from a checkpoint, log to the
    same run. W&B cannot delete rows: steps that are repeated after a resume appear twice. Needs `pip install wandb`.

    Args:
        project: The name of the project, as for `wandb.init`. None: W&B's default.
        **init: Other arguments of `wandb.init`, such as name, group or mode="offline". The TrainerConfig is
            logged as the run's config; `config={...}` adds entries to it.

    Raises:
        ConfigError: If wandb is not installed.
    """

    def __init__(self, project: str | None = None, **init: Any) -> None:
        super().__init__(project=project, **init)
        require("wandb", "WandbLogger")

    def start(self, trainer: Any, continued: dict[str, Any]) -> Any:
        """Start or continue a run."""
        import wandb  # imported only on the main rank, because it takes seconds

        run = wandb.init(**self.arguments(trainer, continued))
        # Log the optimizer step as a metric of its own: W&B's step counter cannot go back, as it must after a resume.
        run.define_metric("step")
        for curves in ("train/*", "eval/*"):
            run.define_metric(curves, step_metric="step")
        return run

    def log(self, run: Any, step: int, values: dict[str, float]) -> None:
        """Log a row."""
        run.log({"step": step, **values})
