"""From a dataset to batches on the device: DataLoader, pinned memory, copies beside the computation."""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor

# torch's own walk over nested containers; public under torch.utils.pytree only from later versions on.
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, SequentialSampler

from ddp_kit.config import DataConfig
from ddp_kit.errors import DataError
from ddp_kit.world import World

Data = Dataset[Any] | DataLoader[Any]


def open_data(data: object, role: str) -> "tuple[Dataset[Any], DataLoader[Any] | None]":
    """The dataset, and the user's own DataLoader where that is what they gave.

    Raises `DataError` for what cannot be divided over ranks.
    """
    loader = data if isinstance(data, DataLoader) else None
    dataset = loader.dataset if loader is not None else data
    if isinstance(dataset, IterableDataset):
        raise DataError(
            f"{role} is an IterableDataset ({type(dataset).__name__}), which is not available in this version",
            "give a dataset with __getitem__ and __len__",
        )
    if not hasattr(dataset, "__getitem__") or not isinstance(dataset, Sized):
        raise DataError(
            f"{role} is a {type(dataset).__name__}, without __getitem__ or without __len__",
            "give a torch Dataset, or a DataLoader over one",
        )
    if len(dataset) == 0:
        raise DataError(f"{role} is empty: {type(dataset).__name__} has 0 samples", "check the path it was made from")
    if loader is not None and not isinstance(loader.sampler, RandomSampler | SequentialSampler):
        raise DataError(
            f"{role} is a DataLoader with a sampler of its own ({type(loader.sampler).__name__})",
            "leave the sampler out: the Trainer divides the samples over the ranks, in an order it can repeat",
        )
    return dataset, loader  # type: ignore[return-value]


def shuffles(loader: "DataLoader[Any] | None", default: bool) -> bool:
    """Whether the samples are shuffled: as the user's DataLoader says, else as configured."""
    return default if loader is None else isinstance(loader.sampler, RandomSampler)


def check_batch_size(loader: "DataLoader[Any] | None", micro_batch: int) -> None:
    """Raise `DataError` where the user's DataLoader and the configuration disagree."""
    if loader is not None and loader.batch_size is not None and loader.batch_size != micro_batch:
        raise DataError(
            f"the DataLoader has batch_size={loader.batch_size}, but the configuration makes micro-batches of "
            f"{micro_batch} samples",
            f"set micro_batch_size={loader.batch_size} in the TrainerConfig, or batch_size={micro_batch} there",
        )


def build_loader(
    dataset: Dataset[Any],
    batches: Sampler[list[int]],
    config: DataConfig,
    world: World,
    seed: int,
    template: "DataLoader[Any] | None" = None,
) -> "DataLoader[Any]":
    """A DataLoader over `batches`; what the user's own DataLoader (`template`) chose is kept."""
    pinned = world.device.type == "cuda" if config.pin_memory == "auto" else config.pin_memory
    generator = torch.Generator().manual_seed(seed * world.world_size + world.rank)
    if template is None:
        workers = _workers(config, world)
        return DataLoader(
            dataset,
            batch_sampler=batches,
            num_workers=workers,
            pin_memory=pinned,
            persistent_workers=workers > 0,
            generator=generator,  # seeds the workers: differently on every rank, without touching the global state
        )
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=template.num_workers,
        collate_fn=template.collate_fn,
        pin_memory=pinned or template.pin_memory,
        timeout=template.timeout,
        worker_init_fn=template.worker_init_fn,
        multiprocessing_context=template.multiprocessing_context,
        generator=template.generator or generator,
        prefetch_factor=template.prefetch_factor,
        persistent_workers=template.persistent_workers,
    )


def on_device(loader: Iterable[Any], device: torch.device, dtype: torch.dtype | None, ahead: int) -> Iterator[Any]:
    """The loader's batches on `device`; floating-point tensors as `dtype` where it is given.

    On a GPU, `ahead` batches are copied on a side stream while the computation uses the ones before.
    """
    if device.type != "cuda" or ahead == 0:
        for batch in loader:
            yield _moved(batch, device, dtype)
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    waiting: deque[tuple[Any, torch.cuda.Event]] = deque()
    for batch in loader:
        with torch.cuda.stream(stream):
            copy = _moved(batch, device, dtype)
            waiting.append((copy, stream.record_event()))
        if len(waiting) > ahead:
            yield _arrived(*waiting.popleft())
    while waiting:
        yield _arrived(*waiting.popleft())


def _moved(batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            kind = dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype
            # non_blocking waits for nothing only from pinned memory; from other memory torch copies in order
            return leaf.to(device, kind, non_blocking=True)
        return leaf.to(device) if hasattr(leaf, "to") else leaf

    return pytree.tree_map(move, batch)


def _arrived(batch: Any, event: torch.cuda.Event) -> Any:
    """Hand a batch to the computation: it waits for the copy, and the memory is not reused before it is done."""
    current = torch.cuda.current_stream()
    current.wait_event(event)
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.is_cuda:
            leaf.record_stream(current)
    return batch


def _workers(config: DataConfig, world: World) -> int:
    if config.num_workers != "auto":
        return config.num_workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, max(0, cores // world.local_world_size - 1))
