"""The copies of tensors to host memory: every byte arrives, and no other is written."""

from types import SimpleNamespace

import pytest
import torch

from ddp_kit.checkpoint import saver
from ddp_kit.checkpoint.saver import SharedBuffer


def test_begin_copy_writes_every_byte_of_its_targets_and_no_other() -> None:
    sizes = [0, 1, 63, 64, 65, 0, 128, 1000, 7, 4096]
    tensors = [torch.randint(1, 255, (size,), dtype=torch.uint8) for size in sizes]
    tensors += [torch.arange(30.0).reshape(5, 6).T, torch.tensor([1 + 2j]).conj(), torch.tensor(3)]
    guard = 5
    memory = torch.zeros(sum(tensor.nbytes + 16 + guard for tensor in tensors) + 64, dtype=torch.uint8)
    targets, begin = [], 0
    for tensor in tensors:
        begin += -begin % 16
        targets.append(memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        begin += tensor.nbytes + guard
    saver.begin_copy(zip(targets, tensors, strict=True))()
    assert all(map(torch.equal, targets, tensors))
    for target in targets:
        target.zero_()
    assert not memory.any()


def test_shared_buffer_refused_by_the_driver_is_not_pinned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its error is taken up: CUDA would report it as that of the next kernel."""
    asked, launched = [], []
    driver = SimpleNamespace(cudaHostRegister=lambda *words: asked.append(words) or 801)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    buffer = SharedBuffer()
    buffer._grow(1000)

    def fails(*sizes: int, device: str) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: operation not supported")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "zeros", fails)
        buffer._pin()
        buffer._pin()
    assert (len(asked), launched) == (1, ["cuda"])
    assert not buffer._pinned
    buffer.close()
