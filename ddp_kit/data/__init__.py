"""Loads batches from a dataset, a stream or the user's own DataLoader, and moves them to the device.

source.py           what the user passes: dataset, stream or DataLoader
sampler.py          divides each global batch among ranks and passes; token_batches.py: by numbers of tokens
loading.py          chooses the loader; collate.py makes batches of samples; stream.py, loader_batches.py
device.py           copies batches to the device in advance
feed.py             all of it together: batches of steps, evaluations and predictions
comparison.py       compares the data of ranks and of an interrupted epoch
"""

from ddp_kit.data.collate import DeviceTransform
from ddp_kit.data.device import on_device
from ddp_kit.data.loading import build_loader
from ddp_kit.data.source import Batching, Data, DatasetEpoch, batching, check_batch_size, open_data, train_batching
from ddp_kit.data.stream import ReaderState, Stream, build_stream

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
    "train_batching",
]
