"""Run by test_copies.py: trains with copies in memory, has a fault if told so, and prints what it ends with.

copied.py FOLDER PARALLEL SETTINGS FAULT MOMENT

PARALLEL, SETTINGS: as JSON, for the configuration. FAULT: a name in FAULTS, or "". MOMENT: a name in MOMENTS.
"""

import ctypes
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from toys import Noisy, digest_of

from ddp_kit import EMA, Callback, Trainer, TrainerConfig
from ddp_kit.checkpoint import copies
from ddp_kit.checkpoint.format import checkpoints
from ddp_kit.checkpoint.manager import Checkpoints

RANK = int(os.environ.get("RANK", "0"))
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
STEPS = 120
LATEST = 100  # by then, there is a copy
DISK_SAVE = 30


def crash() -> None:
    ctypes.string_at(0)


def fail() -> None:
    raise RuntimeError("a fault")


FAULTS: dict[str, Callable[[], object]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": crash,
    "exception": fail,
    "exit": lambda: os._exit(3),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "launcher": lambda: os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL),
    "server": lambda: os.kill(os.getppid(), signal.SIGKILL),
}
MOMENTS = (
    *("forward", "gradient hook", "before optimizer.step", "after optimizer.step", "callback", "evaluation"),
    *("disk save", "copy before the gather", "copy after the gather", "copy being written", "resume", "first steps"),
)


class Fault:
    """Strikes at one moment, on the ranks that it concerns, as soon as there is a copy to resume from."""

    def __init__(self, kind: str, moment: str, folder: str) -> None:
        """`folder`: a file beside it notes the newest copy at each strike.

        `kind`: a name in FAULTS, which may be followed by "on all ranks", or by "twice".
        """
        self.folder = folder
        self.kind, _, extent = kind.partition(" ")
        self.moments = {0: moment, 1: moment} if extent == "twice" else {0: moment}
        if moment == "resume":
            self.moments = {0: "callback", 1: "resume"}
        self.concerns = RANK == RANKS - 1 or extent == "on all ranks"
        self.trainer: Trainer | None = None

    def at(self, moment: str) -> None:
        """Strike if this is the moment."""
        if not self.kind or moment != self.moments.get(ATTEMPT) or not self.concerns:
            return
        step = newest = 0
        if self.trainer is not None:  # else, it is being created
            step = self.trainer.step
            own: Any = self.trainer._run.checkpoints.copies
            newest = max((found.step for found in checkpoints(own.series.folder) if found.whole), default=0)
        is_ready = 5 <= newest < step or step > LATEST
        if is_ready or moment in ("first steps", "resume", "disk save"):
            with Path(f"{self.folder}.struck").open("a") as file:  # a launcher that is killed prints no more
                file.write(f"{newest}\n")
            FAULTS[self.kind]()
            time.sleep(60)  # until the kill of another process ends this one


class Strikes(Callback):
    """Gives the copies time, and strikes in a callback."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def on_step(self, trainer: Any) -> None:
        if trainer.step == 2:
            self.fault.at("first steps")
        self.fault.at("callback")
        time.sleep(0.005)


def before(owner: Any, name: str, act: Callable[[], None], after: bool = False) -> None:
    """Let a method call `act` first, or last."""
    method = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if not after:
            act()
        result = method(*arguments, **options)
        if after:
            act()
        return result

    setattr(owner, name, call)


def main(folder: str, parallel: str, settings: str, kind: str, moment: str) -> None:
    fault = Fault(kind, moment, folder)
    copies._LONGEST_SHARE = math.inf  # as many copies as possible, also on a busy machine
    torch.manual_seed(0)
    pipeline = "pipeline" in parallel
    norm = nn.LayerNorm(8) if pipeline else nn.BatchNorm1d(8)
    model = nn.Sequential(
        nn.Linear(4, 8), norm, nn.Dropout(0.2), nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 1))
    )

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        fault.at("forward" if torch.is_grad_enabled() else "evaluation")
        out = model(batch[0])
        if out.requires_grad:
            out.register_hook(lambda _: fault.at("gradient hook"))
        return nn.functional.mse_loss(out, batch[1])

    class Adam(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            fault.at("before optimizer.step")
            result = super().step(closure)
            fault.at("after optimizer.step")
            return result

    def loaded(self: Checkpoints, *arguments: Any, **options: Any) -> None:
        fault.at("resume")
        load(self, *arguments, **options)

    load = Checkpoints._load_parts
    Checkpoints._load_parts = loaded  # type: ignore[method-assign]
    config: dict[str, Any] = json.loads(settings)
    checkpoint = {"dir": folder, "memory_seconds": 0.05, **config.pop("checkpoint", {})}
    if moment == "disk save":
        checkpoint["every_steps"] = DISK_SAVE
    ema = EMA(0.9)
    trainer = Trainer(
        model,
        lambda parameters: Adam(parameters, lr=0.01),
        loss,
        TrainerConfig(
            max_steps=STEPS,
            global_batch_size=12,
            max_grad_norm=0.5,
            parallel=json.loads(parallel),
            checkpoint=checkpoint,
            eval_every_steps=10,
            **config,
        ),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
        callbacks=[ema, Strikes(fault)],
    )
    fault.trainer = trainer
    saved: Any = trainer._run.checkpoints
    if saved.copies is not None:
        print(f"copies in {saved.copies.series.folder}\n", end="", flush=True)
        before(saved._disk.saver, "save", lambda: fault.at("disk save"), after=True)
        before(saved.copies.series, "begin", lambda: fault.at("copy before the gather"))
        before(saved.copies.series.saver, "save", lambda: fault.at("copy after the gather"))
        before(saved.copies.series.saver, "save", lambda: fault.at("copy being written"), after=True)
    result = trainer.fit(Noisy(96), None if pipeline else Noisy(96))
    held = [*trainer.model_state().values(), *ema.model_state().values()]
    print(f"ended {trainer.world.rank} {result.steps} {result.samples} {digest_of(held)}\n", end="", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
