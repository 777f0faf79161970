"""ring_gan.py with Accelerate. Run it with `accelerate launch` and PYTHONPATH=examples/recipes."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from ring_gan import NOISE, Ring, build
from torch.utils.data import DataLoader

accelerator = Accelerator()
set_seed(0)
model = build()
generator, critic = model["generator"], model["critic"]
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=4e-3, betas=(0.0, 0.9))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
loader = DataLoader(Ring(2048), batch_size=64 // accelerator.num_processes, shuffle=True)
generator, critic, critic_optimizer, generator_optimizer, loader = accelerator.prepare(
    generator, critic, critic_optimizer, generator_optimizer, loader
)

step = 0
while step < 600:
    for real, noise in loader:
        fake = generator(noise).detach()
        # One call of the critic: DDP supports one forward pass for each backward pass.
        scores = critic(torch.cat([real, fake]))
        critic_loss = (F.softplus(-scores[: len(real)]) + F.softplus(scores[len(real) :])).mean()
        accelerator.backward(critic_loss)
        critic_optimizer.step()
        critic_optimizer.zero_grad()
        critic.requires_grad_(False)
        generator_loss = F.softplus(-accelerator.unwrap_model(critic)(generator(noise))).mean()
        accelerator.backward(generator_loss)
        generator_optimizer.step()
        generator_optimizer.zero_grad()
        critic.requires_grad_(True)
        step += 1
        if step % 50 == 0:
            losses = accelerator.reduce(torch.stack([critic_loss, generator_loss]).detach(), reduction="mean")
            accelerator.print(f"step {step}: critic {losses[0]:.4f}, generator {losses[1]:.4f}")
        if step == 600:
            break

with torch.no_grad():
    noise = torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(1))
    radius = accelerator.unwrap_model(generator)(noise.to(accelerator.device)).norm(dim=1)
accelerator.print(f"mean distance of generated points from the ring: {(radius - 1).abs().mean():.8f}")
accelerator.end_training()
