"""torch's default collate function, and error messages for samples that it cannot collate."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from ddp_kit.errors import DataError
from ddp_kit.loader.device_transform import Keyed

_SHOWN = 4  # differing samples in a message


@dataclass(frozen=True)
class Uncollated:
    """Takes the place of a batch whose samples cannot be collated; a DataLoader worker sends it like a batch."""

    said: str
    """torch's error message."""
    where: str
    """The first part that differs between samples, such as `[0]` or `['image']`; empty for the sample itself."""
    kinds: tuple[str, ...]
    """The shape, length, keys or type of that part in each sample; empty if the samples do not differ."""


def checked_collate(samples: Any) -> Any:
    """Call `default_collate`; return an `Uncollated` for samples that it cannot collate (see `checked_batches`)."""
    try:
        return default_collate(samples)
    except (TypeError, RuntimeError, LookupError, ValueError, AttributeError) as error:
        where, kinds = _difference(samples)
        if not kinds and "default_collate" not in str(error) and "default collate_fn" not in str(error):
            raise  # not caused by the samples: out of memory, for example
        return Uncollated(str(error), where, kinds)


def identity_collate(batch: Any) -> Any:
    """Collate function for batches that are already complete."""
    return batch


class CollateKeyed:
    """Collates `(key, sample)` pairs to a `Keyed` batch."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, pairs: list[tuple[Any, Any]]) -> Any:
        batch = self._collate([sample for _, sample in pairs])
        return batch if type(batch) is Uncollated else Keyed([key for key, _ in pairs], batch)


def data_error(found: Uncollated, keys: Sequence[Any] | None) -> DataError:
    """The error for samples that cannot be collated. `keys`: the keys of the samples, if known."""
    return DataError(*_message_and_hint(found, keys))


def _message_and_hint(found: Uncollated, keys: Sequence[Any] | None) -> tuple[str, str]:
    if not found.kinds:
        return (
            f"data: the samples cannot be collated into a batch: {found.said}",
            "let __getitem__ return tensors, numpy arrays, numbers, strings, or tuples, lists and dicts of them; "
            'or set data={"collate_fn": ...} to a function that makes the batch',
        )
    first = {kind: number for number, kind in reversed([*enumerate(found.kinds)])}
    shown = ", ".join(
        f"{kind} in {f'sample {keys[number]}' if keys else f'item {number} of the batch'}"
        for kind, number in sorted(first.items(), key=lambda item: item[1])[:_SHOWN]
    )
    part = f" at {found.where}" if found.where else ""
    return (
        f"data: the samples of a batch differ{part}: {shown}{', ...' if len(first) > _SHOWN else ''}",
        'set data={"collate_fn": ...} to a function that pads them to one size, for example with '
        "torch.nn.utils.rnn.pad_sequence; or let __getitem__ return samples of one size",
    )


def _difference(samples: Sequence[Any]) -> tuple[str, tuple[str, ...]]:
    """The first part in which samples differ, and its description in each sample; ("", ()) if they do not."""
    by_part = [dict(_parts(sample)) for sample in samples]
    for where in by_part[0]:
        kinds = tuple(parts.get(where, "nothing") for parts in by_part)
        if len(set(kinds)) > 1:
            return where, kinds
    return "", ()


def _parts(sample: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """(path, description) of each part of a sample, outer ones first; descriptions must be equal in all samples."""
    if hasattr(sample, "shape"):
        yield where, f"shape {tuple(sample.shape)}"
    elif isinstance(sample, Mapping):
        yield where, f"keys {', '.join(map(repr, sample))}"
        for name, value in sample.items():
            yield from _parts(value, f"{where}[{name!r}]")
    elif isinstance(sample, Sequence) and not isinstance(sample, str | bytes):
        yield where, f"length {len(sample)}"
        for number, value in enumerate(sample):
            yield from _parts(value, f"{where}[{number}]")
    else:
        yield where, type(sample).__name__
