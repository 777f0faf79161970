"""Run by test_copies.py: trains with copies in memory, has a fault if told so, and prints what it ends with.

copied.py FOLDER PARALLEL SETTINGS FAULT MOMENT

PARALLEL, SETTINGS: as JSON, for the configuration; "kind" in SETTINGS: "updates" or "stateful stream". FAULT: see
`Fault`, or "". MOMENT: a name in MOMENTS.
"""

import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from toys import Noisy, digest_of

from ddp_kit import EMA, Callback, Trainer, TrainerConfig, Update
from ddp_kit.checkpoint import copies
from ddp_kit.checkpoint.format import checkpoints
from ddp_kit.checkpoint.manager import Checkpoints
from ddp_kit.parallel import zero1

RANK = int(os.environ.get("RANK", "0"))
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
STEPS = 120
LATEST = 100  # by then, there is a copy
DISK_SAVE = 30


def crash(_: Any) -> None:
    ctypes.string_at(0)


def fail(_: Any) -> None:
    raise RuntimeError("a fault")


def fill_memory(_: Any) -> None:
    blocks = []
    while True:
        blocks.append(bytearray(b"x") * (16 << 20))


def damage_copies(copies: Any, number: int) -> None:
    """Change a byte of the newest copies, then end."""
    copies.saver.finished(wait=True)
    for found in [found for found in checkpoints(copies.folder) if found.whole][:number]:
        with (found.path / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS: dict[str, Callable[[Any], object]] = {
    "SIGKILL": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": crash,
    "exception": fail,
    "exit": lambda _: os._exit(3),
    "SIGSTOP": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "memory": fill_memory,
    "damage": lambda copies: damage_copies(copies, 1),
    "damages": lambda copies: damage_copies(copies, 2),
    "launcher": lambda _: os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL),
    "server": lambda _: os.kill(os.getppid(), signal.SIGKILL),
}


def kill_writer(copies: Any) -> None:
    """Kill the process with which this rank writes the copies."""
    os.kill(copies.saver._writer.pid, signal.SIGKILL)


def kill_writer_at_work(copies: Any) -> Any:
    """The same, with a copy to write; returns itself if it has none, and lets it wait for one."""
    if copies.saver.finished(wait=False):
        os.kill(copies.saver._writer.pid, signal.SIGSTOP)
        return kill_writer_at_work
    return kill_writer(copies)


FILL = """
with open("/dev/shm/other", "ab", buffering=0) as file:
    while True:
        try:
            file.write(bytes(4096))
        except OSError:
            pass
"""


def fill_shared_memory(_: Any) -> Any:
    """Take all space in /dev/shm, also what is freed later. Returns what has to be called until a copy has failed."""
    subprocess.Popen([sys.executable, "-I", "-S", "-c", FILL])
    return copy_has_failed


def copy_has_failed(_: Any) -> Any:
    trainer = FAULT[0].trainer
    assert trainer is not None
    copies: Any = trainer._run.checkpoints.copies
    return None if copies._failures else copy_has_failed


FAULT: "list[Fault]" = []  # of this process

EARLIER: dict[str, Callable[[Any], Any]] = {
    "writer": kill_writer,
    "writer at work": kill_writer_at_work,
    "full": fill_shared_memory,
}
"""Faults that training survives. The next fault strikes as soon as there is a newer copy, unless none can be made."""

MOMENTS = (
    *("forward", "gradient hook", "before optimizer.step", "in optimizer.step", "all-gather", "after optimizer.step"),
    *("callback", "evaluation", "disk save", "copy before the gather", "copy after the gather", "copy being written"),
    *("resume", "first steps"),
)


class Fault:
    """Strikes at one moment, on the ranks that it concerns, as soon as there is a copy to resume from."""

    def __init__(self, kind: str, moment: str, folder: str) -> None:
        """`folder`: a file beside it notes the newest copy at each strike.

        `kind`: a name in FAULTS, which may be followed by "on all ranks", by "on two ranks", or by "twice"; and which
        may follow a name in EARLIER and "then".
        """
        self.folder = folder
        earlier, _, fault = kind.rpartition(" then ")
        self.kind, _, extent = fault.partition(" ")
        self.earlier = EARLIER[earlier] if earlier and ATTEMPT == 0 else None
        self.newest_before = 0  # at the earlier fault
        self.strikes_without_newer = earlier == "full"
        self.moments = {0: moment, 1: moment} if extent == "twice" else {0: moment}
        if moment == "resume":
            self.moments = {0: "callback", 1: "resume"}
        ranks = {"on all ranks": RANKS, "on two ranks": 2}.get(extent, 1)
        self.concerns = RANKS - ranks <= RANK
        if earlier == "full":
            self.concerns = RANK == 0  # which learns that a copy has failed
        self.trainer: Trainer | None = None
        FAULT.append(self)

    def at(self, moment: str) -> None:
        """Strike if this is the moment."""
        if not self.kind or moment != self.moments.get(ATTEMPT) or not self.concerns:
            return
        step = newest = second = 0
        copies: Any = None
        if self.trainer is not None:  # else, it is being created
            step = self.trainer.step
            run: Any = self.trainer._run
            if run.checkpoints.copies is not None:
                copies = run.checkpoints.copies.series
                newest, second, *_ = [*(found.step for found in checkpoints(copies.folder) if found.whole), 0, 0]
        is_ready = max(4, self.newest_before) < newest < step and (second or "damage" not in self.kind)
        is_ready = is_ready or step > LATEST
        if self.earlier is not None:
            if is_ready or self.newest_before:
                self.newest_before = newest
                self.earlier = self.earlier(copies)
            if self.earlier is None and self.strikes_without_newer:
                self.newest_before = 0
        elif is_ready or moment in ("first steps", "resume", "disk save"):
            with Path(f"{self.folder}.struck").open("a") as file:  # a launcher that is killed prints no more
                file.write(f"{newest}\n")
            FAULTS[self.kind](copies)
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


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """This rank's samples."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(RANK, 96, RANKS):
            x = torch.randn(4, generator=torch.Generator().manual_seed(index))
            yield x, x.sum(0, keepdim=True)


class Stateful(DataLoader[Any]):
    """Continues where it was, as torchdata's StatefulDataLoader does."""

    begin = 0
    yielded = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        begin = self.begin
        self.begin = self.yielded = 0
        for number, batch in enumerate(super().__iter__()):
            if number >= begin:
                self.yielded = number + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = self.yielded = state["yielded"]


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

        def _init_group(self, group: Any, *arguments: Any) -> Any:
            if group is self.param_groups[-1]:  # all others are updated
                fault.at("in optimizer.step")
            return super()._init_group(group, *arguments)

    def optimizer(parameters: Any) -> Adam:
        first, *rest = parameters
        return Adam([{"params": [first]}, {"params": rest, "lr": 0.005}], lr=0.01)

    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    def loaded(self: Checkpoints, *arguments: Any, **options: Any) -> None:
        fault.at("resume")
        load(self, *arguments, **options)

    load = Checkpoints._load_parts
    Checkpoints._load_parts = loaded  # type: ignore[method-assign]
    config: dict[str, Any] = json.loads(settings)
    kind_of_run = config.pop("kind", "")
    checkpoint = {"dir": folder, "memory_seconds": 0.05, **config.pop("checkpoint", {})}
    if moment == "disk save":
        checkpoint["every_steps"] = DISK_SAVE
    if kind_of_run != "stateful stream":
        config["global_batch_size"] = 12
    ema = EMA(0.9)
    named: dict[str, Any] = {
        "config": TrainerConfig(
            max_steps=STEPS,
            max_grad_norm=0.5,
            parallel=json.loads(parallel),
            checkpoint=checkpoint,
            eval_every_steps=10,
            **config,
        ),
        "callbacks": [ema, Strikes(fault)],
    }
    if kind_of_run == "updates":
        updates = [
            Update("first", loss, optimizer(model[:3].parameters()), scheduler),
            Update("last", loss, optimizer(model[3].parameters()), scheduler, every=2),
        ]
        trainer = Trainer(model, updates=updates, **named)
    else:
        trainer = Trainer(model, optimizer, loss, scheduler=scheduler, **named)
    fault.trainer = trainer
    saved: Any = trainer._run.checkpoints
    before(zero1, "gather_ranges", lambda: fault.at("all-gather"))
    if saved.copies is not None:
        print(f"copies in {saved.copies.series.folder}\n", end="", flush=True)
        before(saved._disk.saver, "save", lambda: fault.at("disk save"), after=True)
        before(saved.copies.series, "begin", lambda: fault.at("copy before the gather"))
        before(saved.copies.series.saver, "save", lambda: fault.at("copy after the gather"))
        before(saved.copies.series.saver, "save", lambda: fault.at("copy being written"), after=True)
    data = Stateful(Stream(), batch_size=12 // RANKS) if kind_of_run == "stateful stream" else Noisy(96)
    result = trainer.fit(data, None if pipeline else Noisy(96))
    held = [*trainer.model_state().values(), *ema.model_state().values()]
    print(f"ended {trainer.world.rank} {result.steps} {result.samples} {digest_of(held)}\n", end="", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
