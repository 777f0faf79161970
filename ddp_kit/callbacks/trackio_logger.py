"""The logger for Trackio."""

from typing import Any

from ddp_kit.callbacks.rows import RowLogger, numbers, require


class TrackioLogger(RowLogger):
    """Logs train/loss, train/learning_rate, ..., eval/loss, ... to a Trackio run, on the main rank.

    `project` and `init`: arguments of `trackio.init`, such as name, group or space_id. The TrainerConfig is the run's
    config; `config={...}` adds to it. Show the run with `trackio show --project PROJECT`.

    The run is finished at the end of `fit`. Later evaluations, and a Trainer that resumes from a checkpoint, log to the
    same run. Trackio cannot delete rows: steps that are repeated after a resume appear twice. Needs
    `pip install trackio`; raises `ConfigError` if it is not installed.
    """

    def __init__(self, project: str, **init: Any) -> None:
        require("trackio", "TrackioLogger")
        self._init = {"project": project, "embed": False, **init}
        self._run: Any = None

    def state_dict(self) -> dict[str, Any]:
        """The name of the run, on the rank that logs."""
        return {"name": self._init.get("name") if self._run is None else self._run.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the checkpoint's run, unless this process has already started one."""
        if state["name"] is not None and self._run is None:
            self._init = {"name": state["name"], "resume": "allow", **self._init}

    def on_fit_start(self, trainer: Any) -> None:
        """Start the run now, so that its system metrics begin with the first step."""
        if trainer.world.is_main and self._run is None:
            self._start(trainer)

    def write(self, trainer: Any, kind: str, step: int, values: dict[str, Any]) -> None:
        """Log the row."""
        if self._run is None:
            self._start(trainer)
        self._run.log(numbers(kind, values), step=step)

    def on_fit_end(self, trainer: Any, result: Any) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()
            self._init |= {"name": self._run.name, "resume": "allow"}
            self._run = None

    def _start(self, trainer: Any) -> None:
        import trackio  # imported only on the main rank, because it takes seconds

        config = {**trainer.config.model_dump(mode="json"), **self._init.get("config", {})}
        self._run = trackio.init(**{**self._init, "config": config})
