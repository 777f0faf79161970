"""Run by test_recipes.py: runs recipes in turn in the same processes; in each, one rank is killed once if told so.

recipes_in_turn.py FOLDER KILLS NAME...

Rank 0 writes what a recipe prints last and its final state to FOLDER/NAME.pt; a recipe for which there is one is left
out. So an attempt after a kill begins with the recipe that was killed.
"""

import io
import os
import runpy
import signal
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

import ddp_kit

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
STEPS, KILLED_AFTER = 7, 5
made: list[ddp_kit.Trainer] = []


class KillsLastRankOnce(ddp_kit.Callback):
    """The last rank, by SIGKILL, once in each recipe."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def on_step(self, trainer: Any) -> None:
        last = trainer.world.rank == trainer.world.world_size - 1
        if last and trainer.step == KILLED_AFTER and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Watched(ddp_kit.Trainer):
    """Remembers the Trainer that a recipe makes, and adds a callback."""

    callbacks: tuple[ddp_kit.Callback, ...] = ()

    def __init__(self, *given: Any, callbacks: Any = (), **named: Any) -> None:
        super().__init__(*given, callbacks=[*callbacks, *self.callbacks], **named)
        self.own_callbacks = callbacks
        made.append(self)


def main(folder: Path, kills: bool, *names: str) -> None:
    torch.set_default_dtype(torch.float64)  # so that rounding does not hide what is not exact
    ddp_kit.Trainer = Watched  # type: ignore[misc]
    for name in [name for name in names if not (folder / f"{name}.pt").exists()]:
        Watched.callbacks = (KillsLastRankOnce(folder / f"{name}.killed"),) if kills else ()
        checkpoint = (f"checkpoint.dir={folder / name}", "checkpoint.every_steps=2")
        sys.argv = [name, f"max_steps={STEPS}", "log_every_steps=2", *checkpoint]
        printed = io.StringIO()
        with redirect_stdout(printed):
            runpy.run_path(str(RECIPES / f"{name}.py"), run_name="__main__")
        trainer = made.pop()
        assert isinstance(trainer, Watched)
        assert trainer.step == STEPS
        if trainer.world.is_main:
            state = {
                "said": printed.getvalue().splitlines()[-1],
                "model": trainer.model.state_dict(),
                "optimizer": trainer.optimizer.state_dict(),
                "averages": [each.model_state() for each in trainer.own_callbacks],
            }
            torch.save(state, folder / f"{name}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "kills", *sys.argv[3:])
