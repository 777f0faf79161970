"""The logger for MLflow."""

from typing import Any

from ddp_kit.callbacks.rows import RunLogger, flat, require


class MLflowLogger(RunLogger):
    """Logs train/loss, train/learning_rate, ..., eval/loss, ... to an MLflow run, on the main rank.

    The TrainerConfig is logged as the run's parameters. If an MLflow run is already active, it is used and left active;
    otherwise the logger starts a run, and ends it at the end of `fit`. Later evaluations, and a Trainer that resumes
    from a checkpoint, log to the same run. MLflow cannot delete rows: steps that are repeated after a resume appear
    twice. Needs `pip install mlflow`.

    Args:
        experiment: The name of the experiment. None: MLflow's default.
        tracking_uri: An address such as "sqlite:///mlflow.db". None: the environment variable
            MLFLOW_TRACKING_URI, or MLflow's default.
        **run: Arguments of `mlflow.start_run`, such as run_name, tags or log_system_metrics=True.

    Raises:
        ConfigError: If mlflow is not installed.
    """

    id_field = "run_id"

    def __init__(self, experiment: str | None = None, tracking_uri: str | None = None, **run: Any) -> None:
        super().__init__(**run)
        require("mlflow", "MLflowLogger")
        self._experiment = experiment
        self._tracking_uri = tracking_uri
        self._is_ours = True

    def start(self, trainer: Any, continued: dict[str, Any]) -> Any:
        """Return the active run. If there is none, start a run, or continue an earlier one."""
        import mlflow  # imported only on the main rank, because it takes seconds

        active: Any = mlflow.active_run()
        self._is_ours = active is None
        if self._is_ours:
            if self._tracking_uri is not None:
                mlflow.set_tracking_uri(self._tracking_uri)
            if self._experiment is not None:
                mlflow.set_experiment(self._experiment)
            active = mlflow.start_run(**{**self._init, **continued})
        if not active.data.params:  # a continued run has them already
            mlflow.log_params(dict(flat(trainer.config.model_dump(mode="json"))))
        return active.info

    def log(self, run: Any, step: int, values: dict[str, float]) -> None:
        """Log a row."""
        import mlflow

        mlflow.log_metrics(values, step=step, run_id=run.run_id)

    def finish(self, run: Any) -> None:
        """End the run, if this logger started it."""
        import mlflow

        if self._is_ours:
            mlflow.end_run()
