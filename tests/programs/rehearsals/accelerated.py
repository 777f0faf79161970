"""A loop with Accelerate that saves and resumes in the middle of an epoch. Argument: --output_dir FOLDER."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, SAVED_EVERY = 8, 7

folder = Path(sys.argv[sys.argv.index("--output_dir") + 1])
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
set_seed(0, device_specific=False)
x = torch.randn(160, 5)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
saved = sorted(folder.glob("step-???/done"))
step = 0
state = None
if saved:
    accelerator.load_state(str(saved[-1].parent))
    state = torch.get_rng_state()
    step = int(saved[-1].parent.name.removeprefix("step-"))
first_epoch, done = divmod(step, len(loader))
for epoch in range(first_epoch, EPOCHS):
    skipped = done if epoch == first_epoch else 0
    batches = accelerator.skip_first_batches(loader, skipped) if skipped else loader
    batches.set_epoch(epoch)
    for inputs, targets in batches:
        if state is not None:  # the loader has drawn from the random generator
            torch.set_rng_state(state)
            state = None
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        if step % SAVED_EVERY == 0:
            path = folder / f"step-{step:03}"
            accelerator.save_state(str(path))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (path / "done").write_text("complete")
accelerator.end_training()
