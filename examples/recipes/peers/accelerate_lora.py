"""lora.py with Accelerate. Run it with `accelerate launch` and PYTHONPATH=examples/recipes."""

from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import ProjectConfiguration, set_seed
from lora import Chains, adapter_groups, build
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from torch.utils.data import DataLoader


def token_losses(model, tokens):
    logits = model(input_ids=tokens).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2).float(), tokens[:, 1:], reduction="none")


def save_adapter(models, weights, folder):
    if accelerator.is_main_process:
        for each in models:
            torch.save(get_peft_model_state_dict(accelerator.unwrap_model(each)), Path(folder) / "adapter.pt")
            weights.pop()


def load_adapter(models, folder):
    while models:
        state = torch.load(Path(folder) / "adapter.pt")
        set_peft_model_state_dict(accelerator.unwrap_model(models.pop()), state)


project = ProjectConfiguration("accelerate-lora", automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(project_config=project)
accelerator.register_save_state_pre_hook(save_adapter)
accelerator.register_load_state_pre_hook(load_adapter)
set_seed(0)
model = build()
optimizer = torch.optim.AdamW(adapter_groups(model, rate=5e-3))
size = 32 // accelerator.num_processes
loader = DataLoader(Chains(1024), batch_size=size, shuffle=True)
test_loader = DataLoader(Chains(200, seed=10_000), batch_size=size)
model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)

step = 0
saved = sorted(Path("accelerate-lora/checkpoints").glob("checkpoint_*"), key=lambda path: int(path.name.split("_")[1]))
if saved:
    accelerator.load_state(str(saved[-1]))
    step = 20 * (int(saved[-1].name.split("_")[1]) + 1)
    project.iteration = step // 20
while step < 80:
    epoch, done = divmod(step, len(loader))
    loader.set_epoch(epoch)
    for tokens in skip_first_batches(loader, done):
        loss = token_losses(model, tokens).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 20 == 0:
            mean = accelerator.reduce(loss.detach(), reduction="mean")
            accelerator.print(f"step {step}: loss {mean:.4f}")
            accelerator.save_state()
        if step == 80:
            break

model.eval()
losses = []
for tokens in test_loader:
    with torch.no_grad():
        losses.append(accelerator.gather_for_metrics(token_losses(model, tokens)))
accelerator.print(f"loss per token on unseen sequences: {torch.cat(losses).mean():.8f}")
accelerator.end_training()
