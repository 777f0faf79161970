"""Reinforcement learning: a policy that balances a pole is trained on episodes that it plays itself.

ddpkit launch --nproc-per-node 2 examples/recipes/reinforcement.py
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.data import Dataset

from ddp_kit import Loss, Trainer, TrainerConfig

HORIZON, DISCOUNT = 60, 0.95
Batch = tuple[Tensor, Tensor, Tensor, Tensor]


def push(state: tuple[float, ...], right: bool) -> tuple[float, ...]:
    """The state of a cart with a pole after 0.02 s: position, speed, angle, angular speed.

    Source: Barto, Sutton and Anderson 1983.
    """
    x, speed, angle, spin = state
    force = 10.0 if right else -10.0
    thrust = (force + 0.05 * spin**2 * math.sin(angle)) / 1.1
    turning = (9.8 * math.sin(angle) - math.cos(angle) * thrust) / (2 / 3 - 0.05 * math.cos(angle) ** 2 / 1.1)
    slide = thrust - 0.05 * turning * math.cos(angle) / 1.1
    return x + 0.02 * speed, speed + 0.02 * slide, angle + 0.02 * spin, spin + 0.02 * turning


class Episodes(Dataset[Batch]):
    """Episodes. Each is played when it is read, with the current policy.

    The random numbers of an episode depend only on its index, so it is the same on any rank, and after a resume.
    """

    def __init__(self, policy: nn.Module, episodes: int) -> None:
        self.policy, self.episodes = policy, episodes

    def __len__(self) -> int:
        return self.episodes

    @torch.no_grad()
    def __getitem__(self, index: int) -> Batch:
        draw = torch.Generator().manual_seed(index)
        device = next(self.policy.parameters()).device
        states, actions = torch.zeros(HORIZON, 4), torch.zeros(HORIZON, dtype=torch.long)
        state = tuple((0.1 * torch.rand(4, generator=draw) - 0.05).tolist())
        steps = 0
        while steps < HORIZON and abs(state[0]) < 2.4 and abs(state[2]) < 0.21:
            states[steps] = torch.tensor(state)
            logits = self.policy(states[steps].to(device))[:2].cpu()
            action = torch.multinomial(logits.softmax(-1), 1, generator=draw)
            actions[steps] = action
            state = push(state, right=bool(action))
            steps += 1
        left = (steps - torch.arange(HORIZON)).clamp(min=0)  # future rewards: 1 per step that the pole stays up
        returns = (1 - DISCOUNT**left) / (1 - DISCOUNT)
        return states, actions, returns, left > 0


def build() -> nn.Module:
    """A model that returns the logits of both actions, and the value of the state."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3))


def main() -> None:
    config = TrainerConfig.from_command_line(
        global_batch_size=16,  # episodes
        log_every_steps=10,
        max_grad_norm=1.0,
        data={"prefetch_batches": 0, "shuffle": False},  # each episode is played with the weights of its own step
    )

    def loss_fn(model: nn.Module, batch: Batch) -> Loss:
        """The actor and critic losses, summed over the steps of all episodes, weighted by the number of steps."""
        states, actions, returns, played = batch
        output = model(states)
        advantage = returns - output[..., 2]
        chosen: Any = Categorical(logits=output[..., :2])  # torch.distributions has no types
        actor = -chosen.log_prob(actions) * advantage.detach() - 0.01 * chosen.entropy()
        trainer.log({"steps": Loss(played.sum(), weight=len(played))})
        return Loss(((actor + 0.05 * advantage.square()) * played).sum(), weight=played.sum())

    model = build()
    trainer = Trainer(model, lambda parameters: torch.optim.Adam(parameters, lr=0.01), loss_fn, config)
    steps = math.nan
    for step in trainer.steps(Episodes(model, 1000)):
        if step.log is not None:
            steps = step.log.values["steps"]
            if trainer.world.is_main:
                print(f"step {step.number}: the pole stays up for {steps:.1f} steps of {HORIZON}")
            if steps > 0.95 * HORIZON:
                break  # `steps` is the same on all ranks, so all of them stop
    if trainer.world.is_main:
        print(f"the pole stayed up for {steps:.8f} steps")


if __name__ == "__main__":
    main()
