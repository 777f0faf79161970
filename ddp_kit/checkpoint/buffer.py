"""Host memory shared by the training process and the writer process; each save reuses its pages."""

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from ctypes import CDLL, c_size_t, c_void_p
from threading import Thread

import torch
from torch import Tensor

from ddp_kit.checkpoint.layout import Layout

_PAGE = mmap.PAGESIZE
_ROOM_TO_GROW = 1 << 20  # for buffers, headers and a slightly longer state.json next time
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14
_PIECE = 16 << 20
_LIBC = CDLL(None)


class SharedBuffer:
    """Memory from memfd_create: freed when the last process closes it, and not limited by the size of /dev/shm."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("ddpkit-checkpoint", os.MFD_CLOEXEC)
        self._memory: mmap.mmap | None = None
        self._bytes: Tensor | None = None
        self._pinned: bool | None = False  # None: the driver refused
        self._layout: Layout | None = None
        self._filling: Thread | None = None
        self.targets: list[Tensor] = []
        """Tensors in this memory to copy the state to, in the order of the layout's places."""

    @property
    def view(self) -> memoryview:
        """The content."""
        assert self._memory is not None
        return memoryview(self._memory)

    def reserve(self, size: int) -> None:
        """Allocate `size` bytes; a background thread faults in the pages."""
        if self._grow(size):
            filling = Thread(target=_fault_in, args=(self._bytes,), daemon=True)  # daemon: exit does not wait for it
            with suppress(RuntimeError):  # no thread is available: pages are faulted in on first write
                filling.start()
                self._filling = filling

    def prepare(self, layout: Layout, tensors: Sequence[Tensor], text: bytes) -> None:
        """Make room for `tensors`, set `targets`, and write the headers and `text`.

        `tensors`: in the order of the layout's places. If the layout has not changed, only `text` is written.
        """
        if self._filling is not None:
            self._filling.join()
        grown = self._grow(layout.bytes + len(text))
        assert self._memory is not None
        assert self._bytes is not None
        if grown:
            _fault_in(self._bytes)
        if layout is not self._layout:
            for offset, header in layout.headers.items():
                self._memory[offset : offset + len(header)] = header
            self.targets = [
                self._bytes[place.offset : place.offset + place.bytes].view(tensor.dtype).view(tensor.shape)
                for place, tensor in zip(layout.places, tensors, strict=True)
            ]
            self._layout = layout
        self._memory[layout.bytes : layout.bytes + len(text)] = text
        if torch.cuda.is_initialized() and any(tensor.is_cuda for tensor in tensors):  # type: ignore[no-untyped-call]
            self._pin()

    def close(self) -> None:
        """Free the memory."""
        self._release()
        with suppress(OSError):
            os.close(self.descriptor)
        self.descriptor = -1

    def _grow(self, size: int) -> bool:
        """Grow to at least `size` bytes; returns whether the pages still have to be faulted in."""
        if self._memory is not None and len(self._memory) >= size:
            return False
        self._release()
        size = -(-(size + _ROOM_TO_GROW) // _PAGE) * _PAGE
        os.ftruncate(self.descriptor, size)
        self._memory = mmap.mmap(self.descriptor, size)
        with suppress(OSError):  # forked DataLoader workers must not keep it
            self._memory.madvise(mmap.MADV_DONTFORK)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        return True

    def _release(self) -> None:
        if self._pinned and self._bytes is not None:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())  # type: ignore[no-untyped-call]
        self._pinned, self._layout, self.targets = False, None, []
        self._bytes = self._memory = None

    def _pin(self) -> None:
        """Pin the memory, so that copies from a GPU run at full speed; if the driver refuses, they are slower."""
        if self._pinned is not False or self._bytes is None:
            return
        error = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self._bytes.numel(), 0)  # type: ignore[no-untyped-call]
        self._pinned = True if int(error) == 0 else None
        if self._pinned is None:
            # CUDA keeps the error until it is queried, and torch would attribute it to its next kernel.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")


def _fault_in(memory: Tensor) -> None:
    """Fault in all pages now instead of one by one on first write, which takes about a second per GB.

    In pieces, because other memory allocations of the process wait meanwhile. Releases the GIL.
    """
    begin, size = memory.data_ptr(), memory.numel()
    for done in range(0, size, _PIECE):
        if _LIBC.madvise(c_void_p(begin + done), c_size_t(min(_PIECE, size - done)), _POPULATE_WRITE) != 0:
            return
