"""The script that checkpoint.py launches for the restart: trains until it is killed, from its newest checkpoint on.

`python checkpoint_restart.py FOLDER ddpkit|by_hand|lightning`. Every rank notes, in a line of FOLDER/marks each, when
it has begun, when it is ready to train, and each optimizer step: attempt, rank, pid, what, step, time.
"""

import os
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()  # one clock for all processes of this machine

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset  # noqa: E402

EVERY = 10
WIDTH, LAYERS, BATCH = 290, 10, 8  # 10 MB with Adam's state
ATTEMPT, RANK = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ["RANK"]
MARKS = os.open(Path(sys.argv[1], "marks"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def mark(what: str, step: int = 0, moment: float | None = None) -> None:
    seconds = time.monotonic() if moment is None else moment
    os.write(MARKS, f"{ATTEMPT} {RANK} {os.getpid()} {what} {step} {seconds}\n".encode())


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def by_hand(model: nn.Module, dataset: TensorDataset, folder: Path) -> None:
    """torch.save by rank 0 to another name and a rename, so that a kill in the middle leaves the one before."""
    dist.init_process_group("gloo")
    optimizer = torch.optim.Adam(model.parameters())
    step, newest = 0, folder / "newest.pt"
    if newest.exists():
        state = torch.load(newest)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    spread = DistributedDataParallel(model, gradient_as_bucket_view=True)
    mark("ready", step)
    loader = DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset))
    for batch in chain.from_iterable(iter(lambda: loader, None)):
        loss_of(spread, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        mark("step", step)
        if step % EVERY == 0 and RANK == "0":
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, folder / "new")
            (folder / "new").rename(newest)


def ddpkit(model: nn.Module, dataset: TensorDataset, folder: Path) -> None:
    from ddp_kit import Callback, Trainer, TrainerConfig

    class Marks(Callback):
        def on_step(self, trainer: Trainer) -> None:
            mark("step", trainer.step)

    config = TrainerConfig(
        max_steps=10**6,
        micro_batch_size=BATCH,
        accumulation_steps=1,
        checkpoint={"dir": folder, "every_steps": EVERY},
    )
    trainer = Trainer(model, torch.optim.Adam(model.parameters()), loss_of, config, callbacks=[Marks()])
    mark("ready", trainer.step)
    trainer.fit(dataset)


def lightning(model: nn.Module, dataset: TensorDataset, folder: Path) -> None:
    from lightning import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return loss_of(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    class Marks(Callback):
        def on_train_start(self, trainer: Trainer, _: Any) -> None:
            mark("ready", trainer.global_step)

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            mark("step", trainer.global_step)

    saves = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=EVERY, save_last=True, enable_version_counter=False
    )
    Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=-1,
        limit_val_batches=0,
        callbacks=[Marks(), saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), DataLoader(dataset, BATCH, shuffle=True), ckpt_path="last", weights_only=False)


def main() -> None:
    mark("began", moment=BEGAN)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    dataset = TensorDataset(torch.randn(4096, WIDTH), torch.randn(4096, WIDTH))
    globals()[sys.argv[2]](model, dataset, Path(sys.argv[1], "checkpoints"))


if __name__ == "__main__":
    main()
