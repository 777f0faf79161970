"""Builds the DataLoader over a dataset."""

import os
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from ddp_kit.config import DataConfig
from ddp_kit.errors import ConfigError
from ddp_kit.loader.collate import CollateKeyed, checked_collate, identity_collate
from ddp_kit.loader.fetch import (
    Batches,
    ExposeUserDataset,
    IsolatedLoader,
    Samples,
    SeededBatches,
    SeededSamples,
    WholeBatches,
    WholeBatchLoader,
    WithEpoch,
    can_fetch_whole_batches,
)
from ddp_kit.loader.shared_memory import sendable
from ddp_kit.loader.source import DatasetEpoch
from ddp_kit.world import World, mixed_seed


def build_loader(
    dataset: Dataset[Any],
    batches: Iterable[list[Any]],
    config: DataConfig,
    world: World,
    seed: int,
    template: "DataLoader[Any] | None" = None,
    *,
    keyed: bool = False,
    dataset_epoch: DatasetEpoch | None = None,
) -> Iterable[Any]:
    """A loader that yields the batches of `dataset` whose keys `batches` yields.

    `template`: the user's own DataLoader, whose options are used. `seed`: of the DataLoader workers. But if `batches`
    has a seed and an epoch (`Batches`), random states are set from these: for each sample with `config.seed_samples`,
    else for each batch if workers or prefetching fetch it ahead of its use. `keyed`: with `config.seed_samples`, yield
    `Keyed` batches. `dataset_epoch`: begins the dataset's epochs in DataLoader workers that live for several.
    """
    options = loader_options(config, world, seed, template)
    workers, pinned = options["num_workers"], options["pin_memory"]
    collate = chosen_collate(config, template)
    own = dataset
    # Whether this process fetches batches, and draws their random numbers, before the step that uses them.
    ahead = world.device.type == "cuda" and config.prefetch_batches > 0
    # Fetching whole batches draws no random numbers.
    if collate is checked_collate and can_fetch_whole_batches(dataset) and not keyed:
        whole = WholeBatches(dataset)
        if not workers and (not pinned or world.device.type == "cuda"):
            return WholeBatchLoader(whole, batches, pinned)
        dataset, collate = whole, identity_collate
    elif config.seed_samples:
        seeded = cast(Batches, batches)
        dataset, batches = SeededSamples(dataset, seeded.seed, dataset_epoch, keyed=keyed), WithEpoch(seeded)
        collate = CollateKeyed(collate) if keyed else collate
    elif (workers or ahead) and hasattr(batches, "epoch"):  # a plain list of batches has no epoch
        seeded = cast(Batches, batches)
        dataset, batches = SeededBatches(dataset, seeded.seed, dataset_epoch), WithEpoch(seeded)
    else:
        dataset = Samples(dataset)
    if dataset is not own:
        options["worker_init_fn"] = ExposeUserDataset(options.get("worker_init_fn"))
    loader = DataLoader(dataset, batch_sampler=batches, collate_fn=sendable(collate, workers), **options)
    return IsolatedLoader(loader) if type(dataset) is SeededBatches and not workers else loader


def chosen_collate(config: DataConfig, template: "DataLoader[Any] | None") -> Callable[[Any], Any]:
    """The user's collate function, or torch's default with better errors. Raises `ConfigError` if there are two."""
    given = config.collate_fn
    if template is not None and template.collate_fn is not default_collate:
        if given is not None:
            raise ConfigError("both the DataLoader and data.collate_fn set a collate function", "leave one of them out")
        given = template.collate_fn
    return given or checked_collate


def loader_options(
    config: DataConfig, world: World, seed: int, template: "DataLoader[Any] | None" = None
) -> dict[str, Any]:
    """Options for the DataLoader, apart from the dataset, the sampler and collate_fn; those of `template` if given."""
    pinned = world.device.type == "cuda" if config.pin_memory == "auto" else config.pin_memory
    # Seeds the DataLoader workers differently on every rank, without drawing from the global generator.
    generator = torch.Generator().manual_seed(mixed_seed(seed, world.rank))
    workers = _workers(config, world) if template is None else template.num_workers
    timeout = config.timeout or 0 if workers else 0
    if template is None:
        return {
            "num_workers": workers,
            "pin_memory": pinned,
            "timeout": timeout,
            "generator": generator,
        }
    return {
        "num_workers": workers,
        "pin_memory": pinned or template.pin_memory,
        "timeout": template.timeout or timeout,
        "worker_init_fn": template.worker_init_fn,
        "multiprocessing_context": template.multiprocessing_context,
        "generator": template.generator or generator,
        "prefetch_factor": template.prefetch_factor,
        "persistent_workers": template.persistent_workers,
    }


def _workers(config: DataConfig, world: World) -> int:
    if config.num_workers != "auto":
        return config.num_workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, max(0, cores // world.local_world_size - 1))
