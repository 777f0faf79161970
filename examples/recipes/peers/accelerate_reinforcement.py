"""reinforcement.py with Accelerate. Run it with `accelerate launch` and PYTHONPATH=examples/recipes."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from reinforcement import HORIZON, Episodes, build
from torch.distributions import Categorical

accelerator = Accelerator()
set_seed(0)
model = build().to(accelerator.device)
episodes = Episodes(model, 1000)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)
rank, ranks = accelerator.process_index, accelerator.num_processes

sums = torch.zeros(2, device=accelerator.device)
for step in range(1, 1000 // 16 + 1):
    # No prepared loader is used here, because it would play the next batch with the weights before this step.
    indices = range((step - 1) * 16 + rank, step * 16, ranks)
    samples = zip(*(episodes[index] for index in indices), strict=True)
    states, actions, returns, played = (torch.stack(part).to(accelerator.device) for part in samples)
    output = model(states)
    advantage = returns - output[..., 2]
    chosen = Categorical(logits=output[..., :2])
    actor = -chosen.log_prob(actions) * advantage.detach() - 0.01 * chosen.entropy()
    loss = ((actor + 0.05 * advantage.square()) * played).sum()
    total = accelerator.reduce(played.sum())
    accelerator.backward(loss * ranks / total)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    sums += torch.stack([played.sum(), torch.tensor(len(played), device=played.device)])
    if step % 10 == 0:
        balanced, number = accelerator.reduce(sums).tolist()
        steps = balanced / number
        sums.zero_()
        accelerator.print(f"step {step}: the pole stays up for {steps:.1f} steps of {HORIZON}")
        if steps > 0.95 * HORIZON:
            break
accelerator.print(f"the pole stayed up for {steps:.8f} steps")
accelerator.end_training()
