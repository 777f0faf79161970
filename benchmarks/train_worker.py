"""The script that train.py launches: one peer trains one case, and each rank leaves what it found in FOLDER/RANK.

`python train_worker.py FOLDER PEER CASE ACCUMULATION STEPS time|observe`. Each peer is used as its
documentation tells its users, with its bars, summaries, checkpoints and validation off, and the same sparse log.
"""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler
from train_gpu import Observed, rate_share
from train_models import BLOCKS, CASES, CUDA, Run, Stopwatch, loss_of, own_core


def by_hand(run: Run) -> None:
    """The loop that a good engineer writes."""
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if CUDA else torch.device("cpu")
    dist.init_process_group("nccl" if CUDA else "gloo")
    model = run.model.to(device)
    optimizer = run.optimizer(model.parameters())
    if run.ranks > 1:
        model = DistributedDataParallel(model, device_ids=[local_rank] if CUDA else None, gradient_as_bucket_view=True)
    sampler = DistributedSampler(run.dataset)
    loader = DataLoader(run.dataset, run.case.batch, sampler=sampler, collate_fn=run.collate, pin_memory=CUDA)
    step, total = 0, torch.zeros((), device=device)
    for number, (inputs, targets) in enumerate(loader, 1):
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        last = number % run.accumulation == 0
        with nullcontext() if last or run.ranks == 1 else model.no_sync():
            with torch.autocast(device.type, torch.bfloat16) if run.case.bf16 else nullcontext():
                loss = loss_of(model, inputs, targets)
            (loss if run.accumulation == 1 else loss / run.accumulation).backward()
        total += loss.detach()
        if not last:
            continue
        if run.case.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), run.case.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % run.log_every_steps == 0:
            if dist.get_rank() == 0:
                print(f"step {step}  loss {total.item() / run.log_every_steps / run.accumulation:.4g}")
            total.zero_()
        if step == run.total:
            break


def ddpkit(run: Run) -> None:
    from ddp_kit import Trainer, TrainerConfig

    config = TrainerConfig(
        max_steps=run.total,
        micro_batch_size=run.case.batch,
        accumulation_steps=run.accumulation,
        max_grad_norm=run.case.clip,
        precision="bf16" if run.case.bf16 else "fp32",
        log_every_steps=run.log_every_steps,
    )
    data: Any = run.dataset
    if run.collate:
        data = DataLoader(data, run.case.batch, shuffle=True, collate_fn=run.collate)
    Trainer(run.model, run.optimizer, lambda model, batch: loss_of(model, *batch), config).fit(data)


def lightning(run: Run) -> None:
    from lightning import LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.strategies import DDPStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = run.model

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            loss = loss_of(self.model, *batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Optimizer:
            return run.optimizer(self.parameters())

    Trainer(
        accelerator="gpu" if CUDA else "cpu",
        devices=run.ranks,
        strategy=DDPStrategy(gradient_as_bucket_view=True) if run.ranks > 1 else "auto",
        precision="bf16-mixed" if run.case.bf16 else "32-true",
        max_steps=run.total,
        accumulate_grad_batches=run.accumulation,
        gradient_clip_val=run.case.clip,
        logger=CSVLogger(run.folder),
        log_every_n_steps=run.log_every_steps,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), DataLoader(run.dataset, run.case.batch, shuffle=True, collate_fn=run.collate, pin_memory=CUDA))


def fabric(run: Run) -> None:
    from lightning import Fabric
    from lightning.fabric.strategies import DDPStrategy

    fabric = Fabric(
        accelerator="gpu" if CUDA else "cpu",
        devices=run.ranks,
        strategy=DDPStrategy(gradient_as_bucket_view=True) if run.ranks > 1 else "auto",
        precision="bf16-mixed" if run.case.bf16 else "32-true",
    )
    fabric.launch()
    model, optimizer = fabric.setup(run.model, run.optimizer(run.model.parameters()))
    loader = DataLoader(run.dataset, run.case.batch, shuffle=True, collate_fn=run.collate, pin_memory=CUDA)
    loader = fabric.setup_dataloaders(loader)
    step, total = 0, torch.zeros((), device=fabric.device)
    for number, (inputs, targets) in enumerate(loader, 1):
        waits = number % run.accumulation != 0
        with fabric.no_backward_sync(model, enabled=waits):
            loss = loss_of(model, inputs, targets)
            fabric.backward(loss if run.accumulation == 1 else loss / run.accumulation)
        total += loss.detach()
        if waits:
            continue
        if run.case.clip is not None:
            fabric.clip_gradients(model, optimizer, max_norm=run.case.clip)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % run.log_every_steps == 0:
            fabric.print(f"step {step}  loss {total.item() / run.log_every_steps / run.accumulation:.4g}")
            total.zero_()
        if step == run.total:
            break


def accelerate(run: Run) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    accelerator = Accelerator(
        cpu=not CUDA,
        mixed_precision="bf16" if run.case.bf16 else "no",
        gradient_accumulation_steps=run.accumulation,
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    loader = DataLoader(run.dataset, run.case.batch, shuffle=True, collate_fn=run.collate, pin_memory=CUDA)
    model, optimizer, loader = accelerator.prepare(run.model, run.optimizer(run.model.parameters()), loader)
    step, total = 0, torch.zeros((), device=accelerator.device)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, inputs, targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients and run.case.clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), run.case.clip)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach()
        if not accelerator.sync_gradients:
            continue
        step += 1
        if step % run.log_every_steps == 0:
            accelerator.print(f"step {step}  loss {total.item() / run.log_every_steps / run.accumulation:.4g}")
            total.zero_()
        if step == run.total:
            break


def transformers(run: Run) -> None:
    from torch.utils.data import default_collate
    from transformers import Trainer, TrainingArguments

    class Own(Trainer):
        def compute_loss(self, model: nn.Module, inputs: Any, **_: Any) -> Tensor:
            return loss_of(model, *inputs)

    settings = TrainingArguments(
        output_dir=str(run.folder),
        max_steps=run.total,
        per_device_train_batch_size=run.case.batch,
        gradient_accumulation_steps=run.accumulation,
        max_grad_norm=run.case.clip or 0.0,
        lr_scheduler_type="constant",
        bf16=run.case.bf16,
        logging_steps=run.log_every_steps,
        logging_nan_inf_filter=False,
        use_cpu=not CUDA,
        ddp_backend=None if CUDA else "gloo",
        dataloader_pin_memory=CUDA,
        remove_unused_columns=False,
        disable_tqdm=True,
        save_strategy="no",
        report_to="none",
    )
    Own(
        run.model,
        settings,
        data_collator=run.collate or default_collate,
        train_dataset=run.dataset,
        optimizers=(run.optimizer(run.model.parameters()), None),
    ).train()


def main() -> None:
    folder, peer, case, accumulation, steps, what = sys.argv[1:]
    own_core()
    ranks, each = int(os.environ["WORLD_SIZE"]), max(1, int(steps) // BLOCKS)
    run = Run(CASES[case], ranks, int(accumulation), each * BLOCKS, Path(folder), each)
    if what != "time":
        run.log_every_steps = 10 * run.total  # at a log point the host may wait for the device
    run.watch = watch = {"time": Stopwatch, "observe": Observed}[what](each)
    globals()[peer](run)
    found = watch.found()
    if CUDA and what == "time" and case == "gpt":
        found["share"] = rate_share(run, found["blocks"])
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that shuts down (pytorch/pytorch pull request 179291)


if __name__ == "__main__":
    main()
