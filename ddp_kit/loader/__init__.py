"""Loads batches from a dataset, a stream or the user's own DataLoader, and moves them to the device."""

from ddp_kit.loader.build import build_loader
from ddp_kit.loader.device import on_device
from ddp_kit.loader.device_transform import DeviceTransform
from ddp_kit.loader.source import Batching, Data, DatasetEpoch, batching, check_batch_size, open_data
from ddp_kit.loader.stream import ReaderState, Stream, build_stream

__all__ = [
    "Batching",
    "Data",
    "DatasetEpoch",
    "DeviceTransform",
    "ReaderState",
    "Stream",
    "batching",
    "build_loader",
    "build_stream",
    "check_batch_size",
    "on_device",
    "open_data",
]
