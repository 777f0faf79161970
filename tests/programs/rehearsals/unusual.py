"""Scripts that are unusual for a rehearsal. Arguments: WHAT FOLDER.

without_optimizer, ends_early, two_optimizers, ignores_sigterm, saves_on_sigterm, prints_forever, fails, random,
saves_nothing, ignores_checkpoint, changes_folder, autograd_grad, opens, functional_grad.
"""

import itertools
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

what, folder = sys.argv[1], Path(sys.argv[2])
if what != "random":
    torch.manual_seed(0)
if what == "changes_folder":
    os.chdir("shared")
if what == "fails":
    raise ValueError("the data is not there")
if what == "prints_forever":
    while True:
        print("still loading")
        time.sleep(0.001)
nets = [nn.Linear(4, 4) for _ in range(2 if what == "two_optimizers" else 1)]
optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in nets]
stopped = False


def stop(*_: object) -> None:
    global stopped
    stopped = True
    if what == "ignores_sigterm":
        (folder / "stopping").touch()


if what in ("ignores_sigterm", "saves_on_sigterm"):
    signal.signal(signal.SIGTERM, stop)
file = folder / "checkpoint.pt"
step = 0
if file.exists() and what != "ignores_checkpoint":
    saved = torch.load(file)
    for part, state in zip([*nets, *optimizers], saved["parts"], strict=True):
        part.load_state_dict(state)
    step = saved["step"]
    torch.set_rng_state(saved["random"])


def save() -> None:
    folder.mkdir(parents=True, exist_ok=True)
    parts = [part.state_dict() for part in (*nets, *optimizers)]
    state = {"parts": parts, "step": step, "random": torch.get_rng_state()}
    temporary = folder / "checkpoint.tmp"
    if os.environ["LOCAL_RANK"] != "0":  # ranks do not wait for each other
        temporary = folder / f"checkpoint-{os.environ['LOCAL_RANK']}.tmp"
    if what == "opens":
        with temporary.open("wb") as stream:
            torch.save(state, stream)
    else:
        torch.save(state, temporary)
    temporary.replace(file)


for _ in itertools.count() if what == "ignores_sigterm" else range(step, 6 if what == "ends_early" else 100):
    x = torch.randn(8, 4)
    for net, optimizer in zip(nets, optimizers, strict=True):
        loss = net(x).square().mean()
        if what == "autograd_grad":
            for parameter, gradient in zip(
                net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True
            ):
                parameter.grad = gradient
        elif what == "functional_grad":
            named = dict(net.named_parameters())
            gradients = torch.func.grad(lambda values: torch.func.functional_call(net, values, x).square().mean())(  # noqa: B023
                {name: parameter.detach() for name, parameter in named.items()}
            )
            for name, parameter in named.items():
                parameter.grad = gradients[name]
        else:
            loss.backward()
        if what == "without_optimizer":
            with torch.no_grad():
                net.weight -= 0.01 * net.weight.grad
        else:
            optimizer.step()
        net.zero_grad()
    step += 1
    if stopped and what == "saves_on_sigterm":
        save()
        sys.exit(75)
    if step % 5 == 0 and what not in ("saves_nothing", "saves_on_sigterm"):
        save()
