"""The logger for MLflow."""

from collections.abc import Mapping
from typing import Any

from ddp_kit.callbacks.rows import RowLogger, numbers, require


class MLflowLogger(RowLogger):
    """Logs train/loss, train/learning_rate, ..., eval/loss, ... to an MLflow run, on the main rank.

    `experiment`: the name of the experiment; None: MLflow's default. `tracking_uri`: such as "sqlite:///mlflow.db";
    None: the variable MLFLOW_TRACKING_URI, or MLflow's default. `run`: arguments of `mlflow.start_run`, such as
    run_name, tags or log_system_metrics=True. The TrainerConfig is logged as the run's parameters.

    An active run is used and left active; otherwise a run is started, and ended at the end of `fit`. Later evaluations,
    and a Trainer that resumes from a checkpoint, log to the same run. MLflow cannot delete rows: steps that are
    repeated after a resume appear twice. Needs `pip install mlflow`; raises `ConfigError` if it is not installed.
    """

    def __init__(self, experiment: str | None = None, tracking_uri: str | None = None, **run: Any) -> None:
        require("mlflow", "MLflowLogger")
        self._experiment, self._tracking_uri, self._how = experiment, tracking_uri, run
        self._run: Any = None
        self._is_ours = True

    def state_dict(self) -> dict[str, Any]:
        """The id of the run, on the rank that logs."""
        return {"id": self._how.get("run_id") if self._run is None else self._run.info.run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the checkpoint's run, unless this process has already started one."""
        if state["id"] is not None and self._run is None:
            self._how.setdefault("run_id", state["id"])

    def on_fit_start(self, trainer: Any) -> None:
        """Start the run now, so that its system metrics begin with the first step."""
        if trainer.world.is_main and self._run is None:
            self._start(trainer)

    def write(self, trainer: Any, kind: str, step: int, values: dict[str, Any]) -> None:
        """Log the row."""
        import mlflow

        if self._run is None:
            self._start(trainer)
        mlflow.log_metrics(numbers(kind, values), step=step, run_id=self._run.info.run_id)

    def on_fit_end(self, trainer: Any, result: Any) -> None:
        """End the run."""
        if self._run is not None:
            import mlflow

            self._how["run_id"] = self._run.info.run_id
            self._run = None
            if self._is_ours:
                mlflow.end_run()

    def _start(self, trainer: Any) -> None:
        import mlflow  # imported only on the main rank, because it takes seconds

        self._run = mlflow.active_run()
        self._is_ours = self._run is None
        if self._is_ours:
            if self._tracking_uri is not None:
                mlflow.set_tracking_uri(self._tracking_uri)
            if self._experiment is not None:
                mlflow.set_experiment(self._experiment)
            self._run = mlflow.start_run(**self._how)
        if not self._run.data.params:  # a continued run has them already
            mlflow.log_params(dict(_flat(trainer.config.model_dump(mode="json"))))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """(name, value) of nested settings, with names such as data.num_workers."""
    found: list[tuple[str, Any]] = []
    for name, value in settings.items():
        found += _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(f"{prefix}{name}", value)]
    return found
