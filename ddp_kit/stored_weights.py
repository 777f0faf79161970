"""Which weights a checkpoint holds, by name, according to its state.json. Read-only, without torch."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ddp_kit.tensor_reading import Key

FROZEN = "frozen"
"""The key of the fingerprint in the entry of a weight that `checkpoint.trainable_only` left out."""
_WRAPPED = "_orig_mod"  # what torch.compile(model) adds to names
_TENSORS = ("$tensor", "$array")
_AVERAGING = "EMA"  # the class of the callback


class StoredWeights(NamedTuple):
    """The weights and buffers in the `model` part of a checkpoint."""

    entries: Mapping[str, Any]
    """Name -> the entry in state.json; tied weights have the same entry."""
    left_out: Mapping[str, Any]
    """Name -> dtype, shape and fingerprint of each weight that `checkpoint.trainable_only` left out."""


def plain_name(name: str) -> str:
    """The name of a weight in a model without the wrappers of `torch.compile(model)`."""
    return ".".join(part for part in name.split(".") if part != _WRAPPED) if _WRAPPED in name else name


def stored_weights(state: Any, *, ema: bool = False) -> StoredWeights:
    """The weights, from the content of state.json. Names are those of `plain_name`.

    `ema`: with the averages of the `EMA` callback in place of the trained weights; requires `has_average`.
    Raises `ValueError` if there are no weights.
    """
    model = dict(_pairs(state.get("model") if isinstance(state, dict) else None))
    left_out = {name: entry for name, entry in model.items() if isinstance(entry, dict) and FROZEN in entry}
    entries = {name: entry for name, entry in model.items() if name not in left_out}
    if not entries:
        raise ValueError("it has no model weights")
    if ema:
        average = _averages(state)[-1]  # evaluations use that of the last callback
        # Tied weights have one name in the average and several in the model.
        new = {key: average[name] for name, entry in entries.items() if name in average for key in keys_in([entry])}
        entries = {
            name: next((new[key] for key in keys_in([entry]) if key in new), entry) for name, entry in entries.items()
        }
    return StoredWeights(entries, left_out)


def has_average(state: Any) -> bool:
    """Whether the checkpoint has averaged weights, from an `EMA` callback. `state`: the content of state.json."""
    return bool(_averages(state))


def keys_in(entries: Iterable[Any]) -> Iterator[Key]:
    """The keys of the tensors that entries of state.json refer to. Raises `ValueError` for invalid references."""
    waiting = [*entries]
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, list):
            waiting += entry
        elif isinstance(entry, dict):
            waiting += entry.values()
            for tag in _TENSORS:
                if tag in entry:
                    yield _key(entry[tag])


def _key(place: Any) -> Key:
    if not isinstance(place, list) or len(place) != 2 or not all(isinstance(each, str) for each in place):
        raise ValueError("an invalid reference to a tensor")
    return place[0], place[1]


def _averages(state: Any) -> list[dict[str, Any]]:
    callbacks = state.get("callbacks") if isinstance(state, dict) else None
    found = []
    for each in callbacks if isinstance(callbacks, list) else ():
        if isinstance(each, list) and len(each) == 2 and each[0] == _AVERAGING and isinstance(each[1], dict):
            found.append(dict(_pairs(each[1].get("average"))))
    return [average for average in found if average]


def _pairs(model: Any) -> Iterator[tuple[str, Any]]:
    """(name, entry) of a state_dict in the format described in docs/checkpoints.md."""
    if isinstance(model, dict):
        pairs: Any = model.get("$ordered") or model.get("$dict") or model.items()
        yield from ((plain_name(name), value) for name, value in pairs if isinstance(name, str) and name[:1] != "$")
