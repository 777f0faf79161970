"""image_classifier.py with Accelerate. Run it with `accelerate launch` and PYTHONPATH=examples/recipes."""

from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import ProjectConfiguration, set_seed
from image_classifier import Shapes, build
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

project = ProjectConfiguration("accelerate-image-classifier", automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(project_config=project)
set_seed(0)
model = build().to(accelerator.device)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
accelerator.register_for_checkpointing(average)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
size = 32 // accelerator.num_processes
loader = DataLoader(Shapes(1000, mixes=True), batch_size=size, shuffle=True)
test_loader = DataLoader(Shapes(300, seed=1), batch_size=size)
model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)

step = 0
folder = Path("accelerate-image-classifier/checkpoints")
saved = sorted(folder.glob("checkpoint_*"), key=lambda path: int(path.name.split("_")[1]))
if saved:
    accelerator.load_state(str(saved[-1]))
    step = 20 * (int(saved[-1].name.split("_")[1]) + 1)
    project.iteration = step // 20
for epoch in range(step // len(loader), 4):
    loader.set_epoch(epoch)
    model.train()
    for images, targets in skip_first_batches(loader, step - epoch * len(loader)):
        loss = F.cross_entropy(model(images), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(accelerator.unwrap_model(model))
        step += 1
        if step % 10 == 0:
            mean = accelerator.reduce(loss.detach(), reduction="mean")
            accelerator.print(f"step {step}: loss {mean:.4f}")
        if step % 20 == 0:
            accelerator.save_state()
    average.eval()
    losses, hits = [], []
    for images, targets in test_loader:
        with torch.no_grad():
            logits, targets = accelerator.gather_for_metrics((average(images), targets))
        losses.append(F.cross_entropy(logits, targets, reduction="none"))
        hits.append(logits.argmax(1) == targets.argmax(1))
    loss, accuracy = torch.cat(losses).mean(), torch.cat(hits).float().mean()
    accelerator.print(f"epoch {epoch}: test loss {loss:.8f}, test accuracy {accuracy:.2%}")
accelerator.end_training()
