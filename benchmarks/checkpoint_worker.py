"""The script that checkpoint.py runs for the standstill: one model, saved by one way after the other, in one process.

`python checkpoint_worker.py FOLDER MEGABYTES SAVES WAY,WAY,...` leaves what it found in FOLDER/found.json. A way trains
as long as `Run.probe` asks for steps, in a loop as its documentation has it, and saves when it is told to.
"""

import json
import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.utils.data import DataLoader, TensorDataset

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
LAYERS = 24
FEATURES, BATCH = 8, 8
QUIET = 2


@dataclass
class Save:
    """One save of one way, in seconds."""

    way: str
    copy: float
    """The same tensors into memory that is there already, shortly before."""
    stood: float
    whole: float
    """From the call until it is on the disk."""
    quiet: float
    """A step before."""
    after: float
    """The step after it."""
    during: float | None
    """A step while it was being written; None where there was none from beginning to end."""


class Run:
    """A model whose weights and Adam's state are so many megabytes, and what its saves took."""

    def __init__(self, folder: Path, megabytes: int, saves: int) -> None:
        width = max(1, int((megabytes * 1e6 / 12 / LAYERS) ** 0.5))
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.model = nn.Sequential(nn.Linear(FEATURES, width), *layers, nn.Linear(width, 1)).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.dataset = TensorDataset(torch.randn(4096, FEATURES), torch.randn(4096, 1))
        self.folder, self.saves = folder, saves
        self.found: list[Save] = []
        self.way = ""
        self.step(next(iter(DataLoader(self.dataset, BATCH))))
        self.tensors = [*self.model.state_dict().values()]
        self.tensors += [value for state in self.optimizer.state.values() for value in state.values()]
        self.copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=CUDA) for tensor in self.tensors]
        self.bytes = sum(tensor.nbytes for tensor in self.tensors)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def path(self, number: int) -> Path:
        return self.folder / f"{self.way}-{number}"

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def step(self, batch: list[Tensor], before_change: Callable[[], None] = lambda: None) -> None:
        """One of a loop by hand; `before_change` is called just before the optimizer changes the weights."""
        self.loss([part.to(DEVICE) for part in batch]).backward()
        before_change()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def probe(self, save: Callable[[int], None], wait: Callable[[int], None]) -> Iterator[None]:
        """Save, each time that nothing of the one before is left to do. It yields whenever a step shall be done."""
        yield
        for number in range(self.saves):
            quiet = []
            for _ in range(QUIET):
                began = now()
                yield
                quiet.append(now() - began)
            copied = self._copy()
            yield  # so that the caches hold after the copy what they hold before
            began = now()
            save(number)
            stood = time.perf_counter() - began
            self.found.append(Save(self.way, copied, stood, 0.0, median(quiet), 0.0, None))
            writing = _Waiting(lambda number=number: wait(number))
            steps = []
            while not steps or writing.is_alive():
                before = now()
                yield
                steps.append((before, now()))
            ended = writing.ended()
            during = [after - before for before, after in steps if after <= ended]
            last = self.found[-1]
            last.whole, last.after, last.during = ended - began, steps[0][1] - steps[0][0], median(during or [None])
            _remove(self.path(number))

    def by_hand(
        self, save: Callable[[int], None], wait: Callable[[int], None], before_change: Callable[[], None] = lambda: None
    ) -> None:
        batches = chain.from_iterable(iter(lambda: DataLoader(self.dataset, BATCH), None))
        for _ in self.probe(save, wait):
            self.step(next(batches), before_change)

    @torch.no_grad()
    def _copy(self) -> float:
        began = now()
        for target, tensor in zip(self.copies, self.tensors, strict=True):
            target.copy_(tensor, non_blocking=CUDA)
        return now() - began


def now() -> float:
    """The time, once the device has done its work."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


class _Waiting(Thread):
    """Waits for what is written while the loop runs, and notes when it is complete."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._wait = wait
        self._ended: float | None = None
        self.start()

    def run(self) -> None:
        self._wait()
        self._ended = time.perf_counter()

    def ended(self) -> float:
        self.join()
        if self._ended is None:
            raise SystemExit("a save has failed")
        return self._ended


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _to_disk(path: Path) -> None:
    for each in (path, path.parent):
        descriptor = os.open(each, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


# The ways ------------------------------------------------------------------------------------------------------------


def ddpkit(run: Run) -> None:
    """All that a Trainer does at a save. keep_last=1: it removes the one before itself, and that is waited for."""
    from ddp_kit import Trainer, TrainerConfig

    folder = run.folder / "ddpkit"
    config = TrainerConfig(
        max_steps=10**6, global_batch_size=BATCH, log_every_steps=10**6, checkpoint={"dir": folder, "keep_last": 1}
    )
    trainer = Trainer(run.model, run.optimizer, lambda _, batch: run.loss(batch), config)
    steps = trainer.steps(run.dataset)

    def save(_: int) -> None:
        trainer._run.checkpoints.on_request()  # as at one of `every_steps`

    def wait(_: int) -> None:
        writer = trainer._run.checkpoints._saver._writer
        while writer._task is not None:  # the loop looks for the answer of the writer after each step
            time.sleep(0.001)

    for _ in run.probe(save, wait):
        next(steps)
    steps.close()


def torch_save(run: Run) -> None:
    run.by_hand(lambda number: torch.save(run.state(), run.path(number)), lambda number: _to_disk(run.path(number)))


def dcp_save(run: Run) -> None:
    """It syncs its files itself."""
    run.by_hand(lambda number: dcp.save(run.state(), checkpoint_id=run.path(number)), lambda _: None)


def dcp_thread(run: Run) -> None:
    """With a stager that is kept, so that its memory is used again."""
    _dcp_async(run, AsyncCheckpointerType.THREAD, StagingOptions(False, False, False, False))


def dcp_process(run: Run) -> None:
    """As above, in memory that is shared with the process that writes."""
    _dcp_async(run, AsyncCheckpointerType.PROCESS, StagingOptions(False, True, False, False))


def dcp_staged(run: Run) -> None:
    """The copy is made by a thread while the next gradients are computed; the loop waits for it before the update.

    What it waits there counts; what the copy takes from the gradients' time does not; it is in the time of that step.
    """
    _dcp_async(run, AsyncCheckpointerType.PROCESS, StagingOptions(False, True, True, False))


def _dcp_async(run: Run, kind: AsyncCheckpointerType, options: StagingOptions) -> None:
    stager = DefaultStager(options)
    copied, written = [], []

    def save(number: int) -> None:
        answer = dcp.async_save(
            run.state(), checkpoint_id=run.path(number), async_checkpointer_type=kind, async_stager=stager
        )
        written[:] = [answer.upload_completion if options.use_async_staging else answer]
        copied[:] = [answer.staging_completion] if options.use_async_staging else []

    def before_change() -> None:
        while copied:
            began = time.perf_counter()
            copied.pop().result()
            run.found[-1].stood += time.perf_counter() - began

    run.by_hand(save, lambda _: written[0].result(), before_change)
    stager.close()


def lightning(run: Run) -> None:
    from lightning.fabric.plugins.io import TorchCheckpointIO

    _lightning(run, TorchCheckpointIO(), lambda number: _to_disk(run.path(number)))


def lightning_async(run: Run) -> None:
    from queue import SimpleQueue

    from lightning.fabric.plugins.io import TorchCheckpointIO
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    written: SimpleQueue[None] = SimpleQueue()

    class Tells(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            try:
                super().save_checkpoint(*args, **kwargs)
            finally:
                written.put(None)

    def wait(number: int) -> None:
        written.get()
        _to_disk(run.path(number))

    _lightning(run, AsyncCheckpointIO(Tells()), wait)


def _lightning(run: Run, files: Any, wait: Callable[[int], None]) -> None:
    from lightning import Callback, LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = run.model

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return run.loss(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return run.optimizer

    class Saves(Callback):
        def on_train_start(self, trainer: Trainer, _: Any) -> None:
            self.probe = run.probe(lambda number: trainer.save_checkpoint(run.path(number)), wait)

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.should_stop = next(self.probe, self) is self

    Trainer(
        accelerator="gpu" if CUDA else "cpu",
        devices=1,
        max_epochs=-1,
        limit_val_batches=0,
        plugins=[files],
        callbacks=[Saves()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), DataLoader(run.dataset, BATCH))


def main() -> None:
    folder, megabytes, saves, ways = sys.argv[1:]
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)  # DCP's process wants one
    run = Run(Path(folder), int(megabytes), int(saves))
    for way in ways.split(","):
        run.way = way
        globals()[way](run)
    saved = [asdict(save) for save in run.found]
    Path(folder, "found.json").write_text(json.dumps({"bytes": run.bytes, "saves": saved}))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that shuts down (pytorch/pytorch pull request 179291)


if __name__ == "__main__":
    main()
