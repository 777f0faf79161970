"""The program that `ddpkit doctor` runs to test torch and the network; it imports nothing from ddpkit.

    python -P probe.py facts                             torch's version and build options
    python -P probe.py reduce BACKEND RANK PORT SOCKET   one of two processes that all-reduce a tensor
    python -P probe.py product                           a matrix product on the only visible GPU
    python -P probe.py host NAME                         the addresses of a host name

The program prints one line of JSON. On failure, the exit code is not 0 and the last line gives the reason.
"""

import json
import os
import socket
import sys
from datetime import timedelta
from typing import Any

_TIMEOUT = timedelta(minutes=10)  # longer than the limit of `ddpkit doctor`, which says that it was reached
_ROUNDING = 1e-3  # relative to the largest element; the error is usually 1e-6, or 4e-4 with TF32


def facts() -> dict[str, Any]:
    """torch's version and build options."""
    import torch
    from torch import distributed

    nccl = distributed.is_available() and distributed.is_nccl_available()
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "architectures": torch.cuda.get_arch_list(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,  # type: ignore[no-untyped-call]
    }


def reduce(backend: str, rank: str, port: str, listening: str) -> dict[str, Any]:
    """Take part in an all-reduce of two processes. Rank 0 serves the store on the inherited socket `listening`.

    Raises `ArithmeticError` if the sum is wrong.
    """
    import torch
    from torch import distributed

    first = rank == "0"
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(rank))
        torch.cuda.set_device(device)
    descriptor = int(listening) if first else None
    store = distributed.TCPStore("127.0.0.1", int(port), is_master=first, timeout=_TIMEOUT, master_listen_fd=descriptor)
    distributed.init_process_group(backend, store=store, rank=int(rank), world_size=2, timeout=_TIMEOUT)
    total = torch.full((2**20,), int(rank) + 1.0, device=device)
    distributed.all_reduce(total)
    if not bool((total == 3).all()):
        raise ArithmeticError(
            f"the all-reduce of 1 and 2 must give 3, but gave values from {total.min().item()} to {total.max().item()}"
        )
    distributed.destroy_process_group()
    if first:
        store.wait(["done"])  # the store ends with this process
    else:
        store.set("done", "")
    return {}


def product() -> dict[str, Any]:
    """Compute a matrix product on the GPU. Raises `ArithmeticError` if it differs from the CPU's result."""
    import torch

    left, right = torch.randn(2, 1024, 1024, generator=torch.Generator().manual_seed(0))
    expected = left @ right
    off = ((left.cuda() @ right.cuda()).cpu() - expected).abs().max() / expected.abs().max()
    if not bool(off < _ROUNDING):  # also true for NaN
        raise ArithmeticError(
            f"the GPU's matrix product differs from the CPU's by {off.item():.1e}, relative to the largest element"
        )
    return {}


def host(name: str) -> dict[str, Any]:
    """The addresses of a host name, and whether one of them belongs to this machine."""
    found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    own = any(_is_own(family, address) for family, _, _, _, address in found)
    return {"addresses": sorted({str(address[0]) for *_, address in found}), "own": own}


def _is_own(family: int, address: Any) -> bool:
    try:
        with socket.socket(family) as tried:
            tried.bind(address)
    except OSError:
        return False
    return True


def _reason(error: Exception) -> str:
    """The type and first line of an error, followed by the last line if it contains NCCL's own message."""
    lines = str(error).strip().splitlines() or [""]
    reason = f"{type(error).__name__}: {lines[0]}"
    if "Last error:" in lines:
        return f"{reason}: {lines[-1]}"
    return reason


if __name__ == "__main__":
    question = {"facts": facts, "reduce": reduce, "product": product, "host": host}[sys.argv[1]]
    try:
        answer = question(*sys.argv[2:])  # type: ignore[operator]
    except Exception as error:
        sys.exit(_reason(error))
    print(json.dumps(answer), flush=True)
    os._exit(0)  # torch's threads could abort during the interpreter's shutdown
