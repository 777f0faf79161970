"""A restart resumes from the newest of the copies in memory and the checkpoints on disk, bitwise.

With every optimizer, sampler and scheduler of torch; other tests compare their names with torch's.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ddp_kit import Callback, Trainer, TrainerConfig
from ddp_kit.checkpoint import copies as copies_module
from ddp_kit.checkpoint import manager
from ddp_kit.checkpoint.format import name_of
from tests.programs import every_resume
from tests.programs.every_resume import OPTIMIZERS, SAMPLERS
from tests.support.toys import adam, regression_data, same_state, state_of, trainer_for
from tests.trainer import test_every_scheduler
from tests.trainer.test_every_scheduler import CASES, PLATEAU, RatesOfGroups

STEPS = 9
DIES_AFTER = 6

MakeTrainer = Callable[..., Trainer]
"""A function that makes a Trainer, with the folder of its checkpoints and its callbacks."""


class Attempt(Callback):
    """Lets each step end with a complete copy, and fails after a step."""

    def __init__(self, dies_after: int = 0, copied: range = range(STEPS)) -> None:
        """`dies_after`: 0: never. `copied`: the steps after which there is a copy."""
        self.dies_after = dies_after
        self.copied = copied

    def on_step(self, trainer: Trainer) -> None:
        checkpoints = trainer._run.checkpoints
        assert checkpoints.copies is not None
        checkpoints.copies._note_end(wait=True)
        checkpoints.copies._due_at = -math.inf if trainer.step in self.copied else math.inf
        if trainer.step == self.dies_after:
            checkpoints.wait_for_saves()
            raise KeyboardInterrupt


class Job:
    """A job in this process, whose launcher has a folder for copies."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.is_restarted = False
        monkeypatch.setattr(copies_module, "shutdown_timeout", lambda: 30.0)
        monkeypatch.setattr(copies_module, "memory_folder", lambda: folder / "memory")
        monkeypatch.setattr(manager, "is_restarted", lambda: self.is_restarted)

    def train(self, make: MakeTrainer, attempt: Attempt, *data: Any) -> Trainer:
        """Train in the first attempt, or in the next one."""
        copies_module._opened.clear()
        trainer = make(self.folder / "run", attempt)
        if attempt.dies_after:
            with pytest.raises(KeyboardInterrupt):
                trainer.fit(*data)
        else:
            trainer.fit(*data)
        self.is_restarted = True
        return trainer

    def damage(self, folder: str, step: int) -> None:
        """Change a byte of a copy, or of a checkpoint on disk."""
        (file,) = self.folder.glob(f"{folder}/{name_of(step)}/model.safetensors")
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    yield Job(tmp_path, monkeypatch)
    copies_module._opened.clear()


def check_resumed_bitwise(job: Job, make: MakeTrainer, data: Callable[[], Any], said: list[str]) -> None:
    whole = make(None)
    whole.fit(*data())
    job.train(make, Attempt(DIES_AFTER), *data())
    resumed = job.train(make, Attempt(), *data())
    assert f"resumed from the copy in memory after step {DIES_AFTER - 1}" in said
    assert resumed.step == whole.step == STEPS
    assert same_state(state_of(resumed.model), state_of(whole.model))


@pytest.mark.parametrize("name", [*OPTIMIZERS, *SAMPLERS])
def test_copy_has_the_state_of_every_optimizer_and_sampler(name: str, job: Job, said: list[str]) -> None:
    make_data: Callable[[], Any] = SAMPLERS.get(name, lambda: every_resume.DATA)
    optimizer = name if name in OPTIMIZERS else "SGD"

    def make(folder: Path | None, *callbacks: Callback) -> Trainer:
        torch.manual_seed(0)
        sizes = {} if isinstance(make_data(), DataLoader) else {"global_batch_size": 8}
        return Trainer(
            every_resume.Rows() if name == "SparseAdam" else every_resume.Net(),
            lambda parameters: getattr(torch.optim, optimizer)(parameters, lr=0.01, **OPTIMIZERS[optimizer]),
            every_resume.loss_fn,
            TrainerConfig(max_steps=STEPS, checkpoint={"dir": folder}, **sizes),
            callbacks=callbacks,
        )

    check_resumed_bitwise(job, make, lambda: (make_data(),), said)


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("LinearLR, then")])
def test_copy_has_the_state_of_every_scheduler(name: str, job: Job, said: list[str]) -> None:
    seen: list[RatesOfGroups] = []
    data = test_every_scheduler.DATA
    needs_metric = CASES[name] is PLATEAU

    def make(folder: Path | None, *callbacks: Callback) -> Trainer:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.02}]
        seen.append(RatesOfGroups())
        return trainer_for(
            folder,
            seen[-1],
            *callbacks,
            model=model,
            loss_fn=lambda model, batch: model(batch[0]).square().mean(),
            optimizer=torch.optim.SGD(groups, momentum=0.9),
            scheduler=CASES[name],
            max_steps=STEPS,
            eval_every_steps=1 if needs_metric else None,
        )

    check_resumed_bitwise(job, make, lambda: (data, data) if needs_metric else (data,), said)
    whole, _, resumed = (each.seen for each in seen)
    assert resumed == whole[DIES_AFTER - 1 :]


# Memory and disk -----------------------------------------------------------------------------------------------------


def make_with_adam(folder: Path | None, *callbacks: Callback, **checkpoint: Any) -> Trainer:
    return trainer_for(folder, *callbacks, optimizer=adam(), max_steps=STEPS, checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("saved_every", "copied", "damaged", "place", "step"),
    [
        (5, range(1, 4), [], "disk", 5),
        (2, range(5, 6), [], "memory", 5),
        (3, range(3, 4), [], "disk", 3),
        (None, range(1, 6), [("memory/*", 5)], "memory", 4),
        (2, range(1, 6), [("memory/*", 5)], "disk", 4),
        (5, range(1, 5), [("run", 5)], "memory", 4),
        (4, range(1, 4), [("run", 4), ("memory/*", 3)], "memory", 2),
        (3, range(5, 6), [("memory/*", 5)], "disk", 3),
        (None, range(5, 6), [("memory/*", 5)], "nothing", 0),
    ],
)
def test_newest_complete_state_wins_wherever_it_is(
    saved_every: int | None,
    copied: range,
    damaged: list[tuple[str, int]],
    place: str,
    step: int,
    job: Job,
    said: list[str],
) -> None:
    whole = make_with_adam(None)
    whole.fit(regression_data())

    def make(folder: Path, *callbacks: Callback) -> Trainer:
        return make_with_adam(folder, *callbacks, every_steps=saved_every)

    job.train(make, Attempt(DIES_AFTER, copied), regression_data())
    for each in damaged:
        job.damage(*each)
    resumed = job.train(make, Attempt(), regression_data())
    source = {"memory": "the copy in memory", "disk": str(job.folder / "run" / name_of(step))}.get(place)
    assert [line for line in said if "resumed" in line] == [
        f"resumed from {source} after step {step}" for _ in range(1) if source
    ]
    assert len([line for line in said if "checkpoint skipped" in line and "its hash differs" in line]) == len(damaged)
    assert same_state(state_of(resumed.model), state_of(whole.model))
