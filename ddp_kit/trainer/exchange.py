"""All-gathers of small values."""

import torch
import torch.distributed as dist

from ddp_kit.world import World


def gathered(world: World, numbers: list[int], hosts: dist.ProcessGroup | None = None) -> list[list[int]]:
    """All ranks' numbers, in rank order. A collective; waits for the device unless `hosts` is given.

    `numbers`: equally many on each rank. `hosts`: a group for host memory, to use instead of the default group.
    """
    device = world.device if hosts is None else torch.device("cpu")
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    everyone = [own]
    if world.world_size > 1:
        everyone = [torch.empty_like(own) for _ in range(world.world_size)]
        dist.all_gather(everyone, own, group=hosts)
    return [one.tolist() for one in everyone]


def gathered_bytes(own: bytes, world: World, hosts: dist.ProcessGroup | None = None) -> list[bytes]:
    """All ranks' texts, in rank order; they may differ in length. `hosts`: as in `gathered`. A collective."""
    if world.world_size == 1:
        return [own]
    lengths = [length for (length,) in gathered(world, [len(own)], hosts)]
    device = world.device if hosts is None else torch.device("cpu")
    mine = torch.zeros(max(lengths), dtype=torch.uint8)
    mine[: len(own)] = torch.frombuffer(bytearray(own or b" "), dtype=torch.uint8)[: len(own)]
    everyone = [torch.empty_like(mine, device=device) for _ in lengths]
    dist.all_gather(everyone, mine.to(device), group=hosts)
    return [text[:length].cpu().numpy().tobytes() for text, length in zip(everyone, lengths, strict=True)]
