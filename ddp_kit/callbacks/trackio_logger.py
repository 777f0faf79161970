"""The logger for Trackio."""

from typing import Any

from ddp_kit.callbacks.rows import RunLogger, require


class TrackioLogger(RunLogger):
    """Logs train/loss, train/learning_rate, ..., eval/loss, ... to a Trackio run, on the main rank.

    Show the run with `trackio show --project PROJECT`. It is finished at the end of `fit`. Later evaluations, and a
    Trainer that resumes from a checkpoint, log to the same run. Trackio cannot delete rows: steps that are repeated
    after a resume appear twice. Needs `pip install trackio`.

    Args:
        project: The name of the project, as for `trackio.init`.
        **init: Other arguments of `trackio.init`, such as name, group or space_id. The TrainerConfig is
            logged as the run's config; `config={...}` adds entries to it.

    Raises:
        ConfigError: If trackio is not installed.
    """

    id_field = "name"

    def __init__(self, project: str, **init: Any) -> None:
        super().__init__(**{"project": project, "embed": False, **init})
        require("trackio", "TrackioLogger")

    def start(self, trainer: Any, continued: dict[str, Any]) -> Any:
        """Start or continue a run."""
        import trackio  # imported only on the main rank, because it takes seconds

        return trackio.init(**self.arguments(trainer, continued))

    def log(self, run: Any, step: int, values: dict[str, float]) -> None:
        """Log a row."""
        run.log(values, step=step)
